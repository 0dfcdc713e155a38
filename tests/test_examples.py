"""Every example runs: at full size as a dry run, and at toy size for real."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.environment import environment_with_interpreter
from megatron.errors import ConfigError
from tests.launch import fork_steps, run_ranks, run_script
from tests.ports import free_port
from tests.repository import ROOT, command_environment, name

# Those of the text generation server are tested in tests/inference/server/test_processes.py, those
# of downstream tasks in tests/tasks/test_examples.py, those of detoxification in tests/detoxify,
# and job files in tests/submit.
_OF_CLUSTERS = ("slurm", "kubernetes")
SCRIPTS = sorted(
    file
    for file in (ROOT / "examples").rglob("*.sh")
    if not file.name.startswith(("run_text_generation_server", "evaluate_", "finetune_"))
    and file.parent.name not in _OF_CLUSTERS
    and "detxoify_lm" not in file.parts
)
CONFIGS = sorted(
    file
    for file in (ROOT / "examples").rglob("*.yaml")
    if file.parent.name not in _OF_CLUSTERS and file.name != "cluster_run.yaml"
)

# The same run at toy size: flags given to a script come last and take precedence.
TOY = (
    "--num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 "
    "--seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 2 "
    "--train-iters 2 --save-interval 2 --eval-interval 2 --eval-iters 1 --log-interval 1"
)


@dataclass(frozen=True)
class Toy:
    """A small corpus with the tokenizer files that the examples need.

    Attributes:
        environment: The variables for a GPT's examples.
        sentences: The variables for a BERT's or T5's examples.
        prefix: The path of the corpus, without a suffix.
    """

    environment: dict[str, str]
    sentences: dict[str, str]
    prefix: Path

    def environment_of(self, script: Path) -> dict[str, str]:
        of_sentences = script.stem.startswith(("pretrain_bert", "pretrain_t5", "pretrain_ict"))
        return {**self.environment, **(self.sentences if of_sentences else {})}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    import sentencepiece
    from tokenizers import ByteLevelBPETokenizer

    from megatron.data.indexed import IndexedDatasetBuilder

    folder = tmp_path_factory.mktemp("toy")
    texts = [file.read_text() for file in sorted((ROOT / "tests").glob("*.py"))]
    lines = [line for text in texts for line in text.splitlines() if line.strip()]

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=400, special_tokens=["<|endoftext|>"])
    bpe.save_model(str(folder))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=200,
        minloglevel=2,
    )
    generator = np.random.default_rng(0)
    with IndexedDatasetBuilder(folder / "corpus_text_document", np.uint16) as builder:
        for _ in range(60):
            builder.add_documents(generator.integers(3, 200, size=50), [50], [1])
    environment = {
        **command_environment(),
        "DATA_PATH": str(folder / "corpus_text_document"),
        "VOCAB_FILE": str(folder / "vocab.json"),
        "MERGE_FILE": str(folder / "merges.txt"),
        "TOKENIZER_MODEL": str(folder / "tokenizer.model"),
        "NPROC_PER_NODE": "2",
        "MASTER_PORT": str(free_port()),
        "CHECKPOINT": str(_small_llama(folder)),
    }
    return Toy(environment, _sentences(folder), folder / "corpus_text_document")


def _sentences(folder: Path) -> dict[str, str]:
    """Write documents of several sentences and a WordPiece vocabulary; return their variables."""
    from megatron.data.indexed import IndexedDatasetBuilder

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(95))]
    vocabulary = folder / "wordpieces.txt"
    vocabulary.write_text("".join(f"{word}\n" for word in words))
    generator = np.random.default_rng(0)
    prefix = folder / "corpus_text_sentence"
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(60):
            builder.add_documents(generator.integers(5, 100, size=30), [8, 12, 10], [3])
    titles = folder / "corpus_title_sentence"
    with IndexedDatasetBuilder(titles, np.uint16) as builder:
        for _ in range(60):
            builder.add_documents(generator.integers(5, 100, size=2), [2], [1])
    return {
        "DATA_PATH": str(prefix),
        "TITLES_PATH": str(titles),
        "VOCAB_FILE": str(vocabulary),
    }


def _small_llama(folder: Path) -> Path:
    """Import a Llama for the toy tokenizer and return its folder."""
    from megatron.tools.checkpoint import util
    from tests.checkpoint.huggingface.models import CASES, Case, tensors_of, write_folder

    case = Case({**CASES["llama"].config, "vocab_size": 200})
    original = write_folder(folder / "llama", case.config, tensors_of(case))
    ends = ["--load-dir", str(original), "--save-dir", str(folder / "imported")]
    assert util.main(["--model-type", "GPT", "--loader", "hf", "--saver", "native", *ends]) == 0
    return folder / "imported"


def _llama2_shape(folder: Path, script: Path) -> Path:
    """Write a checkpoint that describes Llama 2's network, but has none of its tensors."""
    from megatron.checkpoint.entries import Entry
    from megatron.checkpoint.huggingface.families import families
    from megatron.checkpoint.huggingface.settings import Settings
    from megatron.config.run import RunOptions
    from megatron.config.yaml_file import to_dict
    from megatron.parallel.layout import Layout
    from tests.checkpoint.states import save

    hidden, ffn, layers, heads, kv_heads = {
        "7b": (4096, 11008, 32, 32, 32),
        "13b": (5120, 13824, 40, 40, 40),
        "70b": (8192, 28672, 80, 64, 8),
    }[script.stem.rpartition("_")[2]]
    values = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32000,
    }
    model = families()["llama"].read(Settings(values, "config.json")).model
    state = {"model.final_norm.weight": Entry.whole(torch.ones(hidden))}
    save(folder, 0, state, {"config": to_dict(RunOptions(model=model))}, Layout.single())
    return folder


