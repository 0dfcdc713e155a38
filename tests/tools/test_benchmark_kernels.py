"""tools/benchmark_kernels.py: what it runs and leaves out, and rows of other kernels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron.device import Device
from megatron.kernels import library
from megatron.kernels.attention import AttentionOptions, FlashPackage, fused_attention
from tools import benchmark_kernels
from tools.kernel_benchmarks import attention, generation, operation, training
from tools.kernel_benchmarks.operation import Ceilings, Operation, measure

CPU = torch.device("cpu")


class _Watch:
    """Runs each work once, and reports a millisecond for all."""

    def __init__(self, *_):
        pass

    def median(self, works):
        for work in works:
            work()
        return 1e-3

    def copy_bandwidth(self):
        return 1e12

    def product_rate(self):
        return 1e15


def test_without_a_gpu_there_is_nothing_to_time_and_mistakes_are_named(capsys, monkeypatch):
    monkeypatch.setattr(Device, "pick", Device.cpu)

    def fails(*words):
        monkeypatch.setattr("sys.argv", ["benchmark_kernels.py", *words])
        return benchmark_kernels.main()

    assert fails() == 9
    assert "no fused kernels to time on this machine: no kernels for cpu" in capsys.readouterr().err
    for words, message in ((("--onyl", "x"), "did you mean --only?"), (("--only",), "--only")):
        with pytest.raises(SystemExit) as left:
            fails(*words)
        assert left.value.code == 9
        assert message in capsys.readouterr().err


def _tiny(name: str, **more) -> Operation:
    return Operation(
        name=name,
        shape="[4]",
        forward_bytes=2**26,
        backward_bytes=0,
        make_inputs=lambda: [torch.ones(4)],
        ours=lambda x: x,
        eager=None,
        **more,
    )


def test_a_row_whose_library_is_missing_is_left_out_with_a_line(capsys, monkeypatch):
    rows = [_tiny("one that runs"), _tiny("one that lacks", missing=lambda: "not installed")]
    monkeypatch.setattr(benchmark_kernels, "GROUPS", ("layers",))
    group = SimpleNamespace(operations=lambda *_: rows)
    monkeypatch.setattr(benchmark_kernels, "import_module", lambda _: group)
    choice = library.LibraryChoice(object(), "a test")  # type: ignore[arg-type]
    monkeypatch.setattr(library, "find_library", lambda _: choice)
    monkeypatch.setattr(operation, "Stopwatch", _Watch)
    benchmark_kernels._run("one", compiled=True)
    said = capsys.readouterr()
    assert "| one that runs | [4] | forward | 67.1 | 1000.0 | 7% | - | - | - |" in said.out
    assert "one that lacks" not in said.out
    assert "skipped one that lacks [4]: not installed" in said.err


def _check_forms(timed: Operation, expected) -> None:
    inputs = timed.make_inputs()
    assert timed.missing() == ""
    for form in (timed.ours, *timed.libraries.values()):
        torch.testing.assert_close(form(*inputs), expected(*inputs), rtol=2e-2, atol=2e-2)
    names = [set(row.seconds) for row in measure(timed, _Watch(), Ceilings(1, 1), compiled=False)]
    eager = {"eager"} if timed.eager else set()
    assert names[0] == {"ours", *timed.libraries, *eager}


@pytest.mark.parametrize("causal", [True, False])
def test_flash_attention_4_is_timed_on_samples_in_order(causal, monkeypatch):
    seen = []

    def flash_attn_func(query, key, value, *, causal, softmax_scale, deterministic):
        seen.append(all(x.is_contiguous() for x in (query, key, value)))
        turned = [x.transpose(0, 1) for x in (query, key, value)]
        out = fused_attention(*turned, AttentionOptions(causal=causal, scale=softmax_scale))
        return out.unflatten(2, query.shape[2:]).transpose(0, 1)

    sizes = (8, 2, 4, 16)
    monkeypatch.setattr(attention, "_package", lambda _: None)
    lacks = attention.flash_package(CPU, sizes, 2, causal=causal)
    assert "flash-attn-4" in lacks.missing()
    monkeypatch.setattr(attention, "_package", lambda _: FlashPackage(flash_attn_func, "4.0"))
    timed = attention.flash_package(CPU, sizes, 2, causal=causal)
    assert timed.shape == "[2, 8, 4, 16] in order, 2 groups bf16"
    assert timed.forward_bytes == 2 * 8 * 2 * 16 * (4 + 4 + 2 + 2)

    def expected(*inputs):
        return fused_attention(*inputs, AttentionOptions(causal=causal))

    monkeypatch.setattr(attention, "BF16", torch.float32)
    monkeypatch.setattr(operation, "ROTATED_BYTES", 2)
    _check_forms(timed, expected)
    assert seen
    assert all(seen)


def test_attention_with_a_bias_and_softmax_alone_are_timed(monkeypatch):
    monkeypatch.setattr(operation, "ROTATED_BYTES", 2)
    monkeypatch.setattr(attention, "BF16", torch.float32)
    monkeypatch.setattr(attention, "gpu_attention", fused_attention)
    biased = attention.biased(CPU, (8, 2, 4, 16))
    assert len(biased.make_inputs()) == 4
    _check_forms(biased, biased.eager)
    for causal in (True, False):
        softmax = attention.softmax(CPU, (2, 3, 8, 8), causal=causal)
        out = softmax.ours(*softmax.make_inputs())
        torch.testing.assert_close(out.sum(-1), torch.ones(2, 3, 8))
        upper = out[0, 0].triu(1)
        assert (upper == 0).all() == causal
        _check_forms(softmax, softmax.ours)


def test_row_products_are_timed_beside_pytorch(monkeypatch):
    monkeypatch.setattr(operation, "ROTATED_BYTES", 2)
    _check_forms(generation.row_product(F.linear, CPU, 3, 16, 8), F.linear)
    assert generation.row_product(None, CPU, 3, 16, 8).missing() == "cuBLASLt is not available"


def test_the_loss_by_chunks_is_timed_beside_whole_logits(monkeypatch):
    monkeypatch.setattr(training, "BF16", torch.float32)
    monkeypatch.setattr(operation, "ROTATED_BYTES", 2)
    timed = training.chunked_cross_entropy(None, CPU, 6, 8, 20)
    assert timed.eager is not None
    _check_forms(timed, timed.eager)
    (row,) = measure(timed, _Watch(), Ceilings(1e30, 2), compiled=False)
    assert (row.direction, row.floor) == ("forward and backward", 3 * 6 * 8 * 20)
