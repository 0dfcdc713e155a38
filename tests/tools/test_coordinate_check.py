"""The coordinate check: flat with muP, growing without it, and what it refuses."""

import json

import pytest

from megatron.errors import ConfigError
from megatron.tools.coordinate_check import build_parser, fit_powers, main, run, table_lines

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


@pytest.mark.parametrize(
    ("words", "problem"),
    [
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
