"""Finetuning of a bi-encoder on questions with labeled passages (RET-FINETUNE-NQ)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.checkpoint.compatibility import check_network
from megatron.checkpoint.reader import PaddedReader
from megatron.command import print_line
from megatron.config import ParsedRun, Program, RunConfig, parse_config
from megatron.config.checks import RULES
from megatron.config.fields import fields_of
from megatron.config.model import ModelOptions
from megatron.config.rules_retriever import titles
from megatron.config.run import RunOptions
from megatron.config.tasks import FinetuneConfig, RetrieverTextConfig, TaskConfig, TowersConfig
from megatron.data.datasets import Datasets
from megatron.data.sample import Sample
from megatron.errors import ConfigError, DataError
from megatron.inference.load import open_existing, saved_config
from megatron.models.biencoder import BiEncoderModel, compare_all, top_k_accuracy
from megatron.models.plan import RETRIEVAL_HEAD
from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Layout
from megatron.processes.launch import Launch
from megatron.tasks.classify import Epochs
from megatron.tasks.finetune import EpochEvaluation
from megatron.tasks.finetune_command import (
    LATE_RULES,
    PRETRAINING_RULES,
    epoch_ends,
    refuse_lengths,
    refuse_pretraining_flags,
    run_finetuning,
    with_length,
)
from megatron.tasks.passages import PaddedTexts, check_positions, ids_of_passage, pad_texts
from megatron.tasks.results import Metrics, format_number, report_results, results_path
from megatron.tasks.table import PROGRAM, flags_of_other_tasks
from megatron.tasks.texts import find_missing, find_mistakes
from megatron.tokenizer import Tokenizer
from megatron.training.callbacks.base import Callback
from megatron.training.from_bert import StartFromBert
from megatron.training.recipe import PADDED_ATTENTION, Batch, Recipe, SampleCounts
from megatron.training.restoring import load_shared_weights
from megatron.training.run import Run

_READ = 1 << 20  # characters
_EMBED_BATCH = 64  # the number of passages that are embedded together in evaluations


@dataclass(frozen=True)
class LabeledQuestion:
    """A question, a passage that answers it, and passages that do not. A passage is (title, text).

    Attributes:
        text: The question, without its question mark.
        positive: The passage that answers the question.
        hard_negatives: Wrong passages that look right, for example those that BM25 finds.
        negatives: Other wrong passages.
    """

    text: str
    positive: tuple[str, str]
    hard_negatives: tuple[tuple[str, str], ...]
    negatives: tuple[tuple[str, str], ...]


def read_labeled(
    path: str, flag: str, hard_negatives: int | None, negatives: int
) -> list[LabeledQuestion]:
    """Return the questions of a file in the JSON format of DPR, each with its first positive.

    Args:
        path: The file, a list of objects with `question`, `positive_ctxs`, `hard_negative_ctxs`
            and `negative_ctxs`, whose passages have a `title` and a `text`.
        flag: The flag that names the file.
        hard_negatives: The number of hard negatives to keep for each question. `None` keeps all.
        negatives: The number of other negatives to keep for each question.

    Raises:
        DataError: The file cannot be read or has no questions, or an entry is incomplete.
    """
    questions = []
    for number, entry in enumerate(_entries(path, flag), 1):
        where = f"{flag} {path}: entry {number}"
        fields = entry if isinstance(entry, dict) else {}
        question = fields.get("question")
        if not isinstance(question, str) or not question.strip():
            raise DataError(f'{where} has no "question": fix or remove it')
        positive = _passages(fields, "positive_ctxs", 1, where)
        if not positive:
            raise DataError(f'{where} has no passages in "positive_ctxs": fix or remove it')
        questions.append(
            LabeledQuestion(
                question.removesuffix("?"),
                positive[0],
                _passages(fields, "hard_negative_ctxs", hard_negatives, where),
                _passages(fields, "negative_ctxs", negatives, where),
            )
        )
    if not questions:
        raise DataError(f"{flag} {path}: the file has no questions: give another")
    return questions


def _passages(
    fields: Mapping[str, Any], name: str, limit: int | None, where: str
) -> tuple[tuple[str, str], ...]:
    value = fields.get(name, [])
    entries = value[:limit] if isinstance(value, list) else [None]
    texts = [entry if isinstance(entry, dict) else {} for entry in entries]
    pairs: list[tuple[str, str]] = []
    for entry in texts:
        title, text = entry.get("title", ""), entry.get("text")
        if not isinstance(title, str) or not isinstance(text, str):
            raise DataError(
                f'{where}: "{name}" is not a list of passages with "title" and "text": fix it'
            )
        pairs.append((title, text))
    return tuple(pairs)


def _entries(path: str, flag: str) -> Iterator[Any]:
    """Yield the entries of a JSON list without loading it whole, because DPR's file is 7 GB."""
    decoder, text, is_open = json.JSONDecoder(), "", False
    broken = f"{flag} {path}: not a JSON list of questions in DPR's format"
    try:
        with Path(path).open(encoding="utf-8") as file:
            while True:
                text = text.lstrip() if not is_open else text.lstrip(", \t\r\n")
                if is_open and text.startswith("]"):
                    return
                if text and not is_open:
                    if text[0] != "[":
                        raise DataError(f"{broken}: give such a file")
                    is_open, text = True, text[1:]
                    continue
                try:
                    entry, end = decoder.raw_decode(text)
                except ValueError:
                    chunk = file.read(max(_READ, len(text)))
                    if not chunk:
                        raise DataError(f"{broken}, or truncated: fix the file") from None
                    text += chunk
                    continue
                yield entry
                text = text[end:]
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{flag} {path}: cannot be read ({error}): give a JSON file") from error


