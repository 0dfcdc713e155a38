"""The whole preprocessing: the recording from its command line, kills, processes, refusals."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from megatron.config.data import TokenizerConfig
from megatron.config.fields import fields_of
from megatron.config.retro_preprocessing import RETRO_SECTIONS, STAGES, RetroPreprocessing
from megatron.data.indexed import IndexedDataset
from megatron.device import Device
from megatron.durable import TEMPORARY
from megatron.errors import EXIT_OK, CheckpointError, ConfigError, DataError
from megatron.parallel.layout import Layout
from megatron.processes.launch import Launch
from megatron.retro import command
from megatron.retro.database import merged_file
from megatron.retro.embedding import EmbedderOptions, Masking
from tests.data.corpus import write_vocabulary
from tests.distributed import run_distributed, start_method
from tests.repository import ROOT
from tests.retro.corpus import options, write_dataset
from tests.retro.recorded import read
from tests.tasks.toy import save_bert

WIDTH = 8


class HashEmbedder:
    """A stand-in for a BERT: a text's vector depends on its characters."""

    width = WIDTH
    max_length = 64

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return a vector per text."""
        rows = [texts[i] for i in range(len(texts))]
        digests = [hashlib.sha256(text.encode()).digest()[:WIDTH] for text in rows]
        return np.array([list(digest) for digest in digests], np.float32) / 256


@pytest.fixture(autouse=True)
def _stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "golden" not in request.fixturenames:
        monkeypatch.setattr(command, "build_embedder", lambda options, device: HashEmbedder())


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Return a command line without --retro-workdir."""
    random = np.random.default_rng(3)
    documents = [np.append(random.integers(8, 264, random.integers(5, 60)), 1) for _ in range(40)]
    prefix = write_dataset(tmp_path / "text_document", documents)
    vocabulary = write_vocabulary(tmp_path / "vocab.txt")
    return [
        *("--retro-gpt-data-path", "1.0", prefix, "--retro-gpt-split", "80,10,10"),
        *("--retro-gpt-tokenizer-type", "CharacterLevelTokenizer"),
        *("--retro-gpt-seq-length", "16", "--retro-gpt-chunk-length", "8"),
        *("--retro-gpt-eval-interval", "2", "--retro-gpt-eval-iters", "1"),
        *("--train-iters", "4", "--global-batch-size", "4"),
        *("--retro-bert-tokenizer-type", "BertWordPieceLowerCase"),
        *("--retro-bert-vocab-file", str(vocabulary), "--retro-bert-max-chunk-length", "64"),
        *("--bert-embedder-type", "huggingface", "--bert-embedder-load", "anywhere"),
        *("--retro-index-nfeats", str(WIDTH), "--retro-index-str", "IVF4,Flat"),
        *("--retro-index-ntrain", "60", "--retro-block-size", "40"),
        *("--retro-doc-block-size", "15", "--retro-query-nprobe", "4"),
        *("--retro-query-num-neighbors-query", "8", "--retro-query-num-neighbors-save", "4"),
        *("--retro-threads", "1"),  # a forked process cannot use OpenMP threads
    ]


def preprocess(words: Sequence[str], workdir: Path, *more: str) -> None:
    command.run([*words, "--retro-workdir", str(workdir), *more], Launch())


def tables(workdir: Path) -> dict[str, bytes]:
    """Return every file except those that name the folder."""
    files = sorted(path for path in workdir.rglob("*") if path.is_file())
    return {
        str(path.relative_to(workdir)): path.read_bytes()
        for path in files
        if path.suffix not in (".json", ".lock")
    }


