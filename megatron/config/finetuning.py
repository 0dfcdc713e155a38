"""Options for supervised finetuning on conversations, and the defaults of `finetune.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config.arguments import split
from megatron.config.fields import SFT, Requirement, flag

_SAMPLES = Requirement(lambda run: run.finetuning.sample_prompts is not None, "--sample-prompts")

TRUNCATIONS = ("error", "drop", "keep-start", "keep-end", "split")


@dataclass(frozen=True, kw_only=True)
class FinetuningConfig:
    """Finetuning.

    Attributes:
        sft: Train on conversations. --data-path and similar flags name JSON Lines or parquet files,
            and only the assistant's turns count in the loss. finetune.py turns this on unless
            --no-sft is given.
        train_on_inputs: Also count the other turns in the loss.
        last_turn_only: Count only the assistant's last turn of a conversation.
        truncation: What to do with an example that is longer than --seq-length: end with an error,
            leave it out (drop), keep its first (keep-start) or last (keep-end) tokens, or split it
            into several examples (split).
        packing: Pack several examples into a row of --seq-length tokens. Each attends only to
            itself. Off: one padded example per row.
        sample_prompts: File with prompts, one per line, or JSON lines with a "prompt". During
            training, the model answers them greedily, and the answers are logged. With --sft, each
            prompt is a user's turn.
        sample_interval: Iterations between answers to --sample-prompts. Default: --eval-interval.
        sample_tokens: Maximum number of tokens in an answer to --sample-prompts.
        train_epochs: Length of the run in passes over the training examples.
    """

    sft: bool = flag(False, only_for=("gpt",))
    train_on_inputs: bool = flag(False, requires=SFT)
    last_turn_only: bool = flag(False, requires=SFT)
    truncation: str = flag("error", choices=TRUNCATIONS, requires=SFT)
    packing: bool = flag(True, requires=SFT)
    sample_prompts: str | None = flag(None, only_for=("gpt",))
    sample_interval: int | None = flag(None, unit="iterations", at_least=1, needs=_SAMPLES)
    sample_tokens: int = flag(64, unit="tokens", at_least=1, at_most=2**20, needs=_SAMPLES)
    train_epochs: int | None = flag(
        None, unit="epochs", names="--train-epochs --num-train-epochs", at_least=1, requires=SFT
    )


def finetuning_args(argv: Sequence[str]) -> list[str]:
    """Return the arguments of a finetuning run's command line, with the defaults of `finetune.py`.

    The defaults are --sft and, with a --load that differs from --save, --finetune. With --sft, they
    include --calculate-per-token-loss, because rows differ in the number of tokens that count in
    the loss.
    A flag that turns one of them off (`--no-sft`, `--no-calculate-per-token-loss`, `--no-finetune`)
    takes precedence.
    """
    values = {flag.name: flag.values for flag in split(argv)}
    defaults = []
    if "--no-sft" not in values:
        defaults += ["--sft"] * ("--sft" not in values)
        if not {"--calculate-per-token-loss", "--no-calculate-per-token-loss"} & set(values):
            defaults.append("--calculate-per-token-loss")
    load, save = values.get("--load", ()), values.get("--save", ())
    resumes = bool(load and save) and Path(load[0]).resolve() == Path(save[0]).resolve()
    if load and not resumes and not {"--finetune", "--no-finetune"} & set(values):
        defaults.append("--finetune")
    return [*argv, *defaults]