def _start(words: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command; if it hangs, kill it with the processes that it started."""
    process = subprocess.Popen(
        words,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_script_is_valid_bash_and_says_what_to_set(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert _start(["bash", "-n", str(script)], dict(os.environ)).returncode == 0
    bare = {key: value for key, value in os.environ.items() if key != "DATA_PATH"}
    done = _start([str(script)], bare)
    assert done.returncode != 0
    assert "DATA_PATH: set it to" in done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_script_is_valid_at_full_size(script: Path, toy: Toy, tmp_path: Path) -> None:
    environment = {**toy.environment_of(script), "OUT": str(tmp_path), "NPROC_PER_NODE": "1"}
    gpus = "8" if "torchrun" in script.read_text() else "1"
    if script.parent.name == "llama2":
        environment["CHECKPOINT"] = str(_llama2_shape(tmp_path / "llama2", script))
        gpus = "32" if "70b" in script.name else gpus
    gpus = {"pretrain_gpt3_175B": "1024", "pretrain_gpt_multi_node": "16"}.get(script.stem, gpus)
    done = run_script([str(script), "--dry-run", "--dry-run-world-size", gpus], environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "configuration is valid" in done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_script_trains_at_toy_size(script: Path, toy: Toy, tmp_path: Path) -> None:
    environment = {**toy.environment_of(script), "OUT": str(tmp_path), "PRECISION": ""}
    environment |= {"TENSOR_PARALLEL": "2", "PIPELINE_PARALLEL": "1"}
    own = script.read_text()
    for recipe in re.findall(r"megatron/recipes/\S+\.yaml", own):
        own += (ROOT / recipe).read_text().replace("_", "-")
    sizes = TOY
    if "--encoder-seq-length" in own:
        sizes = TOY.replace("--seq-length", "--decoder-seq-length 12 --encoder-seq-length")
    if script.stem == "pretrain_ict":  # each text is compared with the others in its micro-batch
        sizes = TOY.replace("--micro-batch-size 1", "--micro-batch-size 2")
    words = [
        str(script),
        *sizes.split(),
        *(["--lr-warmup-iters", "0"] if "warmup-iters" in own else []),
    ]
    words += ["--lr-decay-iters", "2"] if "lr-decay-iters" in own else []
    # Running each under torchrun would take a minute; the demo and the quickstart do so.
    done = run_script(words, environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "iteration        2/       2" in done.stdout
    assert list((tmp_path / "checkpoints").iterdir())
    assert list((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize(
    ("left", "goes_on"),
    [
        ([], False),
        (["iter_0000002.tmp-0123456789abcdef"], False),
        (["iter_0000002"], True),
        (["latest_checkpointed_iteration.txt"], True),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", ["7b", "13b", "70b"])
def test_a_llama_2_script_begins_anew_only_where_nothing_was_saved(
    size: str, left: list[str], goes_on: bool, tmp_path: Path
) -> None:
    python, saved = tmp_path / "python", tmp_path / "out" / "checkpoints"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    for folder in left:
        (saved / folder).mkdir(parents=True)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"DATA_PATH": "data", "CHECKPOINT": "imported", "OUT": str(tmp_path / "out")}
    environment |= {"MASTER_ADDR": "localhost", "NODE_RANK": "0"}
    done = _start([str(ROOT / "examples" / "llama2" / f"finetune_{size}.sh")], environment)
    assert done.returncode == 0, done.stderr
    assert ("--finetune" in done.stdout.split()) != goes_on
    assert f"--load {saved if goes_on else 'imported'} " in done.stdout


@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_yaml_run_is_valid_and_trains_at_toy_size(config: Path, toy: Toy, tmp_path: Path) -> None:
    from megatron.config import parse_config

    bpe = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", toy.environment["VOCAB_FILE"]]
    bpe += ["--merge-file", toy.environment["MERGE_FILE"], "--data-path", str(toy.prefix)]
    given = ["--config", str(config), "--no-mock-data", *bpe]
    given += ["--save", str(tmp_path / "checkpoints"), "--save-interval", "10"]
    parse_config(given, world_size=8)

    metrics = tmp_path / "metrics.jsonl"
    toy_flags = [*TOY.split(), "--lr-warmup-iters", "0", "--metrics-jsonl", str(metrics)]
    done = run_ranks([str(ROOT / "pretrain_gpt.py"), *given, *toy_flags], toy.environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [r["iteration"] for r in records if "lm loss" in r] == [1, 2]


# SLURM jobs in examples/slurm are made by `megatron submit` (tests/submit). The scripts in
# examples/detxoify_lm take their folders as arguments, like Megatron-LM's (tests/detoxify).
@pytest.mark.parametrize(
    "script",
    [
        file
        for file in sorted((ROOT / "examples").rglob("*.sh"))
        if not {"slurm", "detxoify_lm"} & {*file.parts}
    ],
    ids=name,
)
def test_checkpoint_path_is_used(script: Path, tmp_path: Path) -> None:
    """As in Megatron's own scripts, checkpoints are saved to it and loaded from it."""
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    text, mine = script.read_text(), str(tmp_path / "mine")
    required = dict.fromkeys(re.findall(r'(?m)^: "\$\{(\w+):\?', text), "given")
    if "CHECKPOINT=${CHECKPOINT" in text:
        required.pop("CHECKPOINT", None)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "latest_checkpointed_iteration.txt").touch()
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**required, "PATH": path, "CHECKPOINT_PATH": mine}
    done = subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, check=True
    )
    words = done.stdout.splitlines()
    given = {flag: words[words.index(flag) + 1] for flag in ("--save", "--load") if flag in words}
    assert given
    assert set(given.values()) == {mine}
    assert ("--save" in given) == script.name.startswith(("pretrain_", "finetune_"))


