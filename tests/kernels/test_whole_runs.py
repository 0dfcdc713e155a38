"""Training with every kernel, on the emulator, matches training with PyTorch's operations.

tests/gpu/test_runs_equal_a_cpus.py tests the same on a GPU.
"""

from __future__ import annotations

import pytest

from megatron.kernels.library import LibraryChoice
from megatron.parallel.layout import Layout
from tests.training.toy import train_toy

# Without dropout, because each form draws its own masks.
_STILL = "--train-iters 3 --attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --min-lr 1e-4 "
_LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
_LLAMA += "--group-query-attention --num-query-groups 2 "
_IN_8_BITS = "--bf16 --kv-channels 16 --seq-length 32 --max-position-embeddings 32 "
_IN_8_BITS += "--fp8-format hybrid "
_ALWAYS = {
    *("add_norm_forward", "add_norm_backward", "activation_forward", "activation_backward"),
    *("split_rotate", "cross_entropy_statistics", "cross_entropy_gradient"),
    *("embedding_gradient", "adam_update", "tensor_sums"),
}


class Noting:
    """A library that records which kernels ran."""

    def __init__(self, library):
        self._library, self.used = library, set()

    def launch(self, kernel, *arguments):
        self.used.add(kernel.name)
        self._library.launch(kernel, *arguments)


@pytest.mark.parametrize(
    ("kind", "flags", "further", "tolerance"),
    [
        ("gpt", "", set(), 1e-5),
        ("gpt", _LLAMA, set(), 1e-5),
        (
            "gpt",
            _LLAMA + _IN_8_BITS + "--fp8-recipe tensorwise",
            {"fp8_amax", "fp8_cast_transpose"},
            5e-3,
        ),
        ("gpt", _IN_8_BITS + "--fp8-recipe delayed", {"fp8_cast_transpose"}, 5e-3),
        ("bert", "--squared-relu", set(), 1e-5),
        ("t5", "--openai-gelu", set(), 1e-5),
    ],
)
def test_losses_are_those_of_the_plain_forms(
    emulated, kind, flags, further, tolerance, monkeypatch
):
    words = [*_STILL.split(), *flags.split()]
    plain, _ = train_toy(Layout.single(), words, kind)
    library = Noting(emulated)
    choice = LibraryChoice(library, "emulated")
    for module in ("parallel.build", "models.head", "optimizer.optimizer"):  # all that need one
        monkeypatch.setattr(f"megatron.{module}.find_library", lambda _: choice)
    fused, _ = train_toy(Layout.single(), words, kind)
    assert library.used >= _ALWAYS | further
    names = {name for record in plain.records for name in record if "loss" in name}
    assert {"lm loss", "lm loss validation"} <= names
    for name in sorted(names - {"loss-scale"}):
        assert fused.values(name) == pytest.approx(plain.values(name), rel=tolerance), name
    norms = fused.values("grad-norm"), plain.values("grad-norm")
    assert norms[0] == pytest.approx(norms[1], rel=10 * tolerance)
