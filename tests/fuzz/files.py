"""Targets for corpora, lists of data, files that runs continue, and files next to a model."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import math
import os
import re
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow
from pyarrow import parquet

from megatron.checkpoint.huggingface.reader import HFReader
from megatron.checkpoint.lock import LOCK, save_lock
from megatron.checkpoint.retention import is_as_listed, list_files
from megatron.config import data_files, deepspeed
from megatron.config.data import TokenizerConfig
from megatron.config.run import Findings, RunOptions, with_values
from megatron.data.conversation_records import PlainText, parse_record, read_examples
from megatron.data.text_input import parse_lines, read_blocks
from megatron.detoxify.annotate import annotate
from megatron.detoxify.evaluate import (
    EvaluatedPrompt,
    measure,
    read_perplexity,
    read_prompt_scores,
)
from megatron.detoxify.perspective import PerspectiveClient, ServiceError
from megatron.detoxify.scorers import PerspectiveScorer
from megatron.detoxify.select_texts import read_scored
from megatron.environment import private_cache
from megatron.errors import CheckpointError, ConfigError, DataError, StorageError
from megatron.inference.samples import SampleFile, read_prompts
from megatron.inference.server import run as server
from megatron.report.page import render
from megatron.report.sources import open_runs
from megatron.tasks.finetune import _best_score
from megatron.tasks.results import read_results
from megatron.tokenizer import build_tokenizer, fast_bpe
from megatron.tokenizer.chat_template import find_template, special_tokens
from megatron.tokenizer.files import digest
from megatron.tools import demo, plot_loss
from tests.checkpoint.huggingface.models import CASES, tensors_of, write_folder
from tests.fuzz.harness import Target, made
from tests.repository import ROOT
from tests.tokenizer.test_gpt2 import GOOD

_NOWHERE = "http://localhost:9/"
_ANNOTATED = b"".join(
    b'{"prompt": "a", "text": "%s", "score": {"toxicity": %s}}\n' % pair
    for pair in ((b"x", b"0.25"), (b"y", b"1e-3"))
)
_LINES = b'{"text": "one two", "n": 1}\n{"text": ["a.", "b."]}\n{"text": "\xc3\xa9"}\n'


def _corpus(name: str) -> Callable[[bytes, Path], None]:
    """Read an input as a corpus of this name."""

    def read(data: bytes, folder: Path) -> None:
        (folder / name).write_bytes(data)
        total = 0
        for block in read_blocks([str(folder / name)], ["text"], 64):
            parse_lines(block.read(), ["text"])
            total += block.size
            if total > 1 << 24:
                break

    return read


def _zstd() -> list[bytes]:
    packed = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(packed, "zstd") as stream:
        stream.write(_LINES)
    return [packed.getvalue().to_pybytes()]


def _parquet() -> list[bytes]:
    seeds = []
    for compression in ("none", "snappy"):
        file = io.BytesIO()
        table = pyarrow.table({"text": ["one", "two", None, "\u00e9"], "n": [1, 2, 3, 4]})
        parquet.write_table(table, file, compression=compression)
        seeds.append(file.getvalue())
    return seeds


def _read_lists(data: bytes, folder: Path) -> None:
    (folder / "list").write_bytes(data)
    problems = 0
    for path in data_files.DATA_FILES:
        try:
            data_files._read(path, folder / "list", "--flag list", Findings())
        except ValueError:
            problems += 1
    if problems == len(data_files.DATA_FILES):
        raise ConfigError("refused")


def _deepspeed() -> list[bytes]:
    jobs = [job.read_text() for job in sorted((ROOT / "tests" / "deepspeed").glob("*.sh"))]
    found = [re.search(r"<<JSON\n(.*?)^JSON$", job, re.MULTILINE | re.DOTALL) for job in jobs]
    values = {"GLOBAL_BATCH": "512", "MICRO_BATCH": "16", "SEQ_LEN": "2048"}
    return [
        re.sub(r"\$\{(\w+)\}", lambda name: values.get(name[1], "10"), match[1]).encode()
        for match in found
        if match
    ]


def _read_deepspeed(data: bytes, folder: Path) -> None:
    (folder / "ds.json").write_bytes(data)
    found = Findings()
    file = deepspeed.read(folder / "ds.json", {"optimizer.clip_grad": 1.0}, found)
    run = with_values(RunOptions(), file.values)
    deepspeed.batch_sizes(run, file, 8, found)
    if found.problems:
        raise ConfigError(found.problems)


def _listed(folder: Path) -> list[bytes]:
    (folder / "model.pt").write_bytes(b"weights")
    return [list_files(folder)]


def _read_list(data: bytes, folder: Path) -> None:
    (folder / "model.pt").write_bytes(b"weights")
    (folder / "complete").write_bytes(data)
    is_as_listed(folder)


def _read_lock(data: bytes, folder: Path) -> None:
    (folder / LOCK).write_bytes(data)
    with save_lock(folder):
        pass


def _read_samples(data: bytes, folder: Path) -> None:
    (folder / "out.jsonl").write_bytes(data)
    SampleFile(folder / "out.jsonl").remaining(["a", "b"])


def _read_settings(data: bytes, folder: Path) -> None:
    (folder / "out.jsonl").write_bytes(b'{"prompt": "a", "text": "b"}\n')
    (folder / "out.jsonl.settings.json").write_bytes(data)
    SampleFile(folder / "out.jsonl").keep_settings({"temperature": 1.0, "seed": 1})


def _read_prompts(data: bytes, folder: Path) -> None:
    (folder / "in.jsonl").write_bytes(data)
    read_prompts(folder / "in.jsonl")


def _client(*attributes: str) -> PerspectiveClient:
    return PerspectiveClient(
        *("k", _NOWHERE, attributes),
        language="en",
        requests_per_second=1e6,
        retries=0,
        timeout=60.0,
    )


def _read_annotated(data: bytes, folder: Path) -> None:
    """Read an input for selection, for measuring, and to continue it."""
    path, source = folder / "a.jsonl", folder / "own.jsonl"
    unreachable = PerspectiveScorer(_client(), 1)
    path.write_bytes(data)
    source.write_bytes(_ANNOTATED)
    for read in (
        lambda: read_scored(path),
        lambda: measure(path, [EvaluatedPrompt("a", 0.5)], 2),
        lambda: annotate(source, path, unreachable),
    ):
        with suppress(DataError, StorageError, ServiceError):
            read()


def _read_prompt_scores(data: bytes, folder: Path) -> None:
    (folder / "prompts.jsonl").write_bytes(data)
    for prompt in read_prompt_scores(folder / "prompts.jsonl"):
        assert prompt.toxicity is None or 0 <= prompt.toxicity <= 1


def _read_perplexity(data: bytes, folder: Path) -> None:
    (folder / "results.json").write_bytes(data)
    assert math.isfinite(read_perplexity(folder / "results.json"))


def _read_scores(data: bytes, folder: Path) -> None:
    """Read an input as the Perspective API's answer to the only attempt."""
    client = _client("toxicity")
    client._send = lambda _: data  # type: ignore[method-assign]
    assert 0 <= client.score("text")["toxicity"] <= 1


