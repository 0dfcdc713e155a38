"""Every reader of untrusted bytes, as a fuzzing target."""

from __future__ import annotations

import io
import json
import tempfile
from argparse import Namespace
from base64 import b64encode
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from megatron.checkpoint import manifest
from megatron.checkpoint.find import TRACKER, list_checkpoints
from megatron.checkpoint.huggingface.reader import HFReader
from megatron.checkpoint.legacy.torch_file import TorchZip
from megatron.checkpoint.legacy.unpickler import read_pickle
from megatron.checkpoint.loading import open_checkpoint
from megatron.checkpoint.shard import digest_of, parse_header
from megatron.config import yaml_file
from megatron.config.data import TokenizerConfig
from megatron.config.run import Findings
from megatron.data.cache import ArraySpec, IndexCache, open_array
from megatron.data.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron.data.npy import open_shard
from megatron.data.text_input import parse_lines
from megatron.data.tfrecord import TFRecordDataset, TFRecordOptions, TFRecords
from megatron.errors import CheckpointError, ConfigError, DataError, UserError
from megatron.inference.messages import (
    Cancel,
    Command,
    MessageError,
    Shutdown,
    Unpacker,
    pack,
)
from megatron.inference.request import RequestError
from megatron.inference.server.endpoint import ApiError
from megatron.inference.server.schema import ChatRequest, CompletionRequest, read_request
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.chat_template import ChatTemplate
from megatron.tools import text_generation_cli
from tests.checkpoint.huggingface.models import CASES, tensors_of, write_folder
from tests.checkpoint.legacy.megatron_files import Form, whole_model, write
from tests.checkpoint.legacy.test_malicious import CORPUS as PICKLES
from tests.checkpoint.states import save_state
from tests.data import tfrecords
from tests.fuzz import files, folders
from tests.fuzz.harness import Target, made
from tests.inference.server import fuzz as fuzz_requests
from tests.tokenizer.t5 import write_t5_tokenizer
from tests.tokenizer.test_gpt2 import GOOD

# Indexed datasets


def _indexes(folder: Path) -> list[bytes]:
    made = []
    for dtype, lengths in ((np.uint16, (7, 0, 10, 1)), (np.int32, (3, 0, 5, 1))):
        with IndexedDatasetBuilder(folder / "a", dtype) as builder:
            builder.add_documents(np.arange(sum(lengths)), lengths, [1] * len(lengths))
        made.append((folder / "a.idx").read_bytes())
        for name in ("a.idx", "a.bin"):
            (folder / name).unlink()
    return made


def _cached_indexes() -> list[bytes]:
    """Return an index in the oldest format, without document bounds, and one in a later format."""
    lengths = (3, 0, 5, 1)
    numbers = [*range(5), *np.cumsum((0, *lengths)), *lengths]
    oldest = [b"TNTIDX\0\0", *(int(n).to_bytes(8, "little") for n in (1, 4, 4, 4, 4, *numbers))]
    later = [*oldest[:6], (3).to_bytes(8, "little"), *oldest[6:]]
    return [b"".join(oldest), b"".join(later + [n.to_bytes(8, "little") for n in (0, 2, 4)])]


def _read_records(data: bytes, folder: Path) -> None:
    (folder / "x.tfrecord").write_bytes(data)
    records = TFRecords("x", [folder / "x.tfrecord"])
    dataset = TFRecordDataset(records, (0, len(records)), 3, TFRecordOptions(16, 100, 1))
    for i in range(3):
        assert dataset[i]["text"].shape == (16,)


def _read_example(data: bytes, folder: Path) -> None:
    """Read without the checksums, which would stop every mutation of a record."""
    (folder / "x.tfrecord").write_bytes(tfrecords.record(data))
    dataset = TFRecordDataset(
        TFRecords("x", [folder / "x.tfrecord"]), (0, 1), 1, TFRecordOptions(16, 100, 1)
    )
    assert dataset[0]["labels"].shape == (16,)


