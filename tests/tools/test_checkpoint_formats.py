"""Decisions of tools/checkpoint/util.py, with stand-ins for checkpoints and tokenizers."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpoint.entries import WORD_EMBEDDING, Entry
from megatron.checkpoint.huggingface import files
from megatron.checkpoint.huggingface.writer import parse_bytes
from megatron.config import parse_config
from megatron.config.data import TokenizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.parallel.layout import Layout
from megatron.tools.checkpoint import formats, util
from megatron.tools.checkpoint.formats import SourceModel
from tests.checkpoint.states import meta_of, save

_FLAGS = """
    --num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 8 --micro-batch-size 1
    --max-position-embeddings 8 --mock-data --train-iters 1 --lr 1 --tokenizer-type NullTokenizer
    --vocab-size 99
"""
GPT = parse_config(_FLAGS.split(), world_size=1).config.model
T5 = parse_config(
    [*_FLAGS.split(), "--decoder-seq-length", "8"], world_size=1, architecture="t5"
).config.model


_CLOSED = "x" * 300  # a path that the operating system refuses, like one in a closed folder


def options(*words: str, saver: str = "hf") -> argparse.Namespace:
    base = "--model-type GPT --loader native --load-dir a --save-dir b --saver".split()
    return util.build_parser().read([*base, saver, *words])


def source_of(
    kind: str = "gpt", tokenizer: TokenizerConfig | None = None, rows: int = 100, **more: Any
) -> SourceModel:
    """Return a stand-in for an opened checkpoint."""
    reader = SimpleNamespace(
        meta=more.pop("meta", {}),
        path=Path("ckpt"),
        allow_foreign=False,
        global_shape=lambda _: (rows, 8),
    )
    model = SimpleNamespace(architecture=kind, decoder_layers=2 * (kind == "t5"), lora_rank=None)
    config = SimpleNamespace(
        model=model, tokenizer=tokenizer or TokenizerConfig(), parallel=ParallelConfig()
    )
    return SourceModel(reader, config, **more)


@pytest.mark.parametrize(
    ("text", "size"),
    [("7B", 7), ("12KB", 12_000), ("500MB", 500 * 10**6), ("5GB", 5 * 10**9), ("5", None)]
    + [(text, None) for text in ("0GB", "GB", "1.5GB", "-1GB", "5XB", "5GBKB", "5TB")],
)
def test_sizes_of_shards(text: str, size: int | None) -> None:
    if size is None:
        with pytest.raises(CheckpointError, match=f"--max-shard-size {text}: expected a size"):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == size


_SAVED = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 4,
    "pipeline_model_parallel_split_rank": 2,
}


@pytest.mark.parametrize(
    ("model", "saved", "words", "sizes"),
    [
        (GPT, {}, "", (1, 1, None, None)),
        (GPT, dict.fromkeys(_SAVED), "", (1, 1, None, None)),
        (GPT, {**_SAVED, "pipeline_model_parallel_split_rank": None}, "", (2, 4, None, None)),
        (GPT, _SAVED, "tensor 4 pipeline 2", (4, 2, None, None)),
        (GPT, _SAVED, "pipeline 2 virtual 2", (2, 2, None, 2)),
        (T5, _SAVED, "", (2, 4, 2, None)),
        (T5, _SAVED, "pipeline 2", (2, 2, None, None)),
        (T5, _SAVED, "split 1 pipeline 2", (2, 2, 1, None)),
        (T5, {**_SAVED, "pipeline_model_parallel_split_rank": 3}, "split 2", (2, 4, 2, None)),
    ],
)
def test_files_are_split_like_the_source_unless_flags_differ(
    model: Any, saved: dict[str, Any], words: str, sizes: tuple[int | None, ...]
) -> None:
    found = formats.target_parallel_config(saved, model, options(*_target(words)))
    assert sizes == (
        found.tensor_model_parallel_size,
        found.pipeline_model_parallel_size,
        found.pipeline_model_parallel_split_rank,
        found.num_layers_per_virtual_pipeline_stage,
    )


def _target(words: str) -> list[str]:
    flags = {
        "tensor": "--target-tensor-parallel-size",
        "pipeline": "--target-pipeline-parallel-size",
        "split": "--target-pipeline-parallel-split-rank",
        "virtual": "--target-num-layers-per-virtual-pipeline-stage",
    }
    return [flags.get(word, word) for word in words.split()]


@pytest.mark.parametrize(
    ("model", "words", "message"),
    [
        (GPT, "split 1", "--target-pipeline-parallel-split-rank 1 is for T5 only: drop it"),
        (GPT, "tensor 3", "--target-tensor-parallel-size: Megatron-LM 23.08 gives every"),
        (
            GPT,
            "pipeline 3",
            "--target-pipeline-parallel-size 3: --num-layers 8 cannot be split this way: .*: use "
            "a --target-pipeline-parallel-size of 1, 2, 4 or 8$",
        ),
        (
            GPT,
            "pipeline 2 virtual 3",
            "--target-pipeline-parallel-size 2 --target-num-layers-per-virtual-pipeline-stage 3: "
            "--num-layers 8 cannot .* or 8, and a divisor of a stage's layers for virtual stages$",
        ),
        (T5, "pipeline 4 split 3", "--target-pipeline-parallel-size 4: .* leaves 3 stages for"),
    ],
)
def test_a_target_that_does_not_fit_is_refused(model: Any, words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        formats.target_parallel_config({}, model, options(*_target(words)))


def test_a_vocabulary_file_that_is_given_alone_is_counted(tmp_path: Path) -> None:
    for content, count in (('{"a": 0, "b": 1, "c": 2}', 3), ("a\nb\n", 2), ("7", 1)):
        path = tmp_path / "vocab"
        path.write_text(content)
        given = TokenizerConfig(vocab_file=str(path))
        assert formats._listed_entries(given) == count
        assert formats._listed_entries(replace(given, merge_file="merges")) is None
        assert formats._listed_entries(replace(given, tokenizer_type="GPT2BPETokenizer")) is None
    assert formats._listed_entries(TokenizerConfig()) is None
    missing = TokenizerConfig(vocab_file=str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match=r"--vocab-file .*none: cannot be read: No such"):
        formats._listed_entries(missing)


_CASED = TokenizerConfig(tokenizer_type="BertWordPieceCase")
_SENTINELS = TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_extra_ids=7)


@pytest.mark.parametrize(
    ("kind", "saved", "legacy", "words", "found"),
    [
        ("gpt", _CASED, None, "", (None, 0)),
        ("gpt", None, None, "--tokenizer-model a/tokenizer.json", ("HuggingFaceTokenizer", 0)),
        ("gpt", None, None, "--tokenizer-model a/tokenizer.model", ("Llama2Tokenizer", 0)),
        ("gpt", None, None, "--tokenizer-model .", ("HuggingFaceTokenizer", 0)),  # a folder
        ("gpt", None, None, "--vocab-file v --merge-file m", ("GPT2BPETokenizer", 0)),
        ("gpt", None, None, "--merge-file m", ("GPT2BPETokenizer", 0)),
        ("gpt", None, None, "--vocab-file v --tokenizer-type NullTokenizer", ("NullTokenizer", 0)),
        ("bert", None, None, "--vocab-file v", ("BertWordPieceLowerCase", 0)),
        ("bert", _CASED, None, "--vocab-file v", ("BertWordPieceCase", 0)),
        ("bert", _SENTINELS, None, "--vocab-file v", ("BertWordPieceLowerCase", 7)),
        ("t5", None, "BertWordPieceCase", "--vocab-file v", ("BertWordPieceCase", 9)),
        ("t5", _SENTINELS, "other", "--vocab-file v", ("BertWordPieceLowerCase", 9)),
        (
            *("t5", _SENTINELS, "other"),
            "--vocab-file v --vocab-extra-ids 3",
            ("BertWordPieceLowerCase", 3),
        ),
    ],
)
def test_the_type_of_a_tokenizer_follows_from_the_model_and_its_files(
    kind: str,
    saved: TokenizerConfig | None,
    legacy: str | None,
    words: str,
    found: tuple[str | None, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = []
    monkeypatch.setattr(formats, "_entries", built.append)
    meta = {"legacy_args": {"tokenizer_type": legacy, "vocab_extra_ids": 9}} if legacy else {}
    given = formats._given_tokenizer(source_of(kind, saved, meta=meta), options(*words.split()))
    assert (given.tokenizer_type, given.vocab_extra_ids) == found
    assert built == [given]


@pytest.mark.parametrize(
    ("kind", "fields", "names"),
    [
        ("gpt", {"tokenizer_model": "x.json"}, {"tokenizer.json": "x.json"}),
        ("gpt", {"tokenizer_model": "x.model"}, {"tokenizer.model": "x.model"}),
        ("t5", {"tokenizer_model": "x.model"}, {"spiece.model": "x.model"}),
        ("gpt", {"vocab_file": "v", "merge_file": "m"}, {"vocab.json": "v", "merges.txt": "m"}),
        ("bert", {"vocab_file": "v", "tokenizer_type": "BertWordPieceCase"}, {"vocab.txt": "v"}),
        ("gpt", {"vocab_file": "v", "merge_file": "none"}, {"vocab.json": "v"}),
        ("gpt", {"vocab_file": ".", "merge_file": "m"}, {"merges.txt": "m"}),
    ],
)
@pytest.mark.parametrize("is_given", [True, False])
def test_files_of_a_tokenizer_have_the_names_of_hugging_face(
    kind: str,
    fields: dict[str, str],
    names: dict[str, str],
    is_given: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x.json", "x.model", "v", "m"):
        Path(name).write_text(f"content of {name}")
    config = TokenizerConfig(**fields)  # type: ignore[arg-type]
    source = source_of(kind, TokenizerConfig() if is_given else config)
    given = config if is_given else TokenizerConfig()
    expected = {name: f"content of {path}".encode() for name, path in names.items()}
    monkeypatch.setattr(formats, "files_of", lambda config: formats._FILES)
    monkeypatch.setattr(formats, "_entries_or_none", lambda config: 99)
    assert formats._tokenizer_files(source, given) == expected
    monkeypatch.setattr(formats, "_entries_or_none", lambda config: None)  # it cannot be built
    assert formats._tokenizer_files(source, given) == (expected if is_given else {})


def test_ids_of_special_tokens_are_those_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    special = {"bos": (), "eod": (7, 8), "pad": (0,)}
    built = []

    def build(config: TokenizerConfig) -> Any:
        built.append(config)
        if config == _CASED:
            raise DataError("no such file")
        return SimpleNamespace(special_ids=special.get)

    monkeypatch.setattr(formats, "build_tokenizer", build)
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    found = {"bos_token_id": None, "eos_token_id": 7, "pad_token_id": 0}
    for kind, saved, given, ids, used in (
        ("bert", _SENTINELS, _SENTINELS, {}, []),
        ("gpt", _SENTINELS, None, found, [_SENTINELS]),
        ("gpt", _CASED, _SENTINELS, found, [_SENTINELS]),
        ("gpt", _CASED, None, none, [_CASED]),
        ("gpt", None, None, none, []),
    ):
        built.clear()
        assert formats._token_ids(source_of(kind, saved), given or TokenizerConfig()) == ids
        assert built == used


@pytest.mark.parametrize(
    ("words", "template", "saved", "given", "rows"),
    [
        ("--true-vocab-size 50", {"vocab_size": 90}, 80, 70, 50),
        ("", {"vocab_size": 90}, 80, 70, 90),
        ("", {"vocab_size": 100}, 80, 70, 100),
        ("", {"vocab_size": 101}, 80, 70, 70),
        ("", {"vocab_size": "x"}, 80, None, 80),
        ("", None, 80, None, 80),
        ("", None, 100, None, 100),
        ("", None, 101, None, 100),
        ("", None, None, None, 100),
        ("", {}, 80, 101, 100),
    ],
)
def test_the_number_of_rows_that_are_exported(
    words: str,
    template: dict[str, object] | None,
    saved: int | None,
    given: int | None,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(formats, "_entries_or_none", lambda config: saved)
    monkeypatch.setattr(formats, "_entries", lambda config: given)
    tokenizer = TokenizerConfig() if given is None else _SENTINELS
    found = formats._true_vocabulary(source_of(), options(*words.split()), tokenizer, template)
    assert found == rows


@pytest.mark.parametrize(
    ("before", "end", "after"),
    [
        ("{}", 5, {"eos_token_id": 5}),
        ('{"eos_token_id": null}', 5, {"eos_token_id": 5}),
        ('{"eos_token_id": 3}', 5, {"eos_token_id": [3, 5]}),
        ('{"eos_token_id": [3, 4], "a": 1}', 5, {"eos_token_id": [3, 4, 5], "a": 1}),
        ('{"eos_token_id": [3, 5]}', 5, None),
        ('{"eos_token_id": 5}', 5, None),
        ('{"eos_token_id": 3}', None, None),
        ("[1]", 5, None),
        ("no JSON", 5, None),
    ],
)
@pytest.mark.parametrize("template", ["template.jinja", None])
def test_the_end_of_a_turn_ends_texts(
    before: str,
    end: int | None,
    after: dict[str, Any] | None,
    template: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (
        ("find_template", "text of the template"),
        ("_entries_or_none", 99),
        ("special_tokens", {}),
        ("build_tokenizer", None),
        ("find_turn_end", end),
    ):
        monkeypatch.setattr(formats, name, lambda *_, value=value: value)
    config = TokenizerConfig(chat_template=template)
    content = {files.GENERATION_CONFIG: before.encode()}
    formats._add_chat(content, config)
    assert content.pop(files.CHAT_TEMPLATE, None) == (b"text of the template" if template else None)
    written = content.pop(files.GENERATION_CONFIG)
    assert (written == before.encode()) if after is None else (json.loads(written) == after)
    for name in ("find_template", "_entries_or_none"):
        with monkeypatch.context() as patch:
            patch.setattr(formats, name, lambda *_: None)
            content = {files.GENERATION_CONFIG: before.encode()}
            formats._add_chat(content, config)
            assert content == {files.GENERATION_CONFIG: before.encode()}


@pytest.mark.parametrize(
    ("words", "saver", "entries", "message"),
    [
        ("", "hf", 200, ""),
        ("--true-vocab-size 101", "hf", None, "ckpt has 100 rows: give at most that many"),
        ("--true-vocab-size 100", "hf", 200, ""),
        ("--true-vocab-size 99", "hf", 200, "the tokenizer has 200 entries.* give at least 100"),
        ("--true-vocab-size 60", "hf", 60, ""),
        ("--true-vocab-size 59", "hf", 60, "the tokenizer has 60 entries.* give at least 60,"),
        ("--true-vocab-size 59", "peft", 60, ""),
        ("--true-vocab-size 1", "hf", None, ""),
    ],
)
def test_every_entry_keeps_its_row(
    words: str, saver: str, entries: int | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "_text_entries", lambda *_: entries)
    asked = options(*words.split(), saver=saver)
    if message:
        with pytest.raises(ConfigError, match=message):
            formats.check_vocabulary(source_of(), asked)
    else:
        formats.check_vocabulary(source_of(), asked)


def test_the_entries_of_a_tokenizer_s_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(config: TokenizerConfig) -> Any:
        if config.tokenizer_type == "BertWordPieceCase":
            raise DataError("no such file")
        return SimpleNamespace(text_vocab_size=77, vocab_size=78)

    monkeypatch.setattr(formats, "build_tokenizer", build)
    monkeypatch.setattr(formats.files, "tokenizer_in", lambda *_, **__: _SENTINELS)
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("a\nb\n")
    alone, merges = ["--vocab-file", str(vocabulary)], ["--merge-file", str(vocabulary)]
    for saved, companions, words, saver, count in (
        (None, None, [], "hf", None),
        (None, tmp_path, [], "hf", 77),
        (_SENTINELS, None, [], "hf", 77),
        (_CASED, None, [], "hf", None),
        (_CASED, tmp_path, [], "hf", None),
        (_CASED, None, [*alone, *merges], "hf", 77),
        (_CASED, None, alone, "megatron", 2),
        (_CASED, None, [*alone, *merges], "megatron", 77),
    ):
        source = source_of("gpt", saved, companions=companions)
        assert formats._text_entries(source, options(*words, saver=saver)) == count


def test_companion_files_are_in_a_folder_of_a_model(tmp_path: Path) -> None:
    formats.check_companions(options())
    with pytest.raises(ConfigError, match="there is no such folder: give a folder with config.js"):
        formats.check_companions(options("--hf-files", str(tmp_path / "none")))
    asked = options("--hf-files", str(tmp_path))
    with pytest.raises(ConfigError, match="the folder has no model files"):
        formats.check_companions(asked)
    (tmp_path / "tokenizer.json").touch()
    formats.check_companions(asked)


def test_paths_of_a_copied_tokenizer_are_replaced(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in ("old", "new", "other"))
    for folder in (old, new, other):
        folder.mkdir()
        for name in ("vocab", "merges"):
            (folder / name).touch()
    config = TokenizerConfig(vocab_file=str(old / "vocab"), merge_file=str(other / "merges"))
    found = formats._with_copied_paths(config, old, new)
    assert (found.vocab_file, found.merge_file) == (str(new / "vocab"), str(other / "merges"))
    (other / "merges").unlink()  # the run's own file is gone
    assert formats._with_copied_paths(config, old, new).merge_file == str(new / "merges")
    (new / "merges").unlink()
    assert formats._with_copied_paths(config, old, new).merge_file == str(other / "merges")
    assert formats._with_copied_paths(TokenizerConfig(), old, new) == TokenizerConfig()


@pytest.mark.parametrize(
    ("kind", "rank", "message"),
    [
        ("gpt", None, "--saver peft: ckpt has no adapters: use --saver hf for the whole model"),
        ("bert", 4, "--saver peft: ckpt holds a bert, but PEFT's files are written only for a gpt"),
    ],
)
def test_adapters_of_a_gpt_are_needed_for_peft(kind: str, rank: int | None, message: str) -> None:
    source = source_of(kind)
    source.config.model.lora_rank = rank  # type: ignore[misc]
    with pytest.raises(CheckpointError, match=message):
        formats.save_peft(source, options(saver="peft"), lambda _: None)


@pytest.mark.parametrize(
    ("formats_", "words", "told"),
    [
        ("native megatron", "tensor 2 pipeline 2", []),
        ("native hf", "", []),
        ("native hf", "--model-family llama --max-shard-size 1GB --hf-files x", []),
        ("native peft", "--model-family llama", []),
        ("native peft", "--max-shard-size 1GB", ["--max-shard-size 1GB: no effect"]),
        ("hf native", "--max-shard-size 5GB", []),
        (
            "hf native",
            "--model-family llama --max-shard-size 1GB --hf-files x tensor 2 split 1",
            [
                "--target-tensor-parallel-size 2: no effect: the written checkpoint loads in any",
                "--target-pipeline-parallel-split-rank 1: no effect",
                "--model-family llama: no effect: it is for --saver hf and peft",
                "--max-shard-size 1GB: no effect: it is for --saver hf",
                "--hf-files x: no effect: --load-dir has its own files",
            ],
        ),
        ("llama2_hf native", "--hf-files x", ["--hf-files x: no effect"]),
        (
            "native hf",
            "--megatron-path /m --max-queue-size 5 --no-checking",
            [
                "--megatron-path /m: not needed: none of its code is imported",
                "--max-queue-size 5: there is no queue: one process converts",
                "--no-checking: names and shapes are always checked",
            ],
        ),
    ],
)
def test_flags_without_effect_are_told(formats_: str, words: str, told: list[str]) -> None:
    loader, saver = formats_.split()
    found = list(util.notices(options(*_target(words), "--loader", loader, saver=saver)))
    assert len(found) == len(told)
    assert all(line.startswith(start) for line, start in zip(found, told, strict=True))


@pytest.mark.parametrize(
    ("formats_", "words", "message"),
    [
        ("hf hf", "--verify", "--verify compares our model with Hugging Face's: exactly one of"),
        ("native megatron", "--verify", "--verify compares our model with Hugging Face's"),
        ("native hf", "--verify --verify-tolerance -1", "--verify-tolerance -1: give 0 or more"),
        ("native hf", "--keep-optimizer", "--keep-optimizer: a Hugging Face folder has only we"),
        ("hf native", "--keep-optimizer", "--keep-optimizer: a Hugging Face folder has only we"),
        ("native hf", "--true-vocab-size 0", "--true-vocab-size 0: must be at least 1"),
        ("native native", "tensor 0", "--target-tensor-parallel-size 0: must be at least 1"),
        ("native native", "tensor 1 --hf-files none", "--hf-files none: there is no such folder"),
        ("native native", f"tensor 1 --hf-files {_CLOSED}", "--hf-files x+: there is no such fold"),
    ],
)
def test_mistakes_are_found_before_anything_is_read(
    formats_: str, words: str, message: str
) -> None:
    loader, saver = formats_.split()
    with pytest.raises(ConfigError, match=f"^{message}"):
        next(util.run(options(*_target(words), "--loader", loader, saver=saver)))


@pytest.mark.parametrize("kind", ["gpt", "bert"])
@pytest.mark.parametrize(
    ("words", "saver", "meta", "message"),
    [
        ("--keep-optimizer", "native", {}, "--keep-optimizer: ckpt has no .*: drop the flag"),
        ("--keep-optimizer", "native", {"optimizer": "adam"}, ""),
        ("", "native", {}, ""),
    ],
)
def test_the_source_must_be_what_the_flags_say(
    kind: str,
    words: str,
    saver: str,
    meta: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = source_of(kind, meta=meta)
    monkeypatch.setattr(formats, "LOADERS", {"native": lambda _: source})
    monkeypatch.setattr(formats, "SAVERS", {saver: lambda *_: Path("written")})
    asked = options(*words.split(), saver=saver)
    if kind == "bert":
        with pytest.raises(ConfigError, match="--model-type GPT: ckpt is a BERT: give --model-ty"):
            list(util.run(asked))
    elif message:
        with pytest.raises(CheckpointError, match=message):
            list(util.run(asked))
    else:
        assert list(util.run(asked)) == ["ckpt -> written"]


def test_a_tokenizer_in_a_closed_folder_is_not_needed(tmp_path: Path) -> None:
    """Such as the home folder of the user who trained the model."""
    model = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": f"{_CLOSED}/t.json"}
    rows = {name: Entry.whole(torch.zeros(8, 8)) for name in (WORD_EMBEDDING, formats._POSITIONS)}
    meta = {
        **meta_of(1),
        "padded_vocab_size": 8,
        "config": {"model": model, "tokenizer": tokenizer},
    }
    save(tmp_path, 1, rows, meta, Layout.single())
    source = formats.load_checkpoint(options("--load-dir", str(tmp_path)))
    assert source.companions is None
    assert source.config.tokenizer.tokenizer_model == tokenizer["tokenizer_model"]
