"""tools/plot_loss.py: what it reads, how it smooths, and the figure it writes."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest

from megatron.tools import plot_loss


def write_metrics(path: Path) -> Path:
    records = [{"iteration": i, "lm loss": 8 - i / 100} for i in range(1, 101)]
    records.append({"iteration": 100, "lm loss validation": 7.2})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("count", [1, 2, 20, 1000])
def test_smoothing_has_no_lag(count):
    line = [(10 * i, 9 - 0.01 * i) for i in range(count)]
    smooth = plot_loss.smoothed(line)
    assert [iteration for iteration, _ in smooth] == [iteration for iteration, _ in line]
    assert [value for _, value in smooth] == pytest.approx([value for _, value in line])


def test_smoothing_takes_noise_out():
    draw = random.Random(1)
    noisy = [(i, 5 - 0.001 * i + draw.gauss(0, 0.1)) for i in range(1000)]
    errors = [value - (5 - 0.001 * i) for i, value in plot_loss.smoothed(noisy)]
    assert abs(sum(errors)) / len(errors) < 0.01
    assert sum(error**2 for error in errors) / len(errors) < 0.03**2


@pytest.mark.parametrize("count", [3, 20, 44, 46, 100])
def test_smoothing_fits_a_line_around_each_point(count):
    import numpy as np

    draw = random.Random(count)
    points = [(i * i, draw.random()) for i in range(count)]
    x, y = np.array(points).T
    reach = max(1, round(count / 30))
    expected = []
    for i in range(count):
        near = slice(max(0, i - reach), i + reach + 1)
        expected.append(np.polyval(np.polyfit(x[near], y[near], 1), x[i]))
    smooth = plot_loss.smoothed(points)
    assert [value for _, value in smooth] == pytest.approx(expected, abs=1e-9)


@pytest.fixture
def figures(monkeypatch):
    """Keep figures instead of writing them."""
    from matplotlib.figure import Figure

    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: kept.append(figure))
    return kept


def describe(line):
    points = [(int(x), round(float(y), 3)) for x, y in zip(*line.get_data(), strict=True)]
    color, alpha, style = line.get_color(), line.get_alpha(), line.get_linestyle()
    return points, color, alpha, line.get_linewidth(), style, line.get_marker()


def test_what_a_picture_of_one_run_shows(tmp_path, figures):
    training = [(1, 5.0), (2, 3.0), (4, 4.0)]
    validation = {"validation": [(2, 3.5), (4, 4.25)]}
    plot_loss.draw(training, validation, tmp_path / "a.png", title="My loss", entropy=6.5)
    plot_loss.draw(training, {}, tmp_path / "a.png", title="Other", entropy=None, unit="Reward")
    (axes,), (plain,) = (figure.axes for figure in figures)
    assert (axes.get_title(), axes.get_xlabel()) == ("My loss", "Iteration")
    assert (axes.get_ylabel(), plain.get_ylabel()) == ("Loss (nats per token)", "Reward")
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == [
        "training, each logged value",
        "training, smoothed",
        "validation (last: 4.250)",
        "unigram entropy: 6.500",
    ]
    smooth = [(i, round(value, 3)) for i, value in plot_loss.smoothed(training)]
    assert list(map(describe, axes.get_lines())) == [
        (training, "tab:blue", 0.3, 1, "-", "None"),
        (smooth, "tab:blue", None, 2, "-", "None"),
        (validation["validation"], "tab:orange", None, 2, "-", "o"),
        ([(0, 6.5), (1, 6.5)], "dimgray", None, 2, "--", "None"),  # over the whole width
    ]
    assert [describe(line) for line in plain.get_lines()] == [
        describe(line) for line in axes.get_lines()[:2]
    ]
    assert axes.title.get_fontsize() == 15
    assert axes.xaxis.label.get_fontsize() == 13
    assert all(tick == int(tick) for tick in axes.get_xticks())
    assert axes.xaxis.get_gridlines()[0].get_alpha() == 0.3
    assert figures[0].get_size_inches().tolist() == [8, 5]


def test_what_a_picture_of_several_runs_shows(tmp_path, figures, capsys):
    gpt, t5 = tmp_path / "gpt.jsonl", tmp_path / "t5.jsonl"
    records = [
        {"iteration": 10, "lm loss": 9.0},
        {"iteration": 10, "lm loss validation": 7.5, "other validation": 1.0},
        {"iteration": 20, "lm loss validation": 7.25, "lm loss (b) validation": 6.0},
    ]
    gpt.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    t5.write_text(f"{json.dumps(records[1])}\n")
    sets = tmp_path / "sets.jsonl"
    sets.write_text('{"iteration": 9, "lm loss validation-wiki": 3.5, "lm loss test": 1.0}\n')
    output = ["--output", str(tmp_path / "x.png")]
    assert plot_loss.main(["--compare", f"GPT={gpt}", f"T5={t5}", f"S={sets}", *output]) == 0
    (axes,) = figures[0].axes
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["GPT: 7.250", "GPT (b): 6.000", "T5: 7.500", "S wiki: 3.500"]
    described = [describe(line) for line in axes.get_lines()]
    assert [points for points, *_ in described] == [
        [(10, 7.5), (20, 7.25)],
        [(20, 6.0)],
        [(10, 7.5)],
        [(9, 3.5)],
    ]
    assert {(style, marker) for *_, style, marker in described} == {("-", "o")}
    assert figures[0].get_dpi() == 100
    capsys.readouterr()
    for words, message in (
        ([], "give the file of one run with --metrics, or the files of several with --compare"),
        (["--compare", f"GPT={gpt}", "--metrics", str(gpt)], "give the file of one run"),
        (["--compare", f"GPT={gpt}", "--curve", "lr"], "--curve works only with --metrics"),
        (
            ["--compare", f"GPT={gpt}", f"T5={t5}", f"GPT={t5}"],
            f"--compare GPT={t5}: the label GPT is taken: give each file its own",
        ),
        (["--compare", f"GPT={gpt}", "--entropy", "6"], "--entropy is drawn only with the loss"),
        (["--metrics", str(gpt), "--entropy", "nan"], "--entropy nan: give at least 0, in"),
        (["--metrics", str(gpt), "--entropy", "inf"], "--entropy inf: give at least 0, in"),
        (["--metrics", str(gpt), "--entropy", "-0.1"], "--entropy -0.1: give at least 0"),
    ):
        assert plot_loss.main([*words, *output]) == 9
        assert message in capsys.readouterr().err
    for word in ("x", "=a", "GPT="):
        assert plot_loss.main(["--compare", word, *output]) == 9
        assert f"--compare {word}: expected LABEL=FILE" in capsys.readouterr().err
    gpt.write_text('{"iteration": 1, "lm loss": 9.0, "z validation": 1}\n')
    assert plot_loss.main(["--compare", f"GPT={gpt}", *output]) == 6
    assert "no record has a validation loss" in capsys.readouterr().err


def test_a_picture_large_enough_for_a_paper(tmp_path, capsys):
    metrics, output = write_metrics(tmp_path / "m.jsonl"), tmp_path / "new" / "loss.png"
    words = ["--metrics", str(metrics), "--output", str(output)]
    assert plot_loss.main([*words, "--entropy", "6.5"]) == 0
    assert capsys.readouterr().out == f"wrote {output}\n"
    width, height = struct.unpack(">II", output.read_bytes()[16:24])
    assert (width, height) == (1600, 1000)


def test_any_number_of_the_log_is_drawn(tmp_path, capsys):
    metrics, output = tmp_path / "m.jsonl", tmp_path / "reward.png"
    lines = [{"iteration": i, "reward": i / 9, "lr": 1} for i in range(1, 10)]
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    words = ["--metrics", str(metrics), "--output", str(output)]
    assert plot_loss.main([*words, "--curve", "reward"]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    assert plot_loss.main([*words, "--overwrite", "--curve", "rewards"]) == 6
    assert "no record has the curve ('rewards'); it has" in capsys.readouterr().err


def test_an_existing_picture_is_not_replaced(tmp_path, capsys):
    metrics, output = write_metrics(tmp_path / "m.jsonl"), tmp_path / "loss.png"
    output.write_text("mine")
    words = ["--metrics", str(metrics), "--output", str(output)]
    assert plot_loss.main(words) == 9
    assert f"--output: {output} already exists" in capsys.readouterr().err
    assert output.read_text() == "mine"
    wrong = tmp_path / "loss.qqq"
    assert plot_loss.main(["--metrics", str(tmp_path / "absent"), "--output", str(wrong)]) == 9
    error = f"error: --output {wrong}: give a name that ends in .png, .pdf, .svg\n"
    assert capsys.readouterr().err == error
    assert plot_loss.main([*words, "--overwrite"]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file; train with --metrics-jsonl"),
        ("{}\n", "m.jsonl:1: not a metrics record: '{}"),
        ('{"iteration": 1}\n', "no record of an iteration yet: try again after the first one"),
        ('{"iteration": 1, "a": 2}\n', "no record has a training loss ('lm loss'); it has a\n"),
    ],
)
def test_mistakes_are_named(tmp_path, capsys, text, message):
    metrics = tmp_path / "m.jsonl"
    if text is not None:
        metrics.write_text(text)
    assert plot_loss.main(["--metrics", str(metrics), "--output", str(tmp_path / "x.png")]) == 6
    assert message in capsys.readouterr().err


def test_a_folder_is_not_a_metrics_file(tmp_path, capsys):
    words = ["--metrics", str(tmp_path), "--output", str(tmp_path / "x.png")]
    assert plot_loss.main(words) == 6
    assert f"--metrics {tmp_path}: a folder: name the file" in capsys.readouterr().err


def test_what_a_resumed_run_repeats_is_replaced_and_a_half_written_line_left_out(tmp_path):
    metrics = tmp_path / "m.jsonl"
    records = [{"iteration": i, "lm loss": 5.0} for i in (1, 2, 3, 2)]
    text = "".join(json.dumps(record) + "\n" for record in records)
    metrics.write_text(text + '{"iteration": 3, "lm l')
    assert plot_loss.read_metrics(metrics) == ([(1, 5.0), (2, 5.0)], {})


def test_each_validation_set_has_a_curve(tmp_path, figures):
    metrics = tmp_path / "metrics.jsonl"
    records = [
        {"iteration": 1, "lm loss": 5.0},
        {"iteration": 1, "lm loss validation-wiki": 4.0},
        {"iteration": 1, "lm loss validation-code": 3.0, "lm loss validation-code ppl": 20.0},
        {"iteration": 1, "lm loss test": 2.0},
    ]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["--metrics", str(metrics), "--output", str(tmp_path / "a.png")]
    assert plot_loss.main(words) == 0
    ((axes,),) = (figure.axes for figure in figures)
    _, _, *held_out = axes.get_lines()
    assert [(line.get_label(), line.get_color()) for line in held_out] == [
        ("validation-wiki (last: 4.000)", "tab:orange"),
        ("validation-code (last: 3.000)", "tab:green"),
    ]


@pytest.mark.parametrize(
    ("words", "title"),
    [
        ([], "Pretraining loss"),
        (["--curve", "grad-norm"], "Grad-norm"),
        (["--title", "Mine"], "Mine"),
        (["--curve", "grad-norm", "--title", "Mine"], "Mine"),
    ],
)
def test_a_picture_has_the_title_that_is_given_or_that_of_its_curve(
    tmp_path, monkeypatch, words, title
):
    titles = []
    monkeypatch.setattr(plot_loss, "draw", lambda *_, title, **__: titles.append(title))
    metrics = tmp_path / "m.jsonl"
    lines = [{"iteration": i, "lm loss": 8.0, "grad-norm": 1.0} for i in range(1, 4)]
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    output = ["--output", str(tmp_path / "loss.png")]
    assert plot_loss.main(["--metrics", str(metrics), *output, *words]) == 0
    assert titles == [title]
