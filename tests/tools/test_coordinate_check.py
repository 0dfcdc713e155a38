"""The coordinate check: flat with muP, growing without it, and what it refuses."""

import json

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from megatron.errors import ConfigError
from megatron.tools import coordinate_check
from megatron.tools.coordinate_check import (
    build_parser,
    config_of,
    fit_powers,
    main,
    run,
    table_lines,
)

SHORT = "--seeds 1 --steps 3".split()
UNTIED = "--untie-embeddings-and-output-weights --position-embedding-type rope"


def _powers(folder, flags, capsys, widths=("32", "64", "128")):
    words = ["--widths", *widths, *SHORT, "--output", str(folder), "--", *flags.split()]
    code = main(words)
    told = capsys.readouterr().out
    content = json.loads((folder / "coordinates.json").read_text())
    assert (folder / "coordinates.png").stat().st_size > 1000
    assert content["changes"].keys() == set(widths)
    assert all(f"\n{name}" in told for name in content["powers"])
    return code, content["powers"]


def test_flat_with_mup_and_growing_without(tmp_path, capsys):
    with_mup = "--use-mup --mup-base-hidden-size 64"
    code, flat = _powers(tmp_path / "mup", with_mup, capsys)
    assert code == 0
    assert {"embedding", "layers.0.attention", "layers.1.mlp", "logits"} <= flat.keys()
    assert max(map(abs, flat.values())) < 0.3
    code, growing = _powers(tmp_path / "plain", "", capsys)
    assert code == 1
    inner = [power for name, power in growing.items() if name.startswith("layers")]
    assert min(inner) > 0.5
    assert abs(growing["embedding"]) < 0.1  # its updates do not depend on the width


@pytest.mark.parametrize(
    "flags", [UNTIED, "--optimizer muon --muon-scale-mode unit_rms_norm --lr 1e-2"]
)
def test_other_networks_and_muon(tmp_path, capsys, flags):
    code, powers = _powers(tmp_path, f"--use-mup {flags}", capsys, widths=("64", "128", "256"))
    assert code == 0, powers


def test_the_power_is_that_of_the_width():
    found = {width: {"a": 3.0 * width**0.5, "b": 7.0, "c": 2.0 / width} for width in (8, 16, 64)}
    powers = fit_powers(found)
    assert powers == pytest.approx({"a": 0.5, "b": 0.0, "c": -1.0})
    words = [line.split()[-1] for line in table_lines(found, powers)[1:]]
    assert words == ["grows", "flat", "shrinks"]


def test_the_table_and_the_picture(tmp_path, monkeypatch):
    changes = {32: {"embedding": 0.5, "logits": 0.001}, 128: {"embedding": 0.25, "logits": 2.0}}
    assert table_lines(changes, {"embedding": -0.3, "logits": -0.31}) == [
        "mean change of                 32        128   power",
        "embedding               5.000e-01  2.500e-01   -0.30 flat",
        "logits                  1.000e-03  2.000e+00   -0.31 shrinks",
    ]
    assert table_lines(changes, {"logits": 0.31})[1].endswith("    0.31 grows")
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append((figure, path)))
    coordinate_check.draw(changes, tmp_path / "a.png")
    ((figure, path),) = figures
    (axes,) = figure.axes
    assert path == tmp_path / "a.png"
    assert (figure.get_size_inches().tolist(), figure.get_dpi()) == ([8, 5], 150)
    lines = {line.get_label(): line.get_data() for line in axes.get_lines()}
    assert {name: [list(x), list(y)] for name, (x, y) in lines.items()} == {
        "embedding": [[32, 128], [0.5, 0.25]],
        "logits": [[32, 128], [0.001, 2.0]],
    }
    assert {line.get_marker() for line in axes.get_lines()} == {"o"}
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.xaxis.get_gridlines()[0].get_alpha() == 0.3
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["embedding", "logits"]


