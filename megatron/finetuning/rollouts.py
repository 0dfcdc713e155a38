"""Reinforcement learning: during training, the model answers prompts and learns from its answers.

A sample is a row of `--seq-length` tokens with all answers to one prompt, each preceded by a copy
of the prompt. `Rollouts` fills rows shortly before they are needed; a `RolloutRecipe` trains on
them. The user defines the reward of an answer and the loss of a token, as examples/grpo/grpo.py
does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.config import RunConfig, rules_finetuning
from megatron.config.checks import find_problems
from megatron.data.chat import padding_token
from megatron.data.datasets import Datasets
from megatron.data.gpt import longest_segment, make_batch
from megatron.data.json_lines import read_objects
from megatron.data.loader import SingleSampler, collate
from megatron.data.sample import SEGMENT_ENDS, TRAINED, Sample
from megatron.device import Device
from megatron.errors import ConfigError, DataError
from megatron.finetuning.distillation import GPTTeacher
from megatron.finetuning.documents import ComparingRecipe
from megatron.inference.request import Sampling
from megatron.kernels import batch_invariant
from megatron.kernels.cross_entropy import CrossEntropy
from megatron.kernels.segments import Segments
from megatron.models.gpt import GPTModel
from megatron.parallel.context.split import TokenBatch
from megatron.parallel.cross_entropy import vocabulary_cross_entropy
from megatron.parallel.distillation import VocabularyPart
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer
from megatron.training.generation import AnswerGenerator, GeneratedAnswer
from megatron.training.pretrain import Extras
from megatron.training.recipe import Batch, SampleCounts
from megatron.training.run import Run

# Arrays of a row, fp64 [s], with values at each position that predicts a token of an answer: the
# token's log-probability when it was generated, its answer's advantage, and its loss weight.
OLD_LOG_PROBS = "old_log_probs"
ADVANTAGES = "advantages"
WEIGHTS = "weights"
# With a reference model, a batch also contains its log-probabilities of the same tokens.
REFERENCE_LOG_PROBS = "reference_log_probs"
# An array of a row, fp64 [s]: at the start of each answer's document, the answer's reward divided
# by the number of answers. The sum over the row is the mean reward.
REWARDS = "rewards"


class Group(NamedTuple):
    """The answers to one prompt.

    Attributes:
        record: The line of --data-path that contains the prompt.
        prompt: The prompt's tokens.
        answers: The tokens of the answers, with their log-probabilities.
        texts: The answers as text, without the token that ended them.
    """

    record: Mapping[str, Any]
    prompt: tuple[int, ...]
    answers: list[GeneratedAnswer]
    texts: list[str]


class Judged(NamedTuple):
    """The values that the loss needs for an answer.

    Attributes:
        reward: The reward of the answer, for the log.
        advantage: The advantage of the answer over the other answers to the prompt.
        weight: The weight of its tokens' losses. The loss of an update is the sum of
            weight * loss over the tokens of a row, averaged over the update's rows.
    """

    reward: float
    advantage: float
    weight: float


@dataclass(frozen=True, eq=False)
class Prompts:
    """The prompts of a run: all lines of a file, in a different order in every epoch.

    Attributes:
        records: The JSON object in each line.
        count: The number of samples that the run needs.
        seed: The seed of the shuffle.
    """

    records: Sequence[Mapping[str, Any]]
    count: int
    seed: int
    _orders: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.count

    def __getitem__(self, i: int) -> Sample:
        """Return a sample with only its index, from which `Rollouts` makes the row."""
        return {"id": i}

    def record(self, i: int) -> Mapping[str, Any]:
        """Return the line with the prompt of sample i."""
        epoch, position = divmod(i, len(self.records))
        if epoch not in self._orders:
            self._orders.clear()
            random = np.random.RandomState([self.seed, epoch])
            self._orders[epoch] = random.permutation(len(self.records))
        return self.records[int(self._orders[epoch][position])]


def read_prompts(path: str) -> list[dict[str, Any]]:
    """Return the lines of a file of prompts.

    Raises:
        DataError: The file cannot be read or contains no lines, or a line has no "prompt".
    """
    records = []
    for line in read_objects(Path(path), "--data-path"):
        if not isinstance(line.fields.get("prompt"), str):
            raise DataError(
                f'--data-path {path}: line {line.number} has no "prompt" string: write one JSON '
                'object per line, {"prompt": "..."}, with any other fields that the reward needs'
            )
        records.append(line.fields)
    if not records:
        raise DataError(f"--data-path {path} is empty: write one prompt per line")
    return records


class RolloutRecipe(ComparingRecipe):
    """A recipe that trains on rows of answers. A subclass defines the loss.

    Attributes:
        reference: A second model on the same processes, whose log-probabilities the loss uses, or
            `None`.
    """

    program = "rollouts"
    reference: GPTTeacher | None = None

    def loss_names(self, config: RunConfig) -> tuple[str, ...]:
        """Return the names under which the results of `losses` are logged."""
        raise NotImplementedError

    def losses(self, log_probs: Tensor, batch: Batch) -> Mapping[str, Tensor]:
        """Return the loss of a micro-batch, and other values to log, which have no gradients.

        Args:
            log_probs: The log-probabilities of the answers' tokens under the model that is being
                trained, at the positions that predict them, and 0 elsewhere: fp64 [b, s].
            batch: The rows: `TRAINED`, `OLD_LOG_PROBS`, `ADVANTAGES`, `WEIGHTS`, `REWARDS` and,
                with a reference model, `REFERENCE_LOG_PROBS`, [b, s].
        """
        raise NotImplementedError

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, layout: Layout
    ) -> Datasets:
        """Read the prompts. `Rollouts` makes the rows.

        Raises:
            ConfigError: --data-path does not name one file.
            DataError: The file cannot be used.
        """
        paths = config.data.data_path or ()
        if len(paths) != 1:
            raise ConfigError(
                f"--data-path {' '.join(paths)}: name one file, with a prompt in each line"
            )
        prompts = Prompts(read_prompts(paths[0]), samples[0], config.training.seed)
        return Datasets(prompts, None, None)

    def loss_mask(self, batch: Batch, config: RunConfig, tokenizer: Tokenizer) -> Tensor:
        """Return 1 for each label that is a token of an answer, otherwise 0, [b, s]."""
        return batch[TRAINED].float()

    def forward(
        self,
        part: GPTModel,
        batch: Batch,
        hidden: Tensor | None,
        config: RunConfig,
        tokenizer: Tokenizer,
        layout: Layout,
    ) -> Tensor | Mapping[str, Tensor]:
        """Run one micro-batch through the model, and return its losses."""
        if self.reference is not None:
            with torch.no_grad():
                reference_log_probs = token_log_probs(
                    self.reference.parts[0], batch, tokenizer, layout
                )
            batch = {**batch, REFERENCE_LOG_PROBS: reference_log_probs}
        return self.losses(token_log_probs(part, batch, tokenizer, layout), batch)


def token_log_probs(part: GPTModel, batch: Batch, tokenizer: Tokenizer, layout: Layout) -> Tensor:
    """Return the log-probability of each token that is trained on, at the position before it.

    The result is fp64 [b, s], and 0 at all other positions. As in generation, padding entries of
    the vocabulary have no probability.

    Args:
        part: The whole model, perhaps split over tensor ranks.
        batch: Rows of packed documents.
        tokenizer: The run's tokenizer.
        layout: The ranks of this process.
    """
    rows = make_batch(batch, eod=tokenizer.eod)
    documents = Segments.of(batch[SEGMENT_ENDS], rows.tokens, longest_segment(batch))
    if part.attention_choice.name == batch_invariant.NAME:
        # Positions start from 0 in each answer, as in generation.
        rows = TokenBatch(*(x.reshape(1, -1) for x in rows))
        documents = replace(documents, shape=(1, rows.tokens.numel()))
        documents = replace(documents, positions=rows.position_ids[0])
    logits: Tensor = part(rows.tokens, rows.position_ids, None, documents)
    vocabulary = VocabularyPart(layout.tensor, tokenizer.vocab_size)
    assert part.output is not None, "a rule refuses pipelines"
    log_probs = label_log_probs(logits, rows.labels, vocabulary, part.output.cross_entropy)
    log_probs = log_probs.view_as(batch[TRAINED])
    return torch.where(batch[TRAINED] > 0, log_probs.double(), 0.0)


def label_log_probs(
    logits: Tensor, labels: Tensor, vocabulary: VocabularyPart, cross_entropy: CrossEntropy
) -> Tensor:
    """Return log softmax(logits)[label] over the vocabulary without its padding, fp32 [b, s].

    Args:
        logits: This tensor rank's part of the logits, [b, s, v/t]. Their gradient may overwrite
            them.
        labels: The labels, [b, s].
        vocabulary: The tensor axis, and the size of the vocabulary without padding.
        cross_entropy: The implementation, a kernel or plain PyTorch.
    """
    size, axis = logits.shape[-1], vocabulary.axis
    num_real = vocabulary.real(size)
    if axis.size == 1:
        # A copy, because kernels need contiguous rows.
        logits = logits.transpose(0, 1)[..., :num_real].contiguous().transpose(0, 1)
    elif num_real < size:
        is_padding = torch.arange(size, device=logits.device) >= num_real
        # Use a finite value, because a rank may hold nothing but padding, and inf - inf is nan.
        logits = logits.masked_fill(is_padding, torch.finfo(logits.dtype).min / 2)
    losses = vocabulary_cross_entropy(
        logits.transpose(0, 1), labels.t(), axis, implementation=cross_entropy, reuse_logits=True
    )
    return -losses.t()


class Rollouts(Extras):
    """The steps that fill a run's micro-batches with the model's own answers.

    Args:
        sampling: How answers are sampled. Temperature 1 without top-k or top-p samples from the
            distribution that is trained.
        group_size: The number of answers to each prompt.
        updates: The number of updates that learn from answers generated with the same weights.
        at_once: The number of answers that a process generates concurrently (`AnswerGenerator`).
    """

    def __init__(self, sampling: Sampling, *, group_size: int, updates: int, at_once: int) -> None:
        """Store the settings."""
        self._sampling, self._group_size, self._updates = sampling, group_size, updates
        self._at_once = at_once

    def judge(self, run: Run, groups: Sequence[Group]) -> list[list[Judged]]:
        """Return the values that the loss needs for each answer. Collective over the data axis.

        Args:
            run: The run.
            groups: This data-parallel rank's groups. Every rank has the same number of them.
        """
        raise NotImplementedError

    def replace_training(self, config: RunConfig, device: Device, layout: Layout) -> bool:
        """Check the flags, and return False, because training is not replaced.

        Raises:
            ConfigError: The model cannot generate during training with these flags.
        """
        problems = find_problems(config, layout.world.size, rules=[rules_finetuning.rollouts])
        if problems:
            raise ConfigError(problems)
        return False

    def begin(self, run: Run) -> None:
        """Make the run train on batches that the model generates. Collective."""
        self._generator = AnswerGenerator(run, max_concurrent=self._at_once)
        self._sampling = replace(self._sampling, stop_tokens=self._generator.ends, logprobs=True)
        run.train_batches = self._batches(run)

    def _batches(self, run: Run) -> Iterator[Batch]:
        """Yield this rank's micro-batches, generating answers for `updates` updates at a time."""
        prompts, axis = run.datasets.train, run.layout.data
        assert isinstance(prompts, Prompts), "a RolloutRecipe reads them"
        sampler_args = (len(prompts), run.progress.consumed_samples, run.batches.micro_batch)
        passes = iter(SingleSampler(*sampler_args, axis.rank, axis.size))
        while True:
            # After a resume, generate only for the updates that remain until an uninterrupted run
            # would generate new answers.
            updates = self._updates - run.progress.iteration % self._updates
            local_batches = list(islice(passes, _micro_batches(run, updates)))
            if not local_batches:
                raise DataError(
                    f"all {len(prompts)} samples of the run have been used: make the run longer"
                )
            indices = [index for batch in local_batches for index in batch]
            groups = self._answer(run, [(i, prompts.record(i)) for i in indices])
            judged = self.judge(run, groups)
            for group, verdicts in zip(groups, judged, strict=True):
                for text, verdict in zip(group.texts, verdicts, strict=True):
                    if not math.isfinite(verdict.reward):
                        raise DataError(
                            f"the reward of {text[:60]!r} as an answer to "
                            f"{group.record['prompt'][:60]!r} is {verdict.reward}: return a number"
                        )
            rows = {
                i: new_row(run, i, group, verdicts)
                for i, group, verdicts in zip(indices, groups, judged, strict=True)
            }
            for batch in local_batches:
                yield collate([rows[i] for i in batch])

    def _answer(self, run: Run, records: Sequence[tuple[int, Mapping[str, Any]]]) -> list[Group]:
        """Return the answers to prompts, given the index and the line of each sample.

        Collective over the ranks of one model replica.
        """
        sampling, group_size, row_length = (
            self._sampling,
            self._group_size,
            run.config.data.seq_length,
        )
        requests = []
        for index, record in records:
            prompt = self._generator.encode(record["prompt"])
            needed = group_size * (len(prompt) + sampling.max_new_tokens)
            if needed > row_length:
                raise DataError(
                    f"the prompt {record['prompt'][:60]!r} has {len(prompt)} tokens: with "
                    f"{group_size} answers of up to {sampling.max_new_tokens} it needs a row of "
                    f"{needed}, and --seq-length is {row_length}: raise it, or generate fewer or "
                    "shorter answers"
                )
            requests += [(f"{index}/{i}", prompt, sampling) for i in range(group_size)]
        answers = self._generator.answer(requests)
        groups = []
        for position, (_, record) in enumerate(records):
            group_answers = answers[position * group_size : (position + 1) * group_size]
            for answer in group_answers:
                if answer.problem:
                    raise DataError(f"the prompt {record['prompt'][:60]!r}: {answer.problem}")
            texts = [
                run.tokenizer.detokenize(
                    [t for t in answer.tokens if t not in sampling.stop_tokens]
                )
                for answer in group_answers
            ]
            groups.append(Group(record, requests[position * group_size][1], group_answers, texts))
        return groups


