"""Curriculum learning by sequence length, against DeepSpeed's and samples truncated by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.config.curriculum import CurriculumConfig
from megatron.data.gpt import shorten
from megatron.data.sample import SEGMENT_ENDS
from megatron.kernels.segments import Segments
from megatron.models.arithmetic import flops_per_token
from megatron.parallel.layout import Layout
from megatron.training.batches import BatchPlan, ramp_up
from megatron.training.curriculum import Discrete, Growing, Lengths, updates_of_length
from megatron.training.recipe import Batch
from megatron.training.step import Updates
from tests.config.command import parse, problems
from tests.distributed import run_distributed
from tests.training.toy import build_toy, fingerprint, train_toy

_WORDS = """--curriculum-schedule fixed_linear --curriculum-min-length 4 --curriculum-steps 5
    --curriculum-length-step 4""".split()
_LENGTHS = [4, 8, 8, 12, 16, 16]
_NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0".split()


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        (Growing(4, 16, 5, 4, 1), _LENGTHS),
        # floor(sqrt(n / 9) * 56 + 8), rounded down to a multiple of 8
        (Growing(8, 64, 9, 8, 2), [24, 32, 40, 40, 48, 48, 56, 56, 64, 64]),
        (Growing(10, 64, 64, 8, 1), [16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16]),
        (Growing(16, 16, 3, 8, 1), [16, 16, 16, 16]),
        (Discrete((8, 24, 64), (2, 5)), [8, 8, 24, 24, 24, 64, 64]),
    ],
)
def test_known_lengths(lengths: Lengths, expected: list[int]) -> None:
    assert [lengths.at(update) for update in range(1, len(expected) + 1)] == expected


@pytest.mark.parametrize(
    ("lengths", "kind", "settings"),
    [
        (Growing(64, 1024, 1000, 8, 1), "fixed_linear", {}),
        (Growing(60, 1024, 333, 16, 1), "fixed_linear", {}),
        (Growing(80, 2048, 997, 8, 2), "fixed_root", {"root_degree": 2}),
        (Growing(8, 512, 500, 8, 3), "fixed_root", {"root_degree": 3}),
        (Growing(8, 512, 500, 1, 1.5), "fixed_root", {"root_degree": 1.5}),
        (
            Discrete((64, 128, 1024), (100, 300)),
            "fixed_discrete",
            {"difficulty": [64, 128, 1024], "max_step": [100, 300]},
        ),
    ],
)
def test_lengths_are_deepspeeds(lengths: Lengths, kind: str, settings: dict[str, object]) -> None:
    module = pytest.importorskip(
        "deepspeed.runtime.data_pipeline.curriculum_scheduler", reason="needs deepspeed"
    )
    ends = {"min_difficulty": 64, "max_difficulty": 1024}
    if isinstance(lengths, Growing):
        ends = {"min_difficulty": lengths.shortest, "max_difficulty": lengths.longest}
        settings = settings | {
            "total_curriculum_step": lengths.steps,
            "difficulty_step": lengths.multiple,
        }
    theirs = module.CurriculumScheduler(ends | {"schedule_type": kind, "schedule_config": settings})
    updates = range(1, 1300)
    assert [lengths.at(update) for update in updates] == [
        theirs.update_difficulty(update) for update in updates
    ]


def test_tokens_of_a_curriculum_are_counted_at_once() -> None:
    lengths = Growing(8, 64, 90, 8, 2)
    plan = BatchPlan(1, 12, ramp_up(4, 4, 200, full=12), seq_length=64, curriculum=lengths)
    updates = samples = tokens = 0
    for limit in range(1, 60_000, 487):
        while tokens < limit:
            tokens += plan.tokens_at(updates, samples)
            samples += plan.global_batch_at(samples)
            updates += 1
        assert plan.iterations_for_tokens(limit) == updates
    endless = Growing(8, 2**20, 10**12, 2**16, 2)
    equal = updates_of_length(endless, 1)
    assert equal is not None
    assert endless.at(equal) == endless.at(1) < endless.at(equal + 1)
    assert BatchPlan(1, 8, curriculum=endless).iterations_for_tokens(10**15) > 10**9


@pytest.mark.parametrize(
    "lengths", [Growing(4, 16, 5, 4, 1), Growing(8, 64, 9, 8, 2), Discrete((8, 24, 64), (2, 5))]
)
def test_for_how_many_updates_a_length_lasts(lengths: Lengths) -> None:
    final = lengths.final_update
    for update in range(1, final):
        same = [lengths.at(later) == lengths.at(update) for later in range(update, final + 1)]
        assert updates_of_length(lengths, update) == same.index(False)
    assert updates_of_length(lengths, final) is updates_of_length(lengths, final + 1) is None


def _cut(batches: Iterator[Batch], lengths: list[int], micro_batches: int) -> Iterator[Batch]:
    for number, batch in enumerate(batches):
        length = lengths[number // micro_batches]
        yield {**batch, "text": batch["text"][:, : length + 1].contiguous()}


@pytest.mark.parametrize(
    "words", [[], ["--reset-position-ids", "--eod-mask-loss", "--calculate-per-token-loss"]]
)
def test_training_is_that_on_samples_cut_by_hand(words: list[str]) -> None:
    """Dropout is on, as masks follow the sample."""
    ours, run = train_toy(Layout.single(), [*words, *_WORDS])
    other = build_toy(Layout.single(), words)
    other.train_batches = _cut(other.train_batches, _LENGTHS, micro_batches=4)
    updates = Updates(other)
    losses = [updates.make(look_ahead=False).losses["lm loss"] for _ in _LENGTHS]
    assert ours.values("lm loss") == losses
    assert ours.values("seqlen/curriculum_seqlen") == _LENGTHS
    assert run.progress.consumed_tokens == 4 * sum(_LENGTHS)
    assert run.progress.consumed_samples == 24
    for (name, one), (_, two) in zip(run.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(one, two), name


def test_documents_are_cut_too() -> None:
    text = torch.arange(2 * 9).view(2, 9)
    ends = torch.tensor([0, 3, 8, 8 + 5, 16])
    shorter = shorten({"text": text, SEGMENT_ENDS: ends}, 4)
    assert shorter["text"].tolist() == [[0, 1, 2, 3, 4], [9, 10, 11, 12, 13]]
    assert shorter[SEGMENT_ENDS].tolist() == [0, 3, 4, 8, 8]
    whole = Segments.of(ends, text[:, :8]).mask
    cut = Segments.of(shorter[SEGMENT_ENDS], shorter["text"][:, :4]).mask
    assert torch.equal(cut, whole[:, :, :4, :4])


def test_separate_documents_train_on_shorter_sequences() -> None:
    words = ["--reset-attention-mask", "--reset-position-ids", *_WORDS]
    recorder, _ = train_toy(Layout.single(), words)
    assert len(recorder.values("lm loss")) == 6


def _figures(layout: Layout, words: list[str]) -> tuple[list[float], ...]:
    recorder, run = train_toy(layout, [*words, *_WORDS, *_NO_DROPOUT])
    names = ("lm loss", "grad-norm", "lm loss validation", "seqlen/curriculum_seqlen")
    return (*(recorder.values(name) for name in names), [run.progress.consumed_tokens])


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({}, ["--zero-stage", "2", "--use-distributed-optimizer"]),
        ({"pipeline": 2}, ["--pipeline-model-parallel-size", "2"]),
        ({"tensor": 2}, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
        ({"context": 2}, ["--context-parallel-size", "2"]),
    ],
    ids=["data", "pipeline", "tensor", "context"],
)
def test_every_layout_trains_as_one_process(sizes: dict[str, int], words: list[str]) -> None:
    losses, norms, evaluated, *exact = _figures(Layout.single(), [])
    assert len(losses) == 6
    results = run_distributed(2, _figures, words, **sizes)
    for its_losses, its_norms, its_evaluated, *its_exact in results[1:]:  # the last has the loss
        assert its_losses == pytest.approx(losses, rel=2e-5)
        assert its_norms == pytest.approx(norms, rel=2e-4)
        assert its_evaluated == pytest.approx(evaluated, rel=2e-5)
        assert its_exact == exact


def test_evaluation_reads_whole_samples() -> None:
    words = ["--lr", "0", "--min-lr", "0", *_NO_DROPOUT]
    whole, _ = train_toy(Layout.single(), words)
    cut, _ = train_toy(Layout.single(), [*words, *_WORDS])
    assert cut.values("lm loss validation") == whole.values("lm loss validation")
    assert cut.values("lm loss")[0] != whole.values("lm loss")[0]
    assert cut.values("lm loss")[4:] == whole.values("lm loss")[4:]


def test_a_run_resumed_in_the_middle_is_the_same_to_the_bit(tmp_path: Path) -> None:
    words = [*_WORDS, *"--train-tokens 250 --lr-decay-tokens 240 --save-interval 1".split()]
    flags = [*words, "--save", str(tmp_path)]
    whole = train_toy(Layout.single(), flags)[1]
    assert (whole.progress.iteration, whole.progress.consumed_tokens) == (6, 256)
    for step in ("1", "3", "4"):
        load = ["--load", str(tmp_path), "--ckpt-step", step]
        resumed = train_toy(Layout.single(), [*words, *load])[1]
        assert fingerprint(resumed) == fingerprint(whole)


@pytest.mark.parametrize("kind", ["legacy", "torch_dist"])
def test_the_formats_of_megatron_hold_the_tokens(tmp_path: Path, kind: str) -> None:
    save = ["--save", str(tmp_path), "--save-interval", "9", "--ckpt-format", kind]
    flags = [*_WORDS, *save, "--train-iters", "6"]
    stopped = train_toy(Layout.single(), [*flags, "--exit-interval", "3"])[1]
    resumed = build_toy(Layout.single(), [*flags, "--load", str(tmp_path)])
    assert stopped.progress.consumed_tokens == resumed.progress.consumed_tokens == 80
    assert resumed.next_length == 12


def test_speed_counts_the_tokens_that_were_read(capsys: pytest.CaptureFixture[str]) -> None:
    recorder, run = train_toy(Layout.single(), _WORDS)
    for record, length in zip(
        [one for one in recorder.records if "throughput" in one], _LENGTHS, strict=True
    ):
        per_token = record["throughput"] * 1e12 / record["tokens-per-second-per-gpu"]
        assert per_token == pytest.approx(flops_per_token(run.plan, length))
    lines = [line for line in capsys.readouterr().out.splitlines() if "lm loss:" in line]
    assert " consumed tokens:           48 | " in lines[1]
    assert " curriculum seqlen:     8 | " in lines[1]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--curriculum-schedule fixed_linear --curriculum-steps 9",
            "--curriculum-schedule fixed_linear requires --curriculum-min-length: add it",
        ),
        (
            "--curriculum-schedule fixed_root --curriculum-min-length 8",
            "--curriculum-schedule fixed_root requires --curriculum-steps: add it",
        ),
        (
            "--curriculum-min-length 8",
            "--curriculum-min-length 8 requires --curriculum-schedule fixed_linear or fixed_root",
        ),
        (
            "{} --curriculum-max-length 256",
            "--curriculum-max-length 256 is above --seq-length 128: use at most 128",
        ),
        (
            "{} --curriculum-length-step 12",
            "--seq-length 128 is not a multiple of --curriculum-length-step 12: use a step that",
        ),
        (
            "{} --tensor-model-parallel-size 4 --sequence-parallel --curriculum-length-step 2",
            "--curriculum-length-step 2 is not divisible by 4, as --sequence-parallel with "
            "--tensor-model-parallel-size 4 requires: use 4",
        ),
        (
            "{} --context-parallel-size 4 --curriculum-length-step 4",
            "--curriculum-length-step 4 is not divisible by 8, as --context-parallel-size 4 "
            "requires: use 8",
        ),
        (
            "--curriculum-schedule fixed_discrete --curriculum-lengths 8 16 --curriculum-until 1 2",
            "--curriculum-schedule fixed_discrete requires --curriculum-lengths with two or more",
        ),
        (
            "--curriculum-schedule fixed_discrete --curriculum-lengths 16 8 --curriculum-until 1",
            "--curriculum-lengths 16 8: each number must exceed the previous one",
        ),
        (
            "--curriculum-schedule fixed_discrete --curriculum-lengths 8 256 --curriculum-until 1",
            "--curriculum-lengths 256 is above --seq-length 128: lower it",
        ),
        (
            "{} --cuda-graph-impl local",
            "--cuda-graph-impl local cannot be combined with --curriculum-schedule fixed_linear: "
            "each length would need its own recording: drop one of them",
        ),
    ],
)
def test_mistakes(words: str, line: str) -> None:
    linear = "--curriculum-schedule fixed_linear --curriculum-min-length 8 --curriculum-steps 9"
    said = problems(words.format(linear), world_size=4)
    assert any(one.startswith(line) for one in said), said


def test_only_gpt_has_a_curriculum() -> None:
    said = problems(" ".join(_WORDS), architecture="bert")
    assert said[0] == (
        "--curriculum-schedule fixed_linear is only for GPT, and this model is a BERT: drop it"
    )


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        (
            Growing(10, 64, 5000, 8, 1),
            "16 to 64 tokens in 5,000 iterations, linearly, in",
        ),
        (
            Growing(8, 64, 9, 8, 2),
            "24 to 64 tokens in 9 iterations, by the root of degree 2",
        ),
        (
            Discrete((8, 24, 64), (2, 5)),
            "8 tokens up to iteration 2, 24 tokens up to iteration 5, then 64",
        ),
    ],
)
def test_the_panel_says_what_is_read(lengths: Lengths, said: str) -> None:
    assert lengths.describe().startswith(said)


def test_odd_lengths_are_slow() -> None:
    notices = parse("--bf16 --curriculum-length-step 4", " ".join(_WORDS)).notices
    assert any(line.startswith("--curriculum-length-step 4: 16-bit") for line in notices)
    assert CurriculumConfig().curriculum_length_step == 8