class TrainingQuestions:
    """Questions in training order, each with its passage and some wrong passages.

    Sample k is a pure function of seed and k. Each epoch draws different hard negatives.

    Args:
        questions: The questions, to which `order` refers by index.
        tokenizer: The tokenizer of a BERT.
        length: The number of tokens in a row.
        order: The index of the question of each sample.
        negatives: The number of wrong passages per question. If a question has fewer, the missing
            rows are masked.
        seed: The seed for the random draws.
    """

    def __init__(
        self,
        questions: Sequence[LabeledQuestion],
        tokenizer: Tokenizer,
        length: int,
        order: Epochs,
        *,
        negatives: int,
        seed: int,
    ) -> None:
        """Store the arguments."""
        self._questions, self._order = questions, order
        self._tokenizer, self._length = tokenizer, length
        self._negatives, self._seed = negatives, seed

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._order)

    def __getitem__(self, i: int) -> Sample:
        """Return the tokens and masks of a question, `[s]`, and of its passages, `[p, s]`.

        The passage that answers the question comes first.
        """
        index: Any = self._order[i]
        question, tokenizer = self._questions[index], self._tokenizer
        order = np.random.default_rng((self._seed, i)).permutation(len(question.hard_negatives))
        negatives = [question.hard_negatives[k] for k in order[: self._negatives].tolist()]
        negatives += question.negatives[: self._negatives - len(negatives)]
        query = self._padded([tokenizer.tokenize_with_special(question.text)], 1)
        passages = [question.positive, *negatives]
        texts = [ids_of_passage(title, text, tokenizer) for title, text in passages]
        contexts = self._padded(texts, 1 + self._negatives)
        return {
            "query_tokens": query.tokens[0],
            "query_pad_mask": query.mask[0].astype(np.int64),
            "context_tokens": contexts.tokens,
            "context_pad_mask": contexts.mask.astype(np.int64),
            "id": i,
        }

    def _padded(self, texts: Sequence[Sequence[int]], rows: int) -> PaddedTexts:
        return pad_texts(texts, self._tokenizer, self._length, (rows, self._length))


