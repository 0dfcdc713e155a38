"""Plans of mixtures of experts and their routers, as parts of a network's plan (`plan`)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.models.plan import InitPlan, MLPPlan, SublayerPlan


@dataclass(frozen=True, kw_only=True)
class GatingPlan:
    """DeepSpeed's rules for choosing experts and dropping tokens, instead of Megatron Core's.

    Attributes:
        samples: Whether Gumbel noise is added in training when choosing a token's only expert
            (RSample), or the second of two experts.
        selects_randomly: With one expert per token, whether a full expert keeps random tokens
            instead of the first ones.
    """

    samples: bool = False
    selects_randomly: bool = False


@dataclass(frozen=True, kw_only=True)
class RouterPlan:
    """A router, which chooses the experts for each token.

    Attributes:
        hidden: Width of the residual stream.
        init: Distribution of the initial weights.
        experts: Number of experts to choose from.
        bias: Whether the logits have a learned bias.
        chosen: Number of experts for each token.
        score: "softmax", "sigmoid" or "sqrtsoftplus" (the square root of softplus), the function
            that turns logits into scores.
        scores_all: Whether softmax runs over all experts, rather than only over the chosen ones.
        groups: Number of groups of experts; 1 if there are none.
        groups_chosen: Number of groups that a token's experts may come from.
        group_score: Number of highest expert scores that are summed for a group's score; `None`
            means `chosen` / `groups_chosen`.
        scale: Factor applied to the scores of the chosen experts.
        bias_rate: Amount by which the bias of each expert's score changes in an iteration; `None`
            for no biases.
        balancing: Load-balancing losses ("aux_loss", "seq_aux_loss", "global_aux_loss")
            with their coefficients.
        sinkhorn: Whether experts are chosen in training by scores that Sinkhorn's algorithm has
            balanced.
        z_loss: Coefficient of the z-loss; `None` if there is none.
        jitter: Largest relative noise added to the input in training; 0 for none.
        capacity: Largest number of tokens that an expert keeps, as a multiple of an even share;
            `None` keeps all.
        eval_capacity: The value that replaces `capacity` in evaluation; `None` keeps `capacity`.
        min_capacity: Smallest limit on the tokens that an expert keeps.
        drops_last: Whether the last tokens are dropped, rather than those with the lowest scores.
        gating: DeepSpeed's gating, with softmax over all experts; `None` means Megatron Core's.
    """

    hidden: int
    init: InitPlan
    experts: int
    chosen: int
    bias: bool = False
    score: str = "softmax"
    scores_all: bool = False
    groups: int = 1
    groups_chosen: int = 1
    group_score: int | None = None
    scale: float = 1.0
    bias_rate: float | None = None
    balancing: tuple[tuple[str, float], ...] = ()
    sinkhorn: bool = False
    z_loss: float | None = None
    jitter: float = 0.0
    capacity: float | None = None
    eval_capacity: float | None = None
    min_capacity: int = 0
    drops_last: bool = False
    gating: GatingPlan | None = None

    @property
    def counts_by_sample(self) -> bool:
        """Whether a load-balancing loss is computed for each sample of a batch."""
        return any(kind == "seq_aux_loss" for kind, _ in self.balancing)


@dataclass(frozen=True, kw_only=True)
class MixturePlan(SublayerPlan):
    """A mixture of experts: each token passes through a few of many MLPs.

    Attributes:
        router: The plan of the router.
        expert: The plan of one expert.
        shared: The plan of the shared experts, which every token passes through; `None` for none.
        gates_shared: Whether a learned gate multiplies the output of `shared`.
        weighs_shared: Whether each token weighs `shared` against its experts with two learned
            coefficients that add up to 1 (DeepSpeed's residual experts), instead of adding both.
        weighs_input: Whether a token's weight multiplies the input of its only expert, instead of
            the output.
    """

    kind: str = "mixture"
    router: RouterPlan
    expert: MLPPlan
    shared: MLPPlan | None = None
    gates_shared: bool = False
    weighs_shared: bool = False
    weighs_input: bool = False
