"""Language model tasks: perplexity of texts, and prediction of passages' last words (LAMBADA)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile

import numpy as np

from megatron.command import print_line
from megatron.config import ParsedRun
from megatron.config.parser import asks_for
from megatron.config.tasks import LanguageModelTaskConfig, TaskConfig
from megatron.device import Device
from megatron.errors import DataError
from megatron.inference.load import load_gpt
from megatron.inference.score import Sample, Score, Scorer, windows
from megatron.parallel.layout import Layout
from megatron.processes.launch import Launch
from megatron.tasks.evaluation import parse_evaluation, print_start, publish, run_evaluation
from megatron.tasks.neighbors import evaluate_neighbors
from megatron.tasks.results import Metrics, TaskProgress, megatron_line
from megatron.tasks.texts import (
    DETOKENIZERS,
    detokenizer_for,
    find_mistakes,
    read_documents,
    read_text,
)
from megatron.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prepared:
    """A task's samples, ready to be scored.

    Attributes:
        samples: The samples to score.
        summarize: A function that computes the task's metrics from the scores.
        data: A description of the data.
        headline: The metrics in the line that Megatron-LM prints, with Megatron-LM's names.
    """

    samples: list[Sample]
    summarize: Callable[[Sequence[Score]], Metrics]
    data: str
    headline: dict[str, str]


def prepare_wikitext(
    paths: Sequence[str], options: LanguageModelTaskConfig, tokenizer: Tokenizer, window: int
) -> Prepared:
    """Prepare a text for computing its loss per token and its perplexity per original word.

    As in published perplexities, each line ending counts as a word.

    Raises:
        DataError: The file cannot be read, or has no text to predict.
    """
    path = paths[0]
    raw = read_text(path, "--valid-data")
    name = detokenizer_for(path, options.detokenizer)
    tokens = np.array(tokenizer.tokenize_unterminated(DETOKENIZERS[name](raw)))
    words = count_words(raw)
    if len(tokens) < 2 or words < 2:
        raise DataError(f"--valid-data {path}: this file has no text to predict: give another file")
    samples = list(windows(tokens, window, options.overlapping_eval))

    def summarize(scores: Sequence[Score]) -> Metrics:
        total = -sum(score.log_probability for score in scores)
        targets = len(tokens) - 1
        ratio = targets / (words - 1)
        return {
            "loss": total / targets,
            "perplexity": _exp(total / targets),
            "adjusted perplexity": _exp(total / (words - 1)),
            "token ratio": ratio,
            "words": words,
            "tokens": len(tokens),
        }

    return Prepared(
        samples,
        summarize,
        f"{path}: {words:,} words and line ends, {len(tokens):,} tokens "
        f"(detokenizer: {name}), {len(samples):,} windows",
        {
            "loss": "avg loss",
            "perplexity": "ppl",
            "adjusted perplexity": "adjusted ppl",
            "token ratio": "token ratio",
        },
    )


def count_words(text: str) -> int:
    """Count the words, which are separated by whitespace, and the line endings."""
    return len(text.split()) + text.count("\n")


def prepare_perplexity(
    paths: Sequence[str], options: LanguageModelTaskConfig, tokenizer: Tokenizer, window: int
) -> Prepared:
    """Prepare a corpus for computing its perplexity, document by document.

    Each document is preceded by an end-of-document token, or by the token with which the tokenizer
    begins every text.

    Raises:
        DataError: A file cannot be read, or the files have no text to predict.
    """
    samples: list[Sample] = []
    documents = tokens = words = size = 0
    detokenize = DETOKENIZERS[detokenizer_for(paths[0], options.detokenizer)]
    prefix_ids = tokenizer.tokenize_unterminated("")
    start = prefix_ids[-1:] or [tokenizer.eod]
    for text in read_documents(paths):
        ids = tokenizer.tokenize_unterminated(detokenize(text))[len(prefix_ids) :]
        documents, tokens = documents + 1, tokens + len(ids)
        words, size = words + len(text.split()), size + len(text.encode())
        document = np.array([*start, *ids])
        samples += windows(document, window, options.overlapping_eval)
    if not tokens:
        raise DataError(
            f"--valid-data {' '.join(paths)}: there is no text to predict: give other files"
        )

    def summarize(scores: Sequence[Score]) -> Metrics:
        total = -sum(score.log_probability for score in scores)
        return {
            "loss": total / tokens,
            "perplexity": _exp(total / tokens),
            "word perplexity": _exp(total / max(1, words)),
            "bits per byte": total / math.log(2) / size,
            "documents": documents,
            "words": words,
            "tokens": tokens,
        }

    data = f"{' '.join(paths)}: {documents:,} documents, {words:,} words, {tokens:,} tokens"
    return Prepared(samples, summarize, data, {"loss": "avg loss", "perplexity": "ppl"})


def prepare_lambada(
    paths: Sequence[str], options: LanguageModelTaskConfig, tokenizer: Tokenizer, window: int
) -> Prepared:
    """Prepare passages whose last token, or last word with --strict-lambada, is to be predicted.

    Raises:
        DataError: A file cannot be read or has no passages, or a passage has no context or no word
            to predict.
    """
    detokenize = DETOKENIZERS[options.detokenizer or "none"]
    samples, cut = [], 0
    for i, text in enumerate(map(detokenize, read_documents(paths))):
        tokens = tokenizer.tokenize_unterminated(text)
        context, target = tokens[:-1], tokens[-1:]
        if options.strict_lambada:
            word = text.rsplit(maxsplit=1)[-1] if text.split() else ""
            context, target = encode_pair(tokenizer, text[: text.rfind(word)].strip(), f" {word}")
        if not context or not target:
            raise DataError(
                f"--valid-data {paths[0]}: passage {i + 1} has no "
                f"{'context' if target else 'word to predict'}: {text[:40]!r}: fix or remove it"
            )
        cut += len(context) + len(target) - 1 > window
        samples.append(last_window(context, target, window))
    if not samples:
        raise DataError(f"--valid-data {paths[0]}: this file has no passages: give another file")

    def summarize(scores: Sequence[Score]) -> Metrics:
        correct = sum(score.is_greedy for score in scores)
        scored = sum(sample.scored for sample in samples)
        total = -sum(score.log_probability for score in scores)
        return {
            "number correct": correct,
            "total examples": len(scores),
            "accuracy": correct / len(scores),
            "perplexity of the target": _exp(total / len(scores)),
            "target tokens": scored,
            "passages cut to the window": cut,
        }

    return Prepared(
        samples,
        summarize,
        f"{' '.join(paths)}: {len(samples):,} passages, {cut:,} of them longer than the window "
        "and cut at the front",
        {
            "number correct": "number correct",
            "total examples": "total examples",
            "accuracy": "avg accuracy",
        },
    )


def last_window(context: Sequence[int], target: Sequence[int], window: int) -> Sample:
    """Return a sample that scores `target` after as much of `context` as fits in the window.

    If the target is longer than the window, only its end is scored.
    """
    target = target[-window:]
    tokens = [*context, *target][-window - 1 :]
    return Sample(tokens, min(len(target), len(tokens) - 1))


def encode_pair(
    tokenizer: Tokenizer, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Encode two consecutive texts together, and return the token ids of each.

    With some tokenizers, a continuation that is encoded alone would begin with a start token.
    """
    context_ids = tokenizer.tokenize_unterminated(context)
    ids = tokenizer.tokenize_unterminated(context + continuation)
    if ids[: len(context_ids)] != context_ids:
        # A token that spans the boundary belongs to the continuation.
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(context_ids, ids, strict=False))
        context_ids = [token for token, _ in pairs]
    return context_ids, ids[len(context_ids) :]


