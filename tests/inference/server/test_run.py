"""The server's own parts on rank 0: its inbox, the model's name, stop tokens, and the panel."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.config.generation import ServerConfig
from megatron.errors import ConfigError
from megatron.inference.messages import Add, Cancel, Command, Report, Shutdown, Unpacker, pack
from megatron.inference.request import Finished, Request, Sampling, Stats, Token
from megatron.inference.server import run
from megatron.inference.server.run import SocketInbox, find_token
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.live import make_settings


@pytest.fixture(name="inbox")
def open_inbox() -> Iterator[tuple[SocketInbox, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(60)
    inbox = SocketInbox(ours, lambda: Stats(running=3))
    with theirs:
        yield inbox, theirs
        inbox.close()


def _all_commands(inbox: SocketInbox, count: int) -> list[Command]:
    """Poll until this many commands have arrived."""
    found: list[Command] = []
    while len(found) < count:
        commands = inbox.poll(60.0)
        assert commands, "a poll waits for a command"
        found += commands
    return found


def test_commands_arrive_in_order(inbox: tuple[SocketInbox, socket.socket]) -> None:
    box, front = inbox
    sent = [
        Cancel("a"),
        Add(Request("b", (1, 2), Sampling(max_new_tokens=3))),
        Cancel("b"),
        Cancel("c"),
    ]
    front.sendall(pack(Command, *sent[:2]) + pack(Command, sent[2]) + pack(Command, sent[3]))
    assert _all_commands(box, 4) == sent
    box.shut_down()
    assert box.poll(0.0) == [Shutdown()]


def test_a_poll_waits_only_as_long_as_it_may(inbox: tuple[SocketInbox, socket.socket]) -> None:
    box, _ = inbox
    began = time.monotonic()
    assert box.poll(0.0) == []
    at_once = time.monotonic() - began
    assert box.poll(0.1) == []
    assert 0.1 <= time.monotonic() - began - at_once < 60
    assert at_once < 60
    for request in "abc":
        box._commands.put(Cancel(request))
    assert box.poll(0.0) == [Cancel(request) for request in "abc"]


def test_what_is_sent_before_the_end_arrives(inbox: tuple[SocketInbox, socket.socket]) -> None:
    box, front = inbox
    events = [Token("a", 5, -0.5), Finished("a", "stop")]
    box.send(events[:1])
    box.send(events[1:])
    box.close()
    received = bytearray()
    while data := front.recv(1 << 16):
        received += data
    reports = [*Unpacker[Report](Report).feed(bytes(received))]
    assert [report.events for report in reports] == [(events[0],), (events[1],)]
    assert {report.stats for report in reports} == {Stats(running=3)}
    assert box._connection.fileno() == -1


@pytest.mark.parametrize("message", [b"", b"\0\0\0\1?", b'\0\0\0\x12[{"command":"no"}]'])
def test_a_front_that_ends_or_is_broken_shuts_down(
    message: bytes, inbox: tuple[SocketInbox, socket.socket]
) -> None:
    box, front = inbox
    front.sendall(message)
    front.shutdown(socket.SHUT_WR)
    assert _all_commands(box, 1) == [Shutdown()]
    front.close()
    box.send([])  # is not an error
    box.close()


@pytest.mark.parametrize(
    ("folder", "served", "name"),
    [
        ("runs/demo/checkpoints", None, "demo"),
        ("runs/demo/checkpoint", None, "demo"),
        ("runs/demo/llama", None, "llama"),
        ("runs/demo/llama/../checkpoints/", None, "demo"),
        ("runs/demo/checkpoints", "mine", "mine"),
    ],
)
def test_the_name_of_a_model(
    folder: str, served: str | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server = ServerConfig(served_model_name=served, serve_adapter=("a=x", "b=y"))
    assert run._model_name(folder, server) == name
    with pytest.raises(ConfigError, match=f"--serve-adapter {name}=...: the model itself has this"):
        run._model_name(folder, ServerConfig(served_model_name=served, serve_adapter=(f"{name}=",)))


@pytest.mark.parametrize(
    ("content", "tokens"),
    [
        ({"eos_token_id": 3}, (3,)),
        ({"eos_token_id": [9, 0, 10, -1, 5, "7", None, 2.0, True]}, (9, 0, 5)),
        ({"eos_token_id": None}, ()),
        ({}, ()),
        ([3], ()),
        (None, ()),
    ],
)
def test_stop_tokens_of_an_imported_model(
    content: object, tokens: tuple[int, ...], tmp_path: Path
) -> None:
    (tmp_path / "huggingface").mkdir()
    if content is not None:
        (tmp_path / "huggingface/generation_config.json").write_text(json.dumps(content))
    assert run._stop_tokens(tmp_path, 10) == tokens
    (tmp_path / "huggingface/generation_config.json").write_text("[" * 100_000)
    assert run._stop_tokens(tmp_path, 10) == ()
    assert run._stop_tokens(tmp_path / ("x" * 300), 10) == ()  # it cannot be accessed


def test_a_token_has_at_least_16_characters(tmp_path: Path) -> None:
    path = tmp_path / "token"
    server = ServerConfig(auth_token_file=str(path))
    path.write_text("0123456789abcdef\n")
    assert find_token(server) == "0123456789abcdef"
    for token in ("0123456789abcde", "0123456789abcde\x07ghi", "01234567 89abcdefgh"):
        path.write_text(token)
        with pytest.raises(ConfigError, match="give one word of at least 16 ASCII characters"):
            find_token(server)
    path.unlink()
    with pytest.raises(ConfigError, match=r"--auth-token-file .* cannot be read: .*No such file"):
        find_token(server)


def test_the_panel_says_how_to_reach_the_server(tokenizer_folder: Path) -> None:
    settings = make_settings(tokenizer_folder, FakeEngine(max_length=2048), adapters=("law", "tax"))
    panel = run._panel(settings, "http://h:5000", [("layout", "one process")])
    assert panel.splitlines()[1] == "run_text_generation_server.py: serving test"
    assert panel.splitlines()[3:-1] == [
        "  page            http://h:5000/",
        "  command line    python tools/text_generation_cli.py h:5000",
        "  OpenAI clients  base URL http://h:5000/v1, model test or law or tax",
        "  access          this machine only, no token required",
        "  chat            available",
        "  longest text    2,048 tokens",
        "  layout          one process",
    ]
    others = make_settings(tokenizer_folder, FakeEngine(), token="t", chat_template=None)
    rows = run._panel(others, "http://h:5000", [])
    assert "access          token required\n" in rows
    assert "chat            not available (no chat template)\n" in rows


def test_handlers_of_signals_are_restored() -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    with run._handle_signals(signal.SIG_IGN):
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before
