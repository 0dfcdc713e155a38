"""torch.compile and torch.export with models that contain kernels."""

import pytest
import torch

from megatron.kernels.library import KernelLibrary, LibraryChoice
from megatron.models.norm import Stream
from megatron.models.recompute import RecomputePlan
from tests.kernels.compare import BF16, FP32
from tests.models.small import LLAMA, batch, gpt

SIZES = {"hidden_size": 64, "kv_channels": 16, "ffn_hidden_size": 64, "num_layers": 1}
LLAMA_FLAGS = {**LLAMA, **SIZES}
GPT_FLAGS = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **SIZES}
DROPOUT = {**GPT_FLAGS, "hidden_dropout": 0.1, "attention_dropout": 0.1}
ALWAYS = {
    *("add_norm_forward", "add_norm_backward", "activation_forward", "activation_backward"),
    "split_rotate",
}


@pytest.fixture
def launched(emulated, monkeypatch):
    """Build models with kernels, and return the names of those that run."""
    names = []
    launch = KernelLibrary.launch

    def noting(self, kernel, *arguments):
        names.append(kernel.name)
        launch(self, kernel, *arguments)

    monkeypatch.setattr(KernelLibrary, "launch", noting)
    choice = LibraryChoice(emulated, "emulated")
    for module in ("parallel.build", "models.head"):
        monkeypatch.setattr(f"megatron.{module}.find_library", lambda _: choice)
    return names


@pytest.mark.parametrize(
    ("flags", "plan", "backend", "kernels"),
    [
        (LLAMA_FLAGS, None, "inductor", set()),
        (LLAMA_FLAGS, RecomputePlan("selective"), "aot_eager", set()),
        (GPT_FLAGS, None, "inductor", set()),
        (DROPOUT, None, "aot_eager", {"bias_dropout_add_forward", "bias_dropout_add_backward"}),
    ],
    ids=["llama", "recomputed core", "gpt", "dropout"],
)
def test_a_block_compiles_whole(launched, flags, plan, backend, kernels):
    model = gpt(flags, {"bf16": True}, dtype=BF16, recompute=plan)
    block = model.layers["0"]
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(12, 2, 64, generator=generator) for _ in range(2))
    rotation = next(iter(model.rotation(torch.arange(12))), None)

    def run(block):
        leaf = x.to(BF16).requires_grad_()
        torch.manual_seed(1)
        loss = (block(Stream(leaf), None, rotation).join().float() * grad).sum()
        loss.backward()
        grads = {name: p.grad for name, p in model.layers.named_parameters()}
        model.zero_grad()
        return loss.item(), leaf.grad, grads

    loss, x_grad, grads = run(block)
    eager = set(launched)
    launched.clear()
    torch.compiler.reset()
    ours, our_x_grad, our_grads = run(torch.compile(block, fullgraph=True, backend=backend))
    assert set(launched) == eager == ALWAYS | kernels
    assert ours == pytest.approx(loss, rel=1e-3)
    torch.testing.assert_close(our_x_grad, x_grad, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(our_grads, grads, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("flags", [LLAMA_FLAGS, GPT_FLAGS], ids=["llama", "gpt"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_model_is_exported(request, flags, fused):
    launched = request.getfixturevalue("launched") if fused else []
    model = gpt(flags, dtype=FP32).eval()
    tokens, _ = batch()
    exported = torch.export.export(model, (tokens,))
    operators = {
        str(node.target) for node in exported.graph.nodes if "megatron" in str(node.target)
    }
    assert bool(operators) == fused, operators
    assert not launched
    torch.testing.assert_close(exported.module()(tokens), model(tokens), rtol=1e-6, atol=1e-6)
    assert bool(launched) == fused
