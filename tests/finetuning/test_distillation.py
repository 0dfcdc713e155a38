"""Distillation on one process and in parallel layouts, from a teacher and from its files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes

from megatron.config.data import TokenizerConfig
from megatron.config.distillation import DistillationConfig
from megatron.config.parser import parse_config
from megatron.config.run import RunConfig
from megatron.data import logits as files
from megatron.data.datasets import Datasets
from megatron.data.mock import MockDataset
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.finetuning import teacher as teacher_module
from megatron.finetuning.distillation import LOSS_NAMES, Distillation, student_losses
from megatron.finetuning.teacher import load_teacher
from megatron.parallel.context.split import TokenBatch
from megatron.parallel.distillation import TopLogProbs, VocabularyPart
from megatron.parallel.layout import Axis, Layout
from megatron.planner.memory import amount, estimate_memory
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.training.build import build_run
from megatron.training.evaluation import evaluate
from megatron.training.loop import standard_callbacks, train
from megatron.training.pretrain import main
from megatron.training.recipe import SampleCounts
from megatron.training.run import Run
from pretrain_gpt import GPTRecipe
from tests.config.command import problems
from tests.distributed import as_given, run_distributed, toy_device
from tests.training.toy import TOY, Recorder, train_toy

_TEACHER = "--num-layers 3 --hidden-size 48 --train-iters 30 --save-interval 30".split()
_PLAIN = "--hidden-dropout 0 --attention-dropout 0".split()
_SIZES = {
    "--tensor-model-parallel-size": "tensor",
    "--context-parallel-size": "context",
    "--pipeline-model-parallel-size": "pipeline",
}
_DEEP = ["--num-layers", "4"]  # for a student in a pipeline; its teacher has 3


def parsed(layout: Layout, words: Sequence[str]) -> RunConfig:
    words = [*TOY, *_PLAIN, "--no-exit-signal-handler", "--train-iters", "6", *words]
    return parse_config(words, world_size=layout.world.size, architecture="gpt").config


def begin(layout: Layout, words: Sequence[str]) -> Run:
    recipe = GPTRecipe()
    config = parsed(layout, words)
    layout = as_given(layout, config)
    run = build_run(config, recipe, toy_device(layout.world.rank), layout)
    Distillation(recipe).begin(run)
    return run


def distill(layout: Layout, words: Sequence[str]) -> list[list[float]]:
    """Train a student; return both losses of every iteration and the gradient norms."""
    run, recorder = begin(layout, words), Recorder()
    callbacks, _ = standard_callbacks(run, [recorder])
    train(run, callbacks)
    return [recorder.values(name) for name in ("lm loss", LOSS_NAMES[1], "grad-norm")]


def _save_small_files(layout: Layout, words: Sequence[str]) -> None:
    """Save 7 samples per file, also in processes that are not forks of this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_ENTRIES_PER_FILE", 16 * 9 * 7)
        save(layout, words)


def save(layout: Layout, words: Sequence[str]) -> None:
    config, recipe = parsed(layout, words), GPTRecipe()
    device, layout = toy_device(layout.world.rank), as_given(layout, config)
    assert Distillation(recipe).replace_training(config, device, layout)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("teacher"))
    train_toy(Layout.single(), [*_TEACHER, "--save", folder])
    return folder


@pytest.fixture(scope="module")
def saved(teacher: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("logits"))
    options = "--logits-save-top-k 9 --logits-save-top-p 0.9 --logits-save-dtype fp32".split()
    save(Layout.single(), ["--teacher-load", teacher, "--logits-save-dir", folder, *options])
    return folder


def _both(layout: Layout, teacher: str, saved: str, words: list[str]) -> list[list[list[float]]]:
    common = ["--kd-loss-alpha", "0.7", *words]
    from_model = distill(layout, ["--teacher-load", teacher, "--kd-temperature", "2", *common])
    return [from_model, distill(layout, ["--logits-load-dir", saved, *common])]


