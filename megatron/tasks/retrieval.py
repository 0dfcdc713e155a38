"""Evaluation of a bi-encoder: how often it finds a passage that answers a question (ORQA, NQ)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron import __version__
from megatron.checkpoint.compatibility import check_network
from megatron.checkpoint.entries import model_state
from megatron.checkpoint.exchange import JsonExchange
from megatron.checkpoint.reader import PaddedReader, restore
from megatron.command import print_line
from megatron.config import ParsedRun, Program, RunConfig, parse_config
from megatron.config.tasks import RetrieverTaskConfig, RetrieverTextConfig, TaskConfig
from megatron.device import Device
from megatron.errors import EXIT_OK, ConfigError
from megatron.extras import packages_of
from megatron.inference.load import (
    SAVED_MODEL_READS,
    SAVED_MODEL_RULES,
    open_existing,
    saved_run,
)
from megatron.models.biencoder import BiEncoderModel, TextEncoder
from megatron.models.build import build_model, run_context
from megatron.models.plan import RETRIEVAL_HEAD
from megatron.parallel.layout import Layout
from megatron.processes.launch import Launch
from megatron.processes.process import print_notices, processes
from megatron.tasks.passages import (
    MATCHES,
    PaddedTexts,
    Passage,
    PassageVectors,
    Question,
    check_positions,
    ids_of_passage,
    pad_texts,
    read_passages,
    read_questions,
)
from megatron.tasks.results import (
    Metrics,
    by_json_key,
    check_results,
    metrics_table,
    report_results,
    results_path,
)
from megatron.tasks.table import PROGRAM, flags_of_other_tasks
from megatron.tasks.texts import find_missing, find_mistakes
from megatron.tokenizer import Tokenizer, build_tokenizer

_MICRO_BATCH = 8  # the default number of questions per batch
_TOPS = (1, 5, 20, 100)  # the top-k accuracies to report by default
_READS = {"training.micro_batch_size", "retriever.retriever_report_topk_accuracies"}


def parse(task: str, arguments: list[str], world_size: int) -> ParsedRun:
    """Parse and check a command line, which overrides the settings of the checkpoint.

    Raises:
        ConfigError: One or more flags are wrong. The message names all of them.
        CheckpointError: --load does not name a checkpoint of a bi-encoder.
    """

    def check(
        options: TaskConfig, task_options: RetrieverTaskConfig, texts: RetrieverTextConfig
    ) -> Iterator[str]:
        if task_options.evidence_data_path is None:
            yield f"--task {task} needs --evidence-data-path: give the file of passages"
        if not _question_files(task_options) and task_options.embedding_path is None:
            yield (
                f"--task {task} has nothing to do without --qa-data-dev, --qa-data-test and "
                "--embedding-path: give questions, or a file in which to store the passages' "
                "vectors"
            )
        for flag, path in (
            ("--evidence-data-path", task_options.evidence_data_path),
            *_question_files(task_options).items(),
        ):
            yield from find_missing(flag, () if path is None else (path,))
        if options.valid_data:
            yield f"--valid-data: --task {task} reads questions from --qa-data-dev: drop the flag"
        yield from find_mistakes(replace(options, valid_data=None))

    return parse_config(
        arguments,
        world_size=world_size,
        architecture="ict",
        program=Program(
            name=PROGRAM,
            extra=(TaskConfig, RetrieverTaskConfig, RetrieverTextConfig),
            find_start=partial(saved_run, micro_batch=_MICRO_BATCH, kinds=("ict",)),
            rules=SAVED_MODEL_RULES,
            reads=lambda given: SAVED_MODEL_READS | _READS,
            check_extra=check,
            flags_of_other_tasks=flags_of_other_tasks(task),
        ),
    )


def _question_files(task_options: RetrieverTaskConfig) -> dict[str, str]:
    files = {"--qa-data-dev": task_options.qa_data_dev, "--qa-data-test": task_options.qa_data_test}
    return {flag: path for flag, path in files.items() if path is not None}


def run(task: str, arguments: list[str], launch: Launch) -> int:
    """Evaluate, and return the exit code. Collective.

    Raises:
        UserError: A flag, the checkpoint or the data is invalid.
    """
    parsed = parse(task, arguments, launch.world_size)
    print_notices(parsed.notices, launch)
    if launch.rank == 0:
        options, task_options, _ = parsed.extra
        check_results(
            options, [task_options.evidence_data_path, *_question_files(task_options).values()]
        )
    with processes(parsed.config, launch) as (device, layout):
        evaluate(task, parsed, device, layout)
    return EXIT_OK


@dataclass(frozen=True)
class LoadedTowers:
    """A bi-encoder that is ready to run.

    Attributes:
        model: The bi-encoder in evaluation mode.
        tokenizer: The model's tokenizer.
        iteration: The number of training steps taken.
        layout: The grid of processes and this process's position in it.
        device: The device of this process.
        length: The maximum number of tokens in a text.
    """

    model: BiEncoderModel
    tokenizer: Tokenizer
    iteration: int
    layout: Layout
    device: Device
    length: int

    @torch.no_grad()
    def vectors(self, tower: TextEncoder, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Return the vectors of n texts, `[n, e]`. Collective over tensor-parallel ranks."""
        batch: PaddedTexts = pad_texts(texts, self.tokenizer, self.length)
        if excess := -batch.tokens.shape[1] % self.layout.sequence.size:
            columns = ((0, 0), (0, excess))  # sequence parallelism needs equal shares on all ranks
            tokens = np.pad(batch.tokens, columns, constant_values=self.tokenizer.pad)
            batch = PaddedTexts(tokens, np.pad(batch.mask, columns))
        device = self.device.torch_device
        inputs: list[Tensor] = [torch.from_numpy(part).to(device) for part in batch]
        result: NDArray[np.float32] = tower.encode(*inputs).float().cpu().numpy()
        return result


