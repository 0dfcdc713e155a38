"""An implementation of the harness's model interface, which scores and generates text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron.inference.load import Loaded
from megatron.tasks.harness import Workers
from megatron.tasks.language_model import last_window


class HarnessModel(TemplateLM):
    """A model on rank 0 whose computations run on all ranks through `workers`."""

    def __init__(self, loaded: Loaded, workers: Workers) -> None:
        """Store the tokenizer and the workers."""
        super().__init__()
        self._tokenizer = loaded.tokenizer
        self._workers = workers
        self._window = loaded.config.data.seq_length
        # Some tokenizers begin every text with a special token.
        self._start = self._tokenizer.tokenize_unterminated("")

    @property
    def eot_token_id(self) -> int:
        """The id of the token that ends a document."""
        return self._tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """The id of the token that precedes a text without context."""
        return self._start[0] if self._start else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's fingerprint, for the harness's caches."""
        return self._tokenizer.fingerprint()

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the token ids of a text; `add_special_tokens=False` omits the start token."""
        ids = self._tokenizer.tokenize_unterminated(string)
        return ids[len(self._start) :] if add_special_tokens is False else ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        samples = []
        for _text, context, continuation in requests:
            sample = last_window(context or [self.prefix_token_id], continuation, self._window)
            samples.append([list(sample.tokens), sample.scored])
        return [(value, greedy) for value, greedy in self._workers.call("score", samples)]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return each whole text's log-probability, using as much context as fits in a window."""
        samples, owners = [], []
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self._window, 1)
            for context, targets in map(make_disjoint_window, windows):
                samples.append([[*context, *targets], len(targets)])
                owners.append(index)
        totals = [0.0] * len(requests)
        for index, (value, _) in zip(owners, self._workers.call("score", samples), strict=True):
            totals[index] += value
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, up to one of the stop sequences."""
        prompts = []
        for context, gen_kwargs in (request.args for request in requests):
            settings = normalize_gen_kwargs(gen_kwargs)
            prompts.append(
                {
                    "prompt": self.tok_encode(context) or [self.prefix_token_id],
                    "max_new_tokens": settings["max_gen_toks"],
                    "until": list(settings["until"]),
                    "temperature": float(settings.get("temperature") or 0.0),
                    "top_k": int(settings.get("top_k") or 0),
                    "top_p": float(settings.get("top_p") or 0.0),
                }
            )
        texts = self._workers.call("generate", prompts)
        return [str(text) for text in texts]
