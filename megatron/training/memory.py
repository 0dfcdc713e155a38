"""How much memory one process needs, by arithmetic alone.

Counts what training keeps: parameters (with their 8-bit copies), gradients, optimizer states and
the activations saved for backward. Temporary buffers, the allocator's rounding and the CUDA context
are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron.config import RunConfig
from megatron.config.run import known
from megatron.config.stages import ModelPart, parts_of_stage, plan_model
from megatron.models.arithmetic import count_part_matrices, count_part_parameters
from megatron.models.sizes import IN_WORDS, Ending, sizes_of
from megatron.parallel.buckets import BUCKET_BYTES
from megatron.parallel.cross_entropy import CHUNK_LOGITS
from megatron.parallel.layout import Layout
from megatron.parallel.pipeline.schedule import activation_bound, loss_bound, schedule_kind
from megatron.parallel.replicas import shares_weights
from megatron.training.tensor_overlap import exchange_bytes

_GIB = 1024.0**3
_MIB = 1024.0**2


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one process."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    messages: int = 0
    """What other processes write into beside products."""
    host: int = 0
    """What offloading keeps in host memory."""

    @property
    def total(self) -> int:
        kept = self.parameters + self.gradients + self.optimizer
        return kept + self.activations + self.messages

    @property
    def amount(self) -> str:
        """All of it, with its unit."""
        return _amount(self.total)

    def describe(self) -> str:
        names = ["parameters", "gradients", "optimizer", "activations"]
        names += ["messages"] if self.messages else []
        parts = ", ".join(f"{name} {_amount(getattr(self, name))}" for name in names)
        host = f", and {_amount(self.host)} of host memory" if self.host else ""
        return f"{self.amount} ({parts}){host}"


def _amount(size: int) -> str:
    """Bytes in the unit that keeps digits readable."""
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / _MIB:.1f} MiB"


def estimate_memory(
    config: RunConfig,
    padded_vocab_size: int,
    layout: Layout,
    micro_batches: int,
    ending: Ending = IN_WORDS,
) -> MemoryEstimate:
    """Memory of the process that `layout` describes, with `micro_batches` an update."""
    half = config.precision.fp16 or config.precision.bf16
    width = 2 if half else 4
    plan = plan_model(config.model, config.parallel)
    parts = parts_of_stage(plan, layout.pipeline.rank, layout.pipeline.size)
    kept = _kept_for_weights(config, padded_vocab_size, layout, parts, ending)
    kind = schedule_kind(config.parallel, len(parts))
    held = activation_bound(
        kind, layout.pipeline.rank, layout.pipeline.size, len(parts), micro_batches
    )
    messages = exchange_bytes(config, layout, ending.texts)
    config = _with_sequences(config, ending.texts)
    activations = sum(
        _part_activations(config, part, layout, width) * held // len(parts) for part in parts
    )
    if parts[-1].head:
        losses = loss_bound(kind, micro_batches)
        activations += _end_activations(config, layout, width, padded_vocab_size, ending, losses)
    return replace(kept, activations=activations, messages=messages)


def _with_sequences(config: RunConfig, texts: int) -> RunConfig:
    """With as many samples in a micro-batch as there are sequences in those of so many texts."""
    samples = known(config.training.micro_batch_size) * texts
    return replace(config, training=replace(config.training, micro_batch_size=samples))


def _kept_for_weights(
    config: RunConfig,
    padded_vocab_size: int,
    layout: Layout,
    parts: Sequence[ModelPart],
    ending: Ending,
) -> MemoryEstimate:
    """Weights, gradients and optimizer states of the parts that a process holds."""
    half = config.precision.fp16 or config.precision.bf16
    in_fp32 = not half or config.precision.accumulate_allreduce_grads_in_fp32
    width, summed = 2 if half else 4, 4 if in_fp32 else 2
    layer, outside, parameters = _count_weights(config, padded_vocab_size, layout, parts, ending)
    of_8_bits = _count_8_bit_weights(config, layout, parts)
    moments = 2 if config.optimizer.optimizer == "adam" else int(config.optimizer.sgd_momentum > 0)
    on_host, stage = config.optimizer.optimizer_cpu_offload, config.parallel.zero_stage or 0
    updated = parameters // layout.replica.size if stage > 0 else parameters
    copies = 4 if on_host or (half and not shares_weights(config.parallel, layout)) else 0
    states = (4 * moments + copies) * updated
    if shares_weights(config.parallel, layout):
        # Whole for a while: this layer and the next, which arrives in one piece and is cut then.
        gathered = width * (outside + 3 * layer)
        leaving = width * outside + (width + summed) * layer
        weights, gradients, summed = 4 * updated + gathered, 4 * updated + leaving, 4
    else:
        weights = width * parameters + 2 * of_8_bits  # these and their transposes
        gradients = summed * parameters
        if stage == 2 and layout.replica.size > 1:
            passing = 2 * max(
                BUCKET_BYTES, summed * _largest_weight(config, padded_vocab_size, layout)
            )
            if config.precision.fp8_param_gather:  # all small ones fill a bucket of their own
                passing += min(BUCKET_BYTES, summed * (parameters - outside - of_8_bits))
            gradients = summed * updated + min(passing, summed * parameters)
        if config.parallel.ddp_impl == "torch" and layout.replica.size > 1:
            gradients *= 2  # its own buckets
    return MemoryEstimate(
        parameters=weights,
        gradients=gradients,
        optimizer=0 if on_host else states,
        activations=0,
        host=states + summed * updated if on_host else 0,
    )


def _count_weights(
    config: RunConfig,
    padded_vocab_size: int,
    layout: Layout,
    parts: Sequence[ModelPart],
    ending: Ending,
) -> tuple[int, int, int]:
    """Parameters of the largest layer, of all outside of layers, and of the parts in all."""
    count = partial(
        count_part_parameters,
        config.model,
        padded_vocab_size,
        tensor=layout.tensor.size,
        ending=ending,
    )
    layer = max(
        count(part=ModelPart(range(index, index + 1), embedding=False, head=False))
        for index in (0, config.model.all_layers - 1)
    )
    outside = sum(count(part=replace(part, layers=range(0))) for part in parts)
    return layer, outside, sum(count(part=part) for part in parts)


def _count_8_bit_weights(config: RunConfig, layout: Layout, parts: Sequence[ModelPart]) -> int:
    """Elements of the matrices that fp8 products multiply by."""
    if config.precision.fp8_format is None:
        return 0
    size = layout.tensor.size
    return sum(count_part_matrices(config.model, part, tensor=size) for part in parts)


def _largest_weight(config: RunConfig, padded_vocab_size: int, layout: Layout) -> int:
    """Elements of the largest matrix that one tensor rank may hold."""
    sizes = sizes_of(config.model)
    rows = max(padded_vocab_size, sizes.up, sizes.ffn, sizes.qkv)
    return rows * sizes.hidden // layout.tensor.size


def largest_process(
    config: RunConfig, padded_vocab_size: int, world_size: int, ending: Ending = IN_WORDS
) -> MemoryEstimate:
    """Memory of the process that needs the most: stages differ, ranks of one stage do not."""
    parallel, training = config.parallel, config.training
    stages = parallel.pipeline_model_parallel_size
    layouts = [
        Layout.at(
            stage * (world_size // stages),
            world_size,
            tensor=parallel.tensor_model_parallel_size,
            context=parallel.context_parallel_size,
            pipeline=stages,
        )
        for stage in range(stages)
    ]
    samples = known(training.micro_batch_size) * layouts[0].data.size
    micro_batches = known(training.global_batch_size) // samples
    estimates = [
        estimate_memory(config, padded_vocab_size, layout, micro_batches, ending)
        for layout in layouts
    ]
    return max(estimates, key=lambda estimate: estimate.total)


def _tokens(config: RunConfig, layout: Layout, sequence: int | None = None) -> int:
    """Of one micro-batch of sequences (unset: --seq-length) on one process."""
    length = known(config.data.seq_length) if sequence is None else sequence
    return length * known(config.training.micro_batch_size) // layout.context.size


def _end_activations(
    config: RunConfig,
    layout: Layout,
    width: int,
    padded_vocab_size: int,
    ending: Ending,
    losses: int,
) -> int:
    """The logits, whose gradient takes their place, and BERT's layer before them: of as many
    micro-batches as have a loss and wait for its backward."""
    if not ending.guesses_tokens:
        return 0  # some vectors of a sequence, where a layer keeps that many of each token
    hidden = known(config.model.hidden_size)
    tokens = _tokens(config, layout, config.data.decoder_seq_length)
    size = padded_vocab_size // layout.tensor.size
    if config.precision.cross_entropy_fusion_impl == "linear":  # and gradients, until backward
        gradients = hidden * (4 * size + width * tokens)
        bytes_ = width * min(tokens * size, CHUNK_LOGITS) + losses * gradients
    else:
        bytes_ = losses * width * tokens * size
    if config.model.architecture != "bert":
        return bytes_
    outside = layout.tensor.size if config.parallel.sequence_parallel else 1
    # Output of the dense layer, of its activation, of the normalization.
    return bytes_ + losses * 3 * width * tokens * hidden // outside


def _part_activations(config: RunConfig, part: ModelPart, layout: Layout, width: int) -> int:
    """Bytes saved for the backward of one micro-batch through the layers of a part."""
    training, count = config.training, len(part.layers)
    outside = layout.tensor.size if config.parallel.sequence_parallel else 1
    message = _tokens(config, layout, config.data.sample_tokens)
    boundary = width * message * known(config.model.hidden_size) // outside
    encoder = known(config.model.num_layers)
    of_layers = [
        _layer_activations(config, layout, width, is_decoder=index >= encoder)
        for index in part.layers
    ]
    layers = sum(of_layers)
    if training.recompute_granularity == "full":
        group = training.recompute_num_layers or 1
        saved = boundary
        if config.parallel.distribute_saved_activations and outside == 1:
            saved //= layout.tensor.size
        largest = max(of_layers, default=0)
        if training.recompute_method == "uniform":
            layers = -(-count // group) * saved + min(group, count) * largest
        else:
            kept = of_layers[group:]
            layers = (count - len(kept)) * saved + max(sum(kept), largest)
    layers += _position_biases(config, part, layout, width)
    return layers + (int(part.embedding) + int(part.head)) * boundary


def _position_biases(config: RunConfig, part: ModelPart, layout: Layout, width: int) -> int:
    """What a T5 with relative positions adds to scores: the encoder's is another for each sample,
    as it has the padding's mask too."""
    model, data = config.model, config.data
    if model.position_embedding_type != "relative":
        return 0
    of_encoder, of_decoder = part.halves(known(model.num_layers))
    scores = known(data.decoder_seq_length) ** 2 if of_decoder else 0
    if of_encoder:
        scores += known(config.training.micro_batch_size) * known(data.seq_length) ** 2
    return width * known(model.num_attention_heads) // layout.tensor.size * scores


