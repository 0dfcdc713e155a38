"""The file of the reference model's log-probabilities, and whole finetune.py runs with it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch

from finetune import FinetuningRecipe, choose
from megatron.config.finetuning import finetuning_args
from megatron.data.datasets import Datasets
from megatron.data.packing import pack
from megatron.data.preferences import PreferenceDataset
from megatron.errors import EXIT_OK, CheckpointError, ConfigError
from megatron.finetuning import reference
from megatron.parallel.layout import Layout
from megatron.training.pretrain import main
from tests.distributed import run_sharing_memory
from tests.finetuning.toy_pairs import FILE, build_pairs
from tests.training.toy import TOY


def values(layout: Layout, *words: str) -> list[float]:
    """Return the reference log-probabilities of a run's first sample."""
    run = build_pairs(layout, words)
    assert run.datasets[0] is not None
    found: list[float] = run.datasets[0][0]["reference"].tolist()
    return found


def test_the_file_is_read_by_runs_of_the_same_weights_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--reference-log-probs", str(tmp_path / "kept" / "file.npz")]
    (tmp_path / "kept").mkdir()
    first = values(Layout.single(), *words)
    assert "computing the reference model's log-probabilities of 9 rows" in capsys.readouterr().out
    assert any(first)
    assert values(Layout.single(), *words) == first
    assert "computing" not in capsys.readouterr().out
    for changed in (["--seed", "5"], ["--preference-loss", "ipo", "--hidden-size", "16"]):
        other = values(Layout.single(), *words, *changed)
        assert "is for other data or weights; it will be replaced" in capsys.readouterr().out
        assert other != first
    (tmp_path / "kept" / "file.npz").write_bytes(b"PK damaged")
    assert values(Layout.single(), *words) == first
    assert "not a file of log-probabilities" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"data": "x"}, "is for other data or weights"),
        ({"weights": "x"}, "is for other data or weights"),
        ({"values": np.zeros((25, 2))}, "is for other data or weights"),
        ({"values": np.zeros((24, 2), np.float32)}, "is for other data or weights"),
        ({"values": np.full((24, 2), "", object)}, "not a file of log-probabilities"),
    ],
    ids=range(6),
)
def test_a_file_is_read_only_if_all_of_it_fits(
    changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Objects are not even read, because reading them would run code."""
    path = tmp_path / "file.npz"
    first = values(Layout.single(), "--reference-log-probs", str(path))
    with np.load(path) as file:
        parts: dict[str, Any] = {**file, **changes}
    np.savez(path, **parts)
    capsys.readouterr()
    assert values(Layout.single(), "--reference-log-probs", str(path)) == first
    printed = capsys.readouterr().out
    assert said in printed
    assert ("will be replaced" in printed) == ("computing" in printed) == bool(changes)


@pytest.mark.parametrize("flags", ["--bf16", "--lora-rank 4"])
def test_files_of_other_formats_and_adapters(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--reference-log-probs", str(tmp_path / "file.npz"), *flags.split()]
    first = values(Layout.single(), *words)
    assert "computing" in capsys.readouterr().out
    assert values(Layout.single(), *words) == first
    assert "computing" not in capsys.readouterr().out
    assert values(Layout.single(), *words, "--seed", "5") != first
    assert "is for other data or weights; it will be replaced" in capsys.readouterr().out


class Answers(NamedTuple):
    """A stand-in for the answers of a file, with a digest."""

    name: str

    def digest(self) -> str:
        return self.name


def test_a_digest_of_the_data_depends_on_answers_order_and_number_format() -> None:
    one, two = Answers("one"), Answers("two")

    def digest(dtype: torch.dtype, *members: tuple[Answers, int, int]) -> str:
        config = SimpleNamespace(precision=SimpleNamespace(stream_dtype=dtype))
        parts = [SimpleNamespace(source=s, first=f, pairs=p) for s, f, p in members]
        return reference.data_digest(cast(Any, config), cast(Any, parts))

    first = digest(torch.float32, (one, 0, 5), (one, 5, 2))
    assert first == digest(torch.float32, (one, 0, 5), (one, 5, 2))
    others = {
        digest(torch.bfloat16, (one, 0, 5), (one, 5, 2)),
        digest(torch.float32, (two, 0, 5), (two, 5, 2)),
        digest(torch.float32, (one, 0, 5), (one, 5, 3)),
        digest(torch.float32, (one, 0, 5), (one, 4, 2)),
        digest(torch.float32, (one, 0, 5)),
    }
    assert len(others - {first}) == 5


def test_the_reference_model_has_no_dropout() -> None:
    dropout = "--hidden-dropout 0.5 --attention-dropout 0.5".split()
    assert values(Layout.single(), *dropout) == values(Layout.single())


def test_nothing_is_computed_without_need(capsys: pytest.CaptureFixture[str]) -> None:
    run = build_pairs(Layout.single(), ["--preference-loss", "simpo"])
    (member, *_) = run.datasets
    assert isinstance(member, PreferenceDataset)
    assert member.reference is None
    assert "computing" not in capsys.readouterr().out
    run = build_pairs(Layout.single(), [])
    capsys.readouterr()
    run.datasets = Datasets(None, None, None)
    reference.ReferenceLogProbs().begin(run)
    assert capsys.readouterr().out == ""


def test_a_file_of_another_kind_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--reference-log-probs {tmp_path}: not a file of"):
        values(Layout.single(), "--reference-log-probs", str(tmp_path))
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    with pytest.raises(ConfigError, match=r"--reference-log-probs .*pairs\.jsonl: not a file of"):
        values(Layout.single(), "--reference-log-probs", str(file))
    assert "chosen" in file.read_text()


def test_each_split_gets_the_log_probabilities_of_its_own_pairs() -> None:
    run = build_pairs(Layout.single(), [])
    whole, _, _ = run.datasets
    assert isinstance(whole, PreferenceDataset)
    assert whole.reference is not None
    parts = []
    for first, last in ((0, 15), (15, 24)):
        packing = pack(whole.source.limits[first:last].sum(axis=1), 32)
        parts.append(replace(whole, first=first, packing=packing, reference=None))
    run.datasets = Datasets(*parts, None)
    reference.ReferenceLogProbs().begin(run)
    found = np.concatenate([part.reference for part in parts])
    np.testing.assert_allclose(found, whole.reference, rtol=1e-5)


def test_every_layout_computes_and_reads_the_same(tmp_path: Path) -> None:
    expected = values(Layout.single())
    words = ["--reference-log-probs", str(tmp_path / "file.npz")]
    split = ["--tensor-model-parallel-size", "2"]
    for found in run_sharing_memory(2, values, *words, *split, tensor=2):
        assert found == pytest.approx(expected, rel=1e-5)
    before = (tmp_path / "file.npz").read_bytes()
    values(Layout.single(), *words)  # its weights have the same checksum
    run_sharing_memory(2, values, *words, "--zero-stage", "3")  # and so do its shards
    assert (tmp_path / "file.npz").read_bytes() == before
    for found in run_sharing_memory(2, values):
        assert found == pytest.approx(expected, rel=1e-5)


def run_program(folder: Path, *words: str) -> int:
    toy = [word for word in TOY if word != "--mock-data"]
    file = shutil.copy(FILE, folder.parent)  # its cache is next to it
    given = [*toy, "--data-path", str(file), "--split", "80,20,0", "--preference-loss", "dpo"]
    given += "--seq-length 32 --max-position-embeddings 32 --no-exit-signal-handler".split()
    given += ["--hidden-dropout", "0", "--attention-dropout", "0"]
    given += ["--save", str(folder), "--save-interval", "1", "--train-iters", "4", *words]
    return main(FinetuningRecipe(), finetuning_args(given), choose=choose)


def losses(capsys: pytest.CaptureFixture[str]) -> dict[int, str]:
    return losses_in(capsys.readouterr().out)


def losses_in(told: str) -> dict[int, str]:
    lines = [line for line in told.splitlines() if " iteration " in line]
    trained = [line for line in lines if "consumed samples" in line]
    return {
        int(line.split("/")[0].split()[-1]): line[line.index("loss:") : line.index("loss scale")]
        for line in trained
    }


def test_an_interrupted_run_continues_with_its_reference_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(tmp_path / "run") == EXIT_OK
    told = capsys.readouterr().out
    assert "validation loss at iteration" in told
    assert "PPL" not in told  # the loss is not that of tokens
    whole = losses_in(told)
    assert whole[1].startswith("loss: 6.93147")
    assert np.load(tmp_path / "run" / reference.FILE_NAME)["values"].shape == (12, 2)
    shutil.copytree(tmp_path / "run", tmp_path / "resumed")
    resume = ("--load", str(tmp_path / "resumed"), "--ckpt-step", "1")
    assert run_program(tmp_path / "resumed", *resume) == EXIT_OK
    assert losses(capsys) == {step: line for step, line in whole.items() if step > 1}
    # In another folder the run writes its own copy.
    assert run_program(tmp_path / "moved", *resume, "--no-finetune") == EXIT_OK
    capsys.readouterr()
    assert (tmp_path / "moved" / reference.FILE_NAME).is_file()
    (tmp_path / "resumed" / reference.FILE_NAME).unlink()
    assert run_program(tmp_path / "resumed", *resume) == CheckpointError.exit_code
    told = capsys.readouterr()
    assert "cannot be computed from weights that are already trained" in told.out + told.err


LORA = ("--lora-rank", "4", "--lr", "1e-2")


def test_a_run_with_adapters_needs_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its reference is the model with the adapters disabled, which is always available."""
    assert run_program(tmp_path / "run", *LORA) == EXIT_OK
    told = capsys.readouterr().out
    assert "log-probabilities of 5 rows with the adapters off" in told
    whole = losses_in(told)
    assert whole[1].startswith("loss: 6.93147")
    assert not whole[4].startswith("loss: 6.93")
    resume = (*LORA, "--load", str(tmp_path / "run"), "--ckpt-step", "2")
    file = tmp_path / "run" / reference.FILE_NAME
    with np.load(file) as stored:
        np.savez(file, **{**stored, "data": "other"})
    for _ in range(2):
        assert run_program(tmp_path / "run", *resume) == EXIT_OK
        told = capsys.readouterr().out
        assert "log-probabilities of 5 rows with the adapters off" in told
        assert losses_in(told) == {step: line for step, line in whole.items() if step > 2}
        file.unlink()


def test_adapters_that_were_trained_before_are_part_of_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(tmp_path / "first", *LORA) == EXIT_OK
    capsys.readouterr()
    words = (*LORA, "--load", str(tmp_path / "first"), "--finetune")
    assert run_program(tmp_path / "second", *words) == EXIT_OK
    told = capsys.readouterr().out
    assert "with the adapters off" not in told
    whole = losses_in(told)
    assert whole[1].startswith("loss: 6.93147")
    resume = (*LORA, "--load", str(tmp_path / "second"), "--ckpt-step", "2")
    assert run_program(tmp_path / "second", *resume) == EXIT_OK
    assert losses(capsys) == {step: line for step, line in whole.items() if step > 2}
    (tmp_path / "second" / reference.FILE_NAME).write_bytes(b"PK damaged")
    assert run_program(tmp_path / "second", *resume) == CheckpointError.exit_code
