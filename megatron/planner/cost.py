"""The time of a micro-batch in a layer or head, and of messages, on a given machine.

All times are in seconds. They follow from quantities computed from the layer plan: the FLOPs of
matrix products and attention, and the bytes that other kernels move and that processes exchange.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from megatron.config import RunConfig
from megatron.config.stages import plan_model
from megatron.models.arithmetic import heads_of
from megatron.models.block import Block, class_of
from megatron.models.costs import MicroBatch, WeightSplit
from megatron.models.freezing import frozen_format
from megatron.models.latent_attention import LatentAttention
from megatron.models.mixture_plan import MixturePlan
from megatron.models.multi_token import Depth
from megatron.models.plan import (
    AttentionPlan,
    LatentAttentionPlan,
    LayerPlan,
    ModelPlan,
    SublayerPlan,
    multi_token_plan,
)
from megatron.models.recompute import RecomputePlan
from megatron.models.recurrent_plan import RecurrentPlan
from megatron.parallel.layout import Layout
from megatron.planner.machine import Link, Machine
from megatron.planner.memory import micro_batch

# How many times kernels without matrix products read or write each byte of a kept activation.
_FORWARD_PASSES, _BACKWARD_PASSES = 1.3, 1.7
# The sequence length at which attention reaches half of its full rate: causal and bidirectional.
_CAUSAL_HALF, _SQUARE_HALF = 674, 225
# Copies around attention with all-to-all (parallel/context/ring.py), forward and backward: copies
# of queries, keys and values together, copies of results, and the number of their kernels in
# addition to one per process.
_FORWARD_COPIES, _BACKWARD_COPIES = (3, 3, 5), (4, 2, 7)
_DROPOUT_PASSES = 2.5  # additional passes over a residual update with dropout, in each direction
_ATTENTION_DROPOUT = 0.85  # rate of attention with dropout, relative to attention without it
# Rate of attention with heads of 64 channels, relative to 128: cuDNN's kernel and the flash kernel.
_SMALL_HEADS, _SMALL_FLASH_HEADS = 0.6, 0.7
_PRODUCT_START = 2e-6  # seconds that a product takes in addition to its time at the full rate
_FORWARD_ATTENTION = 0.25  # fraction of attention's time that its forward pass takes
# Bytes read and written per element to unpack a frozen weight for a product in 16 bits.
_UNPACKED: dict[str | None, float] = {None: 0, "nf4": 2.5, "fp8": 3}
FP8_CAST = 5  # bytes read and written to cast an element and to transpose it
# Bytes per updated parameter: the gradient (read again for its norm), states and weights.
OPTIMIZER_BYTES = 32
# Fraction of a message's time that remains when it overlaps with products, which it slows down.
_OVERLAPPED = 0.25
IN_BUCKETS = 0.8  # the same for gradients and weights that are sent in buckets
# Kernels without matrix products in a sublayer, in each direction, and those that a mixture adds.
_KERNELS, _MIXTURE_KERNELS = 4, 31
# Bytes that the divergence from a teacher reads and writes per logit, forward and backward: for
# whole distributions, and for the top k from files (parallel/distillation.py).
_WHOLE_DIVERGENCE, _TOP_DIVERGENCE = (128, 88), (81, 63)
_RECEIVING = 0.037  # fraction of the device that a pipeline's posted receive occupies
# The host's work for a sublayer, forward and backward, in launches of `Machine.launch` seconds: for
# any sublayer, and the additional work for biases, dropout and experts.
_LAUNCHES, _BIAS_LAUNCHES, _DROPOUT_LAUNCHES, _MIXTURE_LAUNCHES = 28, 5, 4, 108
# Additional launches for a recurrence, and for each of its chunks.
_SCAN_LAUNCHES, _CHUNK_LAUNCHES = 170, 6
# Rate of a recurrence's fp32 products, relative to 16 bits (67 of 990 TFLOP/s on an H100).
_SCAN_RATE = 0.067
# Additional launches around a sublayer's messages, and its gathered weights (ZeRO stage 3).
_EXCHANGE_LAUNCHES, _GATHER_LAUNCHES = 22, 41
_BATCH_LAUNCHES = 33  # launches for a micro-batch's data, embedding and loss
# Launches for an update's gradients, optimizer, results and log, and for a message or a bucket.
UPDATE_LAUNCHES, MESSAGE_LAUNCHES = 160, 5
# Bytes moved per element of a weight whose gradient is accumulated in fp32, and of an expert's
# weight, whose gradient the products return in 16 bits.
_ACCUMULATED, _EXPERT_ACCUMULATED = 8, 10


class Seconds(NamedTuple):
    """The time of one pass, by what the device is doing.

    Attributes:
        products: The time of matrix products.
        attention: The time of attention, or of the recurrence that replaces it.
        memory: The time of kernels that move data: normalizations, activations, casts, loss.
        exchange: The time of exposed messages between tensor, context and expert ranks.
    """

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    exchange: float = 0.0

    @property
    def total(self) -> float:
        """The time of the pass."""
        return sum(self)

    def plus(self, *others: Seconds) -> Seconds:
        """Return the sum of this time and others."""
        return Seconds(*map(sum, zip(self, *others, strict=True)))

    def times(self, factor: float) -> Seconds:
        """Return this time multiplied by `factor`."""
        return Seconds(*(factor * value for value in self))


class PassTimes(NamedTuple):
    """The times of a micro-batch in a layer or a head.

    Attributes:
        forward: The time of the forward pass.
        inputs: The time of the gradients of the inputs, including recomputation.
        weights: The time of the gradients of the weights.
        host: The time that the host takes to launch all passes while the device computes.
    """

    forward: Seconds
    inputs: Seconds
    weights: Seconds
    host: float = 0.0

    @property
    def total(self) -> float:
        """The time of all passes on the device."""
        return self.forward.total + self.inputs.total + self.weights.total

    def plus(self, other: PassTimes) -> PassTimes:
        """Return the sum of these times and those of passes that follow."""
        return PassTimes(
            self.forward.plus(other.forward),
            self.inputs.plus(other.inputs),
            self.weights.plus(other.weights),
            self.host + other.host,
        )


@dataclass(frozen=True)
class Setting:
    """The machine, sizes and options that, besides its plan, determine the time of a layer.

    Attributes:
        machine: The rates of the machine.
        batch: The micro-batch on a process.
        expert: The number of expert-parallel processes.
        tensor_link: The connection between tensor-parallel processes.
        context_link: The connection between context-parallel processes.
        expert_link: The connection between expert-parallel processes.
        fp8: Whether layers compute their matrix products in FP8.
        fp8_weights: Whether they also compute weight gradients in FP8.
        overlaps: Whether tensor-parallel messages overlap with products.
        ring: Whether context-parallel processes pass keys and values around a ring.
        gathers: Whether each layer's weights are gathered when it is used (ZeRO stage 3).
        flash: Whether attention may only use the flash kernel, as ring attention must.
        receives: Whether receives from other pipeline stages are pending during passes.
        graphs: Whether passes are recorded, so that the host launches almost nothing.
        frozen: The format of packed frozen weights (--frozen-weights-dtype), or `None`.
    """

    machine: Machine
    batch: MicroBatch
    expert: int
    tensor_link: Link
    context_link: Link
    expert_link: Link
    fp8: bool
    fp8_weights: bool
    overlaps: bool
    ring: bool
    gathers: bool
    flash: bool
    receives: bool
    graphs: bool
    frozen: str | None

    @classmethod
    def of(cls, config: RunConfig, machine: Machine, texts: int = 1) -> Setting:
        """Return the setting of a run whose samples have `texts` sequences."""
        sizes = config.parallel.sizes
        tensor, context, expert = sizes["tensor"], sizes["context"], sizes["expert"]
        stage = math.lcm(tensor * context, expert * sizes["expert_tensor"])
        layout = Layout.at(0, stage * sizes["pipeline"], **config.parallel.grid)
        return cls(
            machine=machine,
            batch=replace(
                micro_batch(config, layout),
                sequences=config.training.micro_batch_size * texts,
                chunked_loss=config.precision.cross_entropy_fusion_impl == "linear",
            ),
            expert=expert,
            tensor_link=machine.connection(tensor, 1),
            context_link=machine.connection(context, tensor),
            expert_link=machine.connection(expert, sizes["expert_tensor"]),
            fp8=config.precision.fp8_format is not None,
            fp8_weights=config.precision.fp8_format is not None and config.precision.fp8_wgrad,
            overlaps=config.parallel.tp_comm_overlap,
            ring=config.parallel.cp_comm_type == "p2p",
            gathers=config.parallel.zero_stage == 3,
            # Both flags rule out cuDNN.
            flash=config.training.deterministic_mode or config.model.use_flash_attn,
            receives=sizes["pipeline"] > 1,
            graphs=config.training.cuda_graph_impl == "local",
            frozen=frozen_format(config.model),
        )


@lru_cache(maxsize=4096)
def layer_passes(layer: LayerPlan, setting: Setting) -> PassTimes:
    """Return the times of a layer without recomputation, for the lengths in `setting.batch`."""
    machine, batch = setting.machine, setting.batch
    forward, inputs, weights = Seconds(), Seconds(), Seconds()
    for sublayer in layer.sublayers:
        product = _products(sublayer, setting, setting.fp8)
        attention = _attention(sublayer, setting)
        forward_exchange, backward_exchange, weight_exchange = _exchange(
            sublayer, setting, attention
        )
        moved = _casts(sublayer, setting, 1) + _copies(sublayer, setting, *_FORWARD_COPIES)
        forward = forward.plus(
            Seconds(product, _FORWARD_ATTENTION * attention, moved, forward_exchange)
        )
        moved = _casts(sublayer, setting, 0) + _copies(sublayer, setting, *_BACKWARD_COPIES)
        inputs = inputs.plus(
            Seconds(product, (1 - _FORWARD_ATTENTION) * attention, moved, backward_exchange)
        )
        split = WeightSplit(
            tensor=batch.tensor, expert=setting.expert, expert_tensor=batch.expert_tensor
        )
        parameters = sum(
            outputs * inner for outputs, inner in class_of(sublayer).matrices(sublayer, split)
        )
        unpacking = Seconds(memory=_UNPACKED[setting.frozen] * parameters / machine.copy)
        forward, inputs = forward.plus(unpacking), inputs.plus(unpacking)
        is_mixture = isinstance(sublayer, MixturePlan)  # its weight gradients stay in 16 bits
        added = (_EXPERT_ACCUMULATED if is_mixture else _ACCUMULATED) * parameters / machine.copy
        product = _products(sublayer, setting, setting.fp8_weights and not is_mixture)
        weights = weights.plus(Seconds(product, memory=added, exchange=weight_exchange))
    activation_time = Block.activation_bytes(layer, batch) / machine.copy
    mixtures = sum(isinstance(sublayer, MixturePlan) for sublayer in layer.sublayers)
    kernels = (_KERNELS * len(layer.sublayers) + _MIXTURE_KERNELS * mixtures) * machine.kernel
    if layer.dropout > 0:
        updates = len(layer.sublayers) * batch.width * batch.tokens * layer.hidden
        kernels += _DROPOUT_PASSES * updates / batch.sequence / machine.copy
    forward = forward.plus(Seconds(memory=_FORWARD_PASSES * activation_time + kernels))
    inputs = inputs.plus(Seconds(memory=_BACKWARD_PASSES * activation_time + kernels))
    launches = _DROPOUT_LAUNCHES * len(layer.sublayers) * (layer.dropout > 0)
    launches += sum(_launches(sublayer, setting) for sublayer in layer.sublayers)
    return PassTimes(forward, inputs, weights, launches * machine.launch * (not setting.graphs))


def _launches(sublayer: SublayerPlan, setting: Setting) -> int:
    """Return the number of kernel launches of a sublayer, forward and backward, without dropout."""
    is_mixture = isinstance(sublayer, MixturePlan)
    exchanges = (setting.batch.tensor > 1) + (is_mixture and setting.expert > 1)
    exchanges += setting.batch.context > 1 and isinstance(sublayer, AttentionPlan | RecurrentPlan)
    scan = 0
    if isinstance(sublayer, RecurrentPlan):
        chunks = -(-setting.batch.length // sublayer.chunk)
        scan = _SCAN_LAUNCHES + _CHUNK_LAUNCHES * chunks
    return (
        _LAUNCHES
        + scan
        + _BIAS_LAUNCHES * sublayer.bias
        + _MIXTURE_LAUNCHES * is_mixture
        + _EXCHANGE_LAUNCHES * exchanges
        + _GATHER_LAUNCHES * setting.gathers
    )


def _products(sublayer: SublayerPlan, setting: Setting, fp8: bool) -> float:
    """Return the time of a sublayer's matrix products in one of its three passes."""
    machine, batch = setting.machine, setting.batch
    work = class_of(sublayer).flops(sublayer, batch.length, batch.encoder_length).products / 3
    rate, start = machine.products, _PRODUCT_START
    if fp8:
        rate = machine.products_fp8 or machine.products
    if isinstance(sublayer, MixturePlan):
        rate *= machine.grouped / machine.products
        start = machine.kernel
    rate *= 1 - _RECEIVING * setting.receives
    matrices = class_of(sublayer).matrices(sublayer, WeightSplit())
    share = batch.sequences / (batch.tensor * batch.context)
    return work * share / rate + len(matrices) * start


