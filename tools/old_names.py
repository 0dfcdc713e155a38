"""Old names of programs, from earlier versions of Megatron-LM and from its forks.

A script with an old name calls `run_old_name`, which translates the old flags with the table below,
prints a note, and replaces the process with the current program. If there is no successor, the
script says what to do instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from megatron.config.arguments import split
from megatron.errors import ConfigError, print_to_stderr

ROOT = Path(__file__).resolve().parents[1]
_PREPROCESS = "tools/preprocess_data.py"
_CONVERT = "tools/checkpoint/util.py"
_EMBEDDING_ROWS = ("--make-vocab-size-divisible-by", "--pad-vocab-size-to")


class OldName(NamedTuple):
    """The successor of an old program.

    Attributes:
        successor: The current script, or "" if there is none.
        versions: The versions, or the fork, that had the old name.
        remedy: What to do instead if there is no successor.
        drops: Old flags to drop, because they have no effect in the current script.
        only: The old flags that the current script accepts. All others are dropped. If this is
            empty, all flags are kept.
        renames: The current name of each old flag. A key such as "--flag value" gives the current
            value instead.
        adds: Flags that the current script needs, unless the user gives them.
        first_rank_only: Whether only the first of several processes does the work.
    """

    successor: str
    versions: str
    remedy: str = ""
    drops: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    renames: Mapping[str, str] = {}
    adds: tuple[str, ...] = ()
    first_rank_only: bool = False


OLD_NAMES: Mapping[str, OldName] = {
    "pretrain_gpt2.py": OldName("pretrain_gpt.py", "2019 to v1.1"),
    "pretrain_gpt_core.py": OldName("pretrain_gpt.py", "23.06 to 23.10"),
    "tools/preprocess_data_many_cores.py": OldName(
        _PREPROCESS, "BigScience", drops=_EMBEDDING_ROWS
    ),
    "tools/preprocess_data_partitions.py": OldName(_PREPROCESS, "23.04"),
    "tools/preprocess_data_dist.py": OldName(
        _PREPROCESS,
        "BigScience",
        drops=(
            *("--split", "--torch-backend", "--local_rank", "--merge", "--scratch", "--seed"),
            *_EMBEDDING_ROWS,
        ),
        renames={"--columns": "--json-keys"},
        first_rank_only=True,
    ),
    "tools/merge_preprocessed_data.py": OldName(
        "tools/merge_datasets.py",
        "BigScience",
        drops=("--merge", "--torch-backend", "--local_rank"),
        first_rank_only=True,
    ),
    "tasks/msdp/main.py": OldName("tasks/main.py", "v3.0 to Core 0.12"),
    "tools/split_gpt2_json.py": OldName("tools/split_json.py", "2019"),
    "tools/checkpoint_util.py": OldName(_CONVERT, "v3.0 to 23.08"),
    "tools/checkpoint/convert.py": OldName(
        _CONVERT,
        "Core 0.6 and later",
        drops=(
            *("--model-size", "--checkpoint-type", "--position-embedding-type", "--bf16", "--fp16"),
            *("--loader-transformer-impl", "--saver-transformer-impl"),
            "--make-vocab-size-divisible-by",
        ),
        renames={
            **dict.fromkeys(("--loader mcore", "--loader core", "--loader legacy"), "megatron"),
            **dict.fromkeys(("--loader llama_mistral", "--loader mixtral_hf"), "hf"),
            "--saver legacy": "megatron",
            **dict.fromkeys(("--saver mcore", "--saver core"), "torch_dist"),
        },
    ),
    "tools/merge_mp_partitions.py": OldName(
        _CONVERT,
        "v1.0 to v2.6",
        only=(
            *("--model-type", "--load", "--save", "--target-pipeline-model-parallel-size"),
            *("--tokenizer-type", "--vocab-file", "--merge-file", "--tokenizer-model"),
        ),
        renames={
            "--load": "--load-dir",
            "--save": "--save-dir",
            "--target-pipeline-model-parallel-size": "--target-pipeline-parallel-size",
        },
        adds=(
            "--target-tensor-parallel-size 1",
            "--target-pipeline-parallel-size 1",
        ),
    ),
    "tools/openwebtext/group_duplicates_url.py": OldName(
        "tools/openwebtext/group_duplicate_url.py", "2019 to v1.1"
    ),
    "tools/generate_samples_gpt2.py": OldName("tools/generate_samples_gpt.py", "v1.0"),
    "tools/preprocess_data_nmt.py": OldName(
        "",
        "v2.3 to Core 0.10",
        "preprocess each side with tools/preprocess_data.py",
    ),
    "tools/preprocess_mmdata.py": OldName(
        "", "23.08 to Core 0.10", "image models are not supported"
    ),
    "tools/create_doc_index.py": OldName(
        "", "v2.0", "`tasks/main.py --task RETRIEVER-EVAL --embedding-path FILE` without questions"
    ),
    "tools/linter.py": OldName("", "v1.0 and later", "run `make lint`"),
}


def run_old_name(script: str) -> NoReturn:
    """Replace this process with the successor of an old script, or exit if there is none.

    Args:
        script: The path of the script that was started.
    """
    name = Path(script).resolve().relative_to(ROOT).as_posix()
    old, args = OLD_NAMES[name], sys.argv[1:]
    if {"-h", "--help"} & set(args):
        description = f"was removed: {old.remedy}"
        if old.successor:
            description = f"runs {old.successor}; `python {old.successor} --help` lists its flags"
        print(
            f"usage: {name} [flags of {old.versions}]\n\n{name} is an old name that {description}."
        )
        sys.exit(0)
    if not old.successor:
        print_to_stderr(f"error: {name} ({old.versions}) was removed: {old.remedy}")
        sys.exit(ConfigError.exit_code)
    rank = int(os.environ.get("RANK") or 0)
    if old.first_rank_only and rank > 0:
        sys.exit(0)
    new_args = translate_args(old, args)
    if rank == 0:
        command_line = f" {' '.join(new_args)}" if new_args != args else ""
        print_to_stderr(
            f"note: {name} is an old name ({old.versions}) of {old.successor}: running that"
            f"{command_line}"
        )
    interpreter_args, script_words = (
        sys.orig_argv[1 : -len(sys.argv)],
        sys.orig_argv[-len(sys.argv) :],
    )
    options = interpreter_args if script_words == sys.argv else []  # they differ with `python -m`
    os.execv(sys.executable, [sys.executable, *options, str(ROOT / old.successor), *new_args])


def translate_args(old: OldName, args: Sequence[str]) -> list[str]:
    """Translate the arguments of an old command line to the flags of the current script."""
    if not (old.drops or old.only or old.renames or old.adds):
        return list(args)
    new_args: list[str] = []
    for flag in split(args):
        if flag.name in old.drops or (old.only and flag.name not in old.only):
            continue
        values = [old.renames.get(f"{flag.name} {value}", value) for value in flag.values]
        new_args += [arg for arg in (old.renames.get(flag.name, flag.name), *values) if arg]
    for flag_to_add in old.adds:
        if flag_to_add.split()[0] not in new_args:
            new_args += flag_to_add.split()
    return new_args