def test_megatron_s_own_command_line_makes_the_recorded_folder(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = golden / "retro_fp32"
    for path in (golden / "data").glob("*.*"):  # not the cache, in which this run would write
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / path.name).symlink_to(path)
    (tmp_path / "bert_ckpt").symlink_to(golden / "bert_fp32" / "ckpt")
    monkeypatch.chdir(tmp_path)
    # Clusters of nearly equal vectors may differ, so the index is trained on the recorded ones.
    theirs, ours = recorded / "workdir", tmp_path / "retro_fp32" / "workdir"
    words = (recorded / "preprocess_flags.txt").read_text().split()
    asked = [*words, "--retro-compatible", "--retro-threads", "1"]
    command.run([*asked, "--retro-tasks", "db-build"], Launch())
    vectors = ours / "index" / "train_emb" / "train_0.970.bin"
    vectors.parent.mkdir(parents=True)
    vectors.write_bytes((theirs / "index" / "train_emb" / "train_0.970.bin").read_bytes())
    command.run(asked, Launch())

    equal, count = 0, 0
    for path in theirs.rglob("*.hdf5"):
        name = path.relative_to(theirs)
        if name.parts[:2] == ("index", "train_emb"):
            continue
        with h5py.File(path) as old, h5py.File(ours / name) as new:
            assert set(old) == set(new)
            for key, table in old.items():
                assert (new[key].shape, new[key].dtype) == (table.shape, table.dtype)
                if name.parts[0] == "db":
                    assert new[key][()].tobytes() == table[()].tobytes()
                elif key == "neighbors":
                    equal += int((new[key][()] == table[()]).sum())
                    count += table.size
                else:  # a list number and a vector
                    codes = np.stack([new[key][()], table[()]])
                    assert (codes[0, :, 0] == codes[1, :, 0]).mean() > 0.99
                    old_vectors, new_vectors = codes[:, :, 1:].copy().view(np.float32)
                    assert np.abs(old_vectors - new_vectors).max() < 1e-6
    assert equal > 0.99 * count
    args, original = (json.loads((folder / "args.json").read_text()) for folder in (ours, theirs))
    told = {name for section in RETRO_SECTIONS for name in section.__annotations__}
    for name in told & original.keys():
        assert args[name] == original[name]
    for name in ("num_layers", "hidden_size", "seed", "global_batch_size", "params_dtype"):
        assert args[name] == original[name]


def _run_and_die(words: list[str], workdir: Path, writes: int) -> None:
    """Preprocess, and kill this process at the end of a write, before the file gets its name."""
    replace_name, left = os.replace, [writes]

    def killing(source: Any, target: Any) -> None:
        if not str(target).endswith(".json"):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
        replace_name(source, target)

    os.replace = killing  # type: ignore[assignment]
    preprocess(words, workdir)


def test_killed_at_every_file_and_restarted_it_makes_the_same_folder(
    words: list[str], tmp_path: Path
) -> None:
    kept = ("--retro-index-no-delete-training-embeddings", "--retro-index-no-delete-added-codes")
    asked = [*words, *kept]
    preprocess(asked, tmp_path / "whole")
    whole = tables(tmp_path / "whole")
    workdir = tmp_path / "killed"
    kills = 0
    while kills <= len(whole):
        child = start_method().Process(target=_run_and_die, args=(asked, workdir, 1))
        child.start()
        child.join(240)
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        kills += 1
    assert kills >= len(whole) - 1  # each restart finished one file and lost the next
    found = tables(workdir)
    assert found.keys() == whole.keys()
    assert [name for name in whole if found[name] != whole[name]] == []