def test_a_launch_script_exits_with_the_code_of_the_run(tmp_path: Path) -> None:
    """torchrun itself would exit with 1 after every failure."""
    script = ROOT / "examples" / "pretrain_gpt_distributed.sh"
    files = dict.fromkeys(("DATA_PATH", "VOCAB_FILE", "MERGE_FILE"), "absent")
    done = subprocess.run(
        [str(script), "--lr", "high"],
        env={
            **environment_with_interpreter(),
            **files,
            "NPROC_PER_NODE": "1",
            "OUT": str(tmp_path),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ConfigError.exit_code, done.stderr
    assert "--lr high: expected a finite number, got 'high'" in done.stderr
    texts = (file.read_text() for file in (ROOT / "examples").rglob("*.sh"))
    assert not [text for text in texts if re.search(r"(?m)^(exec )?torchrun\b", text)]


def _prose() -> list[str]:
    """Return the project's own pages, six paragraphs per document, without tables and listings."""
    pages = [page.read_text() for page in sorted((ROOT / "docs").rglob("*.md"))]
    paragraphs = [
        paragraph
        for page in pages
        for paragraph in page.split("\n\n")
        if paragraph[:1].isalpha() and len(paragraph) < 1500
    ]
    return ["\n".join(paragraphs[i : i + 6]) for i in range(0, len(paragraphs), 6)]


def _demo(model: str, folder: Path) -> tuple[list[str], Path]:
    """Return the flags of a small demo, and its output folder."""
    source, out = folder / "mine.jsonl", folder / "demo"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in _prose()))
    return ["--out", str(out), "--model", model, "--input", str(source), "--iters", "2"], out