def _attention(sublayer: SublayerPlan, setting: Setting) -> float:
    """Return the time of a sublayer's attention or recurrence, forward and backward."""
    if not isinstance(sublayer, AttentionPlan | RecurrentPlan):
        return 0.0
    machine, batch = setting.machine, setting.batch
    scores = class_of(sublayer).flops(sublayer, batch.length, batch.encoder_length).scores
    if isinstance(sublayer, RecurrentPlan):
        ranks = batch.tensor * batch.context
        return scores * batch.sequences / ranks / (_SCAN_RATE * machine.products)
    is_flash = setting.flash or (batch.context > 1 and setting.ring)
    rate = machine.attention * (machine.ring if is_flash else 1.0)
    small = _SMALL_FLASH_HEADS if is_flash else _SMALL_HEADS
    rate *= 1 - (1 - small) * min(1.0, max(0.0, (128 - sublayer.head_size) / 64))
    rate *= 1 - _RECEIVING * setting.receives
    if sublayer.dropout > 0:
        rate *= _ATTENTION_DROPOUT
    length = batch.encoder_length if sublayer.kind == "cross_attention" else batch.length
    rate /= 1 + (_CAUSAL_HALF if sublayer.causal else _SQUARE_HALF) / length
    return scores * batch.sequences / (batch.tensor * batch.context) / rate


