"""Answers of the model in training to a few prompts (--sample-prompts)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron.command import say
from megatron.inference.build import EngineOptions, build_engine, ranks_of_copy
from megatron.inference.load import Loaded
from megatron.inference.request import Request, RequestError, Sampling, Token
from megatron.inference.samples import read_prompts
from megatron.models.gpt import GPTModel
from megatron.tokenizer.chat_template import (
    TRAINING_DATE,
    ChatTemplate,
    find_template,
    special_tokens,
)
from megatron.tokenizer.turn_end import find_turn_end
from megatron.training.callbacks.base import Callback, Leave
from megatron.training.callbacks.scalars import Scalars

if TYPE_CHECKING:
    from megatron.training.run import Run
    from megatron.training.step import StepOutcome

_BLOCK = 16  # tokens in a block of the cache


class SampleAnswers(Callback):
    """A callback that answers the prompts of a file greedily, with the weights of the moment.

    With --sft a prompt is a user's turn, and the answer ends with the token that ends turns.
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
        self._most = options.sample_tokens
        self._copy = ranks_of_copy(run.layout)
        self._ends = set(run.tokenizer.special_ids("eod", "eos"))
        prompts = self._texts
        source = None
        if options.sft:
            config = run.config.tokenizer
            source = find_template(config.chat_template, config.tokenizer_model)
        if source is not None:
            special = special_tokens(run.config.tokenizer.tokenizer_model)
            template = ChatTemplate(source, special, TRAINING_DATE)
            prompts = [template.render([{"role": "user", "content": one}]) for one in prompts]
            end = find_turn_end(source, special, run.tokenizer)
            self._ends |= set() if end is None else {end}
        self._prompts = [tuple(run.tokenizer.tokenize_spelled(one)) for one in prompts]

    def interrupts(self, run: Run) -> bool:
        """Return whether answers follow the coming update."""
        return (run.progress.iteration + 1) % self._interval == 0

    def after_step(self, run: Run, outcome: StepOutcome, leave: Leave | None) -> None:
        """Answer if it is due, unless the run ends at once."""
        if run.progress.iteration % self._interval or (leave is not None and leave.at_once):
            return
        for text, answer in zip(self._texts, self._answers(run), strict=True):
            if run.is_log_rank:
                say(f" sample at iteration {run.progress.iteration} | {text!r} -> {answer!r}")
            self._scalars.event(run, "sample", f"{text} -> {answer}")

    def _answers(self, run: Run) -> list[str]:
        (part,) = run.parts
        assert isinstance(part, GPTModel), "a rule refuses other networks"
        model = Loaded(part, run.tokenizer, run.config, run.progress.iteration, run.layout)
        room = sum(-(-(len(one) + self._most) // _BLOCK) * _BLOCK for one in self._prompts)
        sizes = EngineOptions(
            max_sequences=max(1, len(self._prompts)),
            cache_tokens=room + _BLOCK,
            block_size=_BLOCK,
            graphs=False,
        )
        engine = build_engine(model, run.device, sizes, copy=self._copy)
        answers: list[list[int]] = [[] for _ in self._prompts]
        errors: dict[int, str] = {}
        for number, prompt in enumerate(self._prompts):
            most = min(self._most, engine.limits.max_length - len(prompt))
            sampling = Sampling(
                max_new_tokens=max(1, most), temperature=0.0, stop_tokens=tuple(self._ends)
            )
            try:
                engine.add(Request(str(number), prompt, sampling))
            except RequestError as error:
                errors[number] = str(error)
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, Token) and event.token not in self._ends:
                    answers[int(event.request)].append(event.token)
        texts = [run.tokenizer.detokenize(tokens) for tokens in answers]
        return [errors.get(number, text) for number, text in enumerate(texts)]