def _read_metrics(data: bytes, folder: Path) -> None:
    (folder / "metrics.jsonl").write_bytes(data)
    plot_loss.read_metrics(folder / "metrics.jsonl")


def _report(folder: Path) -> None:
    render([source.history for source in open_runs([folder])])


def _report_metrics(data: bytes, folder: Path) -> None:
    (folder / "metrics.jsonl").write_bytes(data)
    _report(folder)


def _report_trace(data: bytes, folder: Path) -> None:
    (folder / "metrics.jsonl").write_bytes(b'{"iteration": 1, "lm loss": 2.5}\n')
    (folder / "rank0.2.pt.trace.json").write_bytes(data)
    _report(folder)


def _read_marker(data: bytes, folder: Path) -> None:
    (folder / demo.MARKER).write_bytes(data)
    demo.read_settings(folder)


def _read_tokenizer_config(data: bytes, folder: Path) -> None:
    (folder / "tokenizer_config.json").write_bytes(data)
    find_template(None, str(folder))
    special_tokens(str(folder))


def _read_stop_tokens(data: bytes, folder: Path) -> None:
    path = folder / server.COMPANION_FOLDER / server.GENERATION_CONFIG
    path.parent.mkdir()
    path.write_bytes(data)
    server._stop_tokens(folder, 10)


