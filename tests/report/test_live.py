"""The local server of `--live`: who may access it, and that it serves what is new."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.inference.server.settings import ServerLimits
from megatron.report import live
from megatron.report.live import LiveRuns
from tests.report.test_report import record, report, write_run
from tests.repository import ROOT


def ask(url: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    """Return the status, the ETag and the body."""
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers.get("ETag", ""), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, "", ""


@pytest.fixture
def served(tmp_path):
    """Yield a run's folder and the URL of its live report, which is ended by Ctrl-C."""
    folder = write_run(tmp_path / "run", [record(1)], '{"iteration": 2, "lm')
    server = subprocess.Popen(
        [sys.executable, "-m", "megatron.report", str(folder), "--live", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )
    assert server.stdout
    with server:
        line = server.stdout.readline()
        assert line.startswith("live report: http://127.0.0.1:"), line
        yield folder, line.split()[2]
        server.send_signal(signal.SIGINT)
        assert server.wait(120) == 0


def append(folder: Path, text: str) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(text)


def test_what_the_run_writes_is_served(served):
    folder, url = served
    status, _, page = ask(url)
    assert status == 200
    assert "<body data-live>" in page
    assert "connect-src &#39;self&#39;" in page
    status, tag, text = ask(url + "data.json")
    data = json.loads(text)
    assert data["charts"][0]["curves"][0]["x"] == [1]
    assert data["runs"][0]["damaged"] == 1
    assert ask(url + "data.json", **{"If-None-Match": tag})[0] == 304
    append(folder, ' loss": 7.5}\n')
    deadline = time.monotonic() + 60
    while (answer := ask(url + "data.json", **{"If-None-Match": tag}))[0] == 304:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    data = json.loads(answer[2])
    assert data["charts"][0]["curves"][0]["y"] == [7.999, 7.5]
    assert data["runs"][0]["damaged"] == 0


def test_runs_that_begin_later_are_found(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    live = LiveRuns([runs])
    live_page = asyncio.run(live.page())
    assert "<h1>no runs yet</h1>" in live_page
    assert "<body data-live>" in live_page  # otherwise the page never asks for new data

    def names() -> list[str]:
        live._read()
        return [source.history.name for source in live._sources]

    assert names() == []
    write_run(runs / "b", [{"iteration": 0}])
    assert names() == ["runs"]  # before its first iteration
    append(runs / "b", json.dumps(record(1)) + "\n")
    write_run(runs / "a", [record(1), record(2)])
    assert names() == ["b", "a"]  # in order of appearance, so colors stay the same
    assert not live._read()
    append(runs / "b", json.dumps(record(2)) + "\n")
    assert live._read()
    curves = json.loads(asyncio.run(live.current())[0])["charts"][0]["curves"]
    assert [curve["x"] for curve in curves] == [[1, 2], [1, 2]]
    shutil.rmtree(runs)
    live._read()
    assert len(json.loads(asyncio.run(live.current())[0])["runs"]) == 2


@pytest.mark.parametrize(("cost", "rest"), [(0.01, 1.0), (2.0, 10.0)])
def test_files_are_read_once_a_second_or_less_often_if_the_disk_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cost: float, rest: float
) -> None:
    live = LiveRuns([write_run(tmp_path / "run", [record(1)])])
    now, reads = [0.0], []

    def read() -> bool:
        reads.append(now[0])
        now[0] += cost
        return False

    monkeypatch.setattr(live, "_read", read)
    monkeypatch.setattr("megatron.report.live.time", SimpleNamespace(monotonic=lambda: now[0]))
    asyncio.run(live.current())
    for pause, count in ((rest - 0.1, 1), (0.2, 2)):
        now[0] += pause
        asyncio.run(live.current())
        assert len(reads) == count


def test_a_folder_that_does_not_exist_is_an_error(tmp_path, capsys):
    assert report(tmp_path / "none", "--live") == 6
    assert "none: no such file or folder" in capsys.readouterr().err


def test_only_this_machine_may_ask_and_nothing_can_be_sent(served):
    _, url = served
    assert ask(url, Host="evil.example")[0] == 403
    assert ask(url + "data.json", Host="evil.example")[0] == 403
    assert ask(url + "data.json", method="POST")[0] == 405
    assert ask(url + "metrics.jsonl")[0] == 404
    assert ask(url + "..%2f..%2fetc/passwd")[0] == 404


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "70000"], "--port 70000: use 0 to 65535"),
        (["--output", "x.html"], "--output with --live: give only one: --live"),
        (["--overwrite"], "--overwrite with --live: give only one: --live"),
    ],
)
def test_flags_that_cannot_be(tmp_path, capsys, words, message):
    assert report(write_run(tmp_path / "run", [record(1)]), "--live", *words) == 9
    assert message in capsys.readouterr().err


def test_the_server_trusts_no_proxy_and_says_nothing_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, object]] = []

    class Server:
        def __init__(self, config: dict[str, object]) -> None:
            given.append(config)

        async def serve(self, sockets: list[socket.socket]) -> None:
            sockets[0].close()
            raise KeyboardInterrupt

    monkeypatch.setattr(live.uvicorn, "Config", lambda _, **settings: settings)
    monkeypatch.setattr(live.uvicorn, "Server", Server)
    monkeypatch.setattr(live, "timed_protocol", lambda limits: limits)
    live.serve([write_run(tmp_path / "run", [record(1)])], 0)
    assert given == [
        {
            "http": ServerLimits(connections=256),
            "ws": "none",
            "lifespan": "off",
            "log_config": None,
            "log_level": "error",
            "access_log": False,
            "proxy_headers": False,
            "server_header": False,
            "timeout_graceful_shutdown": 1,
        }
    ]