@pytest.fixture(scope="module")
def alone(teacher: str, saved: str) -> list[list[list[float]]]:
    return _both(Layout.single(), teacher, saved, [])


@pytest.mark.parametrize(
    "words",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--context-parallel-size 2",
        "--zero-stage 3",
    ],
)
def test_layouts_learn_as_one_process(
    words: str, teacher: str, saved: str, alone: list[list[list[float]]]
) -> None:
    flags = words.split()
    sizes = {_SIZES[flags[0]]: 2} if flags[0] in _SIZES else {}
    results = run_distributed(2, _both, teacher, saved, flags, **sizes)
    for ours, expected in zip(results[-1], alone, strict=True):
        for values, wanted in zip(ours, expected, strict=True):
            assert len(values) == 6
            assert values == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.fixture(scope="module")
def deep(teacher: str, saved: str) -> list[list[list[float]]]:
    return _both(Layout.single(), teacher, saved, _DEEP)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--num-layers-per-virtual-pipeline-stage 1",
        "--pipeline-schedule zero-bubble",
        "--pipeline-model-parallel-layout Et|tttL --sequence-parallel "
        "--tensor-model-parallel-size 2",
    ],
)
def test_pipelines_learn_as_one_process(
    words: str, teacher: str, saved: str, deep: list[list[list[float]]]
) -> None:
    """The teacher's 3 layers are on other stages than the student's, and have a different width."""
    flags = ["--pipeline-model-parallel-size", "2", *words.split(), *_DEEP]
    sizes = {axis: 2 for flag, axis in _SIZES.items() if flag in flags}
    results = run_distributed(2 ** len(sizes), _both, teacher, saved, flags, **sizes)
    for ours, expected in zip(results[-1], deep, strict=True):
        for values, wanted in zip(ours, expected, strict=True):
            assert len(values) == 6
            assert values == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_a_student_learns_towards_its_teacher(teacher: str) -> None:
    words = ["--teacher-load", teacher, "--train-iters", "40", "--lr-warmup-fraction", "0.05"]
    _, divergence, _ = distill(Layout.single(), words)
    assert divergence[-1] < 0.4 * divergence[0]


def test_a_student_that_is_its_teacher_has_no_gradient(teacher: str) -> None:
    """It is built and loaded exactly like a run's model."""
    words = [*_TEACHER[:4], "--load", teacher, "--finetune", "--teacher-load", teacher]
    lm_loss, divergence, norm = distill(Layout.single(), [*words, "--train-iters", "1"])
    assert abs(divergence[0]) < 1e-6
    assert norm[0] < 1e-5 < lm_loss[0]


def test_a_teacher_is_named_once_and_has_the_run_s_number_format(
    teacher: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(Layout.single(), ["--teacher-load", teacher, "--bf16"])
    said = f"  teacher: {teacher}, iteration 30, 3 layers, hidden size 48, bfloat16"
    assert capsys.readouterr().out.splitlines().count(said) == 1
    (rounded,) = run.recipe.teacher.parts
    (whole,) = begin(Layout.single(), ["--teacher-load", teacher]).recipe.teacher.parts
    for ours, theirs in zip(rounded.parameters(), whole.parameters(), strict=True):
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours, theirs.bfloat16())


class _LargerDataset(GPTRecipe):
    """A dataset with more samples than a run takes."""

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, layout: Layout
    ) -> Datasets:
        return super().build_datasets(config, tokenizer, (samples[0] + 6, *samples[1:]), layout)


