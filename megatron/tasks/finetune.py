"""Finetuning of a pretrained BERT on labeled texts: recipe, evaluation and best weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.checkpoint.compatibility import check_network
from megatron.checkpoint.exchange import JsonExchange
from megatron.checkpoint.reader import PaddedReader
from megatron.command import print_line
from megatron.config import RunConfig
from megatron.config.stages import ModelPart
from megatron.config.tasks import TaskConfig
from megatron.data.datasets import Datasets
from megatron.inference.load import open_existing
from megatron.models.bert import BertTaskModel
from megatron.models.build import build_model
from megatron.models.plan import HeadSpec
from megatron.parallel.build import BuildContext
from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Layout
from megatron.tasks.classify import Epochs, Example, Padded, Repeated, TextSamples
from megatron.tasks.results import (
    Metrics,
    TaskProgress,
    by_json_key,
    format_number,
    read_results,
    report_results,
    results_path,
    write_results,
)
from megatron.tasks.table import PROGRAM
from megatron.tasks.target import Predictions, Target
from megatron.tokenizer import Tokenizer
from megatron.training.batches import batches_from
from megatron.training.callbacks.base import Callback, EarlyExit
from megatron.training.checkpointing import save_weights
from megatron.training.forward import DirectForward
from megatron.training.passes import Passes
from megatron.training.pretrain import Extras
from megatron.training.recipe import PADDED_ATTENTION, Batch, Recipe, SampleCounts
from megatron.training.restoring import load_shared_weights
from megatron.training.run import Run
from megatron.training.step import StepOutcome


class FinetuneRecipe(Recipe):
    """A recipe that trains a classifier with cross entropy, or a regressor with squared error.

    Args:
        target: The class or value to predict.
        train: The examples to train on. Empty for an evaluation.
        valid: The examples whose loss is computed during training, with --eval-iters.
        samples_per_epoch: The number of examples to use in each epoch. `None` uses all, and
            completes an epoch's last batch with examples from the next epoch.
    """

    program = PROGRAM
    architecture = "bert"
    network = BertTaskModel
    attention = PADDED_ATTENTION

    def __init__(
        self,
        target: Target,
        train: Sequence[Example],
        valid: Sequence[Example],
        samples_per_epoch: int | None,
    ) -> None:
        """Store the arguments."""
        self.target = target
        self._train = train
        self._valid = valid
        self._samples_per_epoch = samples_per_epoch

    @property
    def head(self) -> HeadSpec:
        """The spec of the target's head."""
        return self.target.head

    def build_part(
        self,
        config: RunConfig,
        context: BuildContext,
        padded_vocab_size: int,
        part: ModelPart,
    ) -> BertTaskModel:
        """Build the given part of a BERT with the target's head."""
        network = partial(BertTaskModel, head_name=self.target.head_name)
        return build_model(network, config, context, padded_vocab_size, part, self.head)

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, layout: Layout
    ) -> Datasets:
        """Return the training samples of all epochs, the validation samples and no test samples."""
        length = config.data.seq_length
        train = valid = None
        if self._train:
            train = Epochs(
                TextSamples(self._train, tokenizer, length),
                seed=config.training.seed,
                length=samples[0],
                samples_per_epoch=self._samples_per_epoch,
            )
        if self._valid:
            assert samples[1] is not None, "--full-validation is only for GPT"
            valid = Repeated(TextSamples(self._valid, tokenizer, length), samples[1])
        return Datasets(train, valid, None)

    def loss_mask(self, batch: Batch, config: RunConfig, tokenizer: Tokenizer) -> Tensor:
        """Return ones, `[b]`, because every sample counts."""
        return torch.ones_like(batch["label"])

    def forward(
        self,
        part: BertTaskModel,
        batch: Batch,
        hidden: Tensor | None,
        config: RunConfig,
        tokenizer: Tokenizer,
        layout: Layout,
    ) -> Tensor | Mapping[str, Tensor]:
        """Run a micro-batch through a model part. The last part returns the loss."""
        result = self._scores(part, batch, hidden)
        if not part.part.head:
            return result
        label = batch["label"]
        if self.target.span is not None:
            return {"lm loss": F.mse_loss(result[:, 0], label.float())}
        return {"lm loss": F.cross_entropy(result, label)}

    def predict(
        self,
        part: BertTaskModel,
        batch: Batch,
        hidden: Tensor | None,
        config: RunConfig,
        tokenizer: Tokenizer,
        layout: Layout,
    ) -> Tensor | Mapping[str, Tensor]:
        """Run a micro-batch through a model part. The last part returns predictions, `[b]`."""
        result = self._scores(part, batch, hidden)
        if not part.part.head:
            return result
        is_number = self.target.span is not None
        return {"prediction": result[:, 0] if is_number else result.argmax(dim=-1).float()}

    def _scores(self, part: BertTaskModel, batch: Batch, hidden: Tensor | None) -> Tensor:
        return part.score(batch["text"], batch["padding_mask"].bool(), batch["types"], hidden)


