"""How many processes do what, and how they talk."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism."""

    tensor_model_parallel_size: int = flag(
        1, "Processes that split each layer (1 so far).", unit="processes"
    )
    pipeline_model_parallel_size: int = flag(
        1, "Processes that split the layers into stages (1 so far).", unit="processes"
    )
    context_parallel_size: int = flag(
        1, "Processes that split each sequence (1 so far).", unit="processes"
    )
    distributed_backend: str = flag(
        "nccl", "Communication library on GPUs (a CPU always uses gloo).", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = flag(
        10, "A collective that takes longer ends the run.", unit="minutes"
    )
    ddp_impl: str = flag(
        "local",
        "Gradient reduction (local so far).",
        names="--DDP-impl",
        choices=("local", "torch"),
    )
    use_contiguous_buffers_in_local_ddp: bool = flag(
        True,
        "Keep gradients in contiguous buffers (always so: the same result).",
        off="--no-contiguous-buffers-in-local-ddp",
        notice="gradients always live in contiguous buffers, which cost no extra memory here",
    )
    use_distributed_optimizer: bool = flag(
        False,
        "Share optimizer states and the update among data-parallel processes: --zero-stage 1.",
    )
    zero_stage: int | None = flag(
        None,
        "What data-parallel processes share instead of each holding all of it. 0: nothing. 1: "
        "optimizer states. 2: gradients too, reduced in every micro-batch's backward. Unset: 1 "
        "with --use-distributed-optimizer, else 0.",
        choices=(0, 1, 2, 3),
    )
    overlap_grad_reduce: bool = flag(
        False, "Reduce gradients while backward is still computing others."
    )
    overlap_param_gather: bool = flag(
        False, "Gather updated weights while forward is computing already (with --zero-stage 1, 2)."
    )
    use_cpu_initialization: bool = flag(
        False,
        "Draw the initial weights on the CPU (any device draws the same numbers).",
        notice="every device draws the same initial weights, for any parallel layout",
    )
    local_rank: int | None = flag(
        None, "GPU of this process. Unset: from LOCAL_RANK.", names=("--local_rank", "--local-rank")
    )
    use_mpi: bool = flag(
        False, "Started by mpirun: take ranks from OMPI_COMM_WORLD_* instead of torchrun's."
    )