class TowersRecipe(Recipe):
    """A recipe that trains towers to match each question with its own passage."""

    program = PROGRAM
    architecture = "ict"
    network = BiEncoderModel
    head = RETRIEVAL_HEAD
    attention = PADDED_ATTENTION

    def __init__(
        self, train: Sequence[LabeledQuestion], samples_per_epoch: int | None, negatives: int
    ) -> None:
        """Store the questions, how many to use per epoch, and how many wrong passages each has."""
        self._train, self._samples_per_epoch, self._negatives = train, samples_per_epoch, negatives

    def loss_names(self, config: RunConfig) -> tuple[str, ...]:
        """Return the names of the loss and of the retrieval accuracy."""
        return ("lm loss", "correct predictions")

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, layout: Layout
    ) -> Datasets:
        """Return the training samples of all epochs."""
        if not self._train:
            return Datasets(None, None, None)
        seed = config.training.seed
        indices: Any = range(len(self._train))
        order = Epochs(
            indices, seed=seed, length=samples[0], samples_per_epoch=self._samples_per_epoch
        )
        length = config.data.seq_length
        train = TrainingQuestions(
            self._train, tokenizer, length, order, negatives=self._negatives, seed=seed
        )
        return Datasets(train, None, None)

    def loss_mask(self, batch: Batch, config: RunConfig, tokenizer: Tokenizer) -> Tensor:
        """Return ones, `[b]`, because every question counts."""
        return torch.ones(len(batch["query_tokens"]), device=batch["query_tokens"].device)

    def forward(
        self,
        part: BiEncoderModel,
        batch: Batch,
        hidden: Tensor | None,
        config: RunConfig,
        tokenizer: Tokenizer,
        layout: Layout,
    ) -> Mapping[str, Tensor]:
        """Return the retrieval loss and accuracy over the passages of all data-parallel ranks."""
        # The correct passages come first, as in Megatron-LM.
        passages, mask = (
            batch[f"context_{name}"].transpose(0, 1).flatten(0, 1)
            for name in ("tokens", "pad_mask")
        )
        vectors = part(batch["query_tokens"], batch["query_pad_mask"].bool(), passages, mask.bool())
        comparison = compare_all(
            vectors, layout.data, scale=score_scale(config), counted=mask.bool().any(1)
        )
        return {
            "lm loss": comparison.loss,
            "correct predictions": top_k_accuracy(comparison.ranks, 1),
        }


def score_scale(config: RunConfig) -> float:
    """Return the factor for scores: 1/sqrt(h) with --retriever-score-scaling, otherwise 1."""
    return config.model.hidden_size**-0.5 if config.retriever.retriever_score_scaling else 1.0


class TowersFinetuning(StartFromBert):
    """Initialization from pretrained towers or a BERT, and an evaluation after each epoch.

    Args:
        options: The flags that determine where the results are written.
        pretrained: The folder of a pretrained bi-encoder, or `None`.
        valid: The questions to evaluate on, by file. Each has only the negatives that are ranked.
        ends: The updates, counted from 1, that end an epoch.
        group: The number of questions whose passages are compared with each other.
    """

    def __init__(
        self,
        options: TaskConfig,
        pretrained: str | None,
        valid: Mapping[str, Sequence[LabeledQuestion]],
        ends: Set[int],
        group: int,
    ) -> None:
        """Store the arguments."""
        self._options, self._pretrained, self._valid = options, pretrained, valid
        self._ends, self._group = ends, group

    def begin(self, run: Run) -> None:
        """Load the initial weights, unless the run is resumed.

        Without --save-interval, the run saves after each epoch.
        """
        if run.config.checkpoint.save_interval is None:
            run.save_at = self._ends
        if self._pretrained is None:
            super().begin(run)
        elif run.progress.iteration == 0:
            allow_foreign = run.config.checkpoint.allow_foreign_checkpoints
            flag = "--pretrained-checkpoint"
            reader = open_existing(
                self._pretrained, flag=flag, layout=run.layout, allow_foreign=allow_foreign
            )
            check_network(run.config, reader, flag)
            entries = run.tokenizer.text_vocab_size
            rows = run.plan.embedding.vocabulary
            load_shared_weights(run, PaddedReader(reader, rows=rows, entries=entries), new=())
            run.pretrained = str(reader.path)

    def callbacks(self, run: Run) -> list[Callback]:
        """Return the callback that evaluates after each epoch but the last, which `end` covers."""
        return [EpochEvaluation(self._ends - {max(self._ends)}, self.evaluate_all)]

    def end(self, run: Run) -> None:
        """Evaluate, and write the results with --results or --save. Collective.

        Without validation data, nothing is done.
        """
        if not self._valid:
            return
        metrics = self.evaluate_all(run)
        save, results_file = run.config.checkpoint.save, self._options.results
        if run.layout.world.rank or (results_file is None and save is None):
            return
        iteration = run.progress.iteration
        path = results_path(results_file, save or "", "RET-FINETUNE-NQ", iteration)
        content = {"task": "RET-FINETUNE-NQ", "iteration": iteration, "results": metrics}
        content |= {"layout": run.layout.describe()}
        if save is not None:  # a later run that continues this one may replace the file
            content["save"] = str(Path(save).resolve())
        report_results(path, content)

    def evaluate_all(self, run: Run) -> dict[str, Metrics]:
        """Return the metrics from `evaluate` for each file. Collective."""
        return {path: self.evaluate(run, path) for path in self._valid}

    @torch.no_grad()
    def evaluate(self, run: Run, path: str) -> Metrics:
        """Print and return the mean rank of the correct passages and the accuracies. Collective.

        As in Megatron-LM, a question's passage is ranked among all passages of its group. Ranks
        begin at 0, and accuracies are percentages.
        """
        run.optimizer.wait_for_weights()
        (part,), config, data = run.parts, run.config, run.layout.data
        assert isinstance(part, BiEncoderModel), "the towers form a single part"
        part.eval()
        questions, tops = self._valid[path], config.retriever.retriever_report_topk_accuracies
        sums = torch.zeros(1 + len(tops), device=run.device.torch_device)
        groups = range(0, len(questions), self._group)
        for first in groups[data.rank :: data.size]:
            group = questions[first : first + self._group]
            negatives = [
                passage
                for question in group
                for passage in (*question.negatives, *question.hard_negatives)
            ]
            passages = [
                ids_of_passage(*passage, run.tokenizer)
                for passage in [question.positive for question in group] + negatives
            ]
            vectors = _embed(run, part.contexts.encode, passages)
            queries = [run.tokenizer.tokenize_with_special(question.text) for question in group]
            scores = _embed(run, part.queries.encode, queries) @ vectors.t()
            ranks = (scores > scores.diagonal()[:, None]).sum(1)
            sums += torch.stack([ranks.sum(), *((ranks < k).sum() for k in tops)])
        rank, *hits = (all_reduce(sums, data) / len(questions)).tolist()
        metrics: Metrics = {"rank": rank}
        metrics |= {f"top{k}_acc": 100 * hit for k, hit in zip(tops, hits, strict=True)}
        if run.layout.world.rank == 0:
            summary = " | ".join(f"{name} {format_number(n)}" for name, n in metrics.items())
            print_line(f"RET-FINETUNE-NQ at iteration {run.progress.iteration}: {path}: {summary}")
        return metrics


