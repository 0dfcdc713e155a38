"""The table of the tasks that `--task` names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.config.arguments import split
from megatron.config.fields import closest_match, fields_of, suggestion
from megatron.config.other_flags import translate
from megatron.config.run import Findings
from megatron.config.tasks import (
    DialogueConfig,
    FinetuneConfig,
    HarnessConfig,
    LanguageModelTaskConfig,
    RetrieverTaskConfig,
    RetrieverTextConfig,
    TaskConfig,
    TowersConfig,
)
from megatron.errors import ConfigError

PROGRAM = "tasks/main.py"
Kind = Literal["language model", "harness", "dialogue", "finetuning", "towers", "retrieval"]
# The flags of each kind of task, and the names of these tasks for error messages.
_KIND_OPTIONS: dict[Kind, tuple[type, str]] = {
    "language model": (LanguageModelTaskConfig, "WIKITEXT103, LAMBADA and PERPLEXITY"),
    "harness": (HarnessConfig, "LM_EVAL"),
    "dialogue": (DialogueConfig, "MSDP-PROMPT and MSDP-EVAL-F1"),
    "finetuning": (FinetuneConfig, "GLUE and RACE"),
    "towers": (TowersConfig, "RET-FINETUNE-NQ"),
    "retrieval": (RetrieverTaskConfig, "RETRIEVER-EVAL"),
}
OPTIONS = (
    TaskConfig,
    RetrieverTextConfig,
    *(config for config, _ in _KIND_OPTIONS.values()),
)  # in addition to the options of a run


@dataclass(frozen=True)
class Task:
    """A task that `--task` can name.

    Attributes:
        kind: The kind of task, which determines the module that runs it.
        help: A short description for `--help`, such as "perplexity of any corpus of documents".
    """

    kind: Kind
    help: str


TASKS: dict[str, Task] = {
    "WIKITEXT103": Task("language model", "perplexity per word of WikiText or another text"),
    "LAMBADA": Task("language model", "prediction of the last word of passages"),
    "PERPLEXITY": Task("language model", "perplexity of any corpus of documents"),
    "LM_EVAL": Task("harness", "tasks of EleutherAI's lm-evaluation-harness"),
    "MSDP-PROMPT": Task("dialogue", "generate knowledge or responses for dialogues"),
    "MSDP-EVAL-F1": Task("dialogue", "word F1 between generated and expected texts"),
    "RACE": Task("finetuning", "questions about a text, with four answers each"),
    "MNLI": Task("finetuning", "does one text follow from the other?"),
    "QQP": Task("finetuning", "do two questions have the same meaning?"),
    "SST-2": Task("finetuning", "is a film review good or bad?"),
    "CoLA": Task("finetuning", "is a sentence grammatical?"),
    "MRPC": Task("finetuning", "do two sentences have the same meaning?"),
    "STS-B": Task("finetuning", "how similar are two sentences, from 0 to 5?"),
    "QNLI": Task("finetuning", "does a sentence answer the question?"),
    "RTE": Task("finetuning", "does one text follow from the other?"),
    "RETRIEVER-EVAL": Task("retrieval", "find passages that answer questions, with a bi-encoder"),
    "RET-FINETUNE-NQ": Task("towers", "finetune a bi-encoder on questions and their passages"),
    "ICT-ZEROSHOT-NQ": Task("retrieval", "another name for RETRIEVER-EVAL"),
    "WNLI": Task("finetuning", "does a sentence still follow if a pronoun is replaced?"),
}


def flags_of_other_tasks(task: str) -> dict[str, str]:
    """Return the flags of all other kinds of tasks.

    Each flag is mapped to the end of the error message "FLAG belongs to ...". RET-FINETUNE-NQ also
    accepts the flags of finetuning, which its parser removes from the result.
    """
    return {
        flag: f"{tasks}, but this is {task}"
        for kind, (config, tasks) in _KIND_OPTIONS.items()
        if kind != TASKS[task].kind
        for field in fields_of(config)
        for flag in field.spellings
    }


def find_task(arguments: Sequence[str]) -> str:
    """Return the task that --task (its last occurrence) or an old flag names.

    Raises:
        ConfigError: The task is missing or unknown, or an old flag names a different task.
    """
    flag_names = [name for kind in OPTIONS for field in fields_of(kind) for name in field.names]
    requested: dict[str, tuple[str, str]] = {}  # by flag: (as given, task name)
    misspelled: list[str] = []
    for flag in split(arguments):
        if closest_match(flag.name, flag_names) == "--task" and flag.name != "--task":
            misspelled.append(f"unknown flag {flag.name}: did you mean --task?")
        for current in translate([flag], Findings(), flag_names):
            if current.name == "--task" and current.values:
                requested[flag.name] = (str(flag), current.values[0])
    if not requested:
        raise ConfigError([*misspelled, f"--task is required: give one of {', '.join(TASKS)}"])
    given, names = zip(*requested.values(), strict=True)
    if len(set(names)) > 1:
        raise ConfigError(f"{' and '.join(given)} name different tasks: give only one of them")
    name: str = names[0]
    if name not in TASKS:
        spelled = {_letters(task): task for task in TASKS}
        match = spelled.get(_letters(name))
        hint = f": did you mean {match}?" if match else suggestion(name, TASKS)
        hint = hint or f": give one of {', '.join(TASKS)}"
        raise ConfigError(f"--task {name}: there is no such task{hint}")
    return name


def _letters(name: str) -> str:
    """Return a name's letters and digits in lower case, to recognize spellings such as sst-2."""
    return "".join(filter(str.isalnum, name.lower()))
