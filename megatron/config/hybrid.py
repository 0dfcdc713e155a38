"""Options for hybrid models and their Mamba-2 layers, named as in Megatron Core."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import MAX_LAYERS, MAX_WIDTH, Requirement, flag

MAMBA, ATTENTION, MLP, MIXTURE = "M", "*", "-", "E"
# The meaning of each symbol of a pattern.
SYMBOLS = {
    MAMBA: "Mamba-2",
    ATTENTION: "attention",
    MLP: "an MLP",
    MIXTURE: "a mixture of experts",
}
# Settings of Mamba-2 that determine its weights.
MAMBA_FIELDS = (
    "mamba_state_dim",
    "mamba_head_dim",
    "mamba_num_groups",
    "mamba_num_heads",
    "mamba_norm",
)
_STAGE, _PREDICTION = "|", "/"
_HYBRID = Requirement(
    lambda run: run.model.hybrid_layer_pattern or run.model.parallel_mamba,
    "--hybrid-layer-pattern or --parallel-mamba",
)
_PARALLEL = Requirement(lambda run: run.model.parallel_mamba, "--parallel-mamba")


@dataclass(frozen=True, kw_only=True)
class HybridOptions:
    """Hybrid models.

    Attributes:
        hybrid_layer_pattern: The layers of a hybrid model, one symbol each: M Mamba-2, * attention,
            - an MLP, E a mixture of experts. Each layer has only this module and its normalization.
            A vertical bar begins the next pipeline stage or virtual stage. Default: every layer has
            attention and an MLP.
        parallel_mamba: Add a Mamba-2 mixer parallel to the attention of every layer. Both read the
            same input, and both outputs are added to the residual (Falcon-H1).
        mamba_state_dim: Size of the vectors B and C of Mamba-2: the number of values that its state
            holds for each channel.
        mamba_head_dim: Channels of a Mamba-2 head.
        mamba_num_groups: Number of groups of Mamba-2 heads. The heads of a group share B and C.
        mamba_num_heads: Number of Mamba-2 heads. Default: 2 x --hidden-size / --mamba-head-dim.
        mamba_norm: Normalize the output of Mamba-2 before its output projection.
        embedding_multiplier: With --parallel-mamba, factor applied to the word embeddings.
        key_multiplier: With --parallel-mamba, factor applied to the keys of attention.
        attention_input_multiplier: With --parallel-mamba, factor applied to the input of attention.
        attention_output_multiplier: With --parallel-mamba, factor applied to attention's output.
        mamba_input_multiplier: With --parallel-mamba, factor applied to the input of Mamba-2.
        mamba_multipliers: With --parallel-mamba, factors applied to the five projections of
            Mamba-2's input: the gate, x, B, C, and the time steps.
        mamba_output_multiplier: With --parallel-mamba, factor applied to the output of Mamba-2.
        mlp_multipliers: With --parallel-mamba, factors applied to the gate and the output of the
            MLP.
    """

    hybrid_layer_pattern: str | None = flag(
        None, names="--hybrid-layer-pattern --hybrid-override-pattern", only_for=("gpt",)
    )
    mamba_state_dim: int = flag(128, at_least=1, at_most=MAX_WIDTH, needs=_HYBRID)
    mamba_head_dim: int = flag(64, unit="channels", at_least=1, at_most=MAX_WIDTH, needs=_HYBRID)
    mamba_num_groups: int = flag(8, unit="groups", at_least=1, at_most=2**16, needs=_HYBRID)
    mamba_num_heads: int | None = flag(None, unit="heads", at_least=1, at_most=2**16, needs=_HYBRID)
    parallel_mamba: bool = flag(False, only_for=("gpt",))
    mamba_norm: bool = flag(True, off="--disable-mamba-norm", requires=_HYBRID)
    embedding_multiplier: float = flag(1.0, above=0, requires=_PARALLEL)
    key_multiplier: float = flag(1.0, above=0, requires=_PARALLEL)
    attention_input_multiplier: float = flag(1.0, above=0, requires=_PARALLEL)
    attention_output_multiplier: float = flag(1.0, above=0, requires=_PARALLEL)
    mamba_input_multiplier: float = flag(1.0, above=0, requires=_PARALLEL)
    mamba_multipliers: tuple[float, ...] = flag((1.0,) * 5, above=0, requires=_PARALLEL)
    mamba_output_multiplier: float = flag(1.0, above=0, requires=_PARALLEL)
    mlp_multipliers: tuple[float, ...] = flag((1.0,) * 2, above=0, requires=_PARALLEL)

    @property
    def has_attention(self) -> bool:
        """Whether the model has layers with attention."""
        return self.hybrid_layer_pattern is None or ATTENTION in self.hybrid_layer_pattern

    @property
    def has_mlps(self) -> bool:
        """Whether the model has layers with an MLP or with experts."""
        pattern = self.hybrid_layer_pattern
        return pattern is None or MLP in pattern or MIXTURE in pattern

    @property
    def has_mamba(self) -> bool:
        """Whether the model has Mamba-2 mixers."""
        return self.parallel_mamba or MAMBA in (self.hybrid_layer_pattern or "")


def pattern_parts(pattern: str) -> list[str]:
    """Split a hybrid pattern into the symbols of each pipeline stage or virtual stage.

    Args:
        pattern: The value of --hybrid-layer-pattern.

    Raises:
        ValueError: A symbol is not supported, or there are no layers or too many.
    """
    text = "".join(pattern.split())
    for symbol in text:
        if symbol == _PREDICTION:
            raise ValueError(
                "layers of multi-token prediction (after /) are not supported in hybrid models: "
                "drop them"
            )
        if symbol not in SYMBOLS and symbol != _STAGE:
            known = ", ".join(f"{symbol_text} for {kind}" for symbol_text, kind in SYMBOLS.items())
            raise ValueError(f"cannot read {symbol!r}: use {known}, and | between pipeline stages")
    parts = text.split(_STAGE)
    if not any(parts):
        raise ValueError("it names no layers: write one symbol for each")
    if len(text) > MAX_LAYERS:
        raise ValueError(f"expected at most {MAX_LAYERS} layers")
    return parts


def layer_symbols(pattern: str | None) -> str:
    """Return the symbols of a hybrid model's layers, "" for other models or an invalid pattern."""
    if pattern is None:
        return ""
    try:
        return "".join(pattern_parts(pattern))
    except ValueError:  # a rule reports it
        return ""


def pipeline_layout(pattern: str | None) -> str | None:
    """Convert the vertical bars of a pattern to a value of --pipeline-model-parallel-layout.

    The result is `None` if the pattern has no vertical bars or is invalid.
    """
    if pattern is None or not layer_symbols(pattern) or _STAGE not in pattern:
        return None
    return f"E{'|'.join('t' * len(part) for part in pattern_parts(pattern))}L"
