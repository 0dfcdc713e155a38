"""The model's answers to a few prompts during training (--sample-prompts)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron.command import print_line
from megatron.inference.request import Sampling
from megatron.inference.samples import read_prompts
from megatron.training.callbacks.base import Callback, EarlyExit
from megatron.training.callbacks.scalars import Scalars
from megatron.training.generation import AnswerGenerator

if TYPE_CHECKING:
    from megatron.training.run import Run
    from megatron.training.step import StepOutcome


class SampleAnswers(Callback):
    """A callback that answers the prompts of a file greedily, with the current weights.

    It does so every --sample-interval iterations, by default --eval-interval. With --sft and a chat
    template, a prompt is a user's turn, and the end-of-turn token also ends an answer.
    """

    def __init__(self, run: Run, scalars: Scalars) -> None:
        """Read the prompts. Collective.

        Raises:
            ConfigError: The chat template cannot be used.
            DataError: The file cannot be read.
        """
        options, self._scalars = run.config.finetuning, scalars
        assert options.sample_prompts is not None
        self._texts = read_prompts(Path(options.sample_prompts), flag="--sample-prompts")
        self._interval = options.sample_interval or run.config.evaluation.eval_interval
        self._generator = AnswerGenerator(run, replica=run.layout.world)
        sampling = Sampling(
            max_new_tokens=options.sample_tokens,
            temperature=0.0,
            stop_tokens=self._generator.ends,
        )
        self._requests = [
            (str(index), self._generator.encode(text), sampling)
            for index, text in enumerate(self._texts)
        ]

    def interrupts(self, run: Run) -> bool:
        """Return whether answers follow the next update."""
        return (run.progress.iteration + 1) % self._interval == 0

    def after_step(self, run: Run, outcome: StepOutcome, early_exit: EarlyExit | None) -> None:
        """Answer the prompts if answers are due, unless the run ends immediately."""
        if run.progress.iteration % self._interval or (
            early_exit is not None and early_exit.is_immediate
        ):
            return
        answers = self._generator.answer(self._requests)
        for text, result in zip(self._texts, answers, strict=True):
            tokens = [token for token in result.tokens if token not in self._generator.ends]
            answer = result.problem or run.tokenizer.detokenize(tokens)
            if run.is_log_rank:
                print_line(
                    f" sample at iteration {run.progress.iteration} | {text!r} -> {answer!r}"
                )
            self._scalars.event(run, "sample", f"{text} -> {answer}")
