"""All sensible layouts of a run on a given number of GPUs, and the fastest of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

from megatron.config import RunConfig, rules_attention, rules_hybrid, rules_model
from megatron.config.checks import bounds, find_problems, requirements
from megatron.config.model import ModelConfig, ModelOptions
from megatron.config.resolve import resolve
from megatron.config.run import RunOptions, field_at, flatten, narrow, with_values
from megatron.config.stages import plan_model
from megatron.errors import ConfigError
from megatron.models.plan import ModelPlan
from megatron.models.plans import model_plan
from megatron.planner.cost import model_passes
from megatron.planner.machine import Machine
from megatron.planner.memory import largest_process
from megatron.planner.pipeline_balance import Costs, Pipeline, layout_text
from megatron.planner.prediction import (
    Prediction,
    micro_batches_of,
    pipeline_of,
    predict,
)
from megatron.tokenizer.build import padded_vocab_size

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_MAX_TOKENS = 131_072  # limit for a micro-batch of several samples
_MAX_STAGES = 64
_MIN_TOKENS = 4096  # minimum for a sequence on a context-parallel process
_MAX_BALANCE_GAIN = 0.2  # the largest fraction of the time that an uneven distribution can save
_MIN_BALANCE_GAIN = 0.005  # the smallest such fraction that is worth an uneven distribution
# Ways to recompute in the backward pass, cheapest first.
_RECOMPUTATION: tuple[Mapping[str, Any], ...] = (
    {},
    {
        "training.recompute_granularity": "selective",
        "training.recompute_modules": ("layernorm", "mlp"),
    },
    {
        "training.recompute_granularity": "full",
        "training.recompute_method": "uniform",
        "training.recompute_num_layers": 1,
    },
)
# Values that every layout sets, regardless of the run's own flags.
_UNSET: Mapping[str, Any] = {
    "parallel.cp_comm_type": "p2p",
    "parallel.pipeline_schedule": None,
    "parallel.num_virtual_stages_per_pipeline_rank": None,
    "parallel.num_layers_per_virtual_pipeline_stage": None,
    "parallel.pipeline_model_parallel_layout": None,
    "parallel.decoder_first_pipeline_num_layers": None,
    "parallel.decoder_last_pipeline_num_layers": None,
    "parallel.account_for_embedding_in_pipeline_split": False,
    "parallel.account_for_loss_in_pipeline_split": False,
    "parallel.expert_model_parallel_size": 1,
    "parallel.expert_tensor_parallel_size": None,
    "parallel.use_distributed_optimizer": False,
    "parallel.overlap_grad_reduce": False,
    "parallel.overlap_param_gather": False,
    "training.recompute_activations": False,
    "training.recompute_granularity": None,
    "training.recompute_method": None,
    "training.recompute_num_layers": None,
}
# The smallest layout: a single process.
_SMALLEST: Mapping[str, Any] = {
    **_UNSET,
    "parallel.tensor_model_parallel_size": 1,
    "parallel.sequence_parallel": False,
    "parallel.tp_comm_overlap": False,
    "parallel.context_parallel_size": 1,
    "parallel.pipeline_model_parallel_size": 1,
    "parallel.zero_stage": 0,
    "training.micro_batch_size": 1,
}
# Everything that a layout may set.
PLANNED = frozenset(_SMALLEST) | {"training.recompute_modules"}
# Values that do not affect the time of a stage's computation, except for ZeRO stage 3.
_NOT_IN_BOUND = {
    "parallel.pipeline_schedule",
    "parallel.zero_stage",
    "parallel.use_distributed_optimizer",
    "parallel.overlap_grad_reduce",
    "parallel.overlap_param_gather",
}
_MIXTURE_MODULES = ("layernorm", "moe_act")

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Candidate:
    """A layout whose schedule has not been simulated yet.

    Attributes:
        values: The values that it sets, by "section.field".
        plan: The plan of the network, whose vocabulary is padded for the tensor-parallel size.
        bound: A lower bound on the time of an update, in seconds.
    """

    values: Values
    plan: ModelPlan
    bound: float


@dataclass(frozen=True)
class Plan:
    """A layout with its prediction.

    Attributes:
        values: The values that it sets, by "section.field".
        config: The run with this layout.
        prediction: Its time and memory.
    """

    values: Values
    config: RunConfig
    prediction: Prediction


@dataclass
class Search:
    """A search for the fastest layouts of a run on a given number of GPUs.

    Attributes:
        start: The run, with any layout.
        vocabulary: The number of entries in the vocabulary, without padding.
        gpus: The number of GPUs.
        machine: The machine that the GPUs belong to.
        memory: Bytes that a process may use.
        seconds: The longest acceptable time of an update.
        teacher: The network of a teacher, whose memory and time are included, or `None`.
        dropped: The number of layouts that were dropped, by reason.
        problems: The number of layouts that each rule refused, by its message.
    """

    start: RunOptions
    vocabulary: int
    gpus: int
    machine: Machine
    memory: float
    seconds: float = math.inf
    teacher: ModelConfig | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    _fits: dict[tuple[Any, ...], bool] = field(default_factory=dict)

    def best(self, count: int) -> list[Plan]:
        """Return at most `count` of the fastest layouts that fit, fastest first.

        The layouts that are left out are counted in `dropped`, and the rules that refused them in
        `problems`.

        Candidates are simulated in the order of their bounds, until no other candidate can be among
        the best.
        """
        candidates = sorted(self.candidates(), key=lambda candidate: candidate.bound)
        plans: list[Plan] = []
        pipelines = lru_cache(maxsize=None)(Pipeline)
        for candidate in candidates:
            limit = plans[count - 1].prediction.seconds if len(plans) >= count else self.seconds
            if candidate.bound > limit:
                faster = len(plans) >= count
                self.dropped["slower than those shown" if faster else "slower than --time"] += 1
                continue
            plan = self._examine(candidate, limit, pipelines)
            if plan is None:
                continue
            plans.append(plan)
            plans.sort(key=lambda plan: plan.prediction.seconds)
        if len(plans) > count:
            self.dropped["slower than those shown"] += len(plans) - count
        return plans[:count]

    def candidates(self) -> Iterator[Candidate]:
        """Yield the layouts whose sizes divide the model and the GPUs."""
        base = self._resolved({})
        plan_for = lru_cache(maxsize=None)(self.plan_for)
        bounds: dict[tuple[Any, ...], float] = {}
        for values in layouts(self.start, self.gpus, self.machine.node):
            plan = plan_for(values["parallel.tensor_model_parallel_size"])
            key = tuple(value for path, value in values.items() if path not in _NOT_IN_BOUND)
            key += (values["parallel.zero_stage"] == 3,)
            if key not in bounds:
                bounds[key] = self._bound(with_values(base, values), plan)
            if bounds[key] == math.inf:
                self.dropped["refused by the rules"] += 1
            else:
                yield Candidate(values, plan, bounds[key])

    def _bound(self, config: RunConfig, plan: ModelPlan) -> float:
        """Return a lower bound on an update's time, or infinity if the sizes do not fit.

        A stage computes all its passes. Before that, the first micro-batch passes through the
        earlier stages, and afterwards the last one returns through them.
        """
        try:
            counts = tuple(len(part.layers) for part in plan_model(config.model, config.parallel))
            micro_batches = micro_batches_of(config, self.gpus)
        except ConfigError:
            return math.inf
        parts = Costs.from_passes(*model_passes(config, plan, self.machine)).part_times(counts)
        stages, warm_up, bound = config.parallel.pipeline_model_parallel_size, 0.0, 0.0
        for stage in range(stages):
            busy = micro_batches * sum(map(sum, parts[stage::stages]))
            bound = max(bound, busy + warm_up)
            warm_up += parts[stage].forward + parts[stage].inputs
        return bound

    def plan_for(self, tensor: int) -> ModelPlan:
        """Return the plan of the network, with a vocabulary padded for a tensor-parallel size."""
        model = self._resolved({}).model
        divisor = model.make_vocab_size_divisible_by
        plan = model_plan(model, padded_vocab_size(self.vocabulary, divisor, tensor))
        return with_teacher(plan, self.teacher)

    def _resolved(self, values: Values) -> RunConfig:
        return narrow(resolve(with_values(self.start, values), self.gpus), RunConfig)

    def _examine(
        self, candidate: Candidate, limit: float, pipelines: Callable[..., Pipeline]
    ) -> Plan | None:
        """Return a layout with its prediction, or `None` if it is refused, too large or too slow.

        A better distribution of its layers is tried if that could make it one of the fastest.
        """
        config, plan = self._resolved(candidate.values), candidate.plan
        if not self._may_fit(candidate) or (
            largest_process(config, plan, self.gpus).total > self.memory
        ):
            self.dropped["too large"] += 1
            return None
        problems = find_problems(config, self.gpus)
        if problems:
            self.dropped["refused by the rules"] += 1
            self.problems.update(problems)
            return None
        prediction = predict(config, plan, self.gpus, self.machine, pipelines=pipelines)
        if prediction.seconds > self.seconds:
            self.dropped["slower than --time"] += 1
            return None
        result = Plan(candidate.values, config, prediction)
        may_be_best = prediction.seconds * (1 - _MAX_BALANCE_GAIN) <= limit
        return self._balanced(result, plan, pipelines) if may_be_best else result

    def _may_fit(self, candidate: Candidate) -> bool:
        """Return whether the layout fits with micro-batches of 1 and full recomputation."""
        smallest = {**candidate.values, **_RECOMPUTATION[-1], "training.micro_batch_size": 1}
        key = tuple(smallest.values())
        if key not in self._fits:
            config = self._resolved(smallest)
            self._fits[key] = (
                largest_process(config, candidate.plan, self.gpus).total <= self.memory
            )
        return self._fits[key]

    def _balanced(self, plan: Plan, network: ModelPlan, pipelines: Callable[..., Pipeline]) -> Plan:
        """Return the layout with a better distribution of layers, if that is faster and fits."""
        if plan.config.parallel.pipeline_model_parallel_size == 1 or network.encoder_layers:
            return plan
        pipeline, _, costs = pipeline_of(plan.config, network, self.gpus, self.machine, pipelines)
        values = {
            **plan.values,
            "parallel.pipeline_model_parallel_layout": layout_text(pipeline.best(costs)),
            "parallel.num_virtual_stages_per_pipeline_rank": None,
        }
        config = self._resolved(values)
        prediction = predict(config, network, self.gpus, self.machine, pipelines=pipelines)
        fits = prediction.memory.total <= self.memory and not find_problems(config, self.gpus)
        is_faster = prediction.seconds < plan.prediction.seconds * (1 - _MIN_BALANCE_GAIN)
        return Plan(values, config, prediction) if fits and is_faster else plan


def network_problems(start: RunOptions) -> list[str]:
    """Return the mistakes in a run's network, which must be valid before layouts are examined.

    The other rules are applied to each layout.
    """
    paths = {path for path in flatten(start) if path.startswith("model.")}
    rules = (
        rules_model.required,
        bounds,
        partial(requirements, paths=paths),
        rules_model.architecture,
        rules_model.t5,
        rules_attention.attention,
        rules_attention.delta_net,
        rules_hybrid.hybrid,
        rules_model.experts,
    )
    return find_problems(with_values(start, _SMALLEST), 1, rules=rules)


def with_teacher(plan: ModelPlan, teacher: ModelConfig | None) -> ModelPlan:
    """Add the plan of a teacher, if there is one, with the same vocabulary, to a network's plan."""
    if teacher is None:
        return plan
    return replace(plan, teacher=model_plan(teacher, plan.embedding.vocabulary))