BEST = "best"  # the subfolder of --save that contains the best weights
_RECORD = "evaluation.json"  # the file in this subfolder with the iteration and its score
_OPTIONAL_PARTS = ("pooler", "embedding.token_type")  # modules that a pretrained model may lack
_PASSES = 16  # micro-batches between two updates of the progress


@dataclass(frozen=True)
class TaskEvaluation:
    """The predictions of one evaluation.

    Attributes:
        iteration: The iteration of the evaluated weights.
        by_file: The predictions by validation file.
    """

    iteration: int
    by_file: Mapping[str, Predictions]

    @property
    def all_files(self) -> Predictions:
        """The predictions for all files, concatenated."""
        return Predictions.joined(self.by_file.values())


class Finetuning(Extras):
    """The steps that finetuning adds to a run: load pretrained weights, evaluate, keep the best.

    Args:
        recipe: The recipe to train.
        pretrained: The folder of the pretrained checkpoint, or `None` for random weights.
        valid: The examples to evaluate on, by file.
        epoch_ends: The updates, counted from 1, that end an epoch. Empty without training.
        options: The flags that determine where the results are written.

    Attributes:
        last: The last evaluation, or `None` before the first.
    """

    def __init__(
        self,
        recipe: FinetuneRecipe,
        *,
        pretrained: str | None,
        valid: Mapping[str, Sequence[Example]],
        epoch_ends: Set[int],
        options: TaskConfig,
    ) -> None:
        """Store the arguments. Nothing has been evaluated yet."""
        self._recipe = recipe
        self._pretrained = pretrained
        self._valid = valid
        self._epoch_ends = epoch_ends
        self._options = options
        self._start = 0  # the iteration of the pretrained weights, if they are only evaluated
        self._resumed = 0  # the iteration from which the run resumed; 0 for a new run
        self._best: float | None = None  # the score of the best weights, once it is known
        self.last: TaskEvaluation | None = None

    def begin(self, run: Run) -> None:
        """Load the pretrained weights, unless a finetuning run is resumed.

        Without --save-interval, the run saves after each epoch.
        """
        self._resumed = run.progress.iteration
        if run.config.checkpoint.save_interval is None:
            run.save_at = self._epoch_ends
        if self._pretrained is not None and run.progress.iteration == 0:
            fresh = [self._recipe.target.head_name] if self._epoch_ends else []
            iteration = _load_pretrained(run, self._pretrained, fresh)
            self._start = 0 if self._epoch_ends else iteration

    def callbacks(self, run: Run) -> list[Callback]:
        """Return the callback that evaluates after each epoch, if there is validation data."""
        if not self._valid:
            return []
        return [EpochEvaluation(self._epoch_ends, self.evaluate, catches_up=True)]

    def end(self, run: Run) -> None:
        """Write the final results, after evaluating the final weights if necessary. Collective.

        Without validation data, nothing is done. Without --results and --save, nothing is written.
        """
        if not self._valid:
            return
        if self.last is None or self.last.iteration != self._iteration(run):
            self.evaluate(run)
        assert self.last is not None
        if run.layout.world.rank == 0:
            self._write(run, self.last)

    def evaluate(self, run: Run) -> None:
        """Evaluate on all files and print the results. Collective.

        In training with --save, also save the weights if they are the best so far.
        """
        predictions = {
            name: collect_predictions(run, self._recipe, data) for name, data in self._data(run)
        }
        self.last = TaskEvaluation(self._iteration(run), predictions)
        if run.layout.world.rank == 0:
            print_line(self._table(run, self.last))
        self._save_if_best(run, self.last)

    def _iteration(self, run: Run) -> int:
        """Return the iteration that produced the weights."""
        return run.progress.iteration or self._start

    def _data(self, run: Run) -> list[tuple[str, TextSamples]]:
        length = run.config.data.seq_length
        return [
            (name, TextSamples(examples, run.tokenizer, length))
            for name, examples in self._valid.items()
        ]

    def _table(self, run: Run, evaluation: TaskEvaluation) -> str:
        target = self._recipe.target
        parts = [f"{target.task} at iteration {evaluation.iteration}"]
        for name, predictions in evaluation.by_file.items():
            parts.append(
                f"{name}: {_in_line(target.metrics(predictions))}\n{target.table(predictions)}"
            )
        if len(evaluation.by_file) > 1:
            parts.append(f"all files: {_in_line(target.metrics(evaluation.all_files))}")
        return "\n".join(parts)

    def _save_if_best(self, run: Run, evaluation: TaskEvaluation) -> None:
        """Save the weights in `best` if this evaluation has the best score so far. Collective."""
        if run.config.checkpoint.save is None or not self._epoch_ends:
            return
        root = Path(run.config.checkpoint.save) / BEST
        target = self._recipe.target
        score = target.score(target.metrics(evaluation.all_files))
        if self._best is None:
            self._best = JsonExchange(run.layout.world).on_main(
                lambda: _best_score(root, target.scores, self._resumed)
            )
        if not score > self._best:  # NaN is never better
            return
        self._best = score
        save_weights(run, root)
        if run.layout.world.rank == 0:
            record = {"iteration": evaluation.iteration, "score": score, "of": target.scores}
            write_results(root / _RECORD, record)
            print_line(f"  best so far ({target.score_name} {score:.6g}): saved in {root}")

    def _write(self, run: Run, evaluation: TaskEvaluation) -> None:
        results_file, save = self._options.results, run.config.checkpoint.save
        if results_file is None and save is None:
            return
        target = self._recipe.target
        path = results_path(results_file, save or "", target.task, evaluation.iteration)
        overall = target.metrics(evaluation.all_files)
        content: dict[str, Any] = {
            "task": target.task,
            "iteration": evaluation.iteration,
            "score": target.score(overall),
            "score_of": target.scores,
            "results": by_json_key(overall),
            "files": {
                name: {
                    "results": by_json_key(target.metrics(predictions)),
                    **target.details(predictions),
                }
                for name, predictions in evaluation.by_file.items()
            },
            "pretrained_checkpoint": self._pretrained,
            "layout": run.layout.describe(),
        }
        if save is not None and (best := read_results(Path(save) / BEST / _RECORD)):
            content["best"] = best
        if save is not None:  # a later run that continues this one may replace the file
            content["save"] = str(Path(save).resolve())
        report_results(path, content)