@pytest.mark.parametrize(("words", "samples"), [([], 8), (["--dataloader-type", "cyclic"], 14)])
def test_files_hold_the_samples_that_a_run_may_read(
    words: list[str], samples: int, teacher: str, tmp_path: Path
) -> None:
    words = [*words, "--teacher-load", teacher, "--logits-save-dir", str(tmp_path)]
    words += ["--logits-save-top-k", "2", "--train-iters", "2"]
    config = parsed(Layout.single(), words)
    Distillation(_LargerDataset()).replace_training(config, toy_device(0), Layout.single())
    assert json.loads((tmp_path / "logits.json").read_text())["samples"] == samples
    assert _folder(tmp_path)["0 ids"].numel() == samples * 16 * 2  # 2 of each of 16 tokens


def test_the_reported_size_is_that_of_the_files_of_all_processes(
    teacher: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_own = teacher_module._write_missing

    def wait(_: Axis) -> None:
        with (tmp_path / "logits-of-others.safetensors").open("wb") as file:
            file.truncate(5 * 10**9)

    def write(*args: Any) -> None:
        write_own(*args)
        monkeypatch.setattr(Axis, "barrier", wait)  # the others finish during the wait

    monkeypatch.setattr(teacher_module, "_write_missing", write)
    words = ["--teacher-load", teacher, "--logits-save-top-k", "2", "--train-iters", "2"]
    save(Layout.single(), [*words, "--logits-save-dir", str(tmp_path)])
    printed = capsys.readouterr().out
    assert f"teacher: {teacher}, iteration 30, 3 layers" in printed
    assert f"the logits of 8 samples are in {tmp_path} (5 GB)" in printed


def test_files_of_the_whole_vocabulary_teach_as_the_model_does(
    teacher: str, tmp_path: Path
) -> None:
    words = ["--kd-loss-alpha", "0.5", "--kd-temperature", "1.5", "--seed", "5"]
    options = "--logits-save-top-k 1000 --logits-save-dtype fp32".split()
    folder = str(tmp_path)
    save(
        Layout.single(), ["--teacher-load", teacher, "--logits-save-dir", folder, *options, *words]
    )
    live = distill(Layout.single(), ["--teacher-load", teacher, *words])
    read = distill(Layout.single(), ["--logits-load-dir", folder, "--num-workers", "1", *words])
    for ours, wanted in zip(read, live, strict=True):
        assert ours == pytest.approx(wanted, rel=1e-6, abs=1e-7)


def _folder(path: Path) -> dict[str, torch.Tensor]:
    tensors = [load_file(file) for file in sorted(path.glob("*.safetensors"))]
    return {f"{number} {name}": t for number, one in enumerate(tensors) for name, t in one.items()}


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tensor": 2}, ""),
        ({"context": 2}, ""),
        ({}, ""),
        ({"pipeline": 2}, "--micro-batch-size 2"),  # the last of a file's 7 samples is on its own
        ({"pipeline": 2}, "--num-layers-per-virtual-pipeline-stage 1 --num-layers 6"),
    ],
)
def test_layouts_write_the_same_files(
    sizes: dict[str, int],
    words: str,
    teacher: str,
    saved: str,
    tmp_path: Path,
) -> None:
    options = f"--logits-save-top-k 9 --logits-save-top-p 0.9 --teacher-load {teacher}".split()
    folders = [tmp_path / "one", tmp_path / "two"]
    _save_small_files(Layout.single(), [*options, "--logits-save-dir", str(folders[0])])
    flags = [word for flag, axis in _SIZES.items() if axis in sizes for word in (flag, "2")]
    flags += words.split()
    command = [*options, *flags, "--logits-save-dir", str(folders[1])]
    run_distributed(2, _save_small_files, command, **sizes)
    one, two = map(_folder, folders)
    assert len(one) == 4 * 7
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        if name.endswith("checks"):
            continue  # checks of rounded numbers
        torch.testing.assert_close(two[name], tensor, rtol=2e-3, atol=1e-6)  # values are fp16
    whole = load_file(Path(saved) / "logits-000000000000.safetensors")
    torch.testing.assert_close(torch.cat([two[f"{n} ids"] for n in range(4)]), whole["ids"])