def _embed(
    run: Run, encode: Callable[[Tensor, Tensor], Tensor], texts: Sequence[Sequence[int]]
) -> Tensor:
    """Return the vectors of texts, fp32 `[n, e]`."""
    vectors, length = [], run.config.data.seq_length
    for first in range(0, len(texts), _EMBED_BATCH):
        batch = texts[first : first + _EMBED_BATCH]
        tokens, mask = (
            torch.from_numpy(array).to(run.device.torch_device)
            for array in pad_texts(batch, run.tokenizer, length, (len(batch), length))
        )
        vectors.append(encode(tokens, mask).float())
    return torch.cat(vectors)


def run(task: str, arguments: list[str], launch: Launch) -> int:
    """Finetune and evaluate, and return the exit code. Collective.

    Raises:
        UserError: A flag, a checkpoint or the data is invalid.
    """
    started = time.monotonic()
    parsed = parse(task, arguments, launch.world_size)
    return run_finetuning(parsed, launch, started, partial(prepare, parsed))


def prepare(parsed: ParsedRun, world_size: int) -> tuple[RunConfig, TowersRecipe, TowersFinetuning]:
    """Read the data, which determines the run's length, and return the arguments of `pretrain`.

    Raises:
        ConfigError: A flag does not fit the run's length, or the samples do not fill a batch.
        DataError: A file is not in DPR's format.
    """
    options, tuning, towers_options, texts = parsed.extra
    negatives = towers_options.train_hard_neg if towers_options.train_with_neg else 0
    train = [
        question
        for path in tuning.train_data or ()
        for question in read_labeled(path, "--train-data", None if negatives else 0, negatives)
    ]
    hard_negatives, other_negatives = (
        towers_options.val_av_rank_hard_neg,
        towers_options.val_av_rank_other_neg,
    )
    valid = {
        path: read_labeled(path, "--valid-data", hard_negatives, other_negatives)
        for path in options.valid_data or ()
    }
    length = texts.retriever_seq_length
    config = replace(
        parsed.config,
        data=replace(parsed.config.data, seq_length=length),
        evaluation=replace(parsed.config.evaluation, eval_iters=0),
    )
    config, samples_per_epoch = with_length(config, tuning, len(train), world_size)
    batch = config.training.global_batch_size
    ends = epoch_ends(tuning.epochs or 0, samples_per_epoch or len(train), batch)
    group = towers_options.eval_micro_batch_size or config.training.micro_batch_size
    extras = TowersFinetuning(options, tuning.pretrained_checkpoint, valid, ends, group)
    return config, TowersRecipe(train, samples_per_epoch, negatives), extras