def _micro_batches(run: Run, updates: int) -> int:
    """Return this rank's number of micro-batches in the next updates, whose sizes may differ."""
    count, consumed = 0, run.progress.consumed_samples
    for _ in range(updates):
        count += run.batches.micro_batches_at(consumed)
        consumed += run.batches.global_batch_at(consumed)
    return count


def new_row(run: Run, index: int, group: Group, verdicts: Sequence[Judged]) -> Sample:
    """Return a row with all answers to a prompt, each preceded by a copy of the prompt.

    Args:
        run: The run.
        index: The index of the sample.
        group: The prompt and its answers, which fit in a row.
        verdicts: The values that the loss needs for each answer.
    """
    length = run.config.data.seq_length
    text = np.full(length + 1, padding_token(run.tokenizer), np.int64)
    trained = np.zeros(length, np.int64)
    old_log_probs, advantages, weights, rewards = (np.zeros(length) for _ in range(4))
    ends, end = [], 0
    for answer, verdict in zip(group.answers, verdicts, strict=True):
        start, answer_start = end, end + len(group.prompt)
        end = answer_start + len(answer.tokens)
        text[start:end] = [*group.prompt, *answer.tokens]
        ends.append(end)
        predicts = slice(answer_start - 1, end - 1)  # labels are one token ahead
        trained[predicts] = 1
        old_log_probs[predicts] = answer.log_probs
        advantages[predicts], weights[predicts] = verdict.advantage, verdict.weight
        rewards[start] = verdict.reward / len(verdicts)
    if end < length:
        ends.append(length)
    parts: dict[str, Any] = {OLD_LOG_PROBS: old_log_probs, ADVANTAGES: advantages, WEIGHTS: weights}
    parts |= {TRAINED: trained, REWARDS: rewards, SEGMENT_ENDS: np.array(ends)}
    return {"text": text, **parts, "id": index}
