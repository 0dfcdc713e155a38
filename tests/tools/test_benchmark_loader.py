"""Tokens per second of the data-loading processes."""

from __future__ import annotations

import json
import re

from megatron.tools import train_tokenizer
from tests.data.test_text_stream import SEQUENCE
from tools import benchmark_loader


def test_text_is_measured(tmp_path, capsys):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": f"some text {i} " * 9}) + "\n" for i in range(99))
    )
    words = ["--input", str(corpus), "--vocab-size", "300", "--output-dir", str(tmp_path / "t")]
    train_tokenizer.run(train_tokenizer.build_parser().parse_args(words))
    files = ["--vocab-file", f"{tmp_path}/t/vocab.json", "--merge-file", f"{tmp_path}/t/merges.txt"]
    words = ["--data-path", str(corpus), *files, "--seq-length", str(SEQUENCE), "--batches", "25"]
    capsys.readouterr()
    benchmark_loader.run(
        benchmark_loader.build_parser().parse_args([*words, "--workers", "0", "1"])
    )
    figures = re.findall(
        r"([01]) loading processes: ([\d,]+) tokens/s, in the first 20 micro-batches ([\d,]+)\n",
        capsys.readouterr().out,
    )
    assert [count for count, *_ in figures] == ["0", "1"]
    assert all(int(rate.replace(",", "")) > 0 for _, *rates in figures for rate in rates)
