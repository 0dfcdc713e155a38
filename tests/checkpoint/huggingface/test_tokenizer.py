"""The tokenizer that a Hugging Face folder contains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.checkpoint.huggingface.files import tokenizer_in

# Files in the folder, network kind, tokenizer type, and the file that each flag names.
_FOLDERS = [
    ("vocab.txt tokenizer.json", "bert", "BertWordPieceLowerCase", {"vocab_file": "vocab.txt"}),
    (
        "vocab.txt tokenizer.json",
        "gpt",
        "HuggingFaceTokenizer",
        {"tokenizer_model": "tokenizer.json"},
    ),
    (
        "spiece.model tokenizer.json",
        "t5",
        "HuggingFaceTokenizer",
        {"tokenizer_model": "tokenizer.json"},
    ),
    ("spiece.model", "t5", "GPTSentencePieceTokenizer", {"tokenizer_model": "spiece.model"}),
    ("tokenizer.model", "gpt", "Llama2Tokenizer", {"tokenizer_model": "tokenizer.model"}),
    (
        "vocab.json merges.txt",
        "gpt",
        "GPT2BPETokenizer",
        {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
    ),
    ("vocab.json", "gpt", None, {}),
]


@pytest.mark.parametrize(("names", "architecture", "kind", "flags"), _FOLDERS)
def test_by_its_files(
    tmp_path: Path, names: str, architecture: str, kind: str, flags: dict
) -> None:
    for name in names.split():
        (tmp_path / name).write_bytes(b"not looked at")
    found = tokenizer_in(tmp_path, architecture)
    assert found.tokenizer_type == kind
    for flag in ("tokenizer_model", "vocab_file", "merge_file"):
        path = str(tmp_path / flags[flag]) if flag in flags else None
        assert getattr(found, flag) == path
    assert found.vocab_extra_ids == (100 if kind == "GPTSentencePieceTokenizer" else 0)


@pytest.mark.parametrize(
    ("settings", "architecture", "file", "found"),
    [
        ({"do_lower_case": False}, "bert", "vocab.txt", ("BertWordPieceCase", 0)),
        ({"extra_ids": 0}, "t5", "spiece.model", ("GPTSentencePieceTokenizer", 0)),
    ],
)
def test_by_its_settings(
    tmp_path: Path, settings: dict, architecture: str, file: str, found: tuple[str, int]
) -> None:
    (tmp_path / file).write_bytes(b"not looked at")
    # Gemma 3's file has more than a megabyte.
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings).ljust(2 << 20))
    config = tokenizer_in(tmp_path, architecture)
    assert (config.tokenizer_type, config.vocab_extra_ids) == found