def test_the_runs_and_their_mean(tmp_path, monkeypatch, capsys):
    """Changes are those of a network that is flat, except for the output layer."""
    configs = []

    def changes_after(config, steps):
        configs.append((config, steps))
        width, seed = config.model.hidden_size, config.training.seed
        return {"embedding": seed * 1.0, "logits": seed * width ** power[0]}

    monkeypatch.setattr(coordinate_check, "changes_after", changes_after)
    words = "--widths 32 64 128 --seeds 3 --steps 5 --output".split()
    for power, code in (([0.29], 0), ([0.31], 1), ([-0.31], 1)):
        configs.clear()
        options = build_parser().read([*words, str(tmp_path / "new" / "x"), "--overwrite"])
        assert run(options) == code
        content = json.loads((tmp_path / "new" / "x" / "coordinates.json").read_text())
        assert content["powers"] == pytest.approx({"embedding": 0, "logits": power[0]})
        for width in ("32", "64", "128"):
            expected = {"embedding": 2.0, "logits": 2.0 * int(width) ** power[0]}
            assert content["changes"][width] == pytest.approx(expected)
    assert "width 32: done\nwidth 64: done\n" in capsys.readouterr().out
    described = [(c.model.hidden_size, c.training.seed, steps) for c, steps in configs]
    assert described == [(width, seed, 5) for width in (32, 64, 128) for seed in (1, 2, 3)]
    assert {config.training.train_iters for config, _ in configs} == {5}
    assert [c.model.num_attention_heads for c, _ in configs[::3]] == [2, 4, 8]


def test_flags_of_the_run_come_before_those_of_the_check():
    read = build_parser().read
    base = ["--widths", "32", "64", "--output", "x", "--heads", "4"]
    config = config_of(read([*base, "--", "--lr", "1e-2", "--use-mup"]), 64, 7)
    assert (config.model.num_attention_heads, config.training.seed) == (4, 7)
    assert (config.schedule.lr, config.data.seq_length) == (1e-2, 32)
    assert (config.model.num_layers, config.training.micro_batch_size) == (2, 4)
    assert (config.model.hidden_dropout, config.optimizer.clip_grad) == (0, 0)
    assert config.model.mup_base_hidden_size == 32
    flags = "--use-mup --mup-base-hidden-size 16 --seed 3".split()
    config = config_of(read([*base, "--", *flags]), 64, 7)
    assert (config.model.mup_base_hidden_size, config.training.seed) == (16, 3)


class _Network(nn.Module):
    """A network whose sublayers multiply by a prime each, with dropout."""

    def __init__(self):
        super().__init__()
        layer = nn.ModuleDict({"attention": nn.Linear(1, 1), "mlp": nn.Sequential(nn.Identity())})
        self.embedding, self.layers = nn.Embedding(8, 1), nn.ModuleList([layer])
        self.norm, self.drop = nn.Identity(), nn.Dropout(0.9)
        for p, value in zip(self.parameters(), (torch.arange(8.0)[:, None], 3, 0), strict=True):
            p.data[:] = value

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens))
        return self.drop(self.layers[0]["mlp"](self.layers[0]["attention"](x))).bfloat16()


def test_activations_are_the_outputs_of_sublayers():
    model = _Network()
    found = coordinate_check.activations(model, torch.tensor([[1, 2]]))
    assert {name: x.flatten().tolist() for name, x in found.items()} == {
        "embedding": [1, 2],
        "layers.0.attention": [3, 6],
        "layers.0.mlp": [3, 6],
        "logits": [3, 6],  # without dropout
    }
    assert all(x.dtype == torch.float32 and not x.requires_grad for x in found.values())
    assert not any(module._forward_hooks for module in model.modules())


def test_the_smallest_check_is_accepted(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinate_check, "changes_after", lambda *_: {"logits": 1.0})
    words = "--widths 1 2 --head-size 1 --steps 1 --seeds 1 --output"
    assert run(build_parser().read([*words.split(), str(tmp_path)])) == 0
    with pytest.raises(ConfigError, match="already exists"):
        run(build_parser().read([*words.split(), str(tmp_path)]))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--widths 0 64 --output out", "--widths 0 64: give at least two, in increasing order"),
        ("--widths 32 32 --output out", "--widths 32 32: give at least two, in increasing order"),
        ("--widths 32 64 --seeds 0 --output out", "--seeds 0: must be at least 1"),
        ("--widths 64 --output out", "--widths 64: give at least two, in increasing order"),
        ("--widths 64 32 --output out", "--widths 64 32: give at least two, in increasing order"),
        ("--widths 30 64 --output out", "--widths 30: not divisible by --head-size 16"),
        ("--widths 30 64 --heads 4 --output out", "--widths 30: not divisible by --heads 4"),
        ("--widths 32 64 --steps 0 --output out", "--steps 0: must be at least 1"),
        ("--widths 32 64 --heads 0 --output out", "--heads 0: must be at least 1"),
        ("--widths 32 64 --output out.png", "--output out.png: give a folder"),
        ("--widths 32 64 --output out -- --hidden-size 8", "--hidden-size: the check sets it"),
    ],
)
def test_refusals(words, problem):
    with pytest.raises(ConfigError) as caught:
        run(build_parser().read(words.split()))
    assert any(line.startswith(problem) for line in caught.value.problems)
