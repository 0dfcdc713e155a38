"""A toy for training on preferences: random pairs of answers, and a run on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.config import RunConfig
from megatron.config.parser import parse_config
from megatron.data.conversations import TokenizedExamples
from megatron.data.datasets import Datasets
from megatron.data.packing import one_per_row, pack
from megatron.data.preferences import FittedAnswers, FittedPairs, PreferenceDataset
from megatron.finetuning.kto import KTORecipe
from megatron.finetuning.preferences import PreferenceRecipe, RewardRecipe
from megatron.finetuning.reference import ReferenceLogProbs
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer
from megatron.training.build import build_run
from megatron.training.loop import standard_callbacks, train
from megatron.training.recipe import SampleCounts
from megatron.training.run import Run
from tests.distributed import as_given, toy_device
from tests.training.toy import TOY, Recorder

SEED = 1234  # the flags' default
FILE = Path(__file__).with_name("pairs.jsonl")
# Later flags override those of the toy in tests.training.toy.
PAIRS = """
    --sft --calculate-per-token-loss --seq-length 32
    --max-position-embeddings 32 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0
    --train-iters 4 --preference-loss dpo
""".split()


def toy_pairs(vocabulary: int = 100, pairs: int = 24, longest: int = 9) -> TokenizedExamples:
    """Return pairs of answers with random tokens and lengths, each pair with a shared prompt."""
    random = np.random.RandomState(1)
    tokens, trained = [], []
    for _ in range(pairs):
        prompt = random.randint(vocabulary, size=random.randint(1, 4))
        for _ in range(2):
            answer = random.randint(vocabulary, size=random.randint(1, longest - len(prompt)))
            tokens.append(np.concatenate((prompt, answer)).astype(np.int32))
            trained.append(np.arange(len(tokens[-1])) >= len(prompt))
    lengths = np.array([len(each) for each in tokens])
    starts = lengths.cumsum() - lengths
    held = (np.concatenate(tokens), np.concatenate(trained), lengths, starts)
    return TokenizedExamples("toy", *held, Counter())


def toy_answers(vocabulary: int = 100) -> TokenizedExamples:
    """Return the same answers, each desirable or not."""
    found = toy_pairs(vocabulary)
    found.trained[found.starts] = np.random.RandomState(2).randint(2, size=len(found)).astype(bool)
    return found


def rows_of_one_pair(
    examples: TokenizedExamples, count: int, fitted: type[FittedPairs] = FittedPairs
) -> list[int]:
    """Return the pairs in the order of training with --no-packing."""
    source = fitted(examples, 32, "error")
    packing = one_per_row(source.limits.sum(axis=1), 32)
    dataset = PreferenceDataset(source, 0, packing, count, SEED, 0)
    return [int(number) for i in range(count) for number in dataset.row(i)]


class ToyPreferences(PreferenceRecipe):
    """Training on the toy's pairs."""

    vocabulary = 100

    def source(self, length: int) -> FittedPairs:
        """Return the answers."""
        return FittedPairs(toy_pairs(self.vocabulary), length, "error")

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, layout: Layout
    ) -> Datasets:
        length = config.data.seq_length
        source = self.source(length)
        how = pack if config.finetuning.packing else one_per_row
        packing = how(source.limits.sum(axis=1), length)
        seed = config.training.seed
        train = PreferenceDataset(source, 0, packing, samples[0], seed, 0)
        return Datasets(train, None, None)


class ToyRewards(RewardRecipe):
    """Training of a reward model on the toy's pairs."""

    build_datasets = ToyPreferences.build_datasets
    source = ToyPreferences.source
    vocabulary = ToyPreferences.vocabulary


class ToyAnswers(KTORecipe):
    """Training on the toy's single answers."""

    build_datasets = ToyPreferences.build_datasets
    vocabulary = ToyPreferences.vocabulary

    def source(self, length: int) -> FittedPairs:
        """Return the answers."""
        return FittedAnswers(toy_answers(self.vocabulary), length, "error")


def build_pairs(layout: Layout, words: Sequence[str]) -> Run:
    """Build a run on the toy's pairs, with the reference model's log-probabilities."""
    base = [word for word in TOY if word != "--mock-data"]
    given = [*base, *PAIRS, "--no-exit-signal-handler", "--data-path", str(FILE), *words]
    parsed = parse_config(given, world_size=layout.world.size, architecture="gpt")
    preferences = parsed.config.preferences
    recipe: PreferenceRecipe = ToyPreferences()
    if preferences.trains_reward_model:
        recipe = ToyRewards()
    elif preferences.trains_on_labels:
        recipe = ToyAnswers()
    layout = as_given(layout, parsed.config)
    run = build_run(parsed.config, recipe, toy_device(layout.world.rank), layout)
    ReferenceLogProbs().begin(run)
    return run


def train_pairs(layout: Layout, words: Sequence[str]) -> dict[str, list[float]]:
    """Train on the toy's pairs to the end, and return what was logged."""
    run, recorder = build_pairs(layout, words), Recorder()
    callbacks, _ = standard_callbacks(run, [recorder])
    train(run, callbacks)
    names = (*run.recipe.loss_names(run.config), "grad-norm")
    return {name: recorder.values(name) for name in names}
