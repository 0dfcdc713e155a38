"""Embeddings of texts: one vector per text, the mean of an encoder's last hidden states.

An encoder is either a BERT from any checkpoint that this package can read, or a model of Hugging
Face transformers. Texts are processed in pieces of many batches. Texts in a piece are sorted by
length, so batches contain little padding. While the device processes a piece, a thread tokenizes
the next one.

Megatron-LM 23.08 masks texts before embedding them, as in training, with a seed that depends on the
text's index in its block. `Masking` reproduces this. By default, texts are embedded unmasked.

In shapes, n is the number of texts, s the number of tokens in the longest text of a batch, and h
the hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.checkpoint.entries import model_state
from megatron.checkpoint.reader import PaddedReader, restore
from megatron.config.data import TokenizerConfig
from megatron.data.bert import BertDataset, BertOptions
from megatron.data.masking import SpecialIds
from megatron.device import Device
from megatron.errors import ConfigError
from megatron.extras import packages_of
from megatron.inference.load import open_existing, saved_config
from megatron.models.bert import BertModel
from megatron.models.build import run_context
from megatron.models.plans import model_plan
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer, build_tokenizer

END_OF_DOCUMENT = "<|endoftext|>"  # GPT-2's spelling, which Megatron-LM removes from texts
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BATCHES = 64  # batches of full-length texts in a piece, which is sorted by length
_ENDS = 2  # [CLS] and [SEP]

Vectors = NDArray[np.float32]


class Masking(NamedTuple):
    """The masking that Megatron-LM 23.08 applies to texts, as in BERT's training.

    Attributes:
        seed: The base of the random seeds. Text i of a block is masked with the seed `seed + i`.
        probability: The fraction of tokens to mask.
    """

    seed: int
    probability: float


@dataclass(frozen=True)
class EmbedderOptions:
    """The network that embeds texts, and its settings.

    Attributes:
        kind: "megatron" for a BERT of this package, or "huggingface" for a transformers model.
        load: The folder of the BERT's checkpoints, or the folder or name of a Hugging Face model.
        tokenizer: The BERT's tokenizer. `None` uses the checkpoint's. Ignored with "huggingface".
        batch_size: The maximum number of texts of `max_length` tokens in a batch. A batch may have
            more texts if they are shorter.
        max_length: The maximum number of tokens in a text, including [CLS] and [SEP]. Longer texts
            are truncated.
        dtype: The data type of the weights, a key of `DTYPES`. `None` uses the checkpoint's type,
            or fp32 with "huggingface".
        masking: The masking as in Megatron-LM. `None` embeds texts unmasked.
        allow_foreign: Whether to read files owned by other users.
        flag: The flag that names the network, for error messages.
        length_flag: The flag of `max_length`, for error messages.
    """

    kind: str
    load: str
    tokenizer: TokenizerConfig | None = None
    batch_size: int = 128
    max_length: int = 256
    dtype: str | None = None
    masking: Masking | None = None
    allow_foreign: bool = False
    flag: str = "--load"
    length_flag: str = "--retro-bert-max-chunk-length"


class DecodedChunks(Sequence[str]):
    """The texts of chunks of tokens, each decoded on access.

    Args:
        tokens: The chunks, `[n, m]`, padded with end-of-document tokens.
        tokenizer: The tokenizer that produced the tokens.
        keeps_ends: Whether to write end-of-document tokens into the text. `Embedder` removes
            GPT-2's end-of-document token, so this matters only for other tokenizers and for tokens
            that interrupt the bytes of a character.
    """

    def __init__(
        self, tokens: NDArray[np.int64], tokenizer: Tokenizer, *, keeps_ends: bool = False
    ) -> None:
        """Store the tokens and the tokenizer."""
        self._tokens, self._tokenizer = tokens, tokenizer
        self._skipped_id = None if keeps_ends else tokenizer.eod

    def __len__(self) -> int:
        """Return the number of chunks, n."""
        return len(self._tokens)

    def __getitem__(self, i: Any) -> Any:
        """Return the text of chunk `i`."""
        row = self._tokens[i]
        tokens = row if self._skipped_id is None else row[row != self._skipped_id]
        return self._tokenizer.detokenize(tokens.tolist())


class _Rows(NamedTuple):
    """The tokens of the texts in a piece, sorted by increasing length.

    Attributes:
        indices: The index of each text in the piece, `[n]`.
        rows: The tokens of each text, including special tokens.
    """

    indices: NDArray[np.int64]
    rows: list[NDArray[np.int64]]


class Embedder(ABC):
    """A network that turns texts into vectors.

    Attributes:
        width: The length of a vector, h.
        max_length: The maximum number of tokens in a text, including special tokens.
        iteration: The iteration of the network's checkpoint; `None` for a Hugging Face model.
    """

    width: int
    max_length: int
    iteration: int | None = None

    def __init__(self, device: Device, batch_size: int) -> None:
        """Store the device and the batch size.

        Args:
            device: The device on which to compute.
            batch_size: The maximum number of texts of `max_length` tokens in a batch.
        """
        self._device = device
        self._batch_size = batch_size
        # GPUs are fastest at lengths that are multiples of 8. The attention kernel has a setup cost
        # for every new batch shape, so there should be few shapes.
        self._units = (min(32, batch_size), 8) if device.is_gpu else (1, 1)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of texts, fp32 `[n, h]`.

        If `texts` creates each text on access, the memory used does not depend on the number of
        texts, apart from the result.

        Args:
            texts: The texts of a block. A text's index in the block determines the masking.
        """
        vectors = np.empty((len(texts), self.width), np.float32)
        pending: list[tuple[NDArray[np.int64], Tensor]] = []

        def collect() -> None:
            for indices, values in pending:
                vectors[indices] = values.cpu().numpy()
            pending.clear()

        for start, piece in self._pieces(texts):
            launched = [(start + indices, values) for indices, values in self._launch(piece)]
            collect()  # the previous piece, while the device processes this one
            pending.extend(launched)
        collect()
        return vectors

    def _pieces(self, texts: Sequence[str]) -> Iterator[tuple[int, _Rows]]:
        """Yield the start index and the tokens of each piece, tokenizing one piece ahead."""
        size = self._batch_size * _BATCHES

        def make(start: int) -> _Rows:
            piece = [texts[i] for i in range(start, min(start + size, len(texts)))]
            rows = self._tokenize(piece, start)
            order = np.argsort([len(row) for row in rows], kind="stable")
            return _Rows(order, [rows[i] for i in order])

        starts = range(0, len(texts), size)
        with ThreadPoolExecutor(1) as pool:
            pending = [pool.submit(make, start) for start in starts[:1]]
            for start in starts:
                piece = pending.pop().result()
                if start + size < len(texts):
                    pending.append(pool.submit(make, start + size))
                yield start, piece

    @torch.no_grad()
    def _launch(self, piece: _Rows) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        """Yield the text indices and the vectors of each batch, without waiting for the device."""
        row_unit, token_unit = self._units
        lengths = np.array([len(row) for row in piece.rows])
        padded = np.minimum(-(-lengths // token_unit) * token_unit, self.max_length)
        start = 0
        while start < len(lengths):
            # Texts are sorted by length, so a batch's last text determines its padded size.
            counts = np.arange(1, len(lengths) - start + 1)
            count = int((counts * padded[start:] <= self._batch_size * self.max_length).sum())
            if start + count < len(lengths):
                count -= count % row_unit
            stop, rows = start + count, -(-count // row_unit) * row_unit
            tokens = np.full((rows, padded[stop - 1]), self._pad_id, np.int64)
            ends = np.full(rows, _ENDS)  # rows that pad the batch have no text
            ends[:count] = lengths[start:stop]
            for i, row in enumerate(piece.rows[start:stop]):
                tokens[i, : len(row)] = row
            values = self._vectors(self._device.send(tokens), self._device.send(ends))
            yield piece.indices[start:stop], values[:count]
            start = stop

    _pad_id: int  # the padding id

    @abstractmethod
    def _tokenize(self, texts: Sequence[str], first: int) -> list[NDArray[np.int64]]:
        """Return the tokens of each text, including special tokens.

        Args:
            texts: The texts of a piece.
            first: The index of the first of them in its block.
        """

    @abstractmethod
    def _vectors(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the vectors, fp32 `[n, h]`, of padded tokens `[n, s]` with `lengths` `[n]`."""


def _mean(hidden: Tensor, counts: Tensor) -> Tensor:
    """Return the mean hidden state of each text.

    Args:
        hidden: The hidden states, `[s, n, h]`.
        counts: True for tokens to include in the mean, bool `[n, s]`.

    Returns:
        The means, fp32 `[n, h]`. The mean is 0 for a text without included tokens.
    """
    # Dividing the sum once halves the difference from Megatron-LM's mean, compared to multiplying
    # each state by 1 / n.
    total = torch.where(counts.t()[:, :, None], hidden.float(), 0).sum(dim=0)
    return total / counts.sum(dim=1, keepdim=True).clamp(min=1)


class MegatronEmbedder(Embedder):
    """An embedder that runs a BERT of this package.

    As in Megatron-LM, the mean over a text's tokens excludes [CLS] and [SEP].

    Args:
        model: A BERT without heads, in evaluation mode, on the device.
        tokenizer: The BERT's tokenizer, with cls, sep, pad and mask.
        device: The device that holds the model.
        options: The sizes and the masking.
        iteration: The iteration of the BERT's checkpoint, if it has one.

    Raises:
        ConfigError: The tokenizer lacks a special token, or texts may be too long for the model.
    """

    def __init__(
        self,
        model: BertModel,
        tokenizer: Tokenizer,
        device: Device,
        options: EmbedderOptions,
        iteration: int | None = None,
    ) -> None:
        """Store the model, and find the special tokens."""
        super().__init__(device, options.batch_size)
        positions = model.plan.positions
        if not _ENDS < options.max_length <= positions:
            raise ConfigError(
                f"{options.length_flag} {options.max_length}: the BERT in {options.load} "
                f"has {positions} positions: give {_ENDS + 1} to {positions}"
            )
        self.width, self.max_length = model.plan.hidden, options.max_length
        self.iteration = iteration
        self._model, self._tokenizer, self._masking = model, tokenizer, options.masking
        self._ids = SpecialIds.for_bert(tokenizer)
        self._pad_id = self._ids.pad

    def _tokenize(self, texts: Sequence[str], first: int) -> list[NDArray[np.int64]]:
        cleaned = [text.replace(END_OF_DOCUMENT, "") for text in texts]
        max_tokens, empty = self.max_length - _ENDS, np.array([self._ids.pad])
        # Tokenize as parts of a text, because some tokenizers add special tokens to whole texts.
        pieces = [ids[:max_tokens] for ids in self._tokenizer.tokenize_sentences(cleaned)]
        pieces = [ids if len(ids) else empty for ids in pieces]
        if self._masking is None:
            cls, sep = [self._ids.cls], [self._ids.sep]
            return [np.concatenate((cls, ids, sep), dtype=np.int64) for ids in pieces]
        seed, probability = self._masking
        bert_options = BertOptions(self.max_length, probability, seed + first, binary_head=False)
        samples = BertDataset(_Texts(pieces), self._ids, bert_options)
        return [np.asarray(samples[i]["text"])[: len(ids) + _ENDS] for i, ids in enumerate(pieces)]

    def _vectors(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        ends = lengths[:, None]
        hidden = self._model(tokens, positions < ends)
        assert isinstance(hidden, Tensor), "the model has heads"
        return _mean(hidden, (positions > 0) & (positions < ends - 1))


class _Texts(list[NDArray[Any]]):
    """The tokens of texts, as a sentence dataset in which each text is a single sentence."""

    description = ""

    def __getitem__(self, i: Any) -> Any:
        """Return the only sentence of text `i`, and its number of tokens."""
        sentence = super().__getitem__(i)
        return [sentence], len(sentence)


class HuggingFaceEmbedder(Embedder):
    """An encoder from Hugging Face transformers, such as a sentence encoder.

    The mean is taken over all tokens of a text, including special tokens, because sentence encoders
    are trained this way. If `options.masking` is set, texts are not masked, but the mean excludes
    the first and the last token, as in Megatron-LM.

    Args:
        device: The device on which to compute.
        options: The model and the sizes.

    Raises:
        ConfigError: The package is missing, or the model cannot be loaded, cannot encode texts on
            its own, or has fewer positions than `options.max_length`.
    """

    def __init__(self, device: Device, options: EmbedderOptions) -> None:
        """Load the model and its tokenizer without running code from the model's folder."""
        super().__init__(device, options.batch_size)
        with packages_of("retro"):
            import transformers
        try:
            # Weights are read from safetensors, because other formats may contain code.
            model = transformers.AutoModel.from_pretrained(
                options.load,
                use_safetensors=True,
                trust_remote_code=False,
                dtype=DTYPES[options.dtype or "fp32"],
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                options.load, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(
                f"{options.flag} {options.load}: not a model that transformers can load "
                f"({error}): give a folder with config.json, model.safetensors and tokenizer.json, "
                "or a model's name"
            ) from error
        positions = getattr(model.config, "max_position_embeddings", options.max_length)
        if not _ENDS < options.max_length <= positions:
            raise ConfigError(
                f"{options.length_flag} {options.max_length}: {options.load} has "
                f"{positions} positions: give {_ENDS + 1} to {positions}"
            )
        self.max_length = options.max_length
        self._model = model.to(device.torch_device).eval()
        self._tokenizer = tokenizer
        self._pad_id = tokenizer.pad_token_id or 0
        self._excludes_ends = options.masking is not None
        try:
            ((_, vectors),) = self._launch(_Rows(np.zeros(1, np.int64), self._tokenize(["a"], 0)))
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{options.flag} {options.load}: a {type(model).__name__} cannot encode texts on "
                f"its own ({error}): give an encoder, such as a BERT or a sentence encoder"
            ) from error
        self.width = vectors.shape[1]

    def _tokenize(self, texts: Sequence[str], first: int) -> list[NDArray[np.int64]]:
        cleaned = [text.replace(END_OF_DOCUMENT, "") for text in texts]
        token_ids = self._tokenizer(cleaned, truncation=True, max_length=self.max_length)[
            "input_ids"
        ]
        empty = [self._pad_id]  # for a text without any tokens
        return [np.array(ids or empty, np.int64) for ids in token_ids]

    def _vectors(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        ends = lengths[:, None]
        present = positions < ends
        output = self._model(input_ids=tokens, attention_mask=present.long())
        counts = (positions > 0) & (positions < ends - 1) if self._excludes_ends else present
        return _mean(output.last_hidden_state.transpose(0, 1), counts)


def build_embedder(options: EmbedderOptions, device: Device) -> Embedder:
    """Load the network named by the options.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, or is not a BERT.
        ConfigError: A value does not match the model, or a package is missing.
        DataError: A file of the tokenizer is missing.
    """
    if options.kind == "huggingface":
        return HuggingFaceEmbedder(device, options)
    reader = open_existing(options.load, flag=options.flag, allow_foreign=options.allow_foreign)
    config = saved_config(reader, options.load, "bert", flag=options.flag)
    if options.dtype is not None:
        fp16, bf16 = options.dtype == "fp16", options.dtype == "bf16"
        config = replace(config, precision=replace(config.precision, fp16=fp16, bf16=bf16))
    tokenizer = build_tokenizer(options.tokenizer or config.tokenizer)
    rows = -(-tokenizer.vocab_size // 8) * 8
    # Fused attention is faster, even if the checkpoint's run did not use it.
    network = replace(config.model, masked_softmax_fusion=True)
    plan = replace(model_plan(network, rows), heads=())
    context = run_context(replace(config, model=network), Layout.single(), device)
    model = BertModel(plan, context).eval()
    restore(
        PaddedReader(reader, rows=rows, entries=tokenizer.text_vocab_size),
        model_state([model]),
        cast=True,
    )
    return MegatronEmbedder(model, tokenizer, device, options, reader.iteration)
