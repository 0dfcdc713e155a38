"""The model's answers during training, from the inference engine with the current weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

from megatron.inference.build import (
    EngineOptions,
    build_engine,
    replica_ranks,
    stage_channel,
)
from megatron.inference.load import Loaded
from megatron.inference.request import Finished, Request, RequestError, Sampling, Token
from megatron.models.gpt import GPTModel
from megatron.parallel.layout import Axis
from megatron.tokenizer.chat_template import (
    TRAINING_DATE,
    ChatTemplate,
    find_template,
    special_tokens,
)
from megatron.tokenizer.turn_end import find_turn_end

if TYPE_CHECKING:
    from megatron.training.run import Run

_BLOCK = 16  # tokens in a block of the cache


class GeneratedAnswer(NamedTuple):
    """The model's answer to a prompt.

    Attributes:
        tokens: The token ids of the answer, including the token that ended it, if any.
        log_probs: The log-probability of each token, if the sampling settings ask for them.
        problem: Why there is no answer, or why it is incomplete; otherwise an empty string.
    """

    tokens: list[int]
    log_probs: list[float]
    problem: str = ""


class AnswerGenerator:
    """A generator of answers from a run's own model.

    The constructor is collective over all ranks, and `answer` over `replica`.

    Args:
        run: The run.
        replica: The processes that answer the same prompts together. If this is the world, experts
            may be divided over data-parallel ranks. `None` means one replica of the model, so that
            each data-parallel rank may answer different prompts.
        max_concurrent: The maximum number of answers to generate at a time. Further prompts wait,
            because each answer needs memory for its keys and values.

    Attributes:
        ends: The tokens that should end an answer: the end-of-document token and, with --sft and a
            chat template, its end-of-turn token, if the tokenizer has them. `answer` stops only at
            the stop tokens in the sampling settings.
    """

    def __init__(self, run: Run, *, replica: Axis | None = None, max_concurrent: int = 256) -> None:
        """Find the chat template and the tokens that end an answer. Collective.

        Raises:
            ConfigError: The chat template cannot be used.
        """
        self._run, self._max_concurrent = run, max_concurrent
        self._replica = replica or replica_ranks(run.layout)
        *earlier, part = cast(Sequence[GPTModel], run.parts)  # a rule refuses other networks
        self._model = Loaded(part, run.tokenizer, run.config, 0, run.layout, earlier_parts=earlier)
        self._channel = stage_channel(self._model, run.device)
        self._template: ChatTemplate | None = None
        ends, config = set(run.tokenizer.special_ids("eod", "eos")), run.config.tokenizer
        source = None
        if run.config.finetuning.sft:
            source = find_template(config.chat_template, config.tokenizer_model)
        if source is not None:
            special = special_tokens(config.tokenizer_model)
            self._template = ChatTemplate(source, special, TRAINING_DATE)
            turn_end = find_turn_end(source, special, run.tokenizer)
            ends |= set() if turn_end is None else {turn_end}
        self.ends = tuple(sorted(ends))

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a prompt, which is a user's turn with --sft and a chat template."""
        if self._template is not None:
            text = self._template.render([{"role": "user", "content": text}])
        return tuple(self._run.tokenizer.tokenize_with_special(text))

    def answer(
        self, requests: Sequence[tuple[str, tuple[int, ...], Sampling]]
    ) -> list[GeneratedAnswer]:
        """Answer prompts with the current weights.

        Args:
            requests: For each answer, a unique name, the tokens of the prompt and the sampling
                settings. If the settings have no seed, random draws depend on --seed and the name.

        Returns:
            The answers in the same order. An answer is shorter than requested if it reaches the
            model's last position.
        """
        run, positions = self._run, self._model.model.plan.positions
        run.optimizer.wait_for_weights()
        trains = run.parts[0].training
        for part in run.parts:
            part.eval()
        max_sequences = max(1, min(len(requests), self._max_concurrent))
        cache_tokens = [
            -(-min(len(prompt) + sampling.max_new_tokens, positions) // _BLOCK) * _BLOCK
            for _, prompt, sampling in requests
        ]
        options = EngineOptions(
            max_sequences=max_sequences,
            cache_tokens=sum(sorted(cache_tokens)[-max_sequences:]) + _BLOCK,
            block_size=_BLOCK,
            seed=run.config.training.seed,
            graphs=False,
        )
        engine = build_engine(
            self._model, run.device, options, replica=self._replica, channel=self._channel
        )
        answers = {name: GeneratedAnswer([], []) for name, _, _ in requests}
        for name, prompt, sampling in requests:
            max_new_tokens = max(1, engine.limits.max_length - len(prompt))
            limited = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, max_new_tokens))
            try:
                engine.add(Request(name, prompt, limited))
            except RequestError as error:
                answers[name] = GeneratedAnswer([], [], str(error))
        while engine.has_work:
            for event in engine.step():
                answer_ = answers[event.request]
                if isinstance(event, Token):
                    answer_.tokens.append(event.token)
                    if event.logprob is not None:
                        answer_.log_probs.append(event.logprob)
                elif isinstance(event, Finished) and event.message:
                    answers[event.request] = answer_._replace(problem=event.message)
        for part in run.parts:
            part.train(trains)
        return list(answers.values())
