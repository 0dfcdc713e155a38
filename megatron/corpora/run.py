"""Execution of a plan with datatrove: its stages and tasks, and resumption of an earlier run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.corpora.blocks import (
    CorpusBlock,
    DatasetJoiner,
    DuplicateDropper,
    GroupFinder,
    OverlapCutter,
    PieceReader,
    ShardEncoder,
    ShardReader,
    ShardWriter,
    SignatureWriter,
    cleaning_blocks,
    output,
)
from megatron.corpora.overlaps import TaskNgrams, read_tasks
from megatron.corpora.plan import CorpusPlan
from megatron.corpora.report import ReportWriter
from megatron.corpora.sources import Piece, cut_pieces
from megatron.durable import writing_to
from megatron.errors import ConfigError, DataError
from megatron.extras import packages_of
from megatron.tokenizer import build_tokenizer

PLAN_FILE = "plan.json"
DATASET = "corpus_text_document"
TASKS_FILE = "tasks.npz"
# Files that a run writes, in the order in which --overwrite removes them. The logs go first,
# because a task without a log counts as not done. The plan goes last, because it shows that the
# folder contains a corpus.
_REPORT = ("report.json", "report.png")
_OWN_FILES = (
    "logs",
    "text",
    "work",
    "dropped",
    *_REPORT,
    f"{DATASET}.idx",
    f"{DATASET}.bin",
    PLAN_FILE,
)


class Stage(NamedTuple):
    """Blocks that process each document in turn, and the number of tasks that run them."""

    name: str
    blocks: list[CorpusBlock]
    tasks: int


@dataclass(frozen=True)
class Cluster:
    """The executor and the resources of the tasks.

    Attributes:
        executor: "local", "slurm" or "ray".
        workers: The number of tasks that run at the same time. Results do not depend on it.
        partition: The SLURM partition, or "" with other executors.
        time: The time limit of a SLURM task, "hh:mm:ss".
        memory_gb: The memory that SLURM or Ray reserves for a task, in GB.
    """

    executor: str = "local"
    workers: int = 1
    partition: str = ""
    time: str = "24:00:00"
    memory_gb: int = 4


def stages_of(plan: CorpusPlan, pieces: list[Piece], folder: Path) -> list[Stage]:
    """Return the stages of a plan. Each stage needs the complete result of the previous one.

    Args:
        plan: The steps, with their settings.
        pieces: The pieces of the plan's input.
        folder: The folder of the corpus.
    """
    work, dropped, text = folder / "work", folder / "dropped", folder / "text"
    count, steps = len(pieces), plan.steps
    has_select_stage = "duplicates" in steps or "tasks" in steps
    clean: list[CorpusBlock] = [PieceReader(pieces, plan), *cleaning_blocks(plan)]
    if "duplicates" in steps:
        clean.append(SignatureWriter(work / "signatures", steps["duplicates"]))
    ledgers = [dropped / "clean"]
    clean.append(ShardWriter(work / "clean" if has_select_stage else text, ledgers[0]))
    stages = [Stage("clean", clean, count)]
    select: list[CorpusBlock] = [ShardReader(work / "clean")]
    if "duplicates" in steps:
        groups = work / "groups"
        finder = GroupFinder(work / "signatures", groups, steps["duplicates"], count)
        stages.append(Stage("groups", [finder], 1))
        select.append(DuplicateDropper(groups))
    if "tasks" in steps:
        select.append(OverlapCutter(work / TASKS_FILE, steps["tasks"]))
    if has_select_stage:
        ledgers.append(dropped / "select")
        stages.append(Stage("select", [*select, ShardWriter(text, ledgers[-1])], count))
    finish: list[CorpusBlock] = []
    if "tokenize" in steps:
        encoder = ShardEncoder(text, work / "tokens", steps["tokenize"])
        stages.append(Stage("tokenize", [encoder], count))
        finish.append(DatasetJoiner(work / "tokens", folder / DATASET, count))
    finish.append(ReportWriter(folder, ledgers, count))
    return [*stages, Stage("finish", finish, 1)]


def build_corpus(plan: CorpusPlan, folder: Path, cluster: Cluster, *, overwrite: bool) -> None:
    """Execute a plan, resuming an interrupted run.

    With SLURM, jobs may still be waiting when this function returns.

    Args:
        plan: The input, and the steps with their settings.
        folder: The folder of the corpus.
        cluster: The executor and the resources of the tasks.
        overwrite: Whether to start over if the folder already contains a corpus.

    Raises:
        ConfigError: The folder contains other files or a corpus with a different plan, a package is
            missing, or SLURM rejects the jobs.
        DataError: The input or a task file is missing or damaged, or has no text.
        StorageError: The folder cannot be written to.
    """
    pieces = cut_pieces(plan.input)
    if not pieces:
        raise DataError(
            f"--input {' '.join(plan.input)}: all files are empty: give files with documents"
        )
    if "tokenize" in plan.steps:
        build_tokenizer(plan.steps["tokenize"].tokenizer)
    ngrams = _task_ngrams(plan) if "tasks" in plan.steps else None
    _claim_folder(plan, pieces, folder, overwrite)
    if ngrams is not None:
        with output(folder / "work" / TASKS_FILE) as file:
            arrays: dict[str, Any] = {str(size): hashes for size, hashes in ngrams.hashes.items()}
            np.savez(file, **arrays)
    previous = None
    for stage in stages_of(plan, pieces, folder):
        logs = folder / "logs" / stage.name
        with writing_to("--output", logs):  # datatrove creates the folder
            previous = _executor(stage, logs, cluster, previous)
        try:
            previous.run()
        except subprocess.CalledProcessError as error:
            raise ConfigError(
                f"--executor slurm: {error.cmd[0]} refused the jobs of stage {stage.name} with the "
                "message above: change --slurm-partition, --slurm-time or --memory-gb"
            ) from None


def input_bytes(folder: Path) -> int:
    """Return the total size in bytes of the input files of the corpus in `folder`."""
    recorded = json.loads((folder / PLAN_FILE).read_bytes())
    paths = {path for piece in recorded["pieces"] for path, _, _ in piece}
    return sum(recorded["inputs"][os.path.abspath(path)][0] for path in paths)


def _claim_folder(plan: CorpusPlan, pieces: list[Piece], folder: Path, overwrite: bool) -> None:
    """Write the plan into the folder, or compare it with the plan that the folder contains."""
    files = [part.path for piece in pieces for part in piece]
    files += plan.steps["tasks"].files if "tasks" in plan.steps else ()
    files += _tokenizer_files(plan)
    inputs = {}
    for path in dict.fromkeys(files):
        status = os.stat(path)
        inputs[os.path.abspath(path)] = [status.st_size, status.st_mtime_ns]
    requested = {"plan": plan.to_dict(), "pieces": [list(map(list, p)) for p in pieces]}
    requested["inputs"] = inputs
    plan_file = folder / PLAN_FILE
    if plan_file.exists() and not overwrite:
        recorded = json.loads(plan_file.read_bytes())
        if recorded == requested:
            return
        difference = _difference(recorded, requested)
        raise ConfigError(
            f"--output {folder}: contains a corpus with a different plan or input ({difference}): "
            "choose another folder, or give --overwrite to start over"
        )
    if folder.exists() and any(folder.iterdir()) and not plan_file.exists():
        raise ConfigError(f"--output {folder}: contains other files: choose an empty or new folder")
    for stale in (folder / name for name in _OWN_FILES):
        if stale.is_dir():
            shutil.rmtree(stale)
        else:
            stale.unlink(missing_ok=True)
    with output(plan_file) as file:
        file.write(json.dumps(requested, indent=1, ensure_ascii=False).encode())


def _tokenizer_files(plan: CorpusPlan) -> list[str]:
    if "tokenize" not in plan.steps:
        return []
    tokenizer = plan.steps["tokenize"].tokenizer
    names = (tokenizer.tokenizer_model, tokenizer.vocab_file, tokenizer.merge_file)
    files: list[str] = []
    for path in (Path(name) for name in names if name):
        candidates = sorted(path.rglob("*")) if path.is_dir() else [path]
        files += [str(file) for file in candidates if file.is_file()]
    return files


def _difference(recorded: dict[str, Any], requested: dict[str, Any]) -> str:
    """Describe the first differences between two plans."""
    for name in ("inputs", "pieces"):
        if recorded.get(name) != requested[name]:
            return "the input files have changed"
    old, new = _flat(recorded.get("plan", {})), _flat(requested["plan"])
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return ", ".join(f"{name} was {old.get(name)}, now {new.get(name)}" for name in names[:2])


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}.{name}" if prefix else name)
    return flat


def _task_ngrams(plan: CorpusPlan) -> TaskNgrams:
    step = plan.steps["tasks"]
    ngrams = TaskNgrams.of_texts(read_tasks(step.files, step.keys), step.max_ngram, step.min_ngram)
    if not ngrams.count:
        raise DataError(
            f"--tasks {' '.join(step.files)}: no text has at least {step.min_ngram} words: check "
            "the files and keys"
        )
    return ngrams


def _executor(stage: Stage, logs: Path, cluster: Cluster, previous: Any) -> Any:
    """Return datatrove's executor for a stage."""
    with packages_of("corpora"):
        from loguru import logger

    # An error ends the command with a one-line message. The log of each task would repeat it.
    logger.disable("datatrove")
    common = {"pipeline": stage.blocks, "tasks": stage.tasks, "logging_dir": str(logs)}
    workers = min(cluster.workers, stage.tasks)
    if cluster.executor == "local":
        from megatron.corpora.local import LocalExecutor

        return LocalExecutor(workers=workers, **common)
    if cluster.executor == "ray":
        with packages_of("corpora"):
            import ray  # noqa: F401 - the executor needs it
        from datatrove.executor.ray import RayPipelineExecutor

        return RayPipelineExecutor(workers=workers, mem_per_cpu_gb=cluster.memory_gb, **common)
    from datatrove.executor.slurm import SlurmPipelineExecutor

    if shutil.which("sbatch") is None:
        raise ConfigError("--executor slurm: sbatch was not found: run on a SLURM login node")
    activate = Path(sys.prefix) / "bin" / "activate"  # jobs need datatrove's commands
    return SlurmPipelineExecutor(
        time=cluster.time,
        partition=cluster.partition,
        workers=workers,
        mem_per_cpu_gb=cluster.memory_gb,
        job_name=f"corpus-{stage.name}",
        depends=previous,
        venv_path=str(activate) if activate.exists() else None,
        **common,
    )
