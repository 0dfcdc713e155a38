"""Which network embeds the texts of a Retro: the one with which its working folder was made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.device import Device
from megatron.errors import ConfigError
from megatron.retro import retriever
from megatron.retro.embedding import EmbedderOptions
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
