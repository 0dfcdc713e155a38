"""What `tasks/main.py` is to do: evaluation and finetuning on downstream tasks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Task."""

    task: str | None = flag(None, "Task to run. docs/tasks.md lists the tasks.")
    valid_data: tuple[str, ...] | None = flag(
        None, "Files (folders for RACE) to evaluate on.", many=True
    )
    results: str | None = flag(
        None,
        "JSON file for the results. Default: TASK-iter_N.json in a folder `evaluation` next to "
        "the checkpoint.",
    )
    overwrite: bool = flag(False, "Replace an existing --results file.")


@dataclass(frozen=True, kw_only=True)
class LanguageModelTaskConfig:
    """Language model tasks."""

    overlapping_eval: int = flag(
        32, "Tokens by which the evaluation window advances.", unit="tokens"
    )
    strict_lambada: bool = flag(
        False,
        "LAMBADA: require all tokens of the last word to be correct. Off: only the last token.",
    )
    detokenizer: str | None = flag(
        None,
        "How to undo a corpus's own tokenization. Default: chosen by `wiki`, `ptb` or `lambada` "
        "in the path of --valid-data, otherwise none.",
        choices=("wikitext", "ptb", "none"),
    )


@dataclass(frozen=True, kw_only=True)
class HarnessConfig:
    """EleutherAI's lm-evaluation-harness (--task LM_EVAL)."""

    lm_eval_tasks: tuple[str, ...] | None = flag(
        None, "Names of harness tasks or groups, patterns, or YAML task files.", many=True
    )
    lm_eval_include_path: str | None = flag(
        None, "Folder with additional task files. Their code is executed."
    )
    lm_eval_num_fewshot: int | None = flag(
        None, "Examples before each question. Default: each task's own setting.", unit="examples"
    )
    lm_eval_limit: float | None = flag(
        None, "Number of documents to use from each task, or a fraction if below 1. Default: all."
    )


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Finetuning tasks (GLUE and RACE)."""

    train_data: tuple[str, ...] | None = flag(
        None, "Files (folders for RACE) to train on.", many=True
    )
    epochs: int | None = flag(None, "Passes over --train-data. 0 only evaluates.", unit="epochs")
    pretrained_checkpoint: str | None = flag(
        None,
        "Folder with the pretrained BERT to start from, in the native, Megatron-LM or Hugging "
        "Face format.",
    )
    keep_last: bool = flag(
        False,
        "Carry the samples of an incomplete last batch over to the first batch of the next "
        "epoch. Off: leave them out.",
    )
