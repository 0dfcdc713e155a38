"""How many processes do what, and how they talk."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import MAX_LAYERS, Need, flag

# What some flags change nothing without.
_SHARES_SEQUENCES = Need(
    lambda run: run.parallel.context_parallel_size > 1,
    "without --context-parallel-size: no process shares a sequence",
)


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Parallelism."""

    tensor_model_parallel_size: int = flag(
        1, "Processes that split each layer.", unit="processes", is_common=True, at_least=1
    )
    pipeline_model_parallel_size: int = flag(
        1,
        "Processes that split the layers into stages.",
        unit="processes",
        is_common=True,
        at_least=1,
        at_most=MAX_LAYERS,
    )
    context_parallel_size: int = flag(
        1, "Processes that split each sequence.", unit="processes", at_least=1
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        "Split each stage into virtual stages of this many layers (interleaved schedule). "
        "Default: one virtual stage.",
        unit="layers",
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "Number of virtual stages per pipeline rank. Default: 1.", unit="parts"
    )
    pipeline_schedule: str | None = flag(
        None,
        "Schedule of forward and backward passes. Default: 1f1b, or interleaved with virtual "
        "stages.",
        choices=("gpipe", "1f1b", "interleaved", "zero-bubble"),
    )
    pipeline_model_parallel_layout: str | None = flag(
        None,
        "Contents of each stage, for example Ett|tt|tt|ttL, where E is the embedding, t a layer "
        "and L the loss.",
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "Layers on the first stage. Default: as many as on the others.", unit="layers"
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "Layers on the last stage. Default: as many as on the others.", unit="layers"
    )
    pipeline_model_parallel_split_rank: int | None = flag(
        None,
        "Pipeline stage on which the T5 decoder begins. Default: encoder and decoder layers are "
        "distributed as one sequence.",
        unit="stage",
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        False, "Count the embedding as a layer when distributing layers over stages."
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, "Count the output layer and loss as a layer when distributing layers over stages."
    )
    cp_comm_type: str = flag(
        "p2p",
        "Communication between context-parallel processes: p2p passes keys and values around a "
        "ring, a2a exchanges tokens for heads (Ulysses).",
        choices=("p2p", "a2a"),
        needs=_SHARES_SEQUENCES,
    )
    sequence_parallel: bool = flag(
        False,
        "Split activations between the tensor-parallel layers along the sequence (Korthikanti et "
        "al., 2022).",
    )
    async_tensor_model_parallel_allreduce: bool = flag(
        True,
        "Communicate input gradients of tensor-parallel layers while computing their weight "
        "gradients.",
        names="--async-tensor-model-parallel-allreduce",
        off="--no-async-tensor-model-parallel-allreduce",
    )
    tp_comm_overlap: bool = flag(
        False,
        "With --sequence-parallel, overlap the communication of tensor-parallel layers with "
        "their matrix products, which are split by rows into one part per tensor-parallel "
        "process. GPUs communicate through each other's mapped memory, so they must be on one "
        "machine.",
    )
    distribute_saved_activations: bool = flag(
        False,
        "With --recompute-granularity full, split the saved layer inputs among tensor-parallel "
        "processes.",
    )
    distributed_backend: str = flag(
        "nccl", "Communication library on GPUs. CPUs always use gloo.", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: float = flag(
        10.0,
        "Time after which a run that waits for a process ends with an error naming that process. "
        "Fractions are allowed.",
        unit="minutes",
        above=0,
        at_most=365 * 24 * 60,
    )
    ddp_impl: str = flag(
        "local",
        "How gradients are averaged over data-parallel processes: local uses contiguous buffers, "
        "torch uses PyTorch's DistributedDataParallel.",
        names="--DDP-impl",
        choices=("local", "torch"),
    )
    use_contiguous_buffers_in_local_ddp: bool = flag(
        True,
        "Accepted for compatibility; no effect. Gradients are always kept in contiguous buffers.",
        off="--no-contiguous-buffers-in-local-ddp",
        notice="gradients always live in contiguous buffers, which cost no extra memory here",
    )
    use_distributed_optimizer: bool = flag(
        False,
        "Shard optimizer states and the update over data-parallel processes. Same as "
        "--zero-stage 1.",
        is_common=True,
    )
    zero_stage: int | None = flag(
        None,
        "What is sharded over data-parallel processes. 0: nothing. 1: optimizer states. 2: also "
        "gradients, reduced in the backward pass of every micro-batch. 3: also weights, gathered "
        "layer by layer. Default: 1 with --use-distributed-optimizer, otherwise 0.",
        choices=(0, 1, 2, 3),
    )
    overlap_grad_reduce: bool = flag(
        False, "Reduce gradients while the backward pass is still computing others."
    )
    overlap_param_gather: bool = flag(
        False, "With --zero-stage 1 or 2, gather updated weights during the forward pass."
    )
    use_cpu_initialization: bool = flag(
        False,
        "Accepted for compatibility; no effect. Every device draws the same initial weights.",
        notice="every device draws the same initial weights, for any parallel layout",
    )
    local_rank: int | None = flag(
        None,
        "GPU of this process, used if LOCAL_RANK is not set.",
        names=("--local_rank", "--local-rank"),
        at_least=0,
        at_most=2**15 - 1,
    )
    use_mpi: bool = flag(
        False, "Take ranks from OMPI_COMM_WORLD_*, for runs started by mpirun instead of torchrun."
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(ParallelOptions):
    """Parallelism as resolved: it is known what data-parallel processes share."""

    zero_stage: int = 0
