"""Options for mixtures of experts, named as in Megatron Core."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron.config.fields import MAX_WIDTH, MIXTURE, Requirement, flag
from megatron.config.patterns import read_pattern

MAX_EXPERTS = 2**16
# Load-balancing losses by Megatron Core's names, with the names under which it logs them.
BALANCING_LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
Z_LOSS = "z_loss"
_LAST_OF = re.compile(r"last-of-([1-9][0-9]{0,4})")

_BALANCED = Requirement(
    lambda run: run.model.moe_router_enable_expert_bias and run.model.lora_rank is None,
    "--moe-router-enable-expert-bias, or with --lora-rank",
)
_GROUPED = Requirement(lambda run: run.model.moe_router_num_groups, "--moe-router-num-groups")
_SHARED = Requirement(
    lambda run: run.model.moe_shared_expert_intermediate_size,
    "--moe-shared-expert-intermediate-size",
)
_GATED = Requirement(
    lambda run: run.model.num_experts and run.model.moe_router_gating == "deepspeed",
    "--moe-router-gating deepspeed",
)
_GATED_TOP_1 = Requirement(
    lambda run: _GATED.is_met(run) and run.model.moe_router_topk == 1,
    "--moe-router-gating deepspeed --moe-router-topk 1",
)
_GATED_TOP_2 = Requirement(
    lambda run: _GATED.is_met(run) and run.model.moe_router_topk == 2,
    "--moe-router-gating deepspeed --moe-router-topk 2",
)
_TOP_1 = Requirement(
    lambda run: run.model.num_experts and run.model.moe_router_topk == 1,
    "--num-experts with --moe-router-topk 1",
)
_DROPS = Requirement(
    lambda run: run.model.moe_expert_capacity_factor is not None, "--moe-expert-capacity-factor"
)
_LIMITED = Requirement(
    lambda run: run.model.moe_expert_capacity_factor or run.model.moe_eval_capacity_factor,
    "--moe-expert-capacity-factor or --moe-eval-capacity-factor",
)


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Mixture of experts.

    Attributes:
        num_experts: Number of experts in each mixture layer, or one number for each of these
            layers, where 1 makes a layer dense. Default: all layers are dense.
        moe_layer_freq: The mixture layers: a number N makes every Nth layer a mixture, starting
            with the first; last-of-N makes it the last of every N layers; a pattern such as
            ([0]*1+[1]*3) has a 1 for each mixture layer.
        moe_ffn_hidden_size: Inner width of an expert. Default: --ffn-hidden-size.
        moe_shared_expert_intermediate_size: Total inner width of the shared experts, which every
            token passes through. Default: no shared experts.
        moe_shared_expert_gate: Multiply the output of the shared experts by a learned gate.
        mlp_type: standard, or residual: every token also passes through a dense MLP as wide as an
            expert, and learned weights combine its output with that of the experts (DeepSpeed's
            residual experts).
        moe_router_gating: How tokens are assigned to experts and dropped: core as in Megatron Core,
            deepspeed as in DeepSpeed (docs/experts.md).
        noisy_gate_policy: Noise of DeepSpeed's gating in training: RSample adds Gumbel noise to the
            logits by which a token chooses its single expert, Jitter multiplies the router's input
            by random numbers between 0.99 and 1.01. Default: none.
        moe_top2_2nd_expert_sampling: Sample each token's second expert in training, with Gumbel
            noise on the logits. Off: take the second best.
        moe_use_rts: If an expert has more tokens than its capacity, keep random ones. Off: keep the
            first ones.
        moe_router_topk: Number of experts that each token is sent to.
        moe_router_bias: Add a learned bias to the router's logits (GPT-OSS).
        moe_router_score_function: Function that turns the router's logits into scores.
        moe_router_pre_softmax: Take the softmax over all experts before choosing the best. Off:
            take it over the chosen experts.
        moe_apply_probs_on_input: Multiply the input of a token's expert by its score, instead of
            the output (Llama 4).
        moe_router_num_groups: Number of groups that the experts are divided into. Each token uses
            experts of at most --moe-router-group-topk groups. Default: no groups.
        moe_router_group_topk: Number of groups that a token may use.
        moe_router_group_score_topk: Choose groups by the sum of this many of their best scores.
            Default: --moe-router-topk / --moe-router-group-topk.
        moe_router_topk_scaling_factor: Factor applied to the scores of the chosen experts. Default:
            1.
        moe_router_enable_expert_bias: Choose experts by score plus a bias, which is raised for
            experts with few tokens and lowered for those with many (DeepSeek-V3).
        moe_router_bias_update_rate: Change of each expert's bias in an iteration. With --lora-rank,
            biases do not change, like all weights outside the adapters.
        moe_router_load_balancing_type: Losses that spread tokens evenly over experts: aux_loss over
            a micro-batch, seq_aux_loss over each sequence, global_aux_loss over the micro-batches
            of a global batch so far. sinkhorn: no loss; in training, tokens choose experts by
            scores that are balanced over all experts (S-BASE). none: no loss.
        moe_aux_loss_coeff: Coefficient of each load-balancing loss.
        moe_z_loss_coeff: Coefficient of the z-loss, which keeps the router's logits small. Default:
            no z-loss.
        moe_input_jitter_eps: Multiply the router's input in training by random numbers that differ
            from 1 by at most this. Default: no noise.
        moe_expert_capacity_factor: Drop the tokens of an expert beyond this multiple of an even
            share. Default: no token is dropped.
        moe_eval_capacity_factor: Capacity factor in evaluation. Default:
            --moe-expert-capacity-factor.
        moe_min_capacity: Minimum capacity of an expert, in tokens.
        moe_token_dropping: Drop tokens beyond the capacity. Off: no limit, regardless of
            the capacity factor.
        moe_token_drop_policy: Tokens that are kept: those with the highest scores (probs), or the
            first (position).
        moe_pad_expert_input_to_capacity: Accepted for compatibility; no effect. Experts compute
            exactly the rows that they receive.
        moe_per_layer_logging: Write the routers' losses of each layer to TensorBoard and the other
            files of metrics, in addition to their means over layers.
    """

    num_experts: tuple[int, ...] | None = flag(
        None, unit="experts", at_least=1, at_most=MAX_EXPERTS
    )
    moe_layer_freq: str = flag("1", needs=MIXTURE)
    moe_ffn_hidden_size: int | None = flag(None, at_least=1, at_most=MAX_WIDTH, needs=MIXTURE)
    moe_shared_expert_intermediate_size: int | None = flag(
        None, at_least=1, at_most=MAX_WIDTH, requires=MIXTURE
    )
    moe_shared_expert_gate: bool = flag(False, requires=_SHARED)
    mlp_type: str = flag("standard", choices=("standard", "residual"), requires=MIXTURE)
    moe_router_gating: str = flag("core", choices=("core", "deepspeed"), needs=MIXTURE)
    noisy_gate_policy: str | None = flag(None, choices=("RSample", "Jitter"), requires=_GATED)
    moe_top2_2nd_expert_sampling: bool = flag(
        True, off="--disable-moe-top2-2nd-expert-sampling", needs=_GATED_TOP_2
    )
    moe_use_rts: bool = flag(True, needs=_GATED_TOP_1)
    moe_router_topk: int = flag(2, unit="experts", at_least=1, at_most=64, needs=MIXTURE)
    moe_router_bias: bool = flag(False, needs=MIXTURE)
    moe_router_score_function: str = flag(
        "softmax", choices=("softmax", "sigmoid", "sqrtsoftplus"), needs=MIXTURE
    )
    moe_router_pre_softmax: bool = flag(False, needs=MIXTURE)
    moe_apply_probs_on_input: bool = flag(False, requires=_TOP_1)
    moe_router_num_groups: int | None = flag(None, unit="groups", at_least=1, requires=MIXTURE)
    moe_router_group_topk: int | None = flag(None, unit="groups", at_least=1, requires=MIXTURE)
    moe_router_group_score_topk: int | None = flag(
        None, unit="experts", at_least=1, requires=_GROUPED
    )
    moe_router_topk_scaling_factor: float | None = flag(None, above=0, requires=MIXTURE)
    moe_router_enable_expert_bias: bool = flag(False, requires=MIXTURE)
    moe_router_bias_update_rate: float = flag(1e-3, at_least=0, needs=_BALANCED)
    moe_router_load_balancing_type: tuple[str, ...] = flag(
        ("aux_loss",), choices=(*BALANCING_LOSSES, "sinkhorn", "none"), needs=MIXTURE
    )
    moe_aux_loss_coeff: tuple[float, ...] = flag((0.0,), at_least=0, needs=MIXTURE)
    moe_z_loss_coeff: float | None = flag(None, at_least=0, requires=MIXTURE)
    moe_input_jitter_eps: float | None = flag(None, at_least=0, below=1, requires=MIXTURE)
    moe_expert_capacity_factor: float | None = flag(None, above=0, requires=MIXTURE)
    moe_eval_capacity_factor: float | None = flag(None, above=0, needs=MIXTURE)
    moe_min_capacity: int = flag(0, unit="tokens", at_least=0, needs=_LIMITED)
    moe_token_dropping: bool = flag(True, off="--disable-moe-token-dropping", needs=MIXTURE)
    moe_token_drop_policy: str = flag("probs", choices=("probs", "position"), needs=_LIMITED)
    moe_pad_expert_input_to_capacity: bool = flag(
        False,
        requires=_DROPS,
        notice="has no effect: experts compute exactly the rows that they receive",
    )
    moe_per_layer_logging: bool = flag(False, requires=MIXTURE)

    @property
    def expert_counts(self) -> tuple[int, ...]:
        """The distinct numbers of experts in mixture layers, in ascending order."""
        given = self.num_experts or ()
        return tuple(sorted(set(given) - {1} if len(given) > 1 else given))

    @property
    def balancing(self) -> tuple[tuple[str, float], ...]:
        """The load-balancing losses in use, each with its coefficient."""
        kinds, coefficients = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        pairs = zip(kinds, coefficients, strict=False)
        return tuple(
            (kind, weight) for kind, weight in pairs if kind in BALANCING_LOSSES and weight > 0
        )

    @property
    def auxiliary_losses(self) -> tuple[str, ...]:
        """The names of the routers' losses, in the order of Megatron Core's log."""
        if not self.expert_counts:
            return ()
        z_loss = (Z_LOSS,) if self.moe_z_loss_coeff is not None else ()
        return (*z_loss, *(BALANCING_LOSSES[kind] for kind, _ in self.balancing))