def _shards(folder: Path) -> list[bytes]:
    made = []
    for ids in (np.arange(12, dtype=np.uint16), np.arange(12).reshape(3, 4)):
        np.save(folder / "a.npy", ids)
        made.append((folder / "a.npy").read_bytes())
    return made


def _read_shard(data: bytes, folder: Path) -> None:
    (folder / "a.npy").write_bytes(data)
    for ids in open_shard(folder / "a.npy").documents(5):
        assert ids.nbytes <= len(data)


def _read_index(data: bytes, folder: Path) -> None:
    (folder / "a.idx").write_bytes(data)
    (folder / "a.bin").write_bytes(bytes(36))
    dataset = IndexedDataset(folder / "a")
    for i in range(min(len(dataset), 100)):
        assert dataset.get(i).nbytes <= 36


# Caches of indices

_SPEC = ArraySpec("a_idx", np.dtype("i4"), (5,))


def _arrays(folder: Path) -> list[bytes]:
    IndexCache((folder,)).load_or_build("text", [_SPEC], lambda: (np.arange(5, dtype="i4"),))
    return [next(folder.glob("*.npy")).read_bytes()]


def _read_array(data: bytes, folder: Path) -> None:
    (folder / "a.npy").write_bytes(data)
    array = open_array(folder / "a.npy", None)
    if array is not None:
        assert not array.dtype.hasobject


# Our checkpoints


def _manifests(folder: Path) -> list[bytes]:
    return [(save_state(folder, 3) / manifest.MANIFEST).read_bytes()]


def _bodies(folder: Path) -> list[bytes]:
    body = json.loads(_manifests(folder)[0])
    del body["sha256"]
    return [json.dumps(body).encode()]


def _read_signed(data: bytes, folder: Path) -> None:
    """Sign the modified manifest, as an attacker would, and load the folder."""
    try:
        body = json.loads(data)
        text = json.dumps(body) + "\n"
        signed = json.dumps({"sha256": digest_of(text.encode()), **body}) + "\n"
    except (ValueError, TypeError, RecursionError):
        raise CheckpointError("not what an attacker would write") from None
    path = save_state(folder, 3)
    (path / manifest.MANIFEST).write_text(signed)
    reader = open_checkpoint(folder)
    assert reader is not None
    reader.names()


def _headers(folder: Path) -> list[bytes]:
    whole = next(save_state(folder, 3).glob("*.safetensors")).read_bytes()
    return [whole[: 8 + int.from_bytes(whole[:8], "little")]]


def _read_tracker(data: bytes, folder: Path) -> None:
    (folder / "iter_0000003").mkdir()
    (folder / "iter_0000003" / manifest.MANIFEST).touch()
    (folder / TRACKER).write_bytes(data)
    assert [one.iteration for one in list_checkpoints(folder, quiet=True)] == [3]


# Megatron-LM's checkpoints


def _pickles() -> list[bytes]:
    tensors = {f"layer{i}": torch.ones(2, i) for i in range(3)}
    tree = {"model": tensors, "args": Namespace(n=1, name="x", sizes=[1, 2]), "iteration": 3}
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.pt"
        path.write_bytes(buffer.getvalue())
        sound = bytes(TorchZip(path).record("data.pkl"))
    return [sound, *PICKLES.values()]


def _zips(folder: Path) -> list[bytes]:
    path = write(folder, Form(), whole_model(1))
    return [(path / "mp_rank_00" / "model_optim_rng.pt").read_bytes()]


def _read_zip(data: bytes, folder: Path) -> None:
    (folder / "x.pt").write_bytes(data)
    archive = TorchZip(folder / "x.pt")
    archive.verify()
    read_pickle(bytes(archive.record("data.pkl")), "x.pt")


# Hugging Face folders