def assert_neighbors(workdir: Path, run: command.Preprocessing) -> None:
    """Compare the neighbors of all chunks with a search of the whole database.

    Of the 8 nearest chunks, up to 4 that are not of the sample's documents are kept.
    """
    database, embedder = run._database("train"), HashEmbedder()
    found = embedder.embed(run._texts("train").between(0, len(database)))
    origins = database.documents(np.arange(len(database)))
    for split, chunks in run._query_chunks().items():
        (folder,) = (workdir / "query").glob(f"{split}_*")
        paths = sorted(folder.iterdir())
        stored = np.concatenate([read(path, "neighbors") for path in paths])
        vectors = embedder.embed(chunks.texts(0, len(chunks)))
        assert stored.shape == (len(chunks), 4)
        for i, (vector, row) in enumerate(zip(vectors, stored, strict=True)):
            distances = ((found - vector) ** 2).sum(1)
            nearest = np.argsort(distances, kind="stable")[:8]
            _, documents = chunks.documents(i // 2)
            others = nearest[~np.isin(origins[nearest, 1], documents)][:4]
            kept = row[row != -1]
            assert (row[len(kept) :] == -1).all()
            assert distances[kept].tolist() == distances[others].tolist()


def test_stages_one_by_one_make_the_same_folder(words: list[str], tmp_path: Path) -> None:
    preprocess(words, tmp_path / "whole")
    assert_neighbors(tmp_path / "whole", opened(words, "--retro-workdir", str(tmp_path / "whole")))
    for stage in STAGES:
        preprocess(words, tmp_path / "staged", "--retro-tasks", stage)
    assert tables(tmp_path / "staged") == tables(tmp_path / "whole")
    names = {path.parts[0] for path in map(Path, tables(tmp_path / "whole"))}
    assert names == {"db", "index", "query"}
    preprocess(words, tmp_path / "two", "--retro-tasks", "db-build,index-build")
    assert not (tmp_path / "two" / "query").exists()


def _preprocess_together(layout: Layout, words: list[str], workdir: Path) -> None:
    parsed = command.parse([*words, "--retro-workdir", str(workdir)], layout.world.size)
    options = RetroPreprocessing(*parsed.extra)
    command.Preprocessing(parsed.config, options, Device.cpu(), layout).run()


def test_processes_make_the_same_folder(words: list[str], tmp_path: Path) -> None:
    preprocess(words, tmp_path / "alone")
    run_distributed(2, _preprocess_together, words, tmp_path / "two")
    assert tables(tmp_path / "two") == tables(tmp_path / "alone")


def test_what_a_run_prints(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preprocess(words, tmp_path / "w", "--use-pipelining")
    printed = capsys.readouterr().out
    shown = [line.strip() for line in printed.splitlines() if "---" not in line]
    assert "--use-pipelining is an old flag" in shown.pop(0)
    rows = dict(re.split("  +", line) for line in shown[1:10])
    assert shown[0] == f"tools/retro/main.py: {tmp_path / 'w'}"
    assert re.fullmatch(r"0.0 MB, temporarily 0.0 MB; .* free", rows.pop("disk"))
    for name, chunks in (("db-build", 177), ("embedding", 307)):
        assert re.fullmatch(rf"about 1 s for {chunks} chunks, at .* chunks/s", rows.pop(name))
    assert rows == {
        "stages": "db-build, index-train, index-add, query-pretraining-neighbors",
        "Megatron-LM's bugs": "fixed",
        "processes": f"1, {Device.cpu().description}",
        "data": "40 documents, 1,257 tokens",
        "chunks": "at most 177",
        # Two per sample: 4 updates of 4 samples, 3 evaluations and the test; each with one spare.
        "chunks of samples": "34 train, 26 valid, 10 test",
    }
    assert shown[10:] == [
        "db-build ...",
        "index-train ...",
        "embedded 0 to 39 of 60 chunks",
        "embedded 40 to 59 of 60 chunks",
        "training IVF4,Flat on 60 vectors",
        "index-add ...",
        "encoded 0 to 39 of 147 chunks",
        "encoded 40 to 79 of 147 chunks",
        "encoded 80 to 119 of 147 chunks",
        "encoded 120 to 146 of 147 chunks",
        "147 of 147 chunks are in the index",
        "query-pretraining-neighbors ...",
        "train: neighbors of 0 to 33 of 34",
        "valid: neighbors of 0 to 25 of 26",
        "test: neighbors of 0 to 9 of 10",
        f"{tmp_path / 'w'} is complete",
    ]


def opened(words: Sequence[str], *more: str, processes: int = 1) -> command.Preprocessing:
    """Return the preprocessing of a command line, which has not run."""
    parsed = command.parse([*words, *more], processes)
    options = RetroPreprocessing(*parsed.extra)
    return command.Preprocessing(parsed.config, options, Device.cpu(), Layout.single())


def test_the_run_that_flags_describe(words: list[str], tmp_path: Path) -> None:
    """A BERT that no stage loads is as small as possible; the length defaults to Megatron's."""
    words += ["--retro-workdir", str(tmp_path / "w")]
    # Batches need not divide among processes, which embed and do not train.
    config = command.parse(words, 3).config
    assert (config.model.num_layers, config.model.hidden_size) == (1, 64)
    assert (config.model.num_attention_heads, config.model.max_position_embeddings) == (1, 64)
    assert (config.training.micro_batch_size, config.training.global_batch_size) == (1, 4)
    assert (config.data.seq_length, config.schedule.lr) == (64, 1e-4)
    at = words.index("--retro-bert-max-chunk-length")
    config = command.parse([*words[:at], *words[at + 2 :]], 1).config
    assert (config.data.seq_length, config.model.max_position_embeddings) == (256, 256)
    with pytest.raises(ConfigError, match="--hidden-dropout 2"):
        command.parse([*words, "--hidden-dropout", "2"], 1)
    with pytest.raises(ConfigError, match="--bf16") as caught:
        command.parse([*words, "--bf16", "--fp16"], 1)
    assert "--retro-workdir" not in str(caught.value)


def test_the_split_and_the_samples(words: list[str], tmp_path: Path) -> None:
    words += ["--retro-workdir", str(tmp_path / "w"), "--split", "50,50,0"]
    for flags, documents in ([], 32), (["--retro-compatible"], 20):
        ((corpus, _),) = opened(words, *flags).corpora
        assert corpus.n_docs_train == documents
    at = words.index("--train-iters")
    rest = [*words[:at], *words[at + 2 :]]
    # 64 samples in 16 updates, which have 9 evaluations of 4 samples
    for flags in (["--train-samples", "64"], ["--train-tokens", str(64 * 16)]):
        chunks = opened(rest, *flags)._query_chunks()
        counts = {split: len(one) // 2 for split, one in chunks.items()}
        assert counts == {"train": 65, "valid": 37, "test": 5}, flags


def test_the_network_that_embeds(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either flag can name it; --bf16 or --fp16 set its format. Megatron-LM masks its words."""
    asked: list[EmbedderOptions] = []
    monkeypatch.setattr(command, "build_embedder", lambda options, _: asked.append(options))
    words += ["--retro-workdir", str(tmp_path / "w"), "--retro-bert-batch-size", "7"]
    at = words.index("--bert-embedder-load")
    unnamed = [*words[:at], *words[at + 2 :]]
    opened(words)._build_embedder()
    tokenizer = TokenizerConfig(
        tokenizer_type="BertWordPieceLowerCase", vocab_file=str(tmp_path / "vocab.txt")
    )
    expected = EmbedderOptions(
        kind="huggingface",
        load="anywhere",
        tokenizer=tokenizer,
        batch_size=7,
        max_length=64,
        dtype="fp32",
        flag="--bert-embedder-load",
    )
    assert asked == [expected]
    opened(unnamed, *"--load there --bf16 --allow-foreign-checkpoints".split())._build_embedder()
    changed = replace(expected, load="there", dtype="bf16", flag="--load", allow_foreign=True)
    assert asked.pop() == changed
    masked = ("--fp16", "--retro-compatible", "--seed", "5", "--mask-prob", "0.25", "--load", "a")
    opened(words, *masked)._build_embedder()
    assert asked.pop() == replace(expected, dtype="fp16", masking=Masking(5, 0.25))
    at = words.index("--retro-bert-tokenizer-type")
    own = [*words[:at], *words[at + 4 :], "--retro-tasks", "index-train"]
    opened(own)._build_embedder()
    assert asked.pop() == replace(expected, tokenizer=None)
    with pytest.raises(ConfigError, match="--load is required to embed chunks"):
        opened(unnamed)._build_embedder()


@pytest.mark.parametrize("flag", ["--load", "--bert-embedder-load"])
def test_the_network_s_size_is_its_checkpoint_s(
    words: list[str], tmp_path: Path, flag: str
) -> None:
    save_bert(tmp_path)
    at = words.index("--bert-embedder-type")
    words[at : at + 4] = [flag, str(tmp_path / "bert"), "--retro-workdir", str(tmp_path / "w")]
    words += ["--retro-bert-max-chunk-length", "24"]
    model = command.parse(words, 1).config.model
    assert (model.num_layers, model.hidden_size, model.max_position_embeddings) == (2, 16, 24)


def test_the_arguments_of_the_run(words: list[str], tmp_path: Path) -> None:
    words += ["--retro-workdir", str(tmp_path / "w")]
    for flags, dtype in (["--bf16"], "bfloat16"), (["--fp16"], "float16"), ([], "float32"):
        arguments = opened(words, *flags)._run_arguments()
        assert str(arguments["params_dtype"]) == f"torch.{dtype}"
        assert arguments["padded_vocab_size"] == 512  # 407 entries in multiples of 128
    arguments = opened(words, "--make-vocab-size-divisible-by", "1")._run_arguments()
    assert arguments["padded_vocab_size"] == 407


def test_the_program(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = [*words, "--retro-workdir", str(tmp_path / "w"), "--retro-tasks", "db-build"]
    monkeypatch.setattr(sys, "argv", ["main.py", *asked])
    left = tmp_path / "w" / f"args.json{TEMPORARY}5"  # by a run that was killed
    other = tmp_path / "w" / "checkpoints" / f"iter_0000005{TEMPORARY}5"
    for path in (left, other):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert command.main() == EXIT_OK
    assert not left.exists()
    assert other.exists()
    with h5py.File(merged_file(tmp_path / "w", "train")) as file:
        rows = file["chunks"][()]
    # Dataset, documents, starts, ends, and numbers of BERT tokens, which are words and signs
    assert (rows.shape, rows.sum(0).tolist()) == ((147, 5), [0, 2169, 2616, 3670, 405])
    monkeypatch.setattr(sys, "argv", ["main.py", "--nothing"])
    for argv, shown in ((["--help"], "--retro-tasks"), (["--help-all"], "--retro-threads")):
        with pytest.raises(SystemExit) as ended:
            command.main(argv)
        assert ended.value.code == 0
        printed = capsys.readouterr().out
        assert "usage: tools/retro/main.py" in printed
        assert shown in printed
        if argv == ["--help"]:
            assert "--train-iters" not in printed, "preprocessing is not training"


def test_the_disk_space_of_each_stage(tmp_path: Path) -> None:
    from megatron.retro.estimate import plan_amounts

    prefix = write_dataset(tmp_path / "d", [range(1, 17), range(1, 9), range(1, 4)])
    asked = options(tmp_path, prefix, ntrain=3)
    index = replace(asked.index, retro_index_nfeats=4, retro_index_str="Flat")
    amounts = plan_amounts(replace(asked, index=index), [IndexedDataset(prefix)], queries=5)
    database, training, adding, query = amounts.values()
    chunks, documents = 2 + 1 + 1, 3
    assert database == (chunks, 36 * chunks + 40 * documents + 20 * 3, 0)
    vectors = 2 * 3 * 4 * 4  # two copies of 3 vectors with 4 fp32 numbers
    assert (training.chunks, training.size + training.temporary) == (3, vectors)
    codes = chunks * 4 * 4
    assert (adding.chunks, adding.size + adding.temporary) == (chunks, 2 * codes + 8 * chunks)
    assert query == (5, 5 * 8 * index.retro_query_num_neighbors_save, 0)


@pytest.mark.parametrize(
    ("size", "text"),
    [(999_940_000, "999.9 MB"), (10**9, "1.0 GB"), (10**12, "1.0 TB"), (25 * 10**14, "2,500.0 TB")],
)
def test_sizes_are_readable(size: int, text: str) -> None:
    from megatron.retro.estimate import _size

    assert _size(size) == text


def test_a_disk_that_is_too_small_is_reported(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from megatron.retro import estimate

    class Usage:
        free = 10

    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda path: Usage)
    preprocess(words, tmp_path / "w", "--retro-tasks", "db-build")
    assert (
        "the stages need up to 0.0 MB, but 0.0 MB are free: free space" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--retro-gpt-seed", "5"], "query: --retro-gpt-seed 1234 in the folder, 5 here"),
        (["--retro-gpt-seq-length", "32"], "--retro-gpt-seq-length 16 in the folder, 32 here"),
        (["--retro-gpt-split", "70,20,10"], "db: --retro-gpt-split 80,10,10 in the folder"),
        (["--retro-compatible", "--split", "80,20"], "--retro-compatible False in the folder"),
    ],
)
def test_a_folder_of_something_else_is_refused_before_it_changes(
    words: list[str], tmp_path: Path, more: list[str], message: str
) -> None:
    workdir = tmp_path / "w"
    preprocess(words, workdir)
    before = {**tables(workdir), "args": (workdir / "args.json").read_bytes()}
    with pytest.raises(DataError, match=message):
        preprocess(words, workdir, *more)
    assert {**tables(workdir), "args": (workdir / "args.json").read_bytes()} == before


def test_other_data_of_the_same_name_is_refused(words: list[str], tmp_path: Path) -> None:
    preprocess(words, tmp_path / "w", "--retro-tasks", "db-build")
    write_dataset(tmp_path / "text_document", [np.arange(8, 40)] * 40)
    with pytest.raises(DataError, match="have the same names, but different content"):
        preprocess(words, tmp_path / "w")


def test_other_words_for_the_same_bert_are_refused(words: list[str], tmp_path: Path) -> None:
    preprocess(words, tmp_path / "w", "--retro-tasks", "db-build")
    with (tmp_path / "vocab.txt").open("a") as file:
        file.write("another\n")
    with pytest.raises(DataError, match="--retro-bert-"):
        preprocess(words, tmp_path / "w")


def test_a_missing_database_is_named_by_later_stages(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"indexed_dataset_infos\.json does not exist.*db-build"):
        preprocess(words, tmp_path / "w", "--retro-tasks", "index-train")
    preprocess(words, tmp_path / "w", "--retro-tasks", "db-build")
    merged_file(tmp_path / "w", "sampled").unlink()
    with pytest.raises(DataError, match=r"sampled\.hdf5 does not exist.*db-build"):
        preprocess(words, tmp_path / "w", "--retro-tasks", "index-train")


def test_a_second_job_in_the_same_folder_is_refused(words: list[str], tmp_path: Path) -> None:
    from megatron.checkpoint.lock import save_lock

    def hold(ready: Any, done: Any) -> None:
        with save_lock(tmp_path / "w"):
            ready.set()
            done.wait(240)

    ready, done = start_method().Event(), start_method().Event()
    other = start_method().Process(target=hold, args=(ready, done))
    other.start()
    assert ready.wait(240)
    try:
        with pytest.raises(CheckpointError, match="give another folder to --retro-workdir"):
            preprocess(words, tmp_path / "w")
    finally:
        done.set()
        other.join()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--retro-tasks", "all"], "--retro-tasks 'all': expected build, index-build, db-build"),
        (["--retro-gpt-chunk-length", "5"], "16 is not a multiple of --retro-gpt-chunk-length 5"),
        (["--retro-query-num-neighbors-save", "9"], "is more than --retro-query-num-neighbors-q"),
        (["--retro-index-add-load-fraction", "0"], "load-fraction 0.0: must be above 0"),
        (["--tensor-model-parallel-size", "2"], "embeds with a complete BERT: drop the flag"),
        (
            ["--retro-index-str", "IVF4,Nothing"],
            "faiss cannot build such an index for vectors of 8 numbers",
        ),
        (["--retro-index-nfeats", "9"], "give --retro-index-nfeats 8"),
        (["--retro-gpt-splt", "1"], "unknown flag --retro-gpt-splt: did you mean --retro-gpt-spl"),
    ],
)
def test_mistakes_are_named_with_the_remedy(
    words: list[str], tmp_path: Path, more: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        preprocess(words, tmp_path / "w", *more)
    # Only the width of the vectors is not known before the first ones.
    assert (tmp_path / "w").exists() == ("--retro-index-nfeats" in more)


def test_megatron_stores_more_neighbors_than_it_searches(words: list[str], tmp_path: Path) -> None:
    """The neighbors beyond those are stored as missing (-1)."""
    preprocess(
        words,
        tmp_path / "w",
        *("--retro-compatible", "--split", "80,10,10", "--retro-index-no-delete-added-codes"),
        *("--retro-index-str", "IVF4_HNSW4,Flat", "--retro-query-num-neighbors-save", "10"),
    )
    (path,) = (tmp_path / "w").glob("query/valid_*/*.hdf5")
    neighbors = read(path, "neighbors")
    assert neighbors.shape[1] == 10
    assert (neighbors[:, 8:] == -1).all()
    assert (neighbors[:, :4] >= 0).any()


def test_what_a_stage_needs_is_required(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        command.run(["--retro-tasks", "db-build"], Launch())
    lines = str(caught.value).splitlines()
    needed = {line.split()[0] for line in lines if "is required" in line}
    assert {"--retro-workdir", "--retro-gpt-data-path", "--retro-gpt-tokenizer-type"} <= needed
    assert "--retro-index-str" not in needed


def test_the_guide_lists_every_flag() -> None:
    guide = (ROOT / "docs" / "retro.md").read_text(encoding="utf-8")
    fields = [field for section in RETRO_SECTIONS for field in fields_of(section)]
    names = [field.display_name for field in fields]
    assert [name for name in names if f"| `{name}` |" not in guide] == []