def _casts(sublayer: SublayerPlan, setting: Setting, side: int) -> float:
    """Return the time to cast the inputs of products, or the gradients of their outputs, to 8 bits.

    Args:
        sublayer: The plan of the sublayer.
        setting: The machine, sizes and options.
        side: The dimension of the weights that the tensors match: 1 for the inputs, 0 for the
            gradients of the outputs.
    """
    if not setting.fp8:
        return 0.0
    batch = setting.batch
    rows = batch.tokens
    if isinstance(sublayer, MixturePlan):
        rows = batch.expert_tokens * sublayer.router.chosen
        sublayer = sublayer.expert
    width = sum(shape[side] for shape in class_of(sublayer).matrices(sublayer, WeightSplit()))
    return FP8_CAST * rows * width / batch.tensor / setting.machine.copy


def _copies(
    sublayer: SublayerPlan, setting: Setting, inputs: int, results: int, kernels: int
) -> float:
    """Return the time of all-to-all's copies around attention in the forward or backward pass.

    Args:
        sublayer: The plan of the sublayer.
        setting: The machine, sizes and options.
        inputs: The number of times that queries, keys and values are copied.
        results: The number of times that results are copied.
        kernels: The number of kernels that make these copies, in addition to one per
            context-parallel process.
    """
    batch, machine = setting.batch, setting.machine
    if batch.context == 1 or setting.ring or not isinstance(sublayer, AttentionPlan):
        return 0.0
    heads = inputs * (sublayer.heads + 2 * sublayer.kv_heads) + results * sublayer.heads
    copied = batch.width * batch.tokens * sublayer.head_size * heads / batch.tensor
    return 2 * copied / machine.copy + (kernels + batch.context) * machine.kernel


