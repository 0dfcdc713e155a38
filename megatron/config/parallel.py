"""Parallelism options: how processes share the work and how they communicate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config.fields import MAX_LAYERS, MIXTURE, RECOMPUTED, Requirement, flag

# Conditions for the flags below, used as their `needs` or `requires`.
_CONTEXT_PARALLEL = Requirement(
    lambda run: run.parallel.context_parallel_size > 1,
    "--context-parallel-size: sequences are not split",
)
_SHARDED = Requirement(
    lambda run: run.parallel.zero_stage, "--use-distributed-optimizer or --zero-stage"
)


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Parallelism.

    Attributes:
        tensor_model_parallel_size: Number of processes that split each layer.
        pipeline_model_parallel_size: Number of processes that split the layers into stages.
        context_parallel_size: Number of processes that split each sequence.
        expert_model_parallel_size: Number of processes that share the experts of a mixture layer.
        expert_tensor_parallel_size: Number of processes that split each expert, a divisor of
            --tensor-model-parallel-size. Default: --tensor-model-parallel-size.
        num_layers_per_virtual_pipeline_stage: Split each stage into virtual stages of this many
            layers (interleaved schedule). Default: one virtual stage.
        num_virtual_stages_per_pipeline_rank: Number of virtual stages per pipeline rank. Default:
            1.
        pipeline_schedule: Schedule of forward and backward passes. Default: 1f1b, or interleaved
            with virtual stages.
        pipeline_model_parallel_layout: Contents of each stage, for example Ett|tt|tt|ttL, where E
            is the embedding, t a layer and L the loss.
        decoder_first_pipeline_num_layers: Number of layers on the first stage. Default: as many as
            on the others.
        decoder_last_pipeline_num_layers: Number of layers on the last stage. Default: as many as on
            the others.
        pipeline_model_parallel_split_rank: Pipeline stage on which the T5 decoder begins. Default:
            encoder and decoder layers are distributed as one sequence.
        account_for_embedding_in_pipeline_split: Count the embedding as a layer when distributing
            layers over stages.
        account_for_loss_in_pipeline_split: Count the output layer and loss as a layer when
            distributing layers over stages.
        cp_comm_type: Communication between context-parallel processes: p2p passes keys and values
            around a ring, a2a exchanges tokens for heads (Ulysses).
        sequence_parallel: Split activations between the tensor-parallel layers along the sequence
            (Korthikanti et al., 2022).
        async_tensor_model_parallel_allreduce: Communicate input gradients of tensor-parallel layers
            while computing their weight gradients.
        tp_comm_overlap: With --sequence-parallel, overlap the communication of tensor-parallel
            layers with their matrix products, which are split by rows into one chunk per
            tensor-parallel process. GPUs communicate through each other's mapped memory, so they
            must be on one machine.
        overlap_moe_expert_parallel_comm: Exchange the tokens of one half of a micro-batch with the
            experts' processes while the experts compute the other half. This pays off where
            communication is slow, for example between machines. Megatron Core overlaps two
            micro-batches.
        distribute_saved_activations: With --recompute-granularity full, split the saved layer
            inputs among tensor-parallel processes.
        use_tp_pp_dp_mapping: Number the ranks with pipeline stages before data-parallel copies
            (tensor, context, pipeline, data), so that the stages of a copy share machines.
            Otherwise the order is tensor, context, data, pipeline.
        distributed_backend: Communication library on GPUs. CPUs always use gloo.
        distributed_timeout_minutes: Time after which a run that waits for a process ends with an
            error naming that process. Fractions are allowed.
        ddp_impl: How gradients are averaged over data-parallel processes: local uses contiguous
            buffers, torch uses PyTorch's DistributedDataParallel.
        use_contiguous_buffers_in_local_ddp: Accepted for compatibility; no effect. Gradients are
            always kept in contiguous buffers.
        use_distributed_optimizer: Shard optimizer states and the update over data-parallel
            processes. Same as --zero-stage 1.
        zero_stage: What is sharded over data-parallel processes. 0: nothing. 1: optimizer states.
            2: also gradients, reduced in the backward pass of every micro-batch. 3: also weights,
            gathered layer by layer. Default: 1 with --use-distributed-optimizer, otherwise 0.
        overlap_grad_reduce: Reduce gradients while the backward pass is still computing others.
        overlap_param_gather: With --zero-stage 1 or 2, gather updated weights during the forward
            pass.
        use_cpu_initialization: Accepted for compatibility; no effect. Every device draws the same
            initial weights.
        local_rank: GPU of this process, used if LOCAL_RANK is not set.
        use_mpi: Take ranks from OMPI_COMM_WORLD_*, for runs started by mpirun instead of torchrun.
    """

    tensor_model_parallel_size: int = flag(1, unit="processes", is_common=True, at_least=1)
    pipeline_model_parallel_size: int = flag(
        1, unit="processes", is_common=True, at_least=1, at_most=MAX_LAYERS
    )
    context_parallel_size: int = flag(1, unit="processes", at_least=1)
    expert_model_parallel_size: int = flag(
        1,
        unit="processes",
        at_least=1,
        requires=MIXTURE,
    )
    expert_tensor_parallel_size: int | None = flag(None, unit="processes", at_least=1)
    num_layers_per_virtual_pipeline_stage: int | None = flag(None, unit="layers", at_least=1)
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, unit="stages", at_least=1)
    pipeline_schedule: str | None = flag(
        None, choices=("gpipe", "1f1b", "interleaved", "zero-bubble")
    )
    pipeline_model_parallel_layout: str | None = None
    decoder_first_pipeline_num_layers: int | None = flag(None, unit="layers", at_least=0)
    decoder_last_pipeline_num_layers: int | None = flag(None, unit="layers", at_least=0)
    pipeline_model_parallel_split_rank: int | None = flag(None, unit="stage", only_for=("t5",))
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    cp_comm_type: str = flag("p2p", choices=("p2p", "a2a"), needs=_CONTEXT_PARALLEL)
    sequence_parallel: bool = False
    async_tensor_model_parallel_allreduce: bool = True
    tp_comm_overlap: bool = False
    overlap_moe_expert_parallel_comm: bool = flag(False, requires=MIXTURE)
    distribute_saved_activations: bool = flag(False, requires=RECOMPUTED)
    use_tp_pp_dp_mapping: bool = False
    distributed_backend: str = flag("nccl", choices=("nccl", "gloo"))
    distributed_timeout_minutes: float = flag(10.0, unit="minutes", above=0, at_most=365 * 24 * 60)
    ddp_impl: str = flag("local", names="--DDP-impl", choices=("local", "torch"))
    use_contiguous_buffers_in_local_ddp: bool = flag(
        True,
        off="--no-contiguous-buffers-in-local-ddp",
        notice="gradients always live in contiguous buffers, which cost no extra memory here",
    )
    use_distributed_optimizer: bool = flag(False, is_common=True)
    zero_stage: int | None = flag(None, choices=(0, 1, 2, 3))
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = flag(False, requires=_SHARDED)
    use_cpu_initialization: bool = flag(
        False, notice="every device draws the same initial weights, for any parallel layout"
    )
    local_rank: int | None = flag(
        None, names="--local_rank --local-rank", at_least=0, at_most=2**15 - 1
    )
    use_mpi: bool = False


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(ParallelOptions):
    """Parallelism options after `resolve`, when the ZeRO stage is known."""

    zero_stage: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the process grid."""
        return {
            "tensor": self.tensor_model_parallel_size,
            "context": self.context_parallel_size,
            "pipeline": self.pipeline_model_parallel_size,
            "expert": self.expert_model_parallel_size,
            "expert_tensor": self.expert_tensor_parallel_size or self.tensor_model_parallel_size,
        }

    @property
    def grid(self) -> dict[str, Any]:
        """The process grid, as the arguments of `Layout.at`."""
        return {
            **self.sizes,
            "sequence_parallel": self.sequence_parallel,
            "pipeline_before_data": self.use_tp_pp_dp_mapping,
        }