def _assert_shown(output: str, out: Path) -> None:
    assert "validation loss" in output
    assert "unigram entropy" in output
    assert (out / "loss.png").stat().st_size > 1000
    assert list((out / "tensorboard").iterdir())
    assert list((out / "checkpoints").iterdir())


@pytest.mark.slow
def test_the_demo_runs_small(toy: Toy, tmp_path: Path) -> None:
    flags, out = _demo("gpt", tmp_path)
    done = _start([sys.executable, str(ROOT / "tools" / "demo.py"), *flags], toy.environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    _assert_shown(done.stdout, out)


@pytest.mark.parametrize("model", ["bert", "t5"])
def test_the_demos_of_other_models_run_small(
    model: str,
    toy: Toy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from megatron.tools import demo

    fork_steps(monkeypatch, toy.environment)
    flags, out = _demo(model, tmp_path)
    code, output = demo.main(flags), capsys.readouterr()
    assert code == 0, output.out[-4000:] + output.err[-4000:]
    _assert_shown(output.out, out)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--input", "/no/such.jsonl"],
            "--input /no/such.jsonl: no such file: give the path of a text file",
        ),
        (["--iters", "0"], "--iters 0: give at least 1"),
    ],
)
def test_the_demo_says_what_to_fix(given: list[str], message: str, tmp_path: Path, capsys) -> None:
    from megatron.tools import demo

    assert demo.main(["--out", str(tmp_path / "out"), *given]) != 0
    assert capsys.readouterr().err.strip() == f"error: {message}"


def test_the_demo_overwrites_nothing_that_is_not_its_own(tmp_path: Path, capsys) -> None:
    from megatron.tools import demo

    (tmp_path / "thesis.txt").touch()
    assert demo.main(["--out", str(tmp_path)]) != 0
    message = capsys.readouterr().err
    assert f"--out {tmp_path}: {tmp_path / 'thesis.txt'} already exists" in message
    assert "choose another folder" in message
    assert "OVERWRITE=1" in message
    assert (tmp_path / "thesis.txt").exists()


@pytest.fixture
def earlier_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a folder filled by a demo whose steps are stubs, and a function that runs it again."""
    from megatron.tools import demo

    out, source = tmp_path / "out", tmp_path / "mine.jsonl"
    source.write_text('{"text": "one"}\n{"text": "two"}\n')
    run = ["--out", str(out), "--input", str(source), "--iters", "3"]

    def steps(kind: object, folder: Path, *_: object) -> None:
        for part in ("checkpoints", "tokenizer"):
            (folder / part).mkdir()
        (folder / "metrics.jsonl").write_text("new")

    monkeypatch.setattr(demo, "demo", steps)
    assert demo.main(run) == 0
    (out / "metrics.jsonl").write_text("old")
    (out / "checkpoints" / "mine").touch()
    return out, lambda *words: demo.main([*run, *words])


def test_a_second_demo_keeps_the_first(earlier_demo, capsys) -> None:
    out, again = earlier_demo
    for number in (1, 2):
        assert again() == 0
        kept = out.with_name(f"out.{number}")
        assert f"was moved to {kept}" in capsys.readouterr().out
    first = out.with_name("out.1")
    assert (first / "metrics.jsonl").read_text() == "old"
    assert (first / "checkpoints" / "mine").exists()
    assert (out / "metrics.jsonl").read_text() == "new"


@pytest.mark.parametrize("text", ['{"text": "alone"}\n', '{"text": "one"}\n{"text"\n'])
def test_the_demo_reads_its_input_before_it_touches_a_folder(
    text: str, earlier_demo, tmp_path: Path, capsys
) -> None:
    out, again = earlier_demo
    (tmp_path / "mine.jsonl").write_text(text)
    assert again("--overwrite") == 6
    assert (out / "metrics.jsonl").read_text() == "old"
    assert not list(tmp_path.glob("out.*"))


def test_a_demo_with_other_settings_replaces_only_when_asked(earlier_demo, capsys) -> None:
    out, again = earlier_demo
    (out / "thesis.txt").touch()
    assert again("--iters", "4") == 9
    assert "already exists and is not from a demo with these settings" in capsys.readouterr().err
    assert (out / "checkpoints" / "mine").exists()
    assert again("--iters", "4", "--overwrite") == 0
    assert (out / "metrics.jsonl").read_text() == "new"
    assert not (out / "checkpoints" / "mine").exists()
    assert (out / "thesis.txt").exists()