def _exchange(
    sublayer: SublayerPlan, setting: Setting, attention: float
) -> tuple[float, float, float]:
    """Return the exposed message times of the forward, input-gradient and weight-gradient passes.

    `attention` is the time of the sublayer's attention, with which ring messages overlap.
    """
    batch, forward, inputs, weights = setting.batch, 0.0, 0.0, 0.0
    if batch.tensor > 1:
        message = _message(batch, sublayer.hidden, setting.tensor_link)
        exposed = _OVERLAPPED if setting.overlaps else 1.0
        forward += 2 * exposed * message
        if batch.sequence > 1:
            # The gradient of the output is gathered. During products, the input is gathered again
            # and its gradient is scattered.
            inputs += (exposed + _OVERLAPPED) * message
            weights += _OVERLAPPED * message
        else:
            weights += 2 * _OVERLAPPED * message
    if batch.context > 1 and isinstance(sublayer, AttentionPlan):
        link, head_bytes = setting.context_link, batch.width * batch.tokens * sublayer.head_size
        head_bytes //= batch.tensor
        if setting.ring:
            sent = 2 * sublayer.kv_heads * head_bytes * (batch.context - 1) / link.bandwidth
            sent += link.latency * (batch.context - 1)
            forward += _exposed(sent, _FORWARD_ATTENTION * attention)
            inputs += _exposed(3 * sent, (1 - _FORWARD_ATTENTION) * attention)
        else:
            sent = 2 * (sublayer.heads + sublayer.kv_heads) * head_bytes * (1 - 1 / batch.context)
            forward += sent / link.bandwidth + 2 * link.latency
            inputs += sent / link.bandwidth + 2 * link.latency
    if batch.context > 1 and isinstance(sublayer, RecurrentPlan):
        # All-to-all exchanges of the recurrence's inputs and of its results.
        link, matrices = setting.context_link, class_of(sublayer).matrices(sublayer, WeightSplit())
        (inputs_width, _), (_, results_width) = matrices
        width = inputs_width + results_width
        sent = batch.width * batch.tokens * width / batch.tensor * (1 - 1 / batch.context)
        forward += sent / link.bandwidth + 2 * link.latency
        inputs += sent / link.bandwidth + 2 * link.latency
    if isinstance(sublayer, MixturePlan) and setting.expert > 1:
        link, share = setting.expert_link, 1 - 1 / setting.expert
        rows = batch.width * batch.expert_tokens * sublayer.router.chosen * sublayer.hidden * share
        forward += 2 * (rows / link.bandwidth + link.latency)
        inputs += 2 * (rows / link.bandwidth + link.latency)
    return forward, inputs, weights