def _folder(folder: Path) -> list[bytes]:
    write_folder(folder, CASES["llama"].config, tensors_of(CASES["llama"]), shards=2)
    return [(folder / "model.safetensors.index.json").read_bytes()]


def _read_hub_index(data: bytes, folder: Path) -> None:
    write_folder(folder, CASES["llama"].config, tensors_of(CASES["llama"]), shards=2)
    (folder / "model.safetensors.index.json").write_bytes(data)
    HFReader(folder)


_MERGES = b"#version: 0.2\na b\n"


def _compiled() -> list[bytes]:
    table = fast_bpe.byte_of_character()
    pieces = [bytes([byte]) for byte in table.values()] + [b"ab"]
    return [b"".join(b"%b %d\n" % (b64encode(piece), i) for i, piece in enumerate(pieces))]


def _read_compiled(data: bytes, folder: Path) -> None:
    """Read an input as a compiled vocabulary, under the name derived from its digest."""
    vocab = json.dumps(GOOD).encode()
    (folder / "vocab").write_bytes(vocab)
    (folder / "merges").write_bytes(_MERGES)
    os.environ["MEGATRON_CACHE"] = str(folder / "cache")
    key = digest(vocab, _MERGES)
    name = fast_bpe._compiled_name(key, len(GOOD), GOOD["<|endoftext|>"], data)
    (private_cache("tokenizers") / name).write_bytes(data)
    config = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(folder / "vocab"),
        merge_file=str(folder / "merges"),
    )
    build_tokenizer(config).tokenize("a b ab")


def _read_results(data: bytes, folder: Path) -> None:
    (folder / "results.json").write_bytes(data)
    read_results(folder / "results.json")


def _read_best(data: bytes, folder: Path) -> None:
    (folder / "evaluation.json").write_bytes(data)
    assert math.isfinite(_best_score(folder, ("accuracy",), resumed=4))


def _conversations() -> list[bytes]:
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    found = {"role": "tool", "content": [{"type": "text", "text": "1"}]}
    said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 1}]
    records = (
        {"messages": [user, call, found, answer], "tools": '[{"name": "f"}]'},
        {"conversations": said, "system": "c"},
        {"prompt": [user], "completion": [answer]},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"chosen": [user, answer], "rejected": [user, {**answer, "content": "c"}]},
    )
    return [json.dumps(record).encode() for record in records]


def _read_conversation(data: bytes, folder: Path) -> None:
    record = parse_record(data)
    for example in read_examples(record, preferences="chosen" in record):
        if isinstance(example, PlainText):
            assert isinstance(example.prompt, str)
            assert isinstance(example.completion, str)
        else:
            assert all(isinstance(message["content"], str) for message in example.messages)