def mixture_layers(options: ExpertOptions, layers: int) -> tuple[bool, ...]:
    """Return whether each layer is a mixture of experts, given the arguments of `layer_experts`."""
    return tuple(count > 0 for count in layer_experts(options, layers))


def layer_experts(options: ExpertOptions, layers: int) -> tuple[int, ...]:
    """Return the number of experts of each layer, 0 for a dense one.

    Args:
        options: The flags.
        layers: The number of layers of the model.

    Raises:
        ValueError: `moe_layer_freq` is not a number, last-of-N or a pattern with one entry per
            layer; or `num_experts` has several numbers, but not one for each mixture layer.
    """
    counts = options.num_experts
    if not counts:
        return (0,) * layers
    chosen = _chosen_layers(options.moe_layer_freq, layers)
    if len(counts) == 1:
        return tuple(counts[0] if is_chosen else 0 for is_chosen in chosen)
    if len(counts) != sum(chosen):
        raise ValueError(
            f"it chooses {sum(chosen)} layers, but --num-experts has {len(counts)} numbers: give "
            "one number, or one for each of these layers"
        )
    remaining = iter(counts)
    result = [next(remaining) if is_chosen else 0 for is_chosen in chosen]
    return tuple(count if count > 1 else 0 for count in result)


def _chosen_layers(frequency: str, layers: int) -> tuple[bool, ...]:
    """Return whether `moe_layer_freq` selects each layer."""
    text = "".join(frequency.split())
    if re.fullmatch(r"[1-9][0-9]{0,4}", text):
        return tuple(index % int(text) == 0 for index in range(layers))
    last = _LAST_OF.fullmatch(text)
    if last is not None:
        return tuple((index + 1) % int(last[1]) == 0 for index in range(layers))
    return read_pattern(text, layers, others="a number, last-of-N")
