"""The page of a short real run in headless Chromium: it draws without errors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.report import page
from megatron.report.sources import open_runs
from pretrain_gpt import GPTRecipe
from tests.report.test_report import record, write_run
from tests.training.toy import TOY

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
# Puts what a test wants to know into the page's title. The page's policy forbids other scripts, so
# this one replaces the page's own.
_PROBE = """
;document.title = JSON.stringify({
  canvases: [...document.querySelectorAll("canvas")].filter((canvas) => canvas.width > 100).length,
  headings: [...document.querySelectorAll("h2")].map((heading) => heading.textContent),
  rows: document.querySelectorAll("tbody tr").length,
  squares: document.querySelectorAll("rect").length,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  unnamed: document.querySelectorAll("figure:not([aria-label]), svg:not([aria-label])").length,
});
"""


def probe(folder: Path, monkeypatch: pytest.MonkeyPatch, window: str) -> dict:
    """Open the report of a run and return what `_PROBE` finds."""
    target = folder / "probed.html"
    with monkeypatch.context() as patch:
        read = page._file
        patch.setattr(page, "_file", lambda name: read(name) + _PROBE * (name == "report.js"))
        histories = [source.history for source in open_runs([folder])]
        target.write_text(page.render(histories))
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={window}",
         "--virtual-time-budget=3000", "--enable-logging=stderr", "--dump-dom", target.as_uri()],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    problems = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not problems
    title = re.search("<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title, done.stderr[-2000:]
    found: dict = json.loads(title[1].replace("&amp;", "&"))
    return found


@pytest.mark.skipif(CHROMIUM is None, reason="apt-get install chromium")
def test_a_real_run_in_a_browser(tmp_path, monkeypatch):
    from megatron.training.pretrain import main

    flags = "--num-experts 4 --save x --profile --profile-windows 2-3 --profile-modules".split()
    flags += ["--train-iters", "6", "--metrics-jsonl", "metrics.jsonl", "--save-interval", "3"]
    monkeypatch.chdir(tmp_path)
    assert main(GPTRecipe(), [*TOY, *flags]) == 0
    for window in ("1300,900", "500,900"):
        found = probe(tmp_path, monkeypatch, window)
        assert found["canvases"] >= 6
        assert found["headings"][:3] == ["LM loss", "Learning rate", "Gradient norm"]
        sections = {"Timeline of an iteration", "Expert load at the last log line"}
        assert sections | {"Events", "Facts", "Settings", "Files"} <= set(found["headings"])
        assert found["rows"] > 250
        assert found["squares"] > 10
        assert found["overflow"] <= 0  # a phone need not scroll sideways
        assert found["unnamed"] == 0


@pytest.mark.skipif(CHROMIUM is None, reason="apt-get install chromium")
def test_a_hostile_run_in_a_browser(tmp_path, monkeypatch):
    evil = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
    records = [record(1, **{evil: 2.0}), {"iteration": 1, "event": evil, "text": evil}]
    assert probe(write_run(tmp_path / "run", records), monkeypatch, "1300,900")["canvases"] == 3