def load_towers(config: RunConfig, length: int, device: Device, layout: Layout) -> LoadedTowers:
    """Load the bi-encoder in --load, which may have been saved in any layout. Collective.

    Args:
        config: The run's configuration.
        length: The maximum number of tokens in a text.
        device: The device to run on.
        layout: The grid of processes and this process's position in it.

    Raises:
        ConfigError: The model has too few positions for texts of this length.
        CheckpointError: The checkpoint is damaged, or its network does not match the flags.
    """
    folder, options = config.checkpoint.load, config.checkpoint
    assert folder is not None
    check_positions(config.model, length)
    reader = open_existing(
        folder,
        step=options.ckpt_step,
        layout=layout,
        allow_foreign=options.allow_foreign_checkpoints,
        averaged=options.load_averaged_weights,
    )
    check_network(config, reader)
    tokenizer = build_tokenizer(config.tokenizer)
    multiple = layout.tensor.size
    rows = -(-int(reader.meta["padded_vocab_size"]) // multiple) * multiple
    reader = PaddedReader(reader, rows=rows, entries=tokenizer.vocab_size)
    context = run_context(config, layout, device)
    model = build_model(BiEncoderModel, config, context, rows, head=RETRIEVAL_HEAD)
    restore(reader, model_state([model]), prefixes=("model.",), cast=True)
    return LoadedTowers(model.eval(), tokenizer, reader.iteration, layout, device, length)


def evaluate(task: str, parsed: ParsedRun, device: Device, layout: Layout) -> Metrics:
    """Embed the passages, search them for all questions, and report. Collective.

    Returns:
        The metrics on rank 0. Without questions, and on other ranks, an empty dictionary.

    Raises:
        UserError: The checkpoint or a file is invalid, or the results cannot be written.
    """
    config, (_, task_options, texts) = parsed.config, parsed.extra
    loaded = load_towers(config, texts.retriever_seq_length, device, layout)
    is_main, exchange = layout.world.rank == 0, JsonExchange(layout.world)
    started = time.monotonic()
    passages = _passage_vectors(loaded, config, task_options)
    metrics: Metrics = {}
    for flag, path in _question_files(task_options).items():
        questions = read_questions(path, flag)
        queries = _query_vectors(loaded, questions, config.training.micro_batch_size)

        def score(queries: Any = queries, questions: Any = questions, flag: str = flag) -> None:
            assert passages is not None
            metrics.update(_score(passages, queries, questions, config, task_options, flag))

        exchange.on_main(score)
    if is_main:
        seconds = round(time.monotonic() - started, 3)
        details = {
            "options": {**asdict(task_options), **asdict(texts)},
            "seconds": seconds,
            "layout": layout.describe(),
        }
        _publish(task, parsed, loaded, metrics, details)
    return metrics


def _passage_vectors(
    loaded: LoadedTowers, config: RunConfig, task_options: RetrieverTaskConfig
) -> PassageVectors | None:
    """Load or compute the vectors of the passages, and return them on rank 0. Collective.

    Other ranks get `None`.
    """
    path = None if task_options.embedding_path is None else Path(task_options.embedding_path)
    evidence = Path(task_options.evidence_data_path or "")
    status = evidence.stat()
    origin = {
        "checkpoint": str(Path(config.checkpoint.load or "").resolve()),
        "iteration": loaded.iteration,
        "evidence": [str(evidence.resolve()), status.st_size, status.st_mtime_ns],
        "length": loaded.length,
    }
    exchange = JsonExchange(loaded.layout.world)
    result: list[PassageVectors] = []

    def load_stored() -> bool:
        if path is None or not path.exists():
            return False
        vectors, stored_origin = PassageVectors.load(path)
        if stored_origin == origin:
            result.append(vectors)
            print_line(f"  {path}: {len(vectors.ids):,} vectors for these passages and this model")
        else:
            print_line(f"  {path}: replacing vectors of other passages or of another model")
        return bool(result)

    if exchange.on_main(load_stored):
        return result[0] if result else None
    folder = Path(f"{path or task_options.evidence_data_path}.vectors-{loaded.iteration}")
    local_vectors = _embed(loaded, task_options)
    if loaded.layout.tensor.is_first:
        local_vectors.save(folder / f"{loaded.layout.data.rank}.npz", origin)
    loaded.layout.world.barrier()

    def merge() -> None:
        names = range(loaded.layout.data.size)
        result.append(
            PassageVectors.joined([PassageVectors.load(folder / f"{i}.npz")[0] for i in names])
        )
        if path is not None:
            result[0].save(path, origin)
            print_line(f"  {len(result[0].ids):,} vectors of passages written to {path}")
        shutil.rmtree(folder)

    exchange.on_main(merge)
    return result[0] if result else None


def _embed(loaded: LoadedTowers, task_options: RetrieverTaskConfig) -> PassageVectors:
    """Return the vectors of this data-parallel rank's share of the passages."""
    data, tower = loaded.layout.data, loaded.model.contexts
    ids: list[int] = []
    vectors: list[NDArray[np.float16]] = []
    passages = read_passages(task_options.evidence_data_path or "")
    for count, batch in enumerate(_batches(passages, task_options.indexer_batch_size)):
        if (
            loaded.layout.world.rank == 0
            and count
            and count % task_options.indexer_log_interval == 0
        ):
            print_line(f"> batch {count:,}, passage {count * task_options.indexer_batch_size:,}")
        if count % data.size != data.rank:
            continue
        texts = [ids_of_passage(passage.title, passage.text, loaded.tokenizer) for passage in batch]
        ids += [passage.id for passage in batch]
        vectors.append(loaded.vectors(tower, texts).astype(np.float16))
    width = loaded.model.plan.head("projection")
    empty = np.empty((0, getattr(width, "outputs", loaded.model.plan.hidden)), np.float16)
    return PassageVectors(np.array(ids, np.int64), np.concatenate([empty, *vectors]))


def _batches(passages: Iterable[Passage], size: int) -> Iterator[list[Passage]]:
    passages = iter(passages)
    while batch := list(islice(passages, size)):
        yield batch


def _query_vectors(
    loaded: LoadedTowers, questions: Sequence[Question], size: int
) -> NDArray[np.float32]:
    """Return the questions' vectors, `[q, e]`. Every data-parallel rank computes all of them."""
    rows = [
        loaded.vectors(
            loaded.model.queries,
            [
                loaded.tokenizer.tokenize_with_special(question.text)
                for question in questions[start : start + size]
            ],
        )
        for start in range(0, len(questions), size)
    ]
    return np.concatenate(rows)


def search(
    passages: PassageVectors, queries: NDArray[np.float32], k: int, *, use_gpu: bool = False
) -> NDArray[np.int64]:
    """Return the ids of the k passages most similar to each question, best first, `[q, k]`.

    The similarity is the inner product of the vectors.

    Args:
        passages: The passages to search.
        queries: The vectors of the questions, `[q, e]`.
        k: The number of passages to return for each question, at most the number of passages.
        use_gpu: Whether to search on a GPU.

    Raises:
        ConfigError: faiss is missing, or cannot use a GPU.
    """
    with packages_of("retro"):
        import faiss
    index: Any = faiss.IndexFlatIP(passages.vectors.shape[1])
    if use_gpu:
        if not getattr(faiss, "get_num_gpus", int)():
            raise ConfigError(
                "--faiss-use-gpu: this build of the package faiss does not support GPUs, or there "
                "is no GPU: drop the flag, or install a build for GPUs"
            )
        options = faiss.GpuMultipleClonerOptions()
        options.shard = options.useFloat16 = True
        index = faiss.index_cpu_to_all_gpus(index, co=options)
    for start in range(0, len(passages.vectors), 1 << 16):  # convert to fp32 piece by piece
        index.add(passages.vectors[start : start + (1 << 16)].astype(np.float32))
    _, rows = index.search(np.ascontiguousarray(queries), k)
    return passages.ids[rows]


def _score(
    passages: PassageVectors,
    queries: NDArray[np.float32],
    questions: Sequence[Question],
    config: RunConfig,
    task_options: RetrieverTaskConfig,
    flag: str,
) -> Metrics:
    """Return the top-k accuracies for several k, as percentages of the questions."""
    k = min(task_options.faiss_topk_retrievals, len(passages.ids))
    retrieved = search(passages, queries, k, use_gpu=task_options.faiss_use_gpu)
    ids = {*retrieved.reshape(-1).tolist()}
    texts = {
        passage.id: passage.text
        for passage in read_passages(task_options.evidence_data_path or "")
        if passage.id in ids
    }
    first = first_hits(retrieved, questions, texts, MATCHES[task_options.faiss_match])
    split = flag.removeprefix("--qa-data-")
    tops = config.retriever.retriever_report_topk_accuracies or _TOPS
    metrics: Metrics = {f"{split} questions": len(questions)}
    for top in sorted({min(top, k) for top in tops}):
        hits = sum(rank < top for rank in first)
        metrics[f"{split} top-{top}"] = 100 * hits / len(questions)
    return metrics


def first_hits(
    retrieved: NDArray[np.int64],
    questions: Sequence[Question],
    texts: Mapping[int, str],
    matches: Callable[[str, Sequence[str]], bool],
) -> list[int]:
    """Return, for each question, the index of the first passage that answers it, or k if none does.

    Args:
        retrieved: The ids of the passages found for each question, `[q, k]`.
        questions: The questions, in the same order.
        texts: The text of each passage that was found.
        matches: A function that returns whether a text contains one of several answers.
    """
    k = retrieved.shape[1]
    return [
        next(
            (i for i, passage_id in enumerate(row) if matches(texts[passage_id], question.answers)),
            k,
        )
        for row, question in zip(retrieved.tolist(), questions, strict=True)
    ]


def _publish(
    task: str,
    parsed: ParsedRun,
    loaded: LoadedTowers,
    metrics: Metrics,
    details: Mapping[str, Any],
) -> None:
    """Print the metrics and write the results file."""
    if not metrics:
        return
    options, load = parsed.extra[0], parsed.config.checkpoint.load
    print_line(metrics_table(task, metrics))
    path = results_path(options.results, load or "", task, loaded.iteration)
    content = {
        "task": task,
        "results": by_json_key(metrics),
        **details,
        "checkpoint": {"folder": load, "iteration": loaded.iteration},
        "tokenizer": loaded.tokenizer.fingerprint(),
        "version": __version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    report_results(path, content)