def test_writing_continues_where_it_ended(
    teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_ENTRIES_PER_FILE", 16 * 3 * 10)
    words = ["--load", teacher, "--logits-save-dir", str(tmp_path), "--logits-save-top-k", "3"]
    save(Layout.single(), words)
    before = _folder(tmp_path)
    lost = tmp_path / "logits-000000000010.safetensors"
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.safetensors")}
    assert len(kept) == 3
    lost.unlink()
    with pytest.raises(DataError, match=r"1 of 3 files are missing: run .* again"):
        begin(Layout.single(), ["--logits-load-dir", str(tmp_path)])
    save(Layout.single(), words)
    for name, tensor in _folder(tmp_path).items():
        assert torch.equal(tensor, before[name])
    assert all(file.stat().st_mtime_ns == kept[file] for file in kept if file != lost)
    with pytest.raises(DataError, match=r"already holds logits with top_k 3 \(here 4\)"):
        save(Layout.single(), [*words[:-1], "4"])


@pytest.mark.parametrize("vocabulary", [300, 65_536, 65_537])
def test_ids_of_any_vocabulary_are_read_as_they_were_written(
    vocabulary: int, tmp_path: Path
) -> None:
    tokens = {"text": np.arange(3), "id": 0}
    ids = torch.tensor([[vocabulary - 1, 0, -1], [5, vocabulary // 2, vocabulary - 2]])
    values = torch.tensor([[-0.25, -2.0, -torch.inf], [-1.0, -1.5, -3.0]])
    header = files.LogitsHeader(
        seed=1,
        seq_length=2,
        tokenizer="t",
        vocab_size=vocabulary,
        separates_documents=[False, False],
        temperature=1.0,
        top_k=3,
        top_p=0.9,
        top_p_min_k=1,
        dtype="bf16",
        samples=1,
        samples_per_file=1,
        teacher="t",
    )
    parts = {files.TOP_IDS: ids, files.TOP_VALUES: values, files.TOP_REST: torch.zeros(2) - 4}
    digest = files.digest_of_tokens(tokens)
    files.write_file(header.path(tmp_path, 0), header, [parts], [digest])
    sample = files.TeacherLogitsDataset([tokens], tmp_path, header)[0]
    assert sample[files.TOP_IDS].tolist() == ids.tolist()
    assert sample[files.TOP_VALUES].tolist() == values.tolist()
    assert sample[files.TOP_REST].tolist() == [-4.0, -4.0]


@pytest.mark.parametrize("source", ["--teacher-load", "--logits-load-dir"])
def test_an_interrupted_student_continues(
    source: str, teacher: str, saved: str, tmp_path: Path
) -> None:
    words = [source, teacher if source == "--teacher-load" else saved, "--save-interval", "3"]
    words += ["--save", str(tmp_path)]
    whole = distill(Layout.single(), words)
    resumed = distill(Layout.single(), [*words, "--load", str(tmp_path), "--ckpt-step", "3"])
    assert resumed == [values[3:] for values in whole]


def test_held_out_samples_have_no_files(saved: str) -> None:
    run = begin(Layout.single(), ["--logits-load-dir", saved])
    assert run.datasets[1] is not None
    losses = evaluate(run, run.datasets[1], skip=0)
    assert losses is not None
    assert list(losses) == ["lm loss"]


def test_evaluation_reports_the_perplexity_of_labels_and_the_divergence_beside_it(
    teacher: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--teacher-load", teacher, "--log-validation-ppl-to-tensorboard"]
    words += ["--train-iters", "3", "--kd-loss-alpha", "0.9"]
    run, recorder = begin(Layout.single(), words), Recorder()
    callbacks, _ = standard_callbacks(run, [recorder])
    train(run, callbacks)
    ce, ppl, kl = (
        recorder.values(f"{name} validation{kind}")
        for name, kind in ((LOSS_NAMES[0], ""), (LOSS_NAMES[0], " ppl"), (LOSS_NAMES[1], ""))
    )
    assert recorder.values(f"{LOSS_NAMES[1]} validation ppl") == []
    said = capsys.readouterr().out
    assert f"lm loss PPL: {ppl[0]:.6E} | {LOSS_NAMES[1]} value: {kl[0]:.6E} | \n" in said
    run.recipe = GPTRecipe()  # the same weights without a teacher
    run.config = parsed(Layout.single(), [])
    assert run.datasets[1] is not None
    plain = evaluate(run, run.datasets[1], skip=0)
    assert plain is not None
    assert plain["lm loss"] == pytest.approx(ce[0], rel=1e-6)
    assert ppl[0] == pytest.approx(np.exp(ce[0]))


def test_a_dry_run_counts_the_teacher(teacher: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = GPTRecipe()
    words = [*TOY, "--train-iters", "1", "--dry-run", "--teacher-load"]
    assert main(recipe, [*words, teacher], Distillation(recipe)) == 0
    planned = capsys.readouterr().out
    run = begin(Layout.single(), ["--teacher-load", teacher])
    weights = 4 * sum(p.numel() for p in run.recipe.teacher.parts[0].parameters())  # type: ignore[attr-defined]
    config = parsed(Layout.single(), [])
    estimate = estimate_memory(config, run.plan, run.layout, 4).teacher
    assert estimate == weights + 4 * 16 * 104  # and its logits
    assert f"teacher {amount(estimate)}" in planned
    assert main(recipe, [*words, "nowhere"], Distillation(recipe)) != 0
    assert "--teacher-load nowhere: there is no checkpoint" in capsys.readouterr().err


def test_a_damaged_teacher_is_refused_but_may_be_planned(teacher: str, tmp_path: Path) -> None:
    """Checking all of its files takes longer than a dry run."""
    folder = tmp_path / "damaged"
    shutil.copytree(teacher, folder)
    (weights,) = folder.glob("iter_*/*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    config = parsed(Layout.single(), ["--teacher-load", str(folder)])
    plan = Distillation(GPTRecipe()).teacher_plan(config, 104)
    assert plan is not None
    assert plan.hidden == 48
    with pytest.raises(CheckpointError, match="none of its checkpoints can be used"):
        begin(Layout.single(), ["--teacher-load", str(folder)])


def test_the_teacher_s_plan_has_no_dropout(teacher: str) -> None:
    run = begin(Layout.single(), ["--teacher-load", teacher, "--hidden-dropout", "0.1"])
    (part,) = run.recipe.teacher.parts  # type: ignore[attr-defined]
    assert "dropout=0.0" in repr(part.plan)
    assert not re.search(r"dropout=(?!0\.0\b)", repr(part.plan))


@pytest.mark.parametrize(
    ("recorded", "flags", "is_same"),
    [
        (None, {"tokenizer_type": "NullTokenizer", "vocab_size": 9}, True),
        (None, {"tokenizer_type": "NullTokenizer", "vocab_size": 8}, False),
        (None, {}, True),  # a checkpoint that does not say
        ("other", {"tokenizer_type": "NullTokenizer", "vocab_size": 9}, False),
        ("same", {"tokenizer_type": "NullTokenizer", "vocab_size": 8}, True),
    ],
)
def test_the_tokenizers_of_checkpoints_of_any_origin_are_compared(
    recorded: str | None, flags: dict[str, Any], is_same: bool
) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9))
    fingerprint = tokenizer.fingerprint() if recorded == "same" else recorded
    reader: Any = SimpleNamespace(meta={} if recorded is None else {"tokenizer": fingerprint})
    with nullcontext() if is_same else pytest.raises(CheckpointError, match="^t: the teacher has"):
        teacher_module._check_tokenizer(reader, TokenizerConfig(**flags), tokenizer, "t")


def test_tokenizers_of_the_same_entries_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary may be stored in files of several kinds."""
    one, two = (
        build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9))
        for _ in range(2)
    )
    monkeypatch.setattr(two, "fingerprint", lambda: "of another file")
    monkeypatch.setattr(teacher_module, "build_tokenizer", lambda _: two)
    reader: Any = SimpleNamespace(meta={})
    config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer")
    teacher_module._check_tokenizer(reader, config, one, "t")


def test_progress_is_reported_after_more_than_a_minute(
    teacher: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = SimpleNamespace(monotonic=iter(range(0, 3000, 30)).__next__)
    monkeypatch.setattr(teacher_module, "time", clock)
    words = ["--teacher-load", teacher, "--logits-save-top-k", "9"]
    _save_small_files(Layout.single(), [*words, "--logits-save-dir", str(tmp_path)])
    reports = [line for line in capsys.readouterr().out.splitlines() if "of this process" in line]
    # The first look is after 30 seconds, the third after 90; the report itself takes 30.
    assert reports == ["  3 of this process's 4 files are written"]


def test_only_the_last_stage_reads_files(saved: str, tmp_path: Path) -> None:
    words = ["--logits-load-dir", saved, "--pipeline-model-parallel-size", "2"]
    for stage, kind in enumerate((MockDataset, files.TeacherLogitsDataset)):
        layout = Layout.at(stage, 2, pipeline=2)
        config = parse_config([*TOY, "--train-iters", "6", *words], world_size=2).config
        tokenizer = build_tokenizer(config.tokenizer)
        splits = GPTRecipe().build_datasets(config, tokenizer, (24, 0, 0), layout)
        assert type(splits[0]) is kind


def test_the_teacher_is_no_part_of_the_run(teacher: str) -> None:
    run = begin(Layout.single(), ["--teacher-load", teacher])
    plain = begin(Layout.single(), [])
    assert [name for name, _ in run.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    known = run.recipe.teacher  # type: ignore[attr-defined]
    assert not known.parts[0].training
    assert not any(parameter.requires_grad for parameter in known.parts[0].parameters())


def test_a_token_with_a_single_known_id_counts_as_known() -> None:
    """At --kd-loss-alpha 1, its labels have no cross-entropy gradient, even if the id is 0."""
    logits = torch.randn(1, 2, 11, generator=torch.Generator().manual_seed(3)).requires_grad_()
    labels = torch.tensor([[1, 2]])
    batch = TokenBatch(labels, labels, torch.ones(1, 2), labels)
    known = TopLogProbs(
        torch.tensor([[[0], [-1]]]), torch.tensor([[[-0.5], [-torch.inf]]]), torch.zeros(1, 2) - 1
    )
    options = DistillationConfig(teacher_load="t", kd_loss_alpha=1.0)
    vocabulary = VocabularyPart(Layout.single().tensor, 11)
    student_losses(logits * 1, batch, known, vocabulary, options)[LOSS_NAMES[0]].backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum(-1)[0].ne(0).tolist() == [False, True]


@pytest.mark.parametrize("source", ["model", "files"])
def test_losses_are_weighted_sums_over_the_labels_that_count(source: str) -> None:
    generator = torch.Generator().manual_seed(3)
    student, theirs = torch.randn(2, 2, 4, 11, generator=generator).double().float()
    labels = torch.randint(11, (2, 4), generator=generator)
    mask = (torch.rand(2, 4, generator=generator) < 0.6).float()
    batch = TokenBatch(labels, labels, mask, labels)
    log_probs = theirs.log_softmax(-1)
    known = torch.ones(2, 4, dtype=torch.bool)
    knowledge: torch.Tensor | TopLogProbs = theirs
    if source == "files":
        known[0] = False  # as if they could not be read
        ids = torch.arange(11).expand(2, 4, 11).where(known[..., None], -1)
        values = log_probs.where(known[..., None], -torch.inf)
        knowledge = TopLogProbs(ids, values, torch.where(known, -torch.inf, 0.0))
    logits = student.clone().requires_grad_()
    options = DistillationConfig(teacher_load="t", kd_loss_alpha=0.3)
    vocabulary = VocabularyPart(Layout.single().tensor, 11)
    result = student_losses(logits * 1, batch, knowledge, vocabulary, options)
    torch.stack(list(result.values())).sum().backward()

    whole = student.clone().requires_grad_()
    ours = whole.log_softmax(-1)
    ce = F.nll_loss(ours.flatten(0, 1), labels.flatten(), reduction="none").view(2, 4)
    kl = F.kl_div(ours, log_probs, log_target=True, reduction="none").sum(-1) * known
    (mask * ((1 - 0.3 * known) * ce + 0.3 * known * kl)).sum().backward()
    values = [result[name].detach() for name in LOSS_NAMES]
    torch.testing.assert_close(values, [(mask * ce).sum().detach(), (mask * kl).sum().detach()])
    torch.testing.assert_close(logits.grad, whole.grad)


def _spoil(folder: Path, saved: str, change: str) -> None:
    """Copy a folder of logits and damage it."""
    header = json.loads((Path(saved) / files.HEADER).read_text())
    data = (Path(saved) / "logits-000000000000.safetensors").read_bytes()
    if change == "cut":
        data = data[:-100]
    elif change == "seed":
        header["seed"] = 7
    elif change == "format":
        header["format"] = "another"
    elif change in ("ids", "rest"):
        tensors = load_file(Path(saved) / "logits-000000000000.safetensors")
        if change == "rest":
            tensors["rest"][0, 3] += 0.1
        else:
            tensors["ids"] = torch.full_like(tensors["ids"], 5000)
            parts = files._sample_tensors(tensors, 0)
            tensors["checks"][0] = files._digest(*parts)
        data = to_bytes(tensors)
    (folder / files.HEADER).write_text(json.dumps(header))
    (folder / "logits-000000000000.safetensors").write_bytes(data)


def test_bytes_damaged_at_random_are_refused(saved: str, tmp_path: Path) -> None:
    """For any damage, a sample is unchanged, or an error names the file."""
    dataset = MockDataset(24, 16, 101, 1234, 0)
    header = files.read_header(Path(saved), "--logits-load-dir")
    sound = [
        files.TeacherLogitsDataset(dataset, Path(saved), header)[i][files.TOP_VALUES]
        for i in range(0, 24, 6)
    ]
    random = np.random.RandomState(1)
    refused = 0
    for _ in range(200):
        _spoil(tmp_path, saved, "")
        path = tmp_path / "logits-000000000000.safetensors"
        data = bytearray(path.read_bytes())
        # Half of the changes are in the header.
        place = random.randint(700 if random.rand() < 0.5 else len(data))
        data[place] ^= 1 << random.randint(8)
        path.write_bytes(data)
        damaged = files.TeacherLogitsDataset(dataset, tmp_path, header)
        for i, expected in zip(range(0, 24, 6), sound, strict=True):
            try:
                values = damaged[i][files.TOP_VALUES]
            except DataError:
                refused += 1
            else:
                assert np.array_equal(values, expected)
    assert refused > 100


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ("", "--seed 7", "--seed was 1234, now 7: use the settings"),
        ("", "--seq-length 8", "--seq-length was 16, now 8"),
        ("", "--kd-temperature 2", "--kd-temperature was 1.0, now 2.0"),
        ("", "--vocab-size 90", "the tokenizer was NullTokenizer:.*, now NullTokenizer:"),
        ("", "--reset-position-ids", r"--reset-attention-mask .* was \[False, False\], now"),
        ("seed", "--seed 7", "sample 0 has different tokens .* number of training samples"),
        ("cut", "", r"logits-000000000000.safetensors is damaged \(.*: delete it and write it"),
        ("rest", "", r"damaged \(the digest of the logits of sample 0 does not match\): delete it"),
        ("ids", "", r"damaged \(an id is outside the vocabulary\)"),
        ("format", "", r"logits.json is damaged \(the format is not megatron-top-logits-1\)"),
    ],
)
def test_other_samples_and_damaged_files_are_refused(
    change: str, words: str, message: str, saved: str, tmp_path: Path
) -> None:
    _spoil(tmp_path, saved, change)
    with pytest.raises(DataError, match=message):
        begin(Layout.single(), ["--logits-load-dir", str(tmp_path), *words.split()])


def test_what_cannot_be_read_may_be_left_out(
    saved: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _spoil(tmp_path, saved, "cut")
    words = ["--logits-load-dir", str(tmp_path), "--logits-load-ignore-errors"]
    lm_loss, divergence, _ = distill(Layout.single(), words)
    plain = train_toy(Layout.single(), _PLAIN)[0].values("lm loss")
    assert divergence == [0.0] * 6
    assert lm_loss == pytest.approx(plain, rel=1e-6)
    assert capfd.readouterr().err.count("only the sample's tokens are used") == 1


def test_other_folders_are_refused(tmp_path: Path) -> None:
    words = ["--logits-load-dir", str(tmp_path)]
    with pytest.raises(DataError, match=r"there is no logits.json: give a folder"):
        begin(Layout.single(), words)
    (tmp_path / "cp0_dp0__100.tar").touch()
    with pytest.raises(DataError, match="Megatron Core's tar files"):
        begin(Layout.single(), words)


def test_other_teachers_are_refused(teacher: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--teacher-load .*: there is no checkpoint"):
        begin(Layout.single(), ["--teacher-load", str(tmp_path)])
    with pytest.raises(
        CheckpointError, match=r"--teacher-load .*a different tokenizer .*share a tokenizer"
    ):
        begin(Layout.single(), ["--teacher-load", teacher, "--vocab-size", "90"])
    mixture = str(tmp_path / "mixture")
    experts = "--num-experts 2 --train-iters 1 --save-interval 1 --save".split()
    train_toy(Layout.single(), [*experts, mixture])
    run = begin(Layout.single(), [])
    recorded = parsed(Layout.single(), ["--cuda-graph-impl", "local"])
    with pytest.raises(ConfigError, match="teacher does not fit this run: --cuda-graph-impl local"):
        load_teacher(mixture, recorded, run.tokenizer, run.device, run.layout)
    load_teacher(teacher, recorded, run.tokenizer, run.device, run.layout)
    longer = "--seq-length 32 --max-position-embeddings 32".split()
    with pytest.raises(ConfigError, match="teacher does not fit this run: --max-pos"):
        begin(Layout.single(), ["--teacher-load", teacher, *longer])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--teacher-load t --logits-load-dir d", "learns from files, learns from a model, or"),
        ("--logits-save-dir s --logits-load-dir d --load t", "cannot be combined with --logits-s"),
        ("--logits-save-dir s --teacher-load t", "requires --logits-save-top-k: add it"),
        ("--logits-save-dir s --logits-save-top-k 5", "requires a teacher: name its checkpoint"),
        ("--teacher-load t --kd-loss-alpha 1.5", "--kd-loss-alpha 1.5: must be at most 1"),
        ("--teacher-load t --kd-temperature 0", "--kd-temperature 0.0: must be above 0"),
        (
            "--teacher-load t --cross-entropy-loss-fusion --cross-entropy-fusion-impl linear",
            "holds",
        ),
        ("--kd", "use --teacher-load DIR"),
        ("--kd-beta-ce 2", "use --kd-loss-alpha A"),
        ("--mos", "staged distillation of mixtures is not supported"),
        ("--logits-load-msc-prefetch-depth 3", "not from object storage"),
    ],
)
def test_flags_that_contradict_each_other(words: str, message: str) -> None:
    assert any(message in line for line in problems(words)), problems(words)