def _hub_file(name: str) -> tuple[Callable[[Path], list[bytes]], Callable[[bytes, Path], None]]:
    def make(folder: Path) -> list[bytes]:
        made = []
        for case in CASES.values():
            write_folder(folder, case.config, tensors_of(case))
            made.append((folder / name).read_bytes())
        return made

    def read(data: bytes, folder: Path) -> None:
        case = CASES["llama"]
        write_folder(folder, case.config, tensors_of(case))
        (folder / name).write_bytes(data)
        HFReader(folder)

    return make, read


# Text and tokenizers


def _yaml() -> list[bytes]:
    return [
        b"model:\n  num_layers: 2\n  hidden_size: 64\ntraining:\n  lr: 0.1\n  train_iters: 5\n",
        b"data: {data_path: [a, b], split: '9,1,0'}\nx: &a [1]\ny: *a\n",
    ]


def _read_yaml(data: bytes, folder: Path) -> None:
    (folder / "x.yaml").write_bytes(data)
    yaml_file.read(folder / "x.yaml", Findings())


def _lines() -> list[bytes]:
    return [b'{"text": "one two", "n": 1}\n\n{"text": ["a.", "b."]}\n{"text": "\\u00e9"}\n']


def _tokenizer(kind: str, fields: str, *sound: bytes) -> Callable[[bytes, Path], None]:
    """Read an input as the file of a tokenizer's first flag; the other flags' files are sound."""

    def read(data: bytes, folder: Path) -> None:
        flags: dict[str, Any] = {"tokenizer_type": kind}
        for field, content in zip(fields.split(), (data, *sound), strict=True):
            name = "x.tiktoken" if kind == "TikTokenizer" else "tokenizer.json"
            path = folder / (name if field == "tokenizer_model" else field)
            path.write_bytes(content)
            flags[field] = str(path)
        tokenizer = build_tokenizer(TokenizerConfig(**flags))
        ids = tokenizer.tokenize("a b ab [MASK] \u00e9")
        assert all(0 <= one < tokenizer.vocab_size for one in ids)
        tokenizer.detokenize(ids)

    return read


