"""Where a step's time goes: the parts of a made-up trace with a known answer."""

from __future__ import annotations

import json
import random

import pytest

from megatron.errors import DataError
from tools.bench.breakdown import (
    PARTS,
    Kernel,
    attribute_time,
    break_down,
    classify,
    read_breakdown,
)


def _event(kind, name, start, length, **args):
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length, "args": args}


def _marks(starts, kind="gpu_user_annotation"):
    return [_event(kind, f"iteration {i}", start, 50.0) for i, start in enumerate(starts, 11)]


# One step of 1000 us on two streams, with its events' start times from 0.
STEP = (
    ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", 0, 300),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x128", 300, 100),
    ("void at::native::vectorized_elementwise_kernel<4, Silu>", 400, 50),
    ("void (anonymous namespace)::statistics_kernel<__nv_bfloat16>", 450, 40),
    ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 350, 350),  # hidden until 490, then exposed
    ("Memcpy HtoD (Pinned -> Device)", 10, 20),  # hidden
    ("Memset (Device)", 800, 25),
)
# Idle from 700 to 800, and from 825 to the next step except for the update.
UPDATE = ("void at::native::elementwise_kernel<Mul>", 900, 60)


def _trace(steps=4, begin=5000.0):
    events = _marks([begin + 1000 * i for i in range(steps)])
    for i in range(steps):
        start = begin + 1000 * i
        for name, at, length in STEP:
            kind = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(name.split()[0], "kernel")
            events.append(_event(kind, name, start + at, length, correlation=0))
        name, at, length = UPDATE
        events.append(_event("kernel", name, start + at, length, correlation=100 + i))
        events.append(
            _event("cuda_runtime", "cudaLaunchKernel", start + 500, 5, correlation=100 + i)
        )
        events.append(_event("user_annotation", "optimizer", start + 490, 30))
        events.append({"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": start})  # an arrow
    return events


def test_parts_of_a_known_step_add_up_to_it() -> None:
    result = break_down(_trace())
    assert result.step == pytest.approx(1000e-6)
    microseconds = {part: round(seconds * 1e6, 6) for part, seconds in result.parts.items()}
    assert microseconds == {
        "matrix products": 300,
        "attention": 100,
        "cross entropy": 40,
        "optimizer": 60,
        "elementwise and normalization": 50,
        "copies, casts and fills": 25,
        "communication": 210,  # from 490 to 700: exposed
        "idle": 215,
    }
    assert sum(result.parts.values()) == pytest.approx(result.step)
    assert result.hidden["communication"] == pytest.approx(140e-6)
    assert result.hidden["copies, casts and fills"] == pytest.approx(20e-6)
    name, part, seconds, launches = result.kernels[0]
    assert name.startswith("nccl")
    assert (part, launches) == ("communication", 1)
    assert seconds == pytest.approx(350e-6)


def test_the_first_and_the_last_iteration_are_left_out() -> None:
    slow = [_event("kernel", "nvjet_profiler_starts", 5000.0, 900.0)]
    assert break_down([*_trace(), *slow]) == break_down(_trace())
    later = [_event("kernel", "nvjet_after_the_end", 8000.0, 900.0)]
    assert break_down([*_trace(), *later]) == break_down(_trace())


def test_kernels_that_cross_the_bounds_count_for_the_part_inside() -> None:
    events = _marks([0.0, 100.0, 200.0])
    events += [_event("kernel", "nvjet_a", 90.0, 30.0), _event("kernel", "nvjet_b", 180.0, 40.0)]
    result = break_down(events)
    assert result.parts["matrix products"] == pytest.approx(40e-6)
    assert result.parts["idle"] == pytest.approx(60e-6)


@pytest.mark.parametrize("seed", range(5))
def test_any_overlap_adds_up(seed) -> None:
    generator = random.Random(seed)
    kernels = []
    for _ in range(200):
        start = generator.uniform(0, 1000)
        end = min(1000.0, start + generator.expovariate(0.1))
        kernels.append(Kernel("k", generator.choice(PARTS[:-1]), start, end))
    given, hidden = attribute_time(kernels, 0.0, 1000.0)
    assert sum(given.values()) == pytest.approx(1000.0)
    assert all(value >= 0 for value in given.values())
    # Each instant of a part is either assigned to it or hidden; together they make its union.
    for part in PARTS[:-1]:
        spans = sorted((k.start, k.end) for k in kernels if k.part == part)
        union, reached = 0.0, 0.0
        for start, end in spans:
            union += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        assert given[part] + hidden[part] == pytest.approx(union)


def test_host_marks_serve_where_the_device_has_none() -> None:
    events = [e for e in _trace() if e["cat"] != "gpu_user_annotation"]
    events += _marks([5000.0, 6000.0, 7000.0, 8000.0], kind="user_annotation")
    assert break_down(events) == break_down(_trace())


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nvjet_qqtst_128x256_128x4_2x1_v_bz_TNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("void cutlass::device_kernel<cutlass::gemm::GemmUniversal<...>>", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matrix products"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(...)", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 1>", "attention"),
        ("void (anonymous namespace)::gradient_kernel<float>(...)", "cross entropy"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>", "cross entropy"),
        ("triton_red_fused__log_softmax_nll_loss_forward_2", "cross entropy"),
        ("void (anonymous namespace)::adam_kernel<__nv_bfloat16>(...)", "optimizer"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata, "
            "FusedAdamMathFunctor<float, 4>>",
            "optimizer",
        ),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float, NormTwoOps>>", "optimizer"),
        ("elementwise_kernel<direct_copy_kernel_cuda>", "copies, casts and fills"),
        ("elementwise_kernel<8, FillFunctor<float>>", "copies, casts and fills"),
        ("void cast_transpose_kernel<__nv_bfloat16>", "copies, casts and fills"),
        ("transpose_kernel(unsigned char const*, unsigned char*)", "copies, casts and fills"),
        ("void at::native::CatArrayBatchedCopy<...>", "copies, casts and fills"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096>)", "communication"),
        ("c10d::symmetric_memory::wait_signal_kernel(unsigned int**, int)", "communication"),
        ("Memcpy PtoP (Device -> Device)", "communication"),
        ("void add_norm_forward_kernel<__nv_bfloat16>", "elementwise and normalization"),
        ("triton_poi_fused_mul_silu_3", "elementwise and normalization"),
        ("void at::native::index_elementwise_kernel<128, 4>", "elementwise and normalization"),
    ],
)  # fmt: skip
def test_kernels_by_name(name, part) -> None:
    assert classify(name) == part


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (_marks([0.0, 1.0, 2.0]), "contains no GPU kernels"),
        ([*_marks([0.0, 1.0]), _event("kernel", "nvjet", 0.0, 1.0)], "2 marked iterations"),
    ],
)
def test_a_trace_that_cannot_be_broken_down_says_why(tmp_path, events, message) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(DataError, match=f"trace.json: .*{message}"):
        read_breakdown(path)
