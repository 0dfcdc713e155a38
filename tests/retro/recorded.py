"""The working folder that Megatron-LM 23.08 recorded, and what produced it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from megatron.config.data import TokenizerConfig
from megatron.data.indexed import IndexedDataset
from megatron.tokenizer import Tokenizer, build_tokenizer

CHUNK, BLOCK, WIDTH = 64, 1000, 64
INDEX = "IVF32_HNSW8,Flat"


def read(path: Path, name: str = "data") -> NDArray[Any]:
    """Return a dataset from a recorded file."""
    with h5py.File(path, "r") as file:
        values: NDArray[Any] = file[name][()]
        return values


class Recorded(NamedTuple):
    """The folder of recordings."""

    golden: Path

    @property
    def workdir(self) -> Path:
        return self.golden / "retro_fp32/workdir"

    @property
    def bert_tokenizer(self) -> TokenizerConfig:
        vocabulary = str(self.golden / "data/bert-5000-vocab.txt")
        return TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=vocabulary)

    def gpt_tokenizer(self) -> Tokenizer:
        data = self.golden / "data"
        return build_tokenizer(
            TokenizerConfig(
                tokenizer_type="GPT2BPETokenizer",
                vocab_file=str(data / "gpt2-tiny-vocab.json"),
                merge_file=str(data / "gpt2-tiny-merges.txt"),
            )
        )

    def database(self, name: str) -> RecordedChunks:
        rows = read(self.workdir / f"db/merged/{name}.hdf5", "chunks")
        data = IndexedDataset(str(self.golden / "data/gpt_text_document"))
        return RecordedChunks(rows, data, self.gpt_tokenizer().eod)

    def embeddings(self) -> NDArray[np.float32]:
        """Return the vectors of the sampled chunks, `[2000, 64]`."""
        folder = self.workdir / "index/train_emb/blocks"
        return np.concatenate([read(path) for path in sorted(folder.iterdir())])


@dataclass(frozen=True)
class RecordedChunks:
    """A table of chunks, with the methods of a chunk database."""

    rows: NDArray[Any]
    data: IndexedDataset
    eod: int

    def __len__(self) -> int:
        return len(self.rows)

    def tokens(self, chunk_ids: Any) -> NDArray[np.int64]:
        found = np.full((len(chunk_ids), CHUNK), self.eod, np.int64)
        for place, (_, document, start, end, _) in enumerate(self.rows[chunk_ids].tolist()):
            found[place, : end - start] = self.data.get(document, start, end - start)
        return found

    def documents(self, chunk_ids: Any) -> NDArray[np.int64]:
        return self.rows[chunk_ids][:, :2].astype(np.int64)