def parse(task: str, arguments: list[str], world_size: int) -> ParsedRun:
    """Parse a command line, which overrides the settings of the pretrained checkpoint.

    Raises:
        ConfigError: One or more flags are wrong. The message names all of them.
        CheckpointError: The checkpoint is missing, or is not of the expected kind.
    """

    def check(
        options: TaskConfig,
        tuning: FinetuneConfig,
        towers_options: TowersConfig,
        texts: RetrieverTextConfig,
    ) -> Iterator[str]:
        if not tuning.epochs or tuning.epochs < 0:
            yield f"--task {task} needs --epochs: give a number of at least 1"
        if not tuning.train_data:
            yield f"--task {task} needs --train-data: give a file of questions in DPR's format"
        if towers_options.train_with_neg and not towers_options.train_hard_neg:
            yield "--train-with-neg needs --train-hard-neg: give the number of wrong passages"
        if towers_options.train_hard_neg and not towers_options.train_with_neg:
            yield (
                f"--train-hard-neg {towers_options.train_hard_neg}: add --train-with-neg, or drop "
                "it"
            )
        if options.results is not None and not options.valid_data:
            yield (
                f"--results {options.results} without --valid-data: nothing is evaluated: give "
                "--valid-data, or drop --results"
            )
        yield from find_missing("--train-data", tuning.train_data)
        yield from find_mistakes(options)

    own_flags = {flag for field in fields_of(FinetuneConfig) for flag in field.spellings}
    other_flags = {
        flag: text for flag, text in flags_of_other_tasks(task).items() if flag not in own_flags
    }
    late = (*LATE_RULES, *PRETRAINING_RULES, titles)
    parsed = parse_config(
        arguments,
        world_size=world_size,
        architecture="ict",
        program=Program(
            name=PROGRAM,
            extra=(TaskConfig, FinetuneConfig, TowersConfig, RetrieverTextConfig),
            find_start=_start,
            rules=[*(rule for rule in RULES if rule not in late), refuse_pretraining_flags],
            check_extra=check,
            flags_of_other_tasks=other_flags,
        ),
    )
    length = parsed.extra[3].retriever_seq_length
    check_positions(parsed.config.model, length)
    tensor = parsed.config.parallel.tensor_model_parallel_size
    if parsed.config.parallel.sequence_parallel and length % tensor:
        raise ConfigError(
            f"--retriever-seq-length {length}: --sequence-parallel needs a multiple of {tensor}: "
            "change one of them"
        )
    batches = parsed.config.evaluation.eval_iters
    ignored = f"--eval-iters {batches} has no effect: each epoch ends with an evaluation"
    return replace(parsed, notices=(*parsed.notices, *([ignored] if batches else [])))


def _start(given: Mapping[str, Any]) -> RunOptions:
    """Return the settings that flags override, read from a checkpoint of a bi-encoder or BERT."""
    refuse_lengths(given)
    for name, kind in (("pretrained_checkpoint", "ict"), ("load", "ict"), ("bert_load", "bert")):
        folder = given.get(name)
        if folder is None:
            continue
        flag = f"--{name.replace('_', '-')}"
        allow_foreign = given.get("allow_foreign_checkpoints", False)
        reader = open_existing(folder, flag=flag, verify=False, allow_foreign=allow_foreign)
        start: RunOptions = saved_config(reader, folder, kind, flag=flag)
        break
    else:
        raise ConfigError(
            "--pretrained-checkpoint is required: give the folder of a bi-encoder, or the folder "
            "of a BERT as --bert-load"
        )
    model: ModelOptions = replace(start.model, architecture="ict", bert_binary_head=True)
    return replace(
        start,
        model=model,
        training=replace(start.training, skip_train=False),
        evaluation=replace(start.evaluation, eval_iters=0),
    )
