"""Options of `tasks/main.py`: evaluation and finetuning on downstream tasks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Task.

    Attributes:
        task: Task to run. docs/tasks.md lists the tasks.
        valid_data: Files (folders for RACE) to evaluate on.
        results: JSON file for the results. Default: TASK-iter_N.json in a folder `evaluation` next
            to the checkpoint.
        overwrite: Replace an existing --results file.
    """

    task: str | None = None
    valid_data: tuple[str, ...] | None = None
    results: str | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class LanguageModelTaskConfig:
    """Language model tasks.

    Attributes:
        overlapping_eval: Tokens by which the evaluation window advances.
        strict_lambada: LAMBADA: require all tokens of the last word to be correct. Off: only the
            last token.
        detokenizer: How to undo a corpus's own tokenization. Default: chosen by `wiki`, `ptb` or
            `lambada` in the path of --valid-data, otherwise none.
    """

    overlapping_eval: int = flag(32, unit="tokens")
    strict_lambada: bool = False
    detokenizer: str | None = flag(None, choices=("wikitext", "ptb", "none"))


@dataclass(frozen=True, kw_only=True)
class HarnessConfig:
    """EleutherAI's lm-evaluation-harness (--task LM_EVAL).

    Attributes:
        lm_eval_tasks: Names of harness tasks or groups, patterns, or YAML task files.
        lm_eval_include_path: Folder with additional task files. Their code is executed.
        lm_eval_num_fewshot: Examples before each question. Default: each task's own setting.
        lm_eval_limit: Number of documents to use from each task, or a fraction if below 1. Default:
            all.
    """

    lm_eval_tasks: tuple[str, ...] | None = None
    lm_eval_include_path: str | None = None
    lm_eval_num_fewshot: int | None = flag(None, unit="examples")
    lm_eval_limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Finetuning tasks (GLUE and RACE).

    Attributes:
        train_data: Files (folders for RACE) to train on.
        epochs: Passes over --train-data. 0 only evaluates.
        pretrained_checkpoint: Folder with the pretrained BERT to start from, in the native,
            Megatron-LM or Hugging Face format.
        keep_last: Carry the samples of an incomplete last batch over to the first batch of the next
            epoch. Off: leave them out.
    """

    train_data: tuple[str, ...] | None = None
    epochs: int | None = flag(None, unit="epochs")
    pretrained_checkpoint: str | None = None
    keep_last: bool = False
