"""The tool that draws schedules."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from matplotlib import rc_context

from megatron.errors import ConfigError, StorageError
from tests.repository import ROOT
from tools.show_schedule import check_sizes, main, prove_all


def test_prints_the_timeline(capsys) -> None:
    main(["--stages", "2", "--micro-batches", "2", "--schedule", "zero-bubble"])
    assert capsys.readouterr().out.splitlines() == [
        "zero-bubble: 2 stages, 2 micro-batches; time 7, bubble 14.3%",
        "peak number of activations, by stage: 2 2",
        "stage  0  F0F1..B0W0B1W1",
        "stage  1  ..F0B0F1B1W0W1",
    ]


def test_times_of_parts_make_a_longer_line(capsys) -> None:
    words = ["--schedule", "interleaved", "--stages", "2", "--virtual-stages", "2"]
    words += ["--micro-batches", "2", "--communication-time", "0.5"]
    main([*words, "--forward-time", "1", "1", "1", "3"])
    heading, held, *rows = capsys.readouterr().out.splitlines()
    assert heading.startswith("interleaved: 2 stages x 2 virtual, 2 micro-batches; time")
    assert held.endswith("4 3")
    assert len(rows) == 2
    assert len(rows[0]) == len(rows[1])


def test_draws_a_picture(tmp_path) -> None:
    picture = tmp_path / "schedule.png"
    words = ["--schedule", "interleaved", "--stages", "2", "--virtual-stages", "2"]
    main([*words, "--micro-batches", "4", "--output", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_names_what_its_colors_mean(tmp_path) -> None:
    picture = tmp_path / "schedule.svg"
    words = ["--stages", "2", "--micro-batches", "2", "--schedule", "zero-bubble"]
    with rc_context({"svg.fonttype": "none"}):  # text is not converted to paths
        main([*words, "--output", str(picture)])
    texts = re.findall("<text[^>]*>([^<]+)</text>", picture.read_text())
    legend = ["forward", "backward, inputs", "backward, weights", "waiting"]
    assert [text for text in texts if text in legend] == legend
    assert {"stage 0", "stage 1", "time"} <= set(texts)


def test_weights_are_a_part_of_backward() -> None:
    words = ["--stages", "2", "--micro-batches", "2", "--backward-time", "1", "--weight-time", "2"]
    with pytest.raises(ConfigError, match="is a part of --backward-time and must not exceed it"):
        main(words)


def test_a_wrong_layout_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "tools/show_schedule.py", "--stages", "2", "--micro-batches", "0"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ConfigError.exit_code
    assert done.stderr == ("error: --micro-batches 0: must be at least 1\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--stages 0", "--stages 0: must be at least 1"),
        ("--schedule interleaved", "--schedule interleaved with --virtual-stages 1: use 2 or more"),
        ("--forward-time nan", "--forward-time nan: must be a number of at least 0"),
        ("--backward-time 1 2 3 inf", "--backward-time inf: must be a number of at least 0"),
        ("--communication-time -3", "--communication-time -3: must be a number of at least 0"),
        (
            "--micro-batches 1000000000",
            "= 4000000000 passes: at most 100000 can be shown; use fewer",
        ),
        ("--output schedule.jpgg", "--output schedule.jpgg: give a name that ends in .png"),
        ("--output schedule", "--output schedule: give a name that ends in .png"),
    ],
)
def test_what_cannot_be_shown_is_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        main(words.split())
    assert message in str(caught.value)


def test_a_picture_makes_its_folder_or_says_why_not(tmp_path) -> None:
    words = ["--stages", "2", "--micro-batches", "2", "--output"]
    main([*words, str(tmp_path / "new" / "schedule.png")])
    assert (tmp_path / "new" / "schedule.png").exists()
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"--output .*/file/schedule.png cannot be written"):
        main([*words, str(tmp_path / "file" / "schedule.png")])


def test_proves_every_layout_up_to_a_size(capsys) -> None:
    prove_all(stages=2, chunks=2, micro_batches=2)
    # gpipe 2 x 2 x 2, 1f1b 2 x 2, interleaved 2 x 2 (of 2 chunks), zero-bubble 2 x 2
    assert capsys.readouterr().out.startswith("20 schedules, ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("interleaved", 4, 1, 8), "use 2 or more"),
        (("1f1b", 4, 2, 8), "use 1, or --schedule interleaved"),
        (("zero-bubble", 4, 2, 8), "use 1, or --schedule interleaved"),
        (("1f1b", 0, 1, 0), "must be at least 1"),
        (("2f2b", 4, 1, 8), "use one of gpipe"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(arguments, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_sizes(*arguments)
