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
        "Cut each stage into virtual stages of this many layers (interleaved). Default: one part.",
        unit="layers",
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "The same by number of virtual stages. Default: one.", unit="parts"
    )
    pipeline_schedule: str | None = flag(
        None,
        "Order of forward and backward passes. Default: 1f1b, or interleaved with virtual stages.",
        choices=("gpipe", "1f1b", "interleaved", "zero-bubble"),
    )
    pipeline_model_parallel_layout: str | None = flag(
        None, "Who holds what, for example Ett|tt|tt|ttL: E embedding, t a layer, L loss."
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "Layers of the first stage. Default: as many as the others.", unit="layers"
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "Layers of the last stage. Default: as many as the others.", unit="layers"
    )
    pipeline_model_parallel_split_rank: int | None = flag(
        None,
        "Pipeline stage on which a T5's decoder begins. Default: the layers of both halves are "
        "dealt out alike.",
        unit="stage",
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        False, "Count the embedding as a layer when layers are dealt out."
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, "Count output and loss as a layer when layers are dealt out."
    )
    cp_comm_type: str = flag(
        "p2p",
        "How context-parallel processes attend to each other: p2p sends keys and values round a "
        "ring, a2a trades tokens for heads (Ulysses).",
        choices=("p2p", "a2a"),
        needs=_SHARES_SEQUENCES,
    )
    sequence_parallel: bool = flag(
        False,
        "Between the split layers, tensor-parallel processes divide activations along the "
        "sequence (Korthikanti et al., 2022).",
    )
    async_tensor_model_parallel_allreduce: bool = flag(
        True,
        "Split layers communicate their input's gradient while they compute their weight's.",
        names="--async-tensor-model-parallel-allreduce",
        off="--no-async-tensor-model-parallel-allreduce",
    )
    tp_comm_overlap: bool = flag(
        False,
        "With --sequence-parallel: what split layers send travels beside their products, which are "
        "cut into as many parts of rows as there are tensor-parallel processes. On GPUs it goes "
        "through memory that they map from each other, so they are on one machine.",
    )
    distribute_saved_activations: bool = flag(
        False,
        "With --recompute-granularity full: tensor-parallel processes divide the kept inputs.",
    )
    distributed_backend: str = flag(
        "nccl", "Communication library on GPUs (a CPU always uses gloo).", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: float = flag(
        10.0,
        "A process that others wait for longer than this ends the run, by name. Fractions count.",
        unit="minutes",
        above=0,
        at_most=365 * 24 * 60,
    )
    ddp_impl: str = flag(
        "local",
        "Who averages gradients over data-parallel processes: local, in contiguous buffers; torch, "
        "PyTorch's DistributedDataParallel.",
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
        is_common=True,
    )
    zero_stage: int | None = flag(
        None,
        "What data-parallel processes share instead of each holding all of it. 0: nothing. 1: "
        "optimizer states. 2: gradients too, reduced in every micro-batch's backward. 3: weights "
        "too, gathered layer by layer. Default: 1 with --use-distributed-optimizer, otherwise 0.",
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
        None,
        "GPU of this process, where LOCAL_RANK does not say it.",
        names=("--local_rank", "--local-rank"),
        at_least=0,
        at_most=2**15 - 1,
    )
    use_mpi: bool = flag(
        False, "Started by mpirun: take ranks from OMPI_COMM_WORLD_* instead of torchrun's."
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(ParallelOptions):
    """Parallelism as resolved: it is known what data-parallel processes share."""

    zero_stage: int = 0