def _exp(loss: float) -> float:
    """Return the perplexity for a loss, or infinity if it is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf


PREPARE: dict[str, Callable[..., Prepared]] = {
    "WIKITEXT103": prepare_wikitext,
    "LAMBADA": prepare_lambada,
    "PERPLEXITY": prepare_perplexity,
}


def parse(task: str, arguments: list[str], world_size: int) -> ParsedRun:
    """Parse and check a command line, which overrides the settings of the checkpoint.

    Raises:
        ConfigError: One or more flags are wrong. The message names all of them.
        CheckpointError: --load does not name a checkpoint that the task can evaluate.
    """
    retrieves = task == "PERPLEXITY" and asks_for("data.retro_workdir", arguments)

    def check(options: TaskConfig, task_options: LanguageModelTaskConfig) -> Iterator[str]:
        paths = options.valid_data or ()
        if task_options.retro_eval_samples is not None and (paths or not retrieves):
            yield (
                "--retro-eval-samples is for --task PERPLEXITY with --retro-workdir and without "
                "--valid-data: drop --retro-eval-samples"
            )
        if task_options.bert_embedder_load is not None and not (paths and retrieves):
            yield (
                f"--bert-embedder-load {task_options.bert_embedder_load} is for --task PERPLEXITY "
                "with --retro-workdir and --valid-data: drop --bert-embedder-load"
            )
        if not paths and not retrieves:
            yield f"--task {task} needs --valid-data: give the file to evaluate on"
        elif task == "WIKITEXT103" and len(paths) > 1:
            yield (
                f"--task {task} reads a single file, but --valid-data names {len(paths)} files: "
                "give one"
            )
        yield from find_mistakes(options)
        if task_options.strict_lambada and task != "LAMBADA":
            yield f"--strict-lambada belongs to --task LAMBADA, not {task}: drop it"
        if task_options.overlapping_eval < 1:
            yield f"--overlapping-eval {task_options.overlapping_eval}: must be at least 1"

    return parse_evaluation(
        task,
        arguments,
        world_size=world_size,
        options=LanguageModelTaskConfig,
        check=check,
        kinds=("gpt", "retro") if task == "PERPLEXITY" else ("gpt",),
    )


def run(task: str, arguments: list[str], launch: Launch) -> int:
    """Evaluate, and return the exit code. Collective.

    Raises:
        UserError: A flag, the checkpoint or the data is invalid.
    """
    parsed = parse(task, arguments, launch.world_size)
    return run_evaluation(parsed, launch, partial(evaluate, task, parsed))


def evaluate(task: str, parsed: ParsedRun, device: Device, layout: Layout) -> Metrics:
    """Load the model, score the data, report, and return the metrics. Collective.

    Raises:
        UserError: The checkpoint or the data is invalid, or the results cannot be written.
    """
    config = parsed.config
    options, task_options = parsed.extra
    assert config.checkpoint.load is not None
    if config.model.architecture == "retro":
        paths = options.valid_data
        prepare = partial(prepare_perplexity, paths, task_options) if paths else None
        return evaluate_neighbors(parsed, device, layout, prepare)
    loaded = load_gpt(config.checkpoint.load, device, layout, config=config, row_by_row=False)
    window = config.data.seq_length
    prepared = PREPARE[task](options.valid_data, task_options, loaded.tokenizer, window)
    print_start(task, loaded, device, prepared.data)
    scorer = Scorer(loaded, device, config.training.micro_batch_size)
    is_main = layout.world.rank == 0
    started = time.monotonic()
    scores = scorer.score(
        prepared.samples, TaskProgress(enabled=is_main, log_interval=config.logging.log_interval)
    )
    seconds = time.monotonic() - started
    metrics = prepared.summarize(scores)
    if is_main:
        print_line(megatron_line(task, prepared.headline, metrics))
    details = {"options": asdict(task_options), "seconds": round(seconds, 3)}
    publish(task, loaded, options, metrics, details)
    return metrics
