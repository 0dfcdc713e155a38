"""`megatron chat` with a checkpoint: a server of its own answers, and ends."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megatron.errors import CheckpointError
from megatron.tools import text_generation_cli as chat


def test_a_folder_without_a_checkpoint_is_told_by_the_server_s_own_message(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)), chat.serving(tmp_path):
        pass


def test_the_address_is_what_the_server_prints(tmp_path: Path) -> None:
    script = "echo loading; sleep 0.3; echo '  page  http://127.0.0.1:4321'; exec sleep 60"
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
