"""The rows of tools/benchmark_kernels.py: every form in a row computes the same.

Otherwise, comparing their times would be meaningless.
"""

from __future__ import annotations

import torch

from megatron.kernels.fp8 import choose_fp8_casts
from tests.kernels.compare import seed_afresh
from tools.kernel_benchmarks import generation, layers, operation, training
from tools.kernel_benchmarks.operation import Ceilings, measure, table_row

CPU = torch.device("cpu")
FP32 = torch.float32


def rows(library):
    """Yield each function of the groups, at sizes for an emulator."""
    casts = choose_fp8_casts(library)
    norms = ((False, layers.BF16), (True, layers.BF16), (False, FP32))
    yield from (layers.add_norm(library, CPU, 6, 64, bias=b, stream=s) for b, s in norms)
    for name, bias in (("swiglu", False), ("gelu", True), ("gelu_tanh", True), ("squared_relu", 0)):
        yield layers.activate(library, CPU, name, 6, 64, bias=bool(bias))
    yield from (layers.split_rotate(library, CPU, 5, 2, groups=2, per_group=n) for n in (1, 3))
    yield training.cross_entropy(library, CPU, 6, 200)
    yield training.chunked_cross_entropy(library, CPU, 6, 16, 200)
    yield training.adam(library, CPU, 64 * 40)
    yield training.tensor_sums(library, CPU, 999)
    yield training.embedding_gradient(library, CPU, 60, 16, 11)
    yield training.product_into_fp32(CPU, 20, 16, 24)
    yield training.fp8_transpose(casts, CPU, 32, 48)
    yield from training.fp8_casts(casts, CPU, 32, 48)
    yield generation.paged_attention(library, CPU, 3, 32)


def results(row, form, inputs):
    """Return the results of a form."""
    copies = [None if x is None else x.detach().clone() for x in inputs]
    out = form(*copies)
    if row.name.startswith("AdamW"):  # all but the gradient, which PyTorch's form scales in place
        return [copies[i].double() for i in (0, 1, 3, 4)]
    outputs = [out] if isinstance(out, torch.Tensor) else list(out)
    if row.name.startswith("sum of squares"):  # in one tensor or two
        return [torch.cat([x.double().flatten() for x in outputs])]
    return [x.detach().double() for x in outputs]


def test_all_forms_of_a_row_compute_the_same(emulated):
    seed_afresh()
    for row in rows(emulated):
        inputs = row.make_inputs()
        expected = results(row, row.eager, inputs)
        libraries = {name: x for name, x in row.libraries.items() if "norm alone" not in name}
        for name, form in {"ours": row.ours, **libraries}.items():
            for ours, theirs in zip(results(row, form, inputs), expected, strict=True):
                error = (ours - theirs).norm() / theirs.norm()
                assert error < 1e-2, (row.name, row.shape, name)


def test_every_row_can_be_timed(emulated, monkeypatch):
    class Watch:
        def median(self, works):
            for work in works:
                work()
            return 1e-3

    monkeypatch.setattr(operation, "ROTATED_BYTES", 2)
    dropped = layers.bias_dropout_add(emulated, CPU, 6, 64, bias=True)
    for row in (*rows(emulated), dropped):
        timed = list(measure(row, Watch(), Ceilings(1e12, 1e15), compiled=False))
        passes = ["forward", "backward"] if row.backward_bytes else ["forward"]
        passes = ["forward and backward"] if row.combines_passes else passes
        assert [x.direction for x in timed] == passes
        columns = operation.HEADER.splitlines()[0].count("|")
        assert all(table_row(x).count("|") == columns for x in timed)