class EpochEvaluation(Callback):
    """A callback that evaluates after each epoch.

    Args:
        ends: The updates, counted from 1, that end an epoch.
        evaluate: A collective function that evaluates the run.
        catches_up: Whether to evaluate when a run resumes at the end of an epoch, because it may
            have stopped between its checkpoint and the evaluation.
    """

    def __init__(
        self, ends: Set[int], evaluate: Callable[[Run], object], *, catches_up: bool = False
    ) -> None:
        """Store the arguments."""
        self._ends, self._evaluate, self._catches_up = ends, evaluate, catches_up

    def on_start(self, run: Run) -> None:
        """Evaluate an epoch that ended before the run resumed, unless nothing is left to train."""
        if self._catches_up and run.progress.iteration in self._ends and not run.finished:
            self._evaluate(run)

    def interrupts(self, run: Run) -> bool:
        """Return whether the next update ends an epoch."""
        return run.progress.iteration + 1 in self._ends

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Evaluate at the end of an epoch, unless the run must end immediately."""
        at_end = run.progress.iteration in self._ends
        if at_end and not (early_exit is not None and early_exit.is_immediate):
            self._evaluate(run)


def collect_predictions(run: Run, recipe: FinetuneRecipe, dataset: TextSamples) -> Predictions:
    """Return the model's prediction for every sample. Collective."""
    run.optimizer.wait_for_weights()
    samples_per_pass = run.batches.samples_per_pass
    passes_needed = -(-len(dataset) // samples_per_pass)
    padded = Padded(dataset, passes_needed * samples_per_pass)
    batches = batches_from(run, padded, consumed=0)
    predictions = torch.zeros(len(padded), device=run.device.torch_device)
    visits = torch.zeros_like(predictions)
    progress = TaskProgress(
        enabled=run.layout.world.rank == 0, log_interval=run.config.logging.log_interval
    )
    for part in run.parts:
        part.eval()
    for first in range(0, passes_needed, _PASSES):
        count = min(_PASSES, passes_needed - first)
        passes = Passes(run, batches, count, forward=DirectForward(recipe.predict))
        passes.forward()
        if passes.losses and run.layout.tensor.is_first:
            ids = [i for micro_batch in passes.sample_ids for i in micro_batch]
            predictions[ids] = torch.cat(passes.losses["prediction"])
            visits[ids] += 1
        progress(first + count, passes_needed)
    predictions, visits = (all_reduce(values, run.layout.world) for values in (predictions, visits))
    assert bool((visits == 1).all()), "a sample was not evaluated exactly once"
    labels = tuple(example.label for example in dataset.examples)
    return Predictions(labels, tuple(predictions[: len(dataset)].tolist()))


def _load_pretrained(run: Run, folder: str, new_layers: Sequence[str]) -> int:
    """Load the weights in --pretrained-checkpoint, except those of `new_layers`.

    Returns:
        The iteration of the checkpoint.

    Raises:
        CheckpointError: The network of the checkpoint differs from that of the run.
    """
    flag = "--pretrained-checkpoint"
    allow_foreign = run.config.checkpoint.allow_foreign_checkpoints
    reader = open_existing(folder, flag=flag, layout=run.layout, allow_foreign=allow_foreign)
    # A classifier needs a pooler, which a model without a binary head lacks. This difference is
    # allowed here, because the pooler is then initialized from scratch.
    saved = reader.meta["config"].get("model", {})
    model = replace(run.config.model, bert_binary_head=saved.get("bert_binary_head", True))
    check_network(replace(run.config, model=model), reader, flag)
    names = reader.names()
    new_weights = list(new_layers)
    for name in _OPTIONAL_PARTS if new_layers else ():
        if not any(saved_name.startswith(f"model.{name}") for saved_name in names):
            new_weights.append(name)
    entries = run.tokenizer.text_vocab_size  # Google's BERT has no rows for appended entries
    padded = PaddedReader(reader, rows=run.plan.embedding.vocabulary, entries=entries)
    load_shared_weights(run, padded, new=new_weights)
    run.pretrained = str(reader.path) + (
        f" (new weights: {', '.join(new_weights)})" if new_weights else ""
    )
    return reader.iteration


def _best_score(root: Path, scores: Sequence[str], resumed: int) -> float:
    """Return the score of the weights in `root`, or -2 (below any score) if there are none.

    Weights from an iteration after `resumed` do not count: another run left them, or this run has
    resumed from an earlier checkpoint.

    Args:
        root: The folder of the best weights.
        scores: The names of the metrics that make up the score.
        resumed: The iteration from which the run resumed, or 0 if it is a new run.
    """
    record = read_results(root / _RECORD)
    score, iteration = record.get("score"), record.get("iteration")
    is_own = isinstance(iteration, int) and iteration <= resumed and record.get("of") == [*scores]
    if is_own and isinstance(score, float) and math.isfinite(score):
        return score
    return -2.0


def _in_line(metrics: Metrics) -> str:
    return ", ".join(f"{key} {format_number(value)}" for key, value in metrics.items())
