"""tools/checkpoint/util.py --verify: what happens to the output."""

from __future__ import annotations

import math
import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.checkpoint.find import TRACKER
from megatron.checkpoint.huggingface.reader import HFReader
from megatron.checkpoint.inspection import summarize
from megatron.checkpoint.loading import checkpoints_below, open_checkpoint
from megatron.errors import CheckpointError
from megatron.tools.checkpoint import util, verify
from tests.checkpoint.huggingface.models import CASES, tensors_of, write_folder
from tests.checkpoint.killing import run_forked
from tests.tools.test_checkpoint_util import assert_same, convert, tensors_in


def test_verify_says_plainly_that_it_did_not_check(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(verify, "find_spec", lambda _: None)
    folder = write_folder(tmp_path / "a", CASES["llama"].config, tensors_of(CASES["llama"]))
    assert convert("hf", "native", folder, tmp_path / "b", "--verify") == 0
    assert "NOT CHECKED: transformers is not installed" in capsys.readouterr().out


def test_a_tolerance_that_nothing_meets_is_refused(tmp_path: Path, capsys) -> None:
    words = ["hf", "native", tmp_path / "a", tmp_path / "b", "--verify", "--verify-tolerance"]
    for tolerance in ("-1", "nan"):
        assert convert(*words, tolerance) == 9
        assert f"--verify-tolerance {tolerance}: give 0 or more" in capsys.readouterr().err
    assert verify.main([str(tmp_path), str(tmp_path), "--tolerance", "-0.1"]) == 9
    assert "--tolerance -0.1: give 0 or more" in capsys.readouterr().err
    verify.check_tolerance("--tolerance", 0.0)


@pytest.mark.parametrize("change", ["one more", "one less"])
def test_tensors_must_be_exactly_those_of_transformers(change: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    case = CASES["llama"]
    tensors = tensors_of(case)
    folder = write_folder(tmp_path / "a", case.config, tensors)
    reader = HFReader(folder)
    assert verify.transformers_model(reader) is not None
    if change == "one more":
        write_folder(folder, case.config, tensors | {"model.odd": torch.zeros(2)})
    else:
        del tensors["model.norm.weight"]
        write_folder(folder, case.config, tensors)
    with pytest.raises(CheckpointError, match=r"model\.(odd|norm\.weight)"):
        verify.transformers_model(reader)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_while_it_is_verified_leaves_no_name(tmp_path: Path, monkeypatch) -> None:
    folder = write_folder(tmp_path / "a", CASES["llama"].config, tensors_of(CASES["llama"]))
    native = tmp_path / "native"
    assert convert("hf", "native", folder, native) == 0
    for saver, source, parent, name in (
        ("native", folder, tmp_path / "b", "iter_0000000"),
        ("megatron", folder, tmp_path / "c", "release"),
        ("hf", native, tmp_path, "d"),
    ):
        target = tmp_path / "d" if saver == "hf" else parent
        words = ("native" if saver == "hf" else "hf", saver, source, target)
        with monkeypatch.context() as patch:
            patch.setattr(verify, "find_spec", lambda _: os.kill(os.getpid(), signal.SIGKILL))
            assert run_forked(partial(convert, *words, "--verify")) == -signal.SIGKILL
        assert [one.name.split("-")[0] for one in parent.glob(f"{name}*")] == [f"{name}.tmp"]
        assert not (target / TRACKER).exists()
        assert convert(*words) == 0
        left = {one.name.split("-")[0] for one in parent.glob(f"{name}*")}
        assert left == ({"d", "d.tmp"} if saver == "hf" else {name})


def test_what_is_verified_keeps_its_name_where_nobody_reads_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(verify, "find_spec", lambda _: None)
    folder = write_folder(tmp_path / "a", CASES["llama"].config, tensors_of(CASES["llama"]))
    words = ["--model-type", "GPT", "--loader", "hf", "--saver", "native", "--verify"]
    words += ["--load-dir", str(folder), "--save-dir", str(tmp_path / "b")]
    lines = util.run(util.build_parser().read(words))
    assert any("--verify: " in line for line in lines)
    lines.close()
    assert open_checkpoint(tmp_path / "b").iteration == 0


@pytest.mark.parametrize(
    "error", [None, RuntimeError("a fault of a library")], ids=["other", "ends"]
)
def test_what_was_not_verified_loses_its_name(error, tmp_path: Path, capsys, monkeypatch) -> None:
    def other_model(reader: HFReader, inputs: verify.Inputs) -> dict[str, torch.Tensor]:
        if error is not None:
            raise error
        return {"logits": torch.ones(*inputs.tokens.shape, reader.vocab)}

    monkeypatch.setattr(verify, "find_spec", lambda _: True)
    monkeypatch.setattr(verify, "transformers_outputs", other_model)
    folder = write_folder(tmp_path / "a", CASES["llama"].config, tensors_of(CASES["llama"]))
    native, exported = tmp_path / "native", tmp_path / "exported"

    def convert_and_fail(*words: str | Path) -> Path:
        """Convert, and return the path of the unverified output, which must not be the target's."""
        if error is None:
            assert convert(*words, "--verify") == 4
        else:
            with pytest.raises(RuntimeError, match="a fault of a library"):
                convert(*words, "--verify")
        name = {"native": "iter_0000000", "megatron": "release", "hf": ""}[words[1]]
        written = words[-1] / name
        (aside,) = written.parent.glob(f"{written.name}*")
        shown = capsys.readouterr().err
        warning = f"WARNING: {written} was not verified: the unverified output is in {aside}: "
        assert warning in shown
        assert error is not None or "error: --verify: logits differ by at most" in shown
        assert aside.name.startswith(f"{written.name}.unverified-")
        return aside

    convert_and_fail("hf", "native", folder, native)
    with pytest.raises(CheckpointError, match=r"iter_0000000\.unverified-\w+ was not verified"):
        open_checkpoint(native)
    assert convert("hf", "native", folder, native) == 0  # the same again
    assert open_checkpoint(native).iteration == 0
    lines, sound = summarize(native, verify=True, details=False)
    assert sound
    assert lines[-1].endswith(" was not verified when it was converted: never loaded")
    aside = convert_and_fail("native", "hf", native, exported)
    assert checkpoints_below(tmp_path) == ["a", "native"]
    assert_same(tensors_in(aside), tensors_of(CASES["llama"]))
    assert convert("native", "hf", native, exported) == 0
    convert_and_fail("hf", "megatron", folder, tmp_path / "megatron")


def test_the_command_compares_two_models_that_are_there(tmp_path: Path, capsys) -> None:
    pytest.importorskip("transformers")
    case = CASES["llama"]
    folder = write_folder(tmp_path / "a", case.config, tensors_of(case))
    other = write_folder(tmp_path / "other", case.config, tensors_of(case, seed=1))
    assert convert("hf", "native", folder, tmp_path / "b") == 0
    capsys.readouterr()
    for checkpoint in (tmp_path / "b", folder):
        assert verify.main([str(checkpoint), str(folder)]) == 0
        assert capsys.readouterr().out.startswith("logits differ by at most ")
    assert verify.main([str(tmp_path / "b"), str(other)]) == CheckpointError.exit_code
    assert "of the largest" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("actual", "expected", "tolerance", "agrees"),
    [
        ([3.5, 1.0], [4.0, 1.0], 0.125, True),
        ([3.5, 1.0], [4.0, 1.0], 0.12, False),
        ([-3.5, 1.0], [-4.0, 1.0], 0.125, True),
        ([0.5, 0.25], [0.5, 0.125], 0.125, True),  # a largest logit below 1 counts as 1
        ([0.5, 0.25], [0.5, 0.125], 0.12, False),
        ([1.0, 2.0, 99.0], [1.0, 2.0], 0.0, True),  # rows of padding in our vocabulary
        ([math.nan], [1.0], 1.0, False),
    ],
)
def test_the_tolerance_is_a_fraction_of_the_largest_logit(
    actual: list[float], expected: list[float], tolerance: float, agrees: bool, monkeypatch
) -> None:
    reader = SimpleNamespace(vocab=9)
    config = SimpleNamespace(model=SimpleNamespace(max_position_embeddings=8))
    monkeypatch.setattr(verify, "find_spec", lambda _: True)
    monkeypatch.setattr("megatron.checkpoint.loading.open_hf", lambda *_, **__: reader)
    for name, values in (("megatron", actual), ("transformers", expected)):
        outputs = {"same": torch.ones(2), "logits": torch.tensor(values)}
        monkeypatch.setattr(verify, f"{name}_outputs", lambda *_, outputs=outputs: outputs)
    if agrees:
        largest = max(map(abs, expected))
        difference = max(abs(a - b) for a, b in zip(actual, expected, strict=False))
        assert verify.verify(reader, config, Path("x"), tolerance=tolerance) == (
            "--verify: same differ by at most 0.00e+00 (largest 1.00, fp32); "
            f"logits differ by at most {difference:.2e} (largest {largest:.2f}, fp32)"
        )
    else:
        with pytest.raises(CheckpointError, match=f"more than {tolerance:g} of the largest"):
            verify.verify(reader, config, Path("x"), tolerance=tolerance)


@pytest.mark.parametrize(("positions", "length"), [(1000, 64), (65, 64), (15, 15)])
def test_random_inputs_have_padding_and_fit_the_context(positions: int, length: int) -> None:
    found = verify.random_inputs(positions, 50)
    assert found.tokens.shape == found.types.shape == (2, length)
    assert found.decoder_tokens.shape == (2, (length + 1) // 2)
    assert {*found.types.unique().tolist()} == {0, 1}
    assert found.tokens.unique().numel() > length // 2
    assert 0 <= int(found.tokens.min()) <= int(found.tokens.max()) < 50
    assert found.padding[0].all()
    assert found.padding[1].tolist() == [i < length - length // 4 for i in range(length)]
    again = verify.random_inputs(positions, 50)
    assert (found.tokens.equal(again.tokens), found.types.equal(again.types)) == (True, True)
