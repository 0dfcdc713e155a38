"""tools/text_generation_cli.py with a server, in a pipe and on a terminal."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import CheckpointError
from megatron.tools import text_generation_cli as cli
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.live import Live, make_settings, running
from tests.inference.server.processes import on_terminal
from tests.repository import ROOT

CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def chatty(tokenizer_folder: Path):
    engine = FakeEngine()
    settings = make_settings(tokenizer_folder, engine, chat_template=CHAT, adapters=("sql",))
    with running(engine, settings) as live:
        yield live


def _address(live: Live) -> str:
    return f"127.0.0.1:{live.port}"


def test_a_prompt_is_answered(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([_address(live), "--prompt", "x", "--tokens", "5"]) == 0
    assert capsys.readouterr().out == "xxxxx\n"


def test_an_answer_has_64_tokens_unless_told(
    live: Live, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([_address(live), "--prompt", "x"]) == 0
    assert capsys.readouterr().out == 64 * "x" + "\n"


def test_flags_reach_the_engine(live: Live) -> None:
    flags = "--temperature 0 --top_k 3 --seed 9 --tokens 2 --stop a --stop b".split()
    assert cli.main([f"http://{_address(live)}/", "--prompt", "x", *flags]) == 0
    sampling = live.engine.seen[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0, 3, 9)


def test_megatron_chat_depends_on_the_template_unless_told(
    tokenizer_folder: Path, chatty: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    monkeypatch.setattr(cli, "run", lambda options: found.append(options.chat))
    engine = FakeEngine()
    settings = make_settings(tokenizer_folder, engine, chat_template=None)
    with running(engine, settings) as plain:
        for server, words in ((chatty, []), (plain, []), (chatty, ["--no-chat"])):
            assert cli.chat([_address(server), *words]) == 0
        assert cli.chat([_address(plain), "--chat"]) == 0
    assert found == [True, False, False, True]


def test_a_model_is_chosen_by_its_name(chatty: Live, capsys: pytest.CaptureFixture[str]) -> None:
    words = [_address(chatty), "--prompt", "x", "--tokens", "1", "--model"]
    assert cli.main([*words, "sql"]) == 0
    assert chatty.engine.seen[-1].adapter == 1
    assert cli.main([*words, "rhymes"]) == 1
    assert "unknown model 'rhymes'; available: test, sql" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("piped", "code", "out", "error"),
    [
        ("東x".encode(), 0, "東x東", ""),
        ("東x東".encode()[:-1], 0, "東x東", ""),  # cut as by `head -c`
        (b"caf\xe9 x", 1, "", "error: the text is not UTF-8"),
    ],
    ids=["whole", "cut", "latin-1"],
)
def test_a_pipe_is_a_prompt(live: Live, piped: bytes, code: int, out: str, error: str) -> None:
    words = [sys.executable, "tools/text_generation_cli.py", _address(live), "--tokens", "20"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        words, input=piped, cwd=ROOT, env=environment, capture_output=True, check=False
    )
    assert done.returncode == code
    assert done.stdout.decode().startswith(out)
    assert bool(done.stdout) == bool(out)
    assert done.stderr.decode().startswith(error)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "give HOST:PORT"),
        (["localhost:http"], "give HOST:PORT"),
        (["127.0.0.1:1"], "is the server running there?"),
        (
            ["{live}", "--tokens", "5000"],
            "max_tokens is 5000, but together they must fit in the model's 256",
        ),
        (["{live}", "--temperature", "-1"], "temperature -1.0: give 0 to 100"),
        (["{live}", "--auth-token-file", "/no/such"], "--auth-token-file /no/such"),
        (
            ["{live}", "--auth-token-file", str(ROOT / "Makefile")],
            "a file whose only line is the token",
        ),
        (["{live}", "--system", "Be brief."], "--system requires --chat"),
        (["{live}", "--timeout", "nan"], "--timeout nan: give seconds"),
        (["{live}", "--temperature", "nan"], "is not finite"),
        (["https://{live}"], "SSL"),
        (["ftp://{live}"], "give HOST:PORT"),
        (["a..b:5000"], "cannot connect to"),
    ],
)
def test_errors_say_what_to_do(
    live: Live, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.replace("{live}", _address(live)) for word in words]
    assert cli.main([*words, "--prompt", "x"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.parametrize(
    ("answer", "out", "message"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", "", "is not an answer from a text generation server"),
        (b"HTTP/1.1 200 OK\r\n\r\n[1]", "", "is not an answer from a text generation server"),
        (b"HTTP/1.1 404 No\r\n\r\nlost", "", "status 404, 'lost': is this a text generation"),
        (b"", "", "is a text generation server running there?"),
        (
            b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [{"index": 0, "text": "as far as"}]}\n\n',
            "as far as\n",
            "the answer is incomplete",
        ),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "", "is incomplete"),
    ],
    ids=["page", "list", "404", "nothing", "half", "chunks"],
)
def test_what_is_no_whole_answer_is_reported(
    answer: bytes, out: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def once() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):  # otherwise the unread rest of the request resets it
                pass

    thread = threading.Thread(target=once, daemon=True)
    thread.start()
    with listener:
        port = listener.getsockname()[1]
        assert cli.main([f"127.0.0.1:{port}", "--prompt", "x", "--timeout", "60"]) == 1
    thread.join(timeout=60)
    assert not thread.is_alive(), "the connection is still open"
    told = capsys.readouterr()
    assert told.out == out
    assert told.err.startswith("error: ")
    assert message in told.err


def test_a_terminal_is_shown_no_control_characters(
    live: Live, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [_address(live), "--prompt", "\x1b\n", "--tokens", "2"]
    assert cli.main(words) == 0
    assert capsys.readouterr().out == "\x1b\n\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(words) == 0
    assert capsys.readouterr().out == "\u241b\n\n"


def test_a_conversation_on_a_terminal(chatty: Live, tmp_path: Path) -> None:
    words = ["tools/text_generation_cli.py", _address(chatty), "--chat"]
    with on_terminal([sys.executable, *words], tmp_path) as (process, terminal):
        for line, answer in (
            ("/tokens 3", "/tokens 3"),
            ("y", "yyy"),
            ("/tokens x", "/tokens x: give a number"),
            ("/nonsense", "no such command"),
            ("/help", "Ctrl-C stops an answer."),
            ("/model rhymes", "/model rhymes"),
            ("y", "unknown model 'rhymes'; available: test, sql"),
            ("/model sql", "/model sql"),
            ("z", "yyy"),  # the engine repeats what came first
        ):
            terminal.say(line)
            terminal.expect(answer)
        terminal.leave()
        assert process.wait(timeout=60) == 0
    assert len(chatty.engine.seen[-1].prompt) == 5  # y, yyy and z
    assert chatty.engine.seen[-1].adapter == 1
    assert "/help" in (tmp_path / f"text_generation-{os.getuid()}" / "history").read_text()
    with on_terminal([sys.executable, *words], tmp_path) as (process, terminal):
        terminal.say("\x1b[A")  # the arrow key that calls up the last line, which was z
        terminal.expect("zzz")
        terminal.leave()
        assert process.wait(timeout=60) == 0


def test_a_server_that_the_command_started_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import time; print('http://127.0.0.1:1', flush=True); time.sleep(600)"
    waiting = [sys.executable, "-c", script]
    monkeypatch.setattr(cli, "module_command", lambda _: waiting)
    servers: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*given: Any, **more: Any) -> subprocess.Popen[bytes]:
        servers.append(popen(*given, **more))
        return servers[-1]

    monkeypatch.setattr(cli.subprocess, "Popen", start)
    begun = time.monotonic()
    with cli.serving(tmp_path, ["a=b"]) as address:
        assert address == "http://127.0.0.1:1"
        flags = ["serve", "--load", str(tmp_path), "--port", "0", "--serve-adapter", "a=b"]
        assert servers[0].args[len(waiting) :] == flags
    assert servers[0].poll() is not None
    assert time.monotonic() - begun < 300
    failing = [sys.executable, "-c", "import sys; sys.exit('error: no checkpoint here')"]
    monkeypatch.setattr(cli, "module_command", lambda _: failing)
    with pytest.raises(CheckpointError, match="^no checkpoint here$"), cli.serving(tmp_path):
        pass
