"""How many processes do what, and how they talk."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism."""

    tensor_model_parallel_size: int = flag(1, "Processes that split each layer.", unit="processes")
    pipeline_model_parallel_size: int = flag(
        1, "Processes that split the layers into stages.", unit="processes"
    )
    context_parallel_size: int = flag(1, "Processes that split each sequence.", unit="processes")
    distributed_backend: str = flag(
        "nccl", "Communication library on GPUs (a CPU always uses gloo).", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = flag(
        10, "A collective that takes longer ends the run.", unit="minutes"
    )
    ddp_impl: str = flag(
        "local", "Gradient reduction.", names="--DDP-impl", choices=("local", "torch")
    )
    use_contiguous_buffers_in_local_ddp: bool = flag(
        True,
        "Keep gradients in contiguous buffers.",
        off="--no-contiguous-buffers-in-local-ddp",
    )
    use_cpu_initialization: bool = flag(False, "Draw the initial weights on the CPU.")
    local_rank: int | None = flag(
        None, "GPU of this process. Unset: from LOCAL_RANK.", names=("--local_rank", "--local-rank")
    )
    use_mpi: bool = flag(
        False, "Started by mpirun: take ranks from OMPI_COMM_WORLD_* instead of torchrun's."
    )