def _layer_activations(
    config: RunConfig, layout: Layout, width: int, *, is_decoder: bool = False
) -> int:
    """Of one layer; of a T5's decoder with its attention to the encoder."""
    model, tensor = config.model, layout.tensor.size
    length = config.data.decoder_seq_length if is_decoder else config.data.seq_length
    tokens = _tokens(config, layout, length)
    outside = tensor if config.parallel.sequence_parallel else 1
    hidden = known(model.hidden_size)
    heads = known(model.num_attention_heads) * known(model.kv_channels)
    keys_values = 2 * model.kv_heads * known(model.kv_channels)
    inner = known(model.ffn_hidden_size) * (3 if model.is_gated else 2)
    # Two norm inputs, two norm outputs; query, key, value; attention output; MLP inner tensors.
    elements = 4 * hidden // outside + (2 * heads + keys_values + inner) // tensor
    total = width * tokens * elements
    masks = 2  # of hidden dropout
    read = known(length)  # keys that a query meets, in all its attentions
    if is_decoder:
        # Norm input and output, query, attention output; key and value of the encoder's tokens.
        total += width * tokens * (2 * hidden // outside + 2 * heads // tensor)
        total += width * _tokens(config, layout) * 2 * heads // tensor
        masks, read = 3, read + known(config.data.seq_length)
    if model.hidden_dropout > 0:
        total += masks * tokens * hidden // outside  # one byte a mask entry
    plain_scores = not model.masked_softmax_fusion
    if plain_scores and config.training.recompute_granularity != "selective":
        scores = tokens * read * known(model.num_attention_heads) // tensor
        total += scores * (2 * width + (1 if model.attention_dropout > 0 else 0))
    return total
