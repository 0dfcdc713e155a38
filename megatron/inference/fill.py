"""Fill in the `[MASK]`s of a text with a trained BERT or T5 model.

BERT fills each `[MASK]` with a single token, and T5 with one or more tokens, at most 20.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.entries import model_state
from megatron.checkpoint.reader import restore
from megatron.config.run import ModelRun
from megatron.device import Device
from megatron.errors import ConfigError, UserError
from megatron.inference.load import open_existing, saved_config
from megatron.models.bert import BertModel, BertResult
from megatron.models.build import build_model, run_context
from megatron.models.t5 import T5Model
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer, build_tokenizer

MARK = "[MASK]"
_MAX_SPAN_TOKENS = 20  # maximum number of tokens with which T5 fills one `[MASK]`
# Hugging Face's T5 models were trained with these lengths, although their positions have no limit.
_ENCODER_LENGTH, _DECODER_LENGTH = 512, 128


class FilledText(NamedTuple):
    """Text for one `[MASK]`, and its probability under the model.

    T5's probability is the product over the tokens, each among those that the format allows.
    """

    text: str
    probability: float


@dataclass(frozen=True)
class Filler:
    """A trained model that fills in masked words, with its tokenizer and configuration."""

    model: BertModel | T5Model
    tokenizer: Tokenizer
    config: ModelRun

    def fill(self, text: str, *, top: int = 1) -> list[list[FilledText]]:
        """Return the best predictions for each `[MASK]` of a text, the most likely first.

        Args:
            text: Text that contains `[MASK]`.
            top: Number of predictions for each `[MASK]`. T5 makes only one, by greedy decoding.

        Raises:
            UserError: The text has no `[MASK]` or too many, or exceeds the model's context window;
                or the vocabulary has fewer than `top` entries.
        """
        model, tokenizer = self.model, self.tokenizer
        first, *following = [tokenizer.tokenize_with_special(part) for part in text.split(MARK)]
        if not following:
            raise UserError(
                f"--text {text!r} has nothing to fill in: write {MARK} in place of words"
            )
        limit = self.config.data.decoder_seq_length or _DECODER_LENGTH
        if isinstance(model, BertModel):
            marks, begin, end = [tokenizer.mask] * len(following), [tokenizer.cls], [tokenizer.sep]
        else:
            marks, begin, end = tokenizer.additional_special_tokens_ids, [], tokenizer.encoder_end
            # Each `[MASK]` takes a sentinel and at least one token, after the first token.
            max_marks = min(len(marks), (limit - 1) // 2)
            if len(following) > max_marks:
                raise UserError(
                    f"--text {text!r} has {len(following)} {MARK}, but this T5 model fills in at "
                    f"most {max_marks}: use fewer"
                )
        marked = [[mark, *part] for mark, part in zip(marks, following, strict=False)]
        ids = [*begin, *first, *chain.from_iterable(marked), *end]
        window = self.config.data.seq_length or _ENCODER_LENGTH
        if len(ids) > window:
            raise UserError(
                f"--text has {len(ids)} tokens, but the model reads at most {window}: shorten it"
            )
        if isinstance(model, BertModel):
            if top > tokenizer.vocab_size:
                raise ConfigError(
                    f"--top {top}: the vocabulary has {tokenizer.vocab_size} entries: give at most "
                    "that many"
                )
            return self._predict_tokens(model, ids, top)
        return self._predict_spans(model, ids, marks[: len(following)], limit)

    @torch.no_grad()
    def _predict_tokens(
        self, model: BertModel, ids: Sequence[int], top: int
    ) -> list[list[FilledText]]:
        """Return the `top` most likely tokens in place of each mask token of a text."""
        tokenizer, text_of = self.tokenizer, self.tokenizer.detokenize
        tokens = _to_batch(ids, model)
        result = model(tokens, torch.ones_like(tokens, dtype=torch.bool))
        assert isinstance(result, BertResult)
        mask_positions = [position for position, token in enumerate(ids) if token == tokenizer.mask]
        logits = result.tokens[0, mask_positions, : tokenizer.vocab_size]  # without padding entries
        best = logits.float().softmax(dim=-1).topk(top)
        return [
            [
                FilledText(text_of([token]), probability)
                for token, probability in zip(*pair, strict=True)
            ]
            for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    @torch.no_grad()
    def _predict_spans(
        self, model: T5Model, ids: Sequence[int], sentinels: Sequence[int], limit: int
    ) -> list[list[FilledText]]:
        """Return the words for each sentinel of a text, by greedy decoding.

        The decoder is restricted to the format on which it was trained: the sentinels in order,
        each followed by its words, and then the end token.

        Args:
            model: The T5 model.
            ids: Token ids of the text.
            sentinels: The sentinels in the text, in order.
            limit: Maximum length of the decoder's sequence in tokens: at least two for each
                sentinel, and one more.
        """
        tokenizer, encoder = self.tokenizer, _to_batch(ids, model)
        is_token = torch.ones_like(encoder, dtype=torch.bool)
        decoder = [tokenizer.decoder_start]
        longest = min(_MAX_SPAN_TOKENS, (limit - 1) // len(sentinels) - 1)
        special = tokenizer.special_ids("pad", "cls", "sep", "mask", "bos")
        ends = {*tokenizer.additional_special_tokens_ids, tokenizer.eos}
        spans: list[list[FilledText]] = []
        for sentinel, next_sentinel in zip(sentinels, [*sentinels[1:], tokenizer.eos], strict=True):
            decoder.append(sentinel)
            start, probability = len(decoder), 1.0
            while len(decoder) - start < longest:
                logits = model(encoder, _to_batch(decoder, model), is_token)
                scores = logits[0, -1, : tokenizer.vocab_size].float()
                # A span is never empty. Only the next sentinel or the end of the text ends a span.
                allowed = {next_sentinel} if len(decoder) > start else set()
                scores[[*special, *(ends - allowed)]] = -torch.inf
                token_probability, token = scores.softmax(dim=-1).max(dim=-1)
                probability *= float(token_probability)
                if int(token) == next_sentinel:
                    break
                decoder.append(int(token))
            spans.append([FilledText(tokenizer.detokenize(decoder[start:]), probability)])
        return spans


def load_filler(folder: str, device: Device, *, allow_foreign: bool = False) -> Filler:
    """Load the BERT or T5 model of a folder's newest complete checkpoint, in a single process.

    Args:
        folder: Folder of checkpoints.
        device: Device to run on.
        allow_foreign: Whether to accept files owned by other users (--allow-foreign-checkpoints).

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or it contains a different kind of
            model.
        ConfigError: The checkpoint does not name a tokenizer, or its settings are invalid.
        DataError: One of the tokenizer's files is missing or damaged.
    """
    reader = open_existing(folder, allow_foreign=allow_foreign)
    config = saved_config(reader, folder, "bert", "t5")
    classes: dict[str, Callable[..., BertModel | T5Model]] = {"bert": BertModel, "t5": T5Model}
    model_class = classes[config.model.architecture]
    rows = reader.meta["padded_vocab_size"]
    model = build_model(model_class, config, run_context(config, Layout.single(), device), rows)
    restore(reader, model_state([model]), prefixes=("model.",), cast=True)
    return Filler(model.eval(), build_tokenizer(config.tokenizer), config)


def _to_batch(ids: Sequence[int], model: torch.nn.Module) -> Tensor:
    """Return the token ids as a tensor `[1, s]` on the model's device."""
    return torch.tensor([list(ids)], device=next(model.parameters()).device)
