"""The server as users start it: its processes, one or several ranks, examples, shutdown."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.inference.server.fuzz import fuzz
from tests.inference.server.processes import (
    SHAPE,
    TOOL,
    server_process,
    write_checkpoint,
)
from tests.repository import ROOT, command_environment

EXAMPLES = sorted((ROOT / "examples").glob("run_text_generation_server*.sh"))
TEXT = "Hello, world!"
BODY = {"prompts": [TEXT, "def main"], "tokens_to_generate": 8, "top_k": 1, "logprobs": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> str:
    """Return the checkpoint of an untrained model with the test tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("model"), tokenizer_folder)


def _ask(url: str) -> dict[str, Any]:
    answer = httpx.put(f"{url}/api", json=BODY, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.fixture(scope="module")
def alone(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run one process from the checkpoint alone, as `make serve` starts it."""
    folder = tmp_path_factory.mktemp("alone")
    words = [str(ROOT / "examples" / "run_text_generation_server_demo.sh")]
    with server_process(words, folder, CHECKPOINT=checkpoint) as (process, url):
        yield url
        for _ in range(2):  # the second one while its front end shuts down
            os.kill(process.pid, signal.SIGTERM)
            time.sleep(0.02)
        assert process.wait(timeout=120) == 0
    assert "Traceback" not in _log(folder)


def test_answers_are_the_same_again(alone: str) -> None:
    answer = _ask(alone)
    _assert_same(answer, _ask(alone))
    for segments, logprobs in zip(answer["segments"], answer["logprobs"], strict=True):
        assert len(segments) == len(logprobs) + 1


def _assert_same(answer: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare text exactly, and numbers up to the order of summation."""
    assert answer["segments"] == other["segments"]
    for row, values in zip(answer["logprobs"], other["logprobs"], strict=True):
        assert row == pytest.approx(values, abs=1e-4)


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on the PATH")
def test_the_command_of_megatrons_readme(alone: str) -> None:
    words = ["curl", "-s", f"{alone}/api", "-X", "PUT"]
    words += ["-H", "Content-Type: application/json; charset=UTF-8"]
    words += ["-d", '{"prompts":["Hello world"], "tokens_to_generate":1}']
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.startswith('{"text":["Hello world')


def test_a_small_load_has_no_failure(alone: str) -> None:
    words = [sys.executable, "tools/benchmark_server.py", alone.removeprefix("http://")]
    flags = "--clients 20 --requests 40 --tokens 4 --prompt-words 4 --hostile 1".split()
    done = subprocess.run(
        [*words, *flags],
        cwd=ROOT,
        env=command_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"failures +0\n", done.stdout)
    assert re.search(r"new tokens +[\d.]+ /s\nfirst text", done.stdout)


def _start_345m(
    name: str, checkpoint: str, tokenizer: Path, folder: Path
) -> contextlib.AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    """Start an example at toy size, with two ranks instead of eight."""
    return server_process(
        [str(ROOT / "examples" / name), *SHAPE],
        folder,
        CHECKPOINT=checkpoint,
        VOCAB_FILE=str(tokenizer / "vocab.json"),
        MERGE_FILE=str(tokenizer / "merges.txt"),
        TENSOR_PARALLEL="2",
        PRECISION="",
    )


def test_two_ranks_answer_the_same_and_end_together(
    checkpoint: str, tokenizer_folder: Path, tmp_path: Path, alone: str
) -> None:
    name = "run_text_generation_server_345M_8_tensor_parallel.sh"
    with _start_345m(name, checkpoint, tokenizer_folder, tmp_path) as (process, url):
        _assert_same(_ask(url), _ask(alone))
        outcome = fuzz("127.0.0.1", int(url.rpartition(":")[2]), 60)
        assert not outcome.faults, outcome.faults
        _assert_same(_ask(url), _ask(alone))
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal: to all of them
        assert process.wait(timeout=120) == 128 + signal.SIGINT
    assert "Traceback" not in _log(tmp_path)


def test_a_rank_that_dies_ends_the_others(
    checkpoint: str, tokenizer_folder: Path, tmp_path: Path, alone: str
) -> None:
    lora = f"--load {checkpoint} --finetune --lora-rank 4 --lr 1 --min-lr 1 --train-iters 2"
    adapter = write_checkpoint(tmp_path, tokenizer_folder, *lora.split())
    words = ["torchrun", "--standalone", "--nproc-per-node", "2", TOOL, "--load", checkpoint]
    flags = ["--pipeline-model-parallel-size", "2", "--serve-adapter", f"mine={adapter}"]
    with server_process([*words, *flags], tmp_path) as (process, url):
        _assert_same(_ask(url), _ask(alone))
        adapted = httpx.put(f"{url}/api", json={**BODY, "model": "mine"}, timeout=60).json()
        assert adapted["logprobs"] != _ask(url)["logprobs"]
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (last,) = [child for child in children if "\0RANK=1\0" in _variables(child)]
        os.kill(int(last), signal.SIGKILL)
        assert process.wait(timeout=120) == 1
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
    assert "rank 1 ended without reporting an error, in text generation" in _log(tmp_path)


def test_without_its_web_server_the_rest_ends(
    checkpoint: str, tokenizer_folder: Path, tmp_path: Path, alone: str
) -> None:
    name = "run_text_generation_server_345M.sh"
    with _start_345m(name, checkpoint, tokenizer_folder, tmp_path) as (process, url):
        _assert_same(_ask(url), _ask(alone))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (front,) = [child for child in children if "server.front" in _words(child)]
        os.kill(int(front), signal.SIGKILL)
        assert process.wait(timeout=120) == 1
    assert "the web server failed with exit code -9" in _log(tmp_path)


def _variables(process: str) -> str:
    return "\0" + Path(f"/proc/{process}/environ").read_text()


def _words(process: str) -> str:
    return Path(f"/proc/{process}/cmdline").read_text()


def _log(folder: Path) -> str:
    return (folder / "log").read_text()


def test_examples_say_what_to_set() -> None:
    for script in EXAMPLES:
        assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
        assert os.access(script, os.X_OK)
        if "demo" not in script.name:
            done = subprocess.run([script], capture_output=True, text=True, check=False)
            assert "CHECKPOINT: set it to" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 9, "--load is required"),
        (["--load", "{empty}"], 4, "there is no checkpoint in this folder"),
        (["--load", "{checkpoint}", "--host", "0.0.0.0"], 9, "give --auth-token-file"),
        (["--load", "{checkpoint}", "--num-layers", "3"], 4, "for a different network"),
        (["--load", "{checkpoint}", "--top_p", "2"], 9, "--top_p 2: must be at most 1"),
        (
            ["--load", "{checkpoint}", "--tensor-model-parallel-size", "2"],
            9,
            "launch 2",
        ),
        (["--load", "{checkpoint}", "--chat-template", "/no/such"], 9, "--chat-template /no/such"),
        (["--load", "{checkpoint}", "--serve-adapter", "sql=/no/such"], 4, "no such folder"),
        (
            ["--load", "{checkpoint}", "--served-model-name", "a", "--serve-adapter", "a=x"],
            9,
            "the model itself has this name",
        ),
    ],
)
def test_mistakes_are_named(
    words: list[str],
    code: int,
    message: str,
    checkpoint: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from megatron.inference.server.run import main

    named = {"{checkpoint}": checkpoint, "{empty}": str(tmp_path)}
    flags = [named.get(word, word) for word in words]
    assert main([*flags, "--port", "0"]) == code
    assert message in capfd.readouterr().err