def _exposed(sent: float, attention: float) -> float:
    """Return the time of messages that remains when they overlap with attention."""
    return max(sent - attention, _OVERLAPPED * sent)


def _message(batch: MicroBatch, hidden: int, link: Link) -> float:
    """Return the time to gather or scatter hidden states over tensor-parallel processes."""
    sent = batch.width * batch.tokens * hidden * (1 - 1 / batch.tensor)
    return link.latency + sent / link.bandwidth


def recomputed(layer: LayerPlan, passes: PassTimes, modules: Iterable[str] | None) -> PassTimes:
    """Return the times of a layer with recomputation of some or all of its parts.

    Args:
        layer: The plan of the layer.
        passes: Its times without recomputation.
        modules: The parts to recompute (--recompute-modules); `None` for the whole layer.
    """
    repeated, host = passes.forward, passes.host / 3
    if modules is not None:
        named = set(modules)
        work = [class_of(sublayer).flops(sublayer, 1, 1).products for sublayer in layer.sublayers]
        share = work[-1] / sum(work) if named & {"mlp", "moe"} else 0.0
        if "mla_up_proj" in named and isinstance(layer.mixer, LatentAttentionPlan):
            share += work[0] / sum(work) * LatentAttention.share_of_heads(layer.mixer)
        repeated = Seconds(
            share * repeated.products,
            repeated.attention if "core_attn" in named else 0.0,
            (share + 0.2 * ("layernorm" in named)) * repeated.memory,
            share * repeated.exchange,
        )
        host *= share
    return passes._replace(inputs=passes.inputs.plus(repeated), host=passes.host + host)


