"""Which network embeds the texts of a Retro model, and the passages that a search finds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.config.data import TokenizerConfig
from megatron.device import Device
from megatron.errors import ConfigError
from megatron.inference.request import NeighborPassage
from megatron.retro import retriever
from megatron.retro.dataset import NeighborTexts
from megatron.retro.embedding import EmbedderOptions
from megatron.tokenizer.build import NullTokenizer
from tests.config.command import parse
from tests.repository import ROOT

ARGUMENTS = json.loads((ROOT / "tests/config/retro_workdir/args.json").read_text())


def _network(
    monkeypatch: pytest.MonkeyPatch, folder: Path, embedder: str | None = None, **arguments: Any
) -> EmbedderOptions:
    """Return the options of the network that a working folder with these arguments loads."""
    (folder / "args.json").write_text(json.dumps(ARGUMENTS | arguments))
    words = f"--num-layers 6 --retro-workdir {ROOT / 'tests/config/retro_workdir'}"
    unset = ["--mock-data", "--seq-length"]
    config = parse(words, without=unset, architecture="retro").config
    config = replace(config, data=replace(config.data, retro_workdir=str(folder)))
    options: list[EmbedderOptions] = []
    monkeypatch.setattr(retriever, "ChunkDatabase", lambda *_, **__: None)
    monkeypatch.setattr(retriever, "NeighborTexts", lambda *_: None)
    monkeypatch.setattr(retriever, "open_searcher", lambda *_: None)
    monkeypatch.setattr(retriever, "check_width", lambda *_: None)
    monkeypatch.setattr(retriever, "build_embedder", lambda given, _: options.append(given))
    tokenizer: Any = SimpleNamespace(fingerprint=lambda: "", eod=0, vocab_size=8)
    retriever.open_retriever(config, tokenizer, Device.cpu(), embedder)
    return options[0]


def test_the_network_of_the_folder_or_the_named_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="give --bert-embedder-load FOLDER"):
        _network(monkeypatch, tmp_path)
    assert _network(monkeypatch, tmp_path, load="a").load == "a"
    assert _network(monkeypatch, tmp_path, load="a", bert_embedder_load="b").load == "b"
    assert _network(monkeypatch, tmp_path, "c", load="a", bert_embedder_load="b").load == "c"


def test_a_vocabulary_that_is_gone_is_the_checkpoint_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder names a file of the machine on which it was made."""
    file = tmp_path / "vocab.txt"
    given = {"load": "a", "retro_bert_vocab_file": str(file)}
    assert _network(monkeypatch, tmp_path, load="a").tokenizer is None
    assert _network(monkeypatch, tmp_path, **given).tokenizer is None
    file.write_text("[PAD]")
    tokenizer = _network(monkeypatch, tmp_path, **given).tokenizer
    assert tokenizer is not None
    assert tokenizer.vocab_file == str(file)


class _Chunks:
    """A database of chunks of two tokens: chunk i holds 2 i and 2 i + 1."""

    eod = 50

    def __len__(self) -> int:
        return 5

    def tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return 2 * rows[:, None] + np.arange(2)

    def documents(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.stack([rows // 2, rows + 10], 1)


def test_the_passages_of_a_text() -> None:
    """A chunk is searched by its text, and missing neighbors have no passage."""
    tokenizer = NullTokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=50))
    found = {"1 2": [3, -1], "4": [-1, 0]}
    embedder: Any = SimpleNamespace(embed=lambda texts: [found[text] for text in texts])
    searcher: Any = SimpleNamespace(search=np.array)
    texts = NeighborTexts(_Chunks(), 2)  # type: ignore[arg-type]
    opened = retriever.Retriever(searcher, embedder, texts, tokenizer)
    neighbors = opened.find(np.array([[1, 2], [4, 50]]))
    assert neighbors.tolist() == [[3, -1], [-1, 0]]
    empty = [50] * 4
    assert opened.tokens(neighbors).tolist() == [[[6, 7, 8, 9], empty], [empty, [0, 1, 2, 3]]]
    assert opened.passages(neighbors) == [
        NeighborPassage(0, 1, 13, "6 7 8 9"),
        NeighborPassage(1, 0, 10, "0 1 2 3"),
    ]
