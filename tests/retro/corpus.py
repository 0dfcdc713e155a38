"""Small corpora for Retro's tests, with tokenizers that need no files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import TokenizerConfig
from megatron.config.retro_preprocessing import (
    RetroGPTConfig,
    RetroIndexConfig,
    RetroPreprocessing,
    RetroStagesConfig,
)
from megatron.data.indexed import IndexedDatasetBuilder
from megatron.retro.database import ChunkCutter
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.build import NullTokenizer

VOCAB = 100
EOD = VOCAB
CHUNK = 8
SILENT = 7  # a token without text


class WordCounter(Tokenizer):
    """A stand-in for BERT's tokenizer: one token per word that is not SILENT."""

    def __init__(self) -> None:
        """Make a tokenizer without special tokens."""
        super().__init__("WordCounter", "", {}, 1)

    def tokenize(self, text: str) -> list[int]:
        """Return a 0 for each word."""
        return [0 for word in text.split() if word != str(SILENT)]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return nothing: the texts of BERT's tokens are not needed."""
        return ""


def cutter() -> ChunkCutter:
    """Return the chunk cutter of the tests."""
    gpt = NullTokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB))
    return ChunkCutter(CHUNK, gpt, WordCounter())


def write_dataset(prefix: Path, documents: Sequence[Sequence[int] | NDArray[np.int64]]) -> str:
    """Write documents as an indexed dataset, one sequence each, and return the prefix."""
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        sizes = [len(document) for document in documents]
        tokens = np.concatenate([np.asarray(document, np.int64) for document in documents])
        builder.add_documents(tokens, sizes, [1] * len(sizes))
    return str(prefix)


def random_documents(count: int, seed: int = 1, longest: int = 40) -> list[NDArray[np.int64]]:
    """Return documents of random lengths, each with EOD at its end."""
    random = np.random.default_rng(seed)
    return [
        np.append(random.integers(0, VOCAB, random.integers(0, longest)), EOD) for _ in range(count)
    ]


def options(
    workdir: Path, *data_path: str, ntrain: int = 20, compatible: bool = False, doc_block: int = 10
) -> RetroPreprocessing:
    """Return preprocessing options for these datasets."""
    return RetroPreprocessing(
        RetroStagesConfig(
            retro_workdir=str(workdir),
            retro_doc_block_size=doc_block,
            retro_block_size=16,
            retro_compatible=compatible,
        ),
        RetroGPTConfig(
            retro_gpt_data_path=data_path,
            retro_gpt_split="90,8,2",
            retro_gpt_seq_length=4 * CHUNK,
            retro_gpt_chunk_length=CHUNK,
        ),
        index=RetroIndexConfig(retro_index_ntrain=ntrain),
    )