def head_passes(plan: ModelPlan, setting: Setting) -> PassTimes:
    """Return the times of the heads: output layer, loss, and the heads of a task."""
    machine, batch = setting.machine, setting.batch
    share = batch.sequences / (batch.tensor * batch.context)
    product = memory = added = 0.0
    for kind, head in heads_of(plan):
        added += _ACCUMULATED * kind.parameter_count(head, batch.tensor) / machine.copy
        rate = machine.products * (1 - _RECEIVING * setting.receives)
        product += kind.flops(head, batch.length) / 3 * share / rate
        memory += kind.activation_bytes(head, batch) / machine.copy
    message = _message(batch, plan.hidden, setting.tensor_link) if batch.tensor > 1 else 0.0
    launches = _BATCH_LAUNCHES + _EXCHANGE_LAUNCHES * (batch.tensor > 1)
    launches += 2 * MESSAGE_LAUNCHES * setting.receives
    return PassTimes(
        Seconds(product, memory=_FORWARD_PASSES * memory, exchange=message),
        Seconds(product, memory=_BACKWARD_PASSES * memory),
        Seconds(product, memory=added, exchange=_OVERLAPPED * message),
        launches * machine.launch,
    )


def stage_message(config: RunConfig, plan: ModelPlan, machine: Machine, world_size: int) -> float:
    """Return the time of a message from a pipeline stage to the next one; 0 with one stage."""
    parallel, stages = config.parallel, config.parallel.pipeline_model_parallel_size
    if stages == 1:
        return 0.0
    stage = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    stride = stage if parallel.use_tp_pp_dp_mapping else world_size // stages
    batch = Setting.of(config, machine, plan.head_spec.sequences).batch
    link = machine.connection(2, stride)
    rate = min(link.bandwidth, machine.pair)
    hidden = plan.hidden + (plan.teacher.hidden if plan.teacher is not None else 0)
    return link.latency + batch.width * batch.tokens * hidden / batch.sequence / rate