TARGETS = (
    Target("conversation", _conversations, _read_conversation, (ValueError,)),
    Target("JSONL file", lambda: [_LINES], _corpus("x.jsonl"), (DataError,)),
    Target("gzip", lambda: [gzip.compress(_LINES, mtime=0)], _corpus("x.jsonl.gz"), (DataError,)),
    Target("bzip2", lambda: [bz2.compress(_LINES)], _corpus("x.jsonl.bz2"), (DataError,)),
    Target("zstd", _zstd, _corpus("x.jsonl.zst"), (DataError,)),
    Target("parquet", _parquet, _corpus("x.parquet"), (DataError,)),
    Target("text file", lambda: [b"One.\nTwo.\n"], _corpus("x.txt"), (DataError,)),
    Target(
        "data lists",
        lambda: [b"a 0.5 b", b'{"train": ["a", 1, "b", 2], "valid": "c", "test": null}'],
        _read_lists,
        (ConfigError,),
    ),
    Target("deepspeed", _deepspeed, _read_deepspeed, (ConfigError,)),
    Target("retention list", made(_listed), _read_list, (CheckpointError,)),
    Target(
        "save lock",
        lambda: [b'{"pid": 1, "host": "x", "start": "12"}', b""],
        _read_lock,
        (CheckpointError,),
    ),
    Target(
        "samples",
        lambda: [b'{"prompt": "a", "text": "b"}\n{"prompt": "b", "error": "no"}\n'],
        _read_samples,
        (StorageError,),
    ),
    Target(
        "sample settings",
        lambda: [b'{\n  "temperature": 1.0,\n  "seed": 1\n}\n'],
        _read_settings,
        (StorageError,),
    ),
    Target(
        "prompts",
        lambda: [b'{"prompt": "a"}\n{"text": "b"}\n'],
        _read_prompts,
        (DataError,),
    ),
    Target(
        "annotated texts",
        lambda: [_ANNOTATED],
        _read_annotated,
        (),
    ),
    Target(
        "scores of prompts",
        lambda: [b'{"prompt": {"text": "a", "toxicity": 0.5}}\n{"text": "b", "score": null}\n'],
        _read_prompt_scores,
        (DataError,),
    ),
    Target(
        "perplexity",
        lambda: [b'{"task": "PERPLEXITY", "results": {"loss": 2.5, "perplexity": 12.18}}'],
        _read_perplexity,
        (DataError,),
    ),
    Target(
        "answer of the Perspective API",
        lambda: [b'{"attributeScores": {"TOXICITY": {"summaryScore": {"value": 0.25}}}}'],
        _read_scores,
        (ServiceError,),
    ),
    Target(
        "metrics",
        lambda: [b'{"iteration": 1, "lm loss": 2.5}\n{"iteration": 1, "lm loss validation": 2}\n'],
        _read_metrics,
        (DataError,),
    ),
    Target(
        "report of metrics",
        lambda: [
            b'{"iteration": 0, "time": 1.5, "event": "start", "iterations": 9, '
            b'"settings": {"--lr": 1}, "tokens_per_sample": 4, '
            b'"changed": ["--lr"], "facts": {"layout": "TP 1"}}\n'
            b'{"iteration": 1, "time": 2.5, "consumed samples": 4, "lm loss": NaN, '
            b'"loss-scale": 2}\n'
            b'{"iteration": 2, "time": 3.5, "lm loss validation": 2, "loss-scale": 1}\n'
            b'{"iteration": 2, "expert load": {"0": [1.0, 0.5]}}\n',
        ],
        _report_metrics,
        (DataError,),
    ),
    Target(
        "report of a trace",
        lambda: [
            b'{"baseTimeNanoseconds": 1, "traceEvents": [{"ph": "X", "cat": "user_annotation", '
            b'"name": "iteration 2", "ts": 1, "dur": 9.5}, {"ph": "X", "cat": "user_annotation", '
            b'"name": "optimizer", "ts": 2, "dur": 3}, {"ph": "X", "cat": "kernel", "name": "k", '
            b'"ts": 2, "dur": 3}]}',
        ],
        _report_trace,
        (DataError,),
    ),
    Target("results", lambda: [b'{"task": "x", "save": "out", "score": 0.5}'], _read_results, ()),
    Target(
        "best weights",
        lambda: [b'{"iteration": 3, "score": 0.5, "of": ["accuracy"]}'],
        _read_best,
        (),
    ),
    Target("demo settings", lambda: [b'{"model": "gpt"}\n'], _read_marker, ()),
    Target(
        "tokenizer_config.json",
        lambda: [
            b'{"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "x"}',
            b'{"chat_template": [{"name": "default", "template": "x"}]}',
        ],
        _read_tokenizer_config,
        (ConfigError,),
    ),
    Target(
        "generation_config.json",
        lambda: [b'{"eos_token_id": 1}', b'{"eos_token_id": [1, 2]}'],
        _read_stop_tokens,
        (),
    ),
    Target("HF index", made(_folder), _read_hub_index, (CheckpointError,)),
    Target("compiled vocabulary", _compiled, _read_compiled, (DataError,)),
)
