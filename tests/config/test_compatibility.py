"""The table of flags in docs/ agrees with the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config.__main__ import BEGIN, END, KEYS_BEGIN, KEYS_END, insert_tables
from megatron.config.deepspeed import key_table
from megatron.config.other_flags import other_flags

_DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
_DEEPSPEED = _DOCUMENT.with_name("deepspeed.md")
_FLAGS = Path(__file__).with_name("megatron_flags.json")


@pytest.mark.parametrize("page", [_DOCUMENT, _DEEPSPEED], ids=lambda page: page.name)
def test_the_document_is_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert insert_tables(text) == text, f"run: python -m megatron.config docs/{page.name}"


def test_the_page_of_deepspeed_has_every_key() -> None:
    text = _DEEPSPEED.read_text(encoding="utf-8")
    assert (text.count(KEYS_BEGIN), text.count(KEYS_END)) == (1, 1)
    listed = set(re.findall(r"`([\w.]+)`", text.partition(KEYS_BEGIN)[2].partition(KEYS_END)[0]))
    assert {*key_table().translated, *key_table().untranslated} <= listed


def test_the_table_has_every_flag_of_megatron() -> None:
    table = _DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    listed = set(re.findall(r"`(--[\w-]+)", table))
    flags = [entry["flags"] for part in json.loads(_FLAGS.read_text()).values() for entry in part]
    assert {name for names in flags for name in names} <= listed
    assert {flag.name for flag in (*other_flags().translated, *other_flags().removed)} <= listed


def test_the_command_rewrites_only_what_is_between_the_marks(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    path.write_text(f"before\n{BEGIN}\nstale\n{END}\nafter\n")
    subprocess.run([sys.executable, "-m", "megatron.config", str(path)], check=True)
    text = path.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "stale" not in text
    assert "`--num-layers`" in text


@pytest.mark.parametrize("mark", [BEGIN, END])
def test_the_marks_occur_once(mark: str) -> None:
    assert _DOCUMENT.read_text(encoding="utf-8").count(mark) == 1


@pytest.mark.parametrize("text", [None, "a page of its own\n", f"{END}\n{BEGIN}\n"])
def test_the_command_leaves_other_pages_alone(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "page.md"
    if text is not None:
        path.write_text(text)
    command = [sys.executable, "-m", "megatron.config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"error: {path}: " in done.stderr
    assert "Traceback" not in done.stderr
    assert text is None or path.read_text() == text
