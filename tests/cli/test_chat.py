"""`megatron chat` with a checkpoint: it starts its own server, which answers and then exits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import pytest

from finetune import FinetuningRecipe, choose
from megatron.config.finetuning import finetuning_args
from megatron.errors import EXIT_OK, CheckpointError
from megatron.recipes.derive import derive_flags
from megatron.tokenizer.chat_template import find_template
from megatron.tools import text_generation_cli as chat
from megatron.tools.checkpoint.util import main as convert
from megatron.training.pretrain import main
from tests.inference.server.processes import TOOL, on_terminal, server_process
from tests.training.trl import TEMPLATE, write_model


def test_a_folder_without_a_checkpoint_is_reported_by_the_server_s_own_message(
    tmp_path: Path,
) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)), chat.serving(tmp_path):
        pass


def test_the_address_is_what_the_server_prints(tmp_path: Path) -> None:
    script = "echo loading; sleep 0.3; echo '  page  http://127.0.0.1:4321'; exec sleep 600"
    with (tmp_path / "log").open("w+b") as log:
        server = subprocess.Popen(["sh", "-c", script], stdout=log)
        try:
            assert chat._address(server, log) == "http://127.0.0.1:4321"
        finally:
            server.kill()
            server.wait()


def test_a_missing_folder_is_not_taken_for_an_address(capfd: pytest.CaptureFixture[str]) -> None:
    assert chat.chat(["runs/none/checkpoints", "--prompt", "x"]) == 9
    assert "runs/none/checkpoints: there is no such folder" in capfd.readouterr().err


TAUGHT = {"Hello": "one two three", "one": "stop here"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a chat model in Hugging Face format, finetuned here until it knows its answers."""
    folder = tmp_path_factory.mktemp("chat")
    model, saved, found = (folder / name for name in ("model", "saved", "exported"))
    model.mkdir()
    write_model(model)
    records = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in TAUGHT.items()
    ]
    records.append([*records[0], *records[1]])  # the second question follows the first
    lines = [json.dumps({"messages": messages}) + "\n" for messages in records]
    (folder / "chats.jsonl").write_text("".join(lines))
    flags = """--seq-length 96 --micro-batch-size 1 --global-batch-size 1 --train-iters 60 --lr 1e-2
        --lr-decay-style constant --hidden-dropout 0 --attention-dropout 0 --num-workers 0
        --eval-iters 0 --no-exit-signal-handler --log-interval 30 --save-interval 60"""
    words = [*derive_flags(model)[1], *flags.split(), "--load", str(model), "--save", str(saved)]
    words += ["--train-data-path", str(folder / "chats.jsonl")]
    assert main(FinetuningRecipe(), finetuning_args(words), choose=choose) == EXIT_OK
    where = ["--load-dir", str(saved), "--save-dir", str(found)]
    assert convert(["--loader", "native", "--saver", "hf", "--model-type", "GPT", *where]) == 0
    assert find_template(None, str(found)) == TEMPLATE
    return found


def test_an_exported_chat_model_answers_on_a_terminal(exported: Path, tmp_path: Path) -> None:
    words = ["chat", str(exported), "--temperature", "0", "--tokens", "20"]
    command = [sys.executable, "-m", "megatron", *words]
    with on_terminal(command, tmp_path) as (process, terminal):
        for question, answer in TAUGHT.items():  # the second one follows the first
            terminal.say(question)
            terminal.expect(f"{answer}\r\n")
        terminal.say("/clear")
        terminal.say("one")
        terminal.expect("stop here\r\n")
        terminal.leave()
        assert process.wait(timeout=120) == 0


def test_an_exported_chat_model_answers_behind_the_server(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, TOOL, "--load", str(exported)]
    with server_process(command, tmp_path) as (_, url):
        messages = []
        for question, answer in TAUGHT.items():
            messages.append({"role": "user", "content": question})
            body = {"messages": messages, "temperature": 0, "max_tokens": 20}
            found = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
            (choice,) = found["choices"]
            assert choice["message"]["content"] == answer
            # The end of the turn ends the answer.
            assert choice["finish_reason"] == "stop"
            messages.append({"role": "assistant", "content": answer})
        address = url.removeprefix("http://")
        assert chat.chat([address, "--temperature", "0", "--prompt", "Hello"]) == EXIT_OK
        assert capsys.readouterr().out == "one two three\n"