def layouts(start: RunOptions, gpus: int, node: int) -> Iterator[dict[str, Any]]:
    """Yield layouts as values by "section.field", including many that the rules will refuse.

    Args:
        start: The run to plan.
        gpus: The number of GPUs.
        node: The number of GPUs in a node. A layer is split over at most that many GPUs.
    """
    model, batch = start.model, start.training.global_batch_size
    assert batch is not None, "a plan requires --global-batch"
    layers = (model.num_layers or 1) + (model.decoder_num_layers or 0)
    experts = math.gcd(*model.expert_counts)  # 0 without a mixture
    length = start.data.seq_length or 1
    micro_batches = [n for n in _MICRO_BATCHES if n == 1 or n * length <= _MAX_TOKENS]
    overlaps = start.training.cuda_graph_impl != "local"  # no messages overlap with recorded passes
    for tensor, context in product(_powers(min(node, gpus)), _powers(gpus)):
        if (model.num_attention_heads or 1) % tensor or gpus % (tensor * context):
            continue
        if context > 1 and length < _MIN_TOKENS * context:
            continue
        for stages in _divisors(gpus // (tensor * context)):
            if stages > min(layers, _MAX_STAGES):
                continue
            data = gpus // (tensor * context * stages)
            if batch % data:
                continue
            layout_values = {
                **_UNSET,
                "parallel.tensor_model_parallel_size": tensor,
                "parallel.sequence_parallel": tensor > 1,
                "parallel.tp_comm_overlap": tensor > 1 and overlaps,
                "parallel.context_parallel_size": context,
                "parallel.pipeline_model_parallel_size": stages,
            }
            for choice in product(
                [{}, {"parallel.cp_comm_type": "a2a"}] if context > 1 else [{}],
                _schedules(model, stages),
                _experts(experts, tensor, tensor * context * data),
                _sharding(data * context, stages, overlaps),
                _RECOMPUTATION,
                [n for n in micro_batches if batch // data % n == 0],
            ):
                *parts, micro_batch = choice
                values = {**layout_values, "training.micro_batch_size": micro_batch}
                for part in parts:
                    values |= part
                if experts and values["training.recompute_granularity"] == "selective":
                    values["training.recompute_modules"] = _MIXTURE_MODULES
                yield values


def _schedules(model: ModelOptions, stages: int) -> list[Values]:
    """Return the schedules to try: 1F1B, zero-bubble, and interleaved with various chunk counts."""
    layers = (model.num_layers or 1) + (model.decoder_num_layers or 0)
    if stages == 1:
        return [{}]
    bubble = {"parallel.pipeline_schedule": "zero-bubble"}
    if layers % stages and not model.decoder_num_layers:
        uneven: list[Values] = []
        for parts in (stages * n for n in _powers(layers // stages)):
            per_part, remainder = divmod(layers, parts)
            # The larger parts come just before the last part, which has the head.
            counts = tuple(
                per_part + (parts - 1 - remainder <= i < parts - 1) for i in range(parts)
            )
            uneven.append({"parallel.pipeline_model_parallel_layout": layout_text(counts)})
        return [uneven[0], {**uneven[0], **bubble}, *uneven[1:]]
    whole = [n for n in _divisors(layers // stages) if n > 1]
    chunk_counts = sorted({*whole[:2], *whole[-1:]})
    return [
        {},
        bubble,
        *({"parallel.num_virtual_stages_per_pipeline_rank": n} for n in chunk_counts),
    ]


def _experts(experts: int, tensor: int, ranks: int) -> list[Values]:
    """Return the ways to divide experts over the ranks of a stage."""
    if not experts:
        return [{}]
    return [
        {
            "parallel.expert_model_parallel_size": size,
            "parallel.expert_tensor_parallel_size": split,
        }
        for size in _powers(min(experts, ranks))
        for split in sorted({1, tensor})
        if experts % size == 0 and ranks % (size * split) == 0
    ]


def _sharding(replicas: int, stages: int, overlaps: bool) -> list[Values]:
    """Return the ZeRO stages worth trying, with the flags that overlap messages if allowed."""
    if replicas == 1:
        return [{"parallel.zero_stage": 0}]
    overlap = {
        "parallel.overlap_grad_reduce": overlaps,
        "parallel.overlap_param_gather": overlaps,
    }
    first = {"parallel.use_distributed_optimizer": True, "parallel.zero_stage": 1, **overlap}
    kinds: list[Values] = [first, {"parallel.zero_stage": 2, **overlap}]
    return kinds + [{"parallel.zero_stage": 3}] if stages == 1 else kinds


def _powers(limit: int) -> list[int]:
    return [2**n for n in range(limit.bit_length()) if 2**n <= limit]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, min(number, 1024) + 1) if number % n == 0]


def to_flags(values: Values, start: RunOptions) -> list[str]:
    """Return, as flags, the values that differ from those of `start`."""
    start_values = flatten(start)
    changed = [(path, value) for path, value in values.items() if value != start_values[path]]
    sharded = values.get("parallel.use_distributed_optimizer")
    if sharded and start_values["parallel.zero_stage"] == 0:  # the flag implies the stage
        changed.remove(("parallel.zero_stage", 1))
    return [word for path, value in changed for word in field_at(path).to_args(value)]