def _pipeline(folder: Path) -> list[bytes]:
    """Return a tokenizer.json of T5's kind, and one with byte-level BPE."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    made = [(write_t5_tokenizer(folder) / "tokenizer.json").read_bytes()]
    vocab = {"a": 0, "b": 1, "ab": 2, "<unk>": 3}
    bpe = Tokenizer(models.BPE(vocab, [("a", "b")], unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Split(Regex("a+|b+"), "isolated")
    return [*made, bpe.to_str().encode()]


def _sentencepiece(folder: Path) -> list[bytes]:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b ab ba aab abb"] * 20),
        model_writer=model,
        vocab_size=12,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return [model.getvalue()]


# Data that is sent over the network


def _requests() -> list[bytes]:
    bodies = [fuzz_requests._base(path) for path in fuzz_requests.PATHS]
    return [json.dumps(body).encode() for body in bodies]


def _read_request(data: bytes, folder: Path) -> None:
    try:
        body = orjson.loads(data)
    except ValueError:
        raise ApiError(400, "not JSON") from None
    if not isinstance(body, dict):
        raise ApiError(400, "not an object")
    for kind in (CompletionRequest, ChatRequest):
        try:
            request = read_request(kind, body)
        except ApiError:
            continue
        if isinstance(request, ChatRequest):
            _TEMPLATE.render([message.for_template() for message in request.messages])


_TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", {})


def _messages() -> list[bytes]:
    return [pack(Command, Cancel("a"), Shutdown()) + pack(Command, Cancel("b"))]


def _read_messages(data: bytes, folder: Path) -> None:
    list(Unpacker(Command).feed(data))


def _answers() -> list[bytes]:
    answer = {"choices": [{"index": 0, "text": "x", "delta": {"content": "y"}}]}
    error = {"error": {"message": "no"}}
    lines = [f"data: {json.dumps(one)}\n\n" for one in (answer, answer, error)]
    return ["".join([*lines[:2], "data: [DONE]\n\n"]).encode(), "".join(lines).encode()]


def _read_answers(data: bytes, folder: Path) -> None:
    list(text_generation_cli._objects(io.BytesIO(data)))  # type: ignore[arg-type]


_CHECKPOINT = (CheckpointError,)
_CONFIG_FILE, _WEIGHTS = _hub_file("config.json"), _hub_file("model.safetensors")

TARGETS = (
    Target(".idx", made(_indexes), _read_index, (DataError,)),
    Target(".idx of TNTIDX", _cached_indexes, _read_index, (DataError,)),
    Target(
        "TFRecord",
        lambda: [
            b"".join(tfrecords.record(tfrecords.encode(tfrecords.example(i))) for i in (0, 1))
        ],
        _read_records,
        (DataError,),
    ),
    Target(
        "tf.train.Example",
        lambda: [tfrecords.encode(tfrecords.example(0), packed=packed) for packed in (True, False)],
        _read_example,
        (DataError,),
    ),
    Target(".npy shard", made(_shards), _read_shard, (DataError,)),
    Target("index cache", made(_arrays), _read_array, (DataError,)),
    Target("manifest", made(_manifests), lambda data, _: manifest.parse(data), (ValueError,)),
    Target("signed manifest", made(_bodies), _read_signed, _CHECKPOINT),
    Target("shard header", made(_headers), lambda data, _: parse_header(data), (ValueError,)),
    Target("tracker", lambda: [b"3", b"release\n"], _read_tracker, _CHECKPOINT),
    Target("pickle", _pickles, lambda data, _: read_pickle(data, "x"), _CHECKPOINT),
    Target("torch file", made(_zips), _read_zip, _CHECKPOINT),
    Target("HF config", made(_CONFIG_FILE[0]), _CONFIG_FILE[1], _CHECKPOINT),
    Target("HF weights", made(_WEIGHTS[0]), _WEIGHTS[1], _CHECKPOINT),
    Target("YAML", _yaml, _read_yaml, (ConfigError,)),
    Target("JSONL", _lines, lambda data, _: parse_lines(data, ["text"]), ()),
    Target(
        "GPT-2 vocabulary",
        lambda: [json.dumps(GOOD).encode()],
        _tokenizer("GPT2BPETokenizer", "vocab_file merge_file", b"#version: 0.2\na b\n"),
        (DataError,),
    ),
    Target(
        "GPT-2 merges",
        lambda: [b"#version: 0.2\na b\n"],
        _tokenizer("GPT2BPETokenizer", "merge_file vocab_file", json.dumps(GOOD).encode()),
        (DataError,),
    ),
    Target(
        "WordPiece vocabulary",
        lambda: [b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n##b\n"],
        _tokenizer("BertWordPieceCase", "vocab_file"),
        (DataError,),
    ),
    Target(
        "tokenizer.json",
        made(_pipeline),
        _tokenizer("HuggingFaceTokenizer", "tokenizer_model"),
        (DataError, ConfigError),
    ),
    Target(
        "SentencePiece model",
        made(_sentencepiece),
        _tokenizer("GPTSentencePieceTokenizer", "tokenizer_model"),
        (DataError, ConfigError),
    ),
    Target(
        "tiktoken file",
        lambda: [b"".join(b"%s %d\n" % (b64encode(bytes([i])), i) for i in range(256))],
        _tokenizer("TikTokenizer", "tokenizer_model"),
        (DataError, ConfigError),
    ),
    Target("request", _requests, _read_request, (ApiError,)),
    Target("engine messages", _messages, _read_messages, (MessageError, RequestError)),
    Target("answers", _answers, _read_answers, (UserError, HTTPException)),
    *files.TARGETS,
    *folders.TARGETS,
)
