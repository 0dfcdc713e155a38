"""The plan of a mixture's experts: which processes hold them, and how many bytes they exchange.

The plan follows from the flags alone, so it can be printed for any number of processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.command import PanelRow
from megatron.config import RunConfig
from megatron.models.mixture import Mixture
from megatron.models.mixture_plan import MixturePlan
from megatron.models.plan import ModelPlan
from megatron.parallel.expert_exchange import gathers_all, share_reached
from megatron.parallel.layout import Layout
from megatron.planner.memory import amount, largest_process, micro_batch

_SHOWN_GROUPS = 4
_CHOICE, _WEIGHT = 8, 4  # bytes of an expert's index (int64) and of its weight (fp32)


@dataclass(frozen=True)
class ExchangePlan:
    """The exchange of tokens in one mixture layer and one micro-batch, for one process.

    Attributes:
        local: Number of experts on each process.
        groups: The processes that exchange tokens, for the first few groups.
        group_count: Number of such groups in the run.
        tokens: Number of tokens on a process.
        mean_destinations: Average number of other processes to which a token is sent, if all
            choices are equally likely.
        max_destinations: The maximum number of other processes to which a token is sent.
        bytes_per_copy: Bytes sent in the forward and backward passes for each token and other
            process: the token with its choices and weights, the result, and the gradients of all
            but the choices.
    """

    local: int
    groups: tuple[tuple[int, ...], ...]
    group_count: int
    tokens: int
    mean_destinations: float
    max_destinations: int
    bytes_per_copy: int

    @property
    def bytes(self) -> int:
        """Bytes that a process sends in the forward and backward passes. It receives as many."""
        return int(self.tokens * self.mean_destinations * self.bytes_per_copy)

    def describe_groups(self) -> str:
        """Return the first groups of processes as text."""
        text = " | ".join(" ".join(map(str, group)) for group in self.groups)
        return f"{text}{' | ...' if len(self.groups) < self.group_count else ''}"


def plan_exchange(config: RunConfig, mixture: MixturePlan, world_size: int) -> ExchangePlan:
    """Plan the exchange of tokens in a mixture layer.

    Args:
        config: The run's configuration.
        mixture: The plan of the mixture in the layer.
        world_size: The number of processes.
    """
    router = mixture.router
    layout = Layout.at(0, world_size, **config.parallel.grid)
    ranks = layout.expert.size
    groups: list[tuple[int, ...]] = []
    rank = 0
    while rank < world_size and len(groups) < _SHOWN_GROUPS:
        if not any(rank in group for group in groups):
            groups.append(layout.as_seen_by(rank).expert.ranks)
        rank += 1
    mean_destinations, max_destinations = float(ranks - 1), ranks - 1
    if not gathers_all(router.experts, router.chosen, ranks):
        mean_destinations *= share_reached(router.experts, router.chosen, ranks)
        max_destinations = min(max_destinations, router.chosen)
    batch = micro_batch(config, layout)
    # Sent: tokens, choices, weights. Returned: results. Then the gradients of all but the choices.
    vectors, scalars = 4 * mixture.hidden * batch.width, router.chosen * (_CHOICE + 2 * _WEIGHT)
    return ExchangePlan(
        local=router.experts // ranks,
        groups=tuple(groups),
        group_count=world_size // ranks,
        tokens=batch.expert_tokens,
        mean_destinations=mean_destinations,
        max_destinations=max_destinations,
        bytes_per_copy=vectors + scalars,
    )


def expert_rows(
    config: RunConfig,
    plan: ModelPlan,
    micro_batches: int,
    world_size: int,
    memory: float | None = None,
) -> list[PanelRow]:
    """Return the panel's rows about experts; none without a mixture.

    Args:
        config: The run's configuration.
        plan: The plan of the whole network.
        micro_batches: The number of micro-batches in an update.
        world_size: The number of processes.
        memory: Memory of a device in bytes; `None` if it is not known.
    """
    mixtures = [layer.mlp for layer in plan.layers if isinstance(layer.mlp, MixturePlan)]
    if not mixtures:
        return []
    mixture, count = max(mixtures, key=lambda mixture: mixture.router.experts), len(mixtures)
    min_experts = min(mixture.router.experts for mixture in mixtures)
    exchange = plan_exchange(config, mixture, world_size)
    experts = mixture.router.experts
    expert_range = f"{experts}" if min_experts == experts else f"{min_experts} to {experts}"
    placement = f"{expert_range} in each of {count} layers, {mixture.router.chosen} per token"
    if exchange.local == experts:
        return [("experts", f"{placement}, all of them on each process")]
    sent = exchange.bytes * micro_batches
    layers = -(-count // config.parallel.pipeline_model_parallel_size)
    rows = [
        (
            "experts",
            f"{placement}, {exchange.local} on each process; processes that exchange tokens: "
            f"{exchange.describe_groups()}",
        ),
        (
            "exchange of tokens",
            f"a token goes to {exchange.mean_destinations:.2f} other processes if all experts are "
            f"chosen equally often, and to at most {exchange.max_destinations}; a process sends "
            f"{amount(exchange.bytes)} per layer and micro-batch, {amount(sent)} per layer and "
            f"iteration, {amount(sent * layers)} for {layers} layers",
        ),
    ]
    batch = micro_batch(config, Layout.at(0, world_size, **config.parallel.grid))
    ranks, tokens = len(exchange.groups[0]), batch.tokens // batch.sequence
    max_imbalance = Mixture.largest_imbalance(mixture, ranks, tokens)
    even, uneven = (
        largest_process(config, plan, world_size, imbalance) for imbalance in (1.0, max_imbalance)
    )
    text = (
        f"at most about {uneven.amount}, if all tokens choose the experts of one process "
        f"({max_imbalance:.2f} times an even share)"
    )
    if memory is not None and even.total != uneven.total:
        share = (uneven.total - even.total) / (max_imbalance - 1)
        text += f"; {full_at(memory, even.total, share, max_imbalance)}"
    return [*rows, ("memory if load is uneven", text)]


def full_at(memory: float, even: int, per_share: float, max_imbalance: float) -> str:
    """Describe the expert load at which a process's device memory is full.

    Args:
        memory: Memory of the device in bytes.
        even: Bytes that a process needs if the load is even.
        per_share: Bytes that each additional even share needs.
        max_imbalance: The largest possible load, relative to an even share.
    """
    shares = 1 + (memory - even) / per_share
    if shares < 1:
        return f"{amount(int(memory))} is not enough for any load"
    if shares >= max_imbalance:
        return f"{amount(int(memory))} is enough for any load"
    return f"{amount(int(memory))} is full at {shares:.2f} times an even share"