def model_passes(
    config: RunConfig, plan: ModelPlan, machine: Machine
) -> tuple[list[PassTimes], PassTimes]:
    """Return the times of every layer and of the heads for one micro-batch."""
    setting = Setting.of(config, machine, plan.head_spec.sequences)
    recompute = RecomputePlan.from_config(config.training)
    fully_recomputed = set()  # layers that are recomputed as a whole
    if recompute is not None and recompute.granularity == "full":
        layer_limit = recompute.num_layers if recompute.method == "block" else len(plan.layers)
        parts = plan_model(config.model, config.parallel)
        fully_recomputed = {i for part in parts for i in part.layers[:layer_limit]}

    def times_of(layer: LayerPlan, setting: Setting, *, is_recomputed: bool) -> PassTimes:
        passes = layer_passes(layer, setting)
        if is_recomputed:
            return recomputed(layer, passes, None)
        if recompute is not None and recompute.granularity == "selective":
            return recomputed(layer, passes, recompute.modules)
        return passes

    cache: dict[tuple[int, int, int, bool, bool], PassTimes] = {}  # most layers are identical
    layers, fp8_layers = [], config.precision.fp8_layers(len(plan.layers))
    setting_16_bits = replace(setting, fp8=False, fp8_weights=False)
    for index, layer in enumerate(plan.layers):
        length, encoder_length = plan.lengths(
            index, config.data.seq_length, config.data.decoder_seq_length
        )
        is_fp8 = index in fp8_layers
        key = (id(layer), length, encoder_length, index in fully_recomputed, is_fp8)
        if key not in cache:
            batch = replace(setting.batch, length=length, encoder_length=encoder_length)
            layer_setting = replace(setting if is_fp8 else setting_16_bits, batch=batch)
            cache[key] = times_of(layer, layer_setting, is_recomputed=index in fully_recomputed)
        layers.append(cache[key])
    head = head_passes(plan, setting)
    multi_token = multi_token_plan(plan)
    for layer in multi_token.layers if multi_token is not None else ():
        head = head.plus(times_of(layer, setting, is_recomputed=Depth.recomputes_all(recompute)))
    if config.model.lora_rank is not None:  # frozen weights have no gradients
        *layers, head = (times._replace(weights=Seconds()) for times in (*layers, head))
    if plan.teacher is not None:
        layers, head = _with_teacher(layers, head, plan.teacher, setting)
    elif config.distillation.is_on:
        head = _with_divergence(head, plan, setting, _TOP_DIVERGENCE)
    return layers, head


def _with_teacher(
    layers: list[PassTimes], head: PassTimes, teacher: ModelPlan, setting: Setting
) -> tuple[list[PassTimes], PassTimes]:
    """Return the times of layers and head including the forward passes of a teacher.

    The time of the teacher's layers is spread evenly over the student's.
    """
    teacher_setting = replace(setting, fp8=False, fp8_weights=False, gathers=False, frozen=None)
    teacher_layers = [layer_passes(layer, teacher_setting) for layer in teacher.layers]
    share = Seconds().plus(*(times.forward for times in teacher_layers)).times(1 / len(layers))
    host = sum(times.host for times in teacher_layers) / 3 / len(layers)
    layers = [
        times._replace(forward=times.forward.plus(share), host=times.host + host)
        for times in layers
    ]
    teacher_head = head_passes(teacher, teacher_setting).forward._replace(memory=0.0)
    head = head._replace(forward=head.forward.plus(teacher_head))
    return layers, _with_divergence(head, teacher, setting, _WHOLE_DIVERGENCE)


def _with_divergence(
    head: PassTimes, plan: ModelPlan, setting: Setting, moved: tuple[int, int]
) -> PassTimes:
    """Return the times of the head including the divergence from a teacher's distributions.

    Args:
        head: The times of the head without the divergence.
        plan: The plan of the student or the teacher, which share a vocabulary.
        setting: The setting of the run.
        moved: The bytes that the divergence reads and writes per logit, forward and backward.
    """
    logits = setting.batch.tokens * plan.embedding.vocabulary / setting.batch.tensor
    forward, backward = (
        Seconds(memory=bytes_per_logit * logits / setting.machine.copy) for bytes_per_logit in moved
    )
    return head._replace(forward=head.forward.plus(forward), inputs=head.inputs.plus(backward))
