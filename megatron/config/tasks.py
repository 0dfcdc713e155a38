"""What `tasks/main.py` is to do: evaluation and finetuning on downstream tasks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Task."""

    task: str | None = flag(None, "The task; docs/tasks.md lists them.")
    valid_data: tuple[str, ...] | None = flag(
        None, "Files (for RACE folders) to evaluate on.", many=True
    )
    results: str | None = flag(
        None,
        "JSON file for the results. Default: TASK-iter_N.json in a folder `evaluation` beside the "
        "checkpoint.",
    )


@dataclass(frozen=True, kw_only=True)
class LanguageModelTaskConfig:
    """Language model tasks."""

    overlapping_eval: int = flag(
        32, "Tokens by which the window moves on over a text.", unit="tokens"
    )
    strict_lambada: bool = flag(
        False, "LAMBADA: all tokens of the last word must be right. Off: the last token."
    )
    detokenizer: str | None = flag(
        None,
        "How to undo a corpus's own tokenization. Default: by `wiki`, `ptb` or `lambada` in the "
        "path of --valid-data, else none.",
        choices=("wikitext", "ptb", "none"),
    )


@dataclass(frozen=True, kw_only=True)
class HarnessConfig:
    """EleutherAI's lm-evaluation-harness (--task LM_EVAL)."""

    lm_eval_tasks: tuple[str, ...] | None = flag(
        None, "Names of its tasks or groups, patterns, or YAML files of tasks.", many=True
    )
    lm_eval_include_path: str | None = flag(
        None, "Folder of further task files. Their code is run."
    )
    lm_eval_num_fewshot: int | None = flag(
        None, "Examples before each question. Default: as each task has it.", unit="examples"
    )
    lm_eval_limit: float | None = flag(
        None, "Use only this many documents of each task, or a share if below 1. Default: all."
    )


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Finetuning tasks (GLUE and RACE)."""

    train_data: tuple[str, ...] | None = flag(
        None, "Files (for RACE folders) to train on.", many=True
    )
    epochs: int | None = flag(None, "Passes over --train-data. 0: only evaluate.", unit="epochs")
    pretrained_checkpoint: str | None = flag(
        None, "Folder of the pretrained BERT to start from: ours, Megatron's or Hugging Face's."
    )
    keep_last: bool = flag(
        False,
        "Samples that fill no batch at the end of an epoch go into the next one's first. Off: "
        "they are left out of this epoch.",
    )
