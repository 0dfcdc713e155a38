"""The GRPO example: its loss equals TRL's, it learns, resumes, and runs on several processes."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from examples.grpo.grpo import GRPO, GRPORollouts, load_reward, read_options
from examples.grpo.sort_digits import main as write_files
from examples.grpo.sort_digits import reward
from megatron.config.parser import parse_config
from megatron.data.sample import SEGMENT_ENDS, TRAINED
from megatron.errors import ConfigError, DataError
from megatron.finetuning.rollouts import (
    ADVANTAGES,
    OLD_LOG_PROBS,
    REFERENCE_LOG_PROBS,
    REWARDS,
    WEIGHTS,
    Group,
    Judged,
    Prompts,
    label_log_probs,
    new_row,
    token_log_probs,
)
from megatron.kernels.cross_entropy import REFERENCE
from megatron.parallel.distillation import VocabularyPart
from megatron.parallel.layout import Layout
from megatron.training.build import build_run
from megatron.training.generation import GeneratedAnswer
from megatron.training.loop import standard_callbacks, train
from megatron.training.run import Run
from tests.distributed import run_sharing_memory, toy_device
from tests.finetuning.record_grpo import (
    CASES,
    CLIP,
    CLIP_HIGH,
    GROUP,
    GROUPS,
    LONGEST,
    RECORD,
    trl_loss,
)
from tests.launch import run_ranks
from tests.repository import ROOT
from tests.training.toy import CPU, TOY, Recorder

RECORDED = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
WORDS = """
    --vocab-size 11 --seq-length 64 --max-position-embeddings 64 --eval-iters 0 --train-iters 4
    --hidden-dropout 0 --attention-dropout 0 --lr-decay-style constant --lr-warmup-fraction 0
    --no-exit-signal-handler
""".split()


def _options(*words: str) -> Namespace:
    base = ["--reward", "unused.py", "--group-size", "4", "--answer-tokens", "6"]
    return read_options([*base, *words])[0]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_loss_and_gradient_are_those_of_trl(case: int) -> None:
    recorded = RECORDED["cases"][case]
    kl = ["--kl", "0.04", "--reference", "x"] if recorded["kl"] else []
    words = ["--loss", recorded["loss"], "--clip", str(CLIP), "--clip-high", str(CLIP_HIGH), *kl]
    options = _options("--answer-tokens", str(LONGEST), *words)
    lengths = torch.tensor(RECORDED["lengths"]).view(GROUPS, GROUP)
    rewards = torch.tensor(RECORDED["rewards"]).view(GROUPS, GROUP).tolist()
    groups = [
        Group({"rewards": dict(zip("abcd", rewards[g], strict=True))}, (1,), answers, [*"abcd"])
        for g in range(GROUPS)
        for answers in [[GeneratedAnswer([0] * int(n), []) for n in lengths[g]]]
    ]
    recipe = GRPO(options)
    rollouts = GRPORollouts(options, recipe, lambda record, answer: record["rewards"][answer])
    judged = rollouts.judge(_alone(), groups)
    advantages = torch.tensor([[one.advantage for one in row] for row in judged])
    assert advantages.flatten().tolist() == pytest.approx(recorded["advantages"], abs=1e-6)

    mask = torch.arange(LONGEST) < lengths[..., None]

    def spread(values: Any) -> torch.Tensor:
        return (torch.tensor(values).double()[..., None] * mask).flatten(1)

    def tokens(name: str) -> torch.Tensor:
        values = torch.tensor(RECORDED[name], dtype=torch.float64)
        return (values.view(GROUPS, GROUP, LONGEST) * mask).flatten(1)

    policy = tokens("policy").requires_grad_()
    batch = {
        TRAINED: mask.flatten(1).long(),
        OLD_LOG_PROBS: tokens("old"),
        ADVANTAGES: spread([[one.advantage for one in row] for row in judged]),
        WEIGHTS: spread([[one.weight for one in row] for row in judged]),
        REWARDS: torch.tensor(rewards) / GROUP,
    }
    if kl:
        batch[REFERENCE_LOG_PROBS] = tokens("reference")
    found = recipe.losses(policy, batch)
    found["loss"].backward()
    assert found["loss"].item() == pytest.approx(recorded["value"], abs=1e-6)
    assert found["reward"].item() == pytest.approx(np.mean(RECORDED["rewards"]), abs=1e-6)
    gradient = torch.tensor(recorded["gradient"], dtype=torch.float64)
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad.view(-1, LONGEST), gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_record_is_what_trl_computes(case: int) -> None:
    pytest.importorskip("trl", reason="needs the extra [parity]")
    names = ("old", "policy", "reference", "rewards")
    old, policy, reference, rewards = (
        torch.tensor(RECORDED[name], dtype=torch.float64) for name in names
    )
    mask = (torch.arange(LONGEST) < torch.tensor(RECORDED["lengths"])[:, None]).double()
    found = trl_loss(*CASES[case], old, policy, reference, mask, rewards)
    for name in ("value", "advantages", "gradient"):
        ours, theirs = torch.tensor(found[name]), torch.tensor(RECORDED["cases"][case][name])
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def _alone() -> Any:
    return SimpleNamespace(device=CPU, layout=Layout.single())


def _sevens(record: Any, answer: str) -> float:
    """Return the share of the answer's tokens that are 7."""
    if record["prompt"] == "0 7":
        return float("nan")
    tokens = answer.split()
    return tokens.count("7") / max(1, len(tokens))


def _build(layout: Layout, folder: Path, words: Sequence[str], own: Sequence[str] = ()) -> Run:
    prompts = folder / "prompts.jsonl"
    if layout.world.rank == 0 and not prompts.is_file():
        prompts.write_text("".join(f'{{"prompt": "{i} 3 {9 - i}"}}\n' for i in range(10)))
    layout.world.barrier()
    base = [word for word in TOY if word != "--mock-data"]
    given = [*base, *WORDS, "--data-path", str(prompts), *words]
    config = parse_config(given, world_size=layout.world.size, architecture="gpt").config
    options = _options(*own)
    recipe = GRPO(options)
    rollouts = GRPORollouts(options, recipe, _sevens)
    assert not rollouts.replace_training(config, toy_device(layout.world.rank), layout)
    run = build_run(config, recipe, toy_device(layout.world.rank), layout)
    rollouts.begin(run)
    return run


def train_grpo(
    layout: Layout, folder: Path, words: Sequence[str] = (), own: Sequence[str] = ()
) -> dict[str, list[float]]:
    run, recorder = _build(layout, folder, words, own), Recorder()
    callbacks, _ = standard_callbacks(run, [recorder])
    train(run, callbacks)
    names = ("loss", "reward", "answer tokens", "clipped", "log-ratio", "grad-norm")
    return {name: recorder.values(name) for name in names}


def test_it_learns(tmp_path: Path) -> None:
    found = train_grpo(Layout.single(), tmp_path, ["--train-iters", "25"])
    assert np.mean(found["reward"][:2]) < 0.25
    assert np.mean(found["reward"][-3:]) > 0.8
    # Answers are used for training with the same weights that generated them.
    assert max(found["log-ratio"]) < 1e-5
    assert max(found["clipped"]) == 0
    assert max(map(abs, found["loss"])) < 1e-6


MODERN = """
    --position-embedding-type rope --normalization RMSNorm --swiglu --group-query-attention
    --num-query-groups 2 --micro-batch-size 2
"""
LONG = "--seq-length 640 --max-position-embeddings 640"
LATENT = (
    "--multi-latent-attention --kv-lora-rank 24 --qk-head-dim 12 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 16 --qk-layernorm --position-embedding-type rope"
)


@pytest.mark.skipif(
    not torch.backends.mkl.is_available(), reason="--batch-invariant-mode is refused without MKL"
)
@pytest.mark.parametrize("words", ["", MODERN, f"{MODERN} {LONG}", "--hidden-size 96", LATENT])
def test_generation_and_training_agree_to_the_bit(words: str, tmp_path: Path) -> None:
    """Compare a token's log-probability in generation and in the update that trains on it."""
    longest = "140" if LONG in words else "6"
    found = train_grpo(
        Layout.single(),
        tmp_path,
        ["--batch-invariant-mode", "--train-iters", "6", *words.split()],
        ["--answer-tokens", longest],
    )
    assert found["log-ratio"] == [0.0] * 6
    assert found["reward"][-1] > 0
    others = train_grpo(
        Layout.single(),
        tmp_path,
        ["--train-iters", "6", *words.split()],
        ["--answer-tokens", longest],
    )
    assert 0 < max(others["log-ratio"]) < 1e-5, "without the mode they differ in the last bits"


NF4 = "--lora-rank 4 --frozen-weights-dtype nf4 --hidden-size 64 --ffn-hidden-size 128"


@pytest.mark.parametrize(("flag", "most"), [("--lora-rank 4", 1e-5), (NF4, 1e-5), ("--bf16", 1e-2)])
def test_adapters_and_16_bits_answer_as_they_train(flag: str, most: float, tmp_path: Path) -> None:
    found = train_grpo(Layout.single(), tmp_path, [*MODERN.split(), *flag.split(), "--lr", "0.05"])
    assert found["log-ratio"][0] > 0
    assert max(found["log-ratio"]) < most


def test_later_updates_clip_what_the_first_has_changed(tmp_path: Path) -> None:
    own = ["--updates-per-rollout", "4", "--loss", "dapo"]
    found = train_grpo(Layout.single(), tmp_path, ["--train-iters", "8"], own)
    for at in (0, 4):
        assert found["log-ratio"][at] < 1e-5
        assert found["log-ratio"][at + 3] > 1e-3
    assert max(found["clipped"]) > 0


_GROWING = """
    --train-iters none --train-samples 20 --rampup-batch-size 4 4 4 --global-batch-size 8
    --lr-warmup-fraction none
"""


@pytest.mark.parametrize(
    ("words", "updates"), [("", "1"), (_GROWING, "2")], ids=["same", "growing"]
)
def test_a_resumed_run_repeats_the_rest(words: str, updates: str, tmp_path: Path) -> None:
    own = ["--updates-per-rollout", updates]
    whole = train_grpo(Layout.single(), tmp_path, words.split(), own)
    saved = [*words.split(), "--save", str(tmp_path / "run"), "--save-interval", "2"]
    train_grpo(Layout.single(), tmp_path, [*saved, "--exit-interval", "2"], own)
    rest = train_grpo(Layout.single(), tmp_path, [*saved, "--load", str(tmp_path / "run")], own)
    assert len(rest["loss"]) > 0
    for name, values in rest.items():
        assert values == whole[name][2:], name


def test_a_resumed_run_generates_when_the_whole_run_would(tmp_path: Path) -> None:
    """An update on answers from older weights has a different log-ratio."""
    own = ["--updates-per-rollout", "4", "--loss", "dapo"]
    words = ["--train-iters", "6", "--save", str(tmp_path / "run"), "--save-interval", "1"]
    train_grpo(Layout.single(), tmp_path, [*words, "--exit-interval", "2"], own)
    rest = train_grpo(Layout.single(), tmp_path, [*words, "--load", str(tmp_path / "run")], own)
    assert [ratio < 1e-5 for ratio in rest["log-ratio"]] == [True, False, True, False]


LAYOUTS = {
    "data": (2, {}, ""),
    "tensor": (2, {"tensor": 2}, "--tensor-model-parallel-size 2"),
    "optimizer": (
        2,
        {},
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_processes_are_one(name: str, tmp_path: Path) -> None:
    """Answers are sampled by their prompt's number, so every layout generates the same ones."""
    processes, sizes, words = LAYOUTS[name]
    expected = train_grpo(Layout.single(), tmp_path)
    for found in run_sharing_memory(processes, train_grpo, tmp_path, words.split(), **sizes):
        for metric in ("reward", "answer tokens", "grad-norm"):
            assert found[metric] == pytest.approx(expected[metric], rel=1e-4), metric


def test_a_reference_model_holds_the_policy_back(tmp_path: Path) -> None:
    start = ["--load", str(tmp_path / "start"), "--finetune"]
    train_grpo(
        Layout.single(),
        tmp_path,
        ["--save", start[1], "--save-interval", "9", "--train-iters", "1"],
    )
    own = ["--kl", "0.5", "--reference", start[1]]
    held = train_grpo(Layout.single(), tmp_path, [*start, "--train-iters", "12"], own)
    free = train_grpo(Layout.single(), tmp_path, [*start, "--train-iters", "12"])
    assert held["loss"][0] == pytest.approx(0, abs=1e-6), "the policy is its own reference"
    assert held["loss"][-1] > 1e-3
    assert held["reward"][0] == free["reward"][0]
    assert held["reward"][-1] < free["reward"][-1]


def test_answers_do_not_depend_on_how_many_are_written_at_once(tmp_path: Path) -> None:
    whole = train_grpo(Layout.single(), tmp_path)
    few = train_grpo(Layout.single(), tmp_path, own=["--answers-at-once", "3"])
    assert few["reward"] == whole["reward"]
    assert few["grad-norm"] == pytest.approx(whole["grad-norm"], rel=1e-5)


def test_a_row_holds_each_answer_after_a_copy_of_its_prompt(tmp_path: Path) -> None:
    run = _build(Layout.single(), tmp_path, ["--seq-length", "64"])
    answers = [GeneratedAnswer([7, 11], [-0.5, -0.25]), GeneratedAnswer([8], [-1.0])]
    group = Group({}, (1, 2, 3), answers, ["7", "8"])
    row = new_row(run, 5, group, [Judged(1.0, 2.0, 0.25), Judged(0.0, -2.0, 0.5)])
    assert row["text"][:10].tolist() == [1, 2, 3, 7, 11, 1, 2, 3, 8, 11]  # then padding
    assert row[SEGMENT_ENDS].tolist() == [5, 9, 64]
    assert row[TRAINED][:9].tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 0]
    assert row[OLD_LOG_PROBS][:9].tolist() == [0, 0, -0.5, -0.25, 0, 0, 0, -1, 0]
    assert row[ADVANTAGES][:9].tolist() == [0, 0, 2, 2, 0, 0, 0, -2, 0]
    assert row[WEIGHTS][:9].tolist() == [0, 0, 0.25, 0.25, 0, 0, 0, 0.5, 0]
    assert row[REWARDS].sum() == 0.5
    full = SimpleNamespace(
        config=SimpleNamespace(data=SimpleNamespace(seq_length=9)), tokenizer=run.tokenizer
    )
    row = new_row(cast(Run, full), 5, group, [Judged(1.0, 2.0, 0.25), Judged(0.0, -2.0, 0.5)])
    assert row[SEGMENT_ENDS].tolist() == [5, 9]  # no padding, and no segment of it
    assert len(row["text"]) == 10


def test_answers_of_the_longest_length_fit_and_all_else_has_no_probability(tmp_path: Path) -> None:
    run = _build(Layout.single(), tmp_path, [], ["--answer-tokens", "13"])  # 4 x (3 + 13) = 64
    batch = next(run.train_batches)
    log_probs = token_log_probs(run.parts[0], batch, run.tokenizer, run.layout)
    assert (log_probs[batch[TRAINED] == 0] == 0).all()
    torch.testing.assert_close(log_probs, batch[OLD_LOG_PROBS], rtol=1e-5, atol=1e-5)


def _label_log_probs(layout: Layout, logits: Tensor, labels: Tensor, entries: int) -> Tensor:
    part = logits.chunk(layout.tensor.size, dim=-1)[layout.tensor.rank].contiguous()
    return label_log_probs(part, labels, VocabularyPart(layout.tensor, entries), REFERENCE)


@pytest.mark.parametrize("entries", [12, 10, 5])  # the second rank has none of 5 entries
def test_padding_of_the_vocabulary_has_no_probability_in_any_layout(entries: int) -> None:
    generator = torch.Generator().manual_seed(entries)
    logits = torch.randn(2, 3, 12, generator=generator)
    labels = torch.randint(entries, (2, 3), generator=generator)
    expected = logits[..., :entries].log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    words = (logits, labels, entries)
    torch.testing.assert_close(_label_log_probs(Layout.single(), *words), expected)
    for found in run_sharing_memory(2, _label_log_probs, *words, tensor=2):
        torch.testing.assert_close(found, expected)


def test_prompts_are_in_another_order_in_each_epoch() -> None:
    prompts = Prompts([{"prompt": str(i)} for i in range(8)], 24, seed=1)
    epochs = [[prompts.record(8 * epoch + i)["prompt"] for i in range(8)] for epoch in range(3)]
    assert all(sorted(epoch) == [*"01234567"] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert [prompts.record(i)["prompt"] for i in range(8)] == epochs[0]
    assert len(prompts._orders) == 1  # only that of the current epoch is kept


@pytest.mark.parametrize(
    "flag", ["--calculate-per-token-loss", "--pipeline-model-parallel-size 2", "--zero-stage 3"]
)
def test_flags_that_do_not_fit_are_named(flag: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"own answers cannot be combined with {flag}"):
        _build_of_two(tmp_path, flag.split())


@pytest.mark.parametrize("name", ["hidden", "lora"])
def test_dropout_is_refused(name: str, tmp_path: Path) -> None:
    flag = f"--{name}-dropout"
    with pytest.raises(ConfigError, match=f"{flag} 0.1: .*: give {flag} 0"):
        _build_of_two(tmp_path, ["--lora-rank", "2", flag, "0.1"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--group-size 1", "--group-size 1: give 2 or more"),
        ("--updates-per-rollout 0", "--updates-per-rollout 0: give 1 or more"),
        ("--kl 0.1", "--kl 0.1, --reference None: give both or neither"),
    ],
)
def test_values_out_of_range_are_named(words: str, message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        _options(*words.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["rewards = 1", None])
def test_a_file_without_a_reward_is_named(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "task.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match=f"--reward {path}: "):
        load_reward(path)


def _build_of_two(folder: Path, words: Sequence[str]) -> None:
    base = [word for word in TOY if word != "--mock-data"]
    given = [*base, *WORDS, "--data-path", "x", *words]
    config = parse_config(given, world_size=2, architecture="gpt").config
    options = _options()
    GRPORollouts(options, GRPO(options), _sevens).replace_training(config, CPU, Layout.single())


@pytest.mark.parametrize(
    ("lines", "own", "message"),
    [
        (
            '{"prompt": "0 7"}\n',
            "--answer-tokens 1",
            "as an answer to '0 7' is nan: return a number",
        ),
        ('{"text": "1"}\n', "", 'line 1 has no "prompt" string'),
        ("", "", "is empty: write one prompt per line"),
        ('{"prompt": "1 2"}\n', "--answer-tokens 20", "needs a row of 88, and --seq-length is 64"),
    ],
)
def test_prompts_that_do_not_fit_are_named(
    lines: str, own: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text(lines)
    with pytest.raises(DataError, match=message):
        train_grpo(Layout.single(), tmp_path, own=own.split())


def test_the_toy_task_rewards_digits_in_their_places() -> None:
    record = {"prompt": "3 1 2 10"}
    assert reward(record, "1 2 3") == 1
    assert reward(record, "3 2 1") == pytest.approx(1 / 3)
    assert reward(record, "1 2") == reward(record, "") == 0


def test_the_program_runs_on_the_toy_task(tmp_path: Path) -> None:
    write_files(tmp_path)
    folder = ROOT / "examples" / "grpo"
    task = [str(folder / "grpo.py"), "--reward", str(folder / "sort_digits.py")]
    base = [word for word in TOY if word != "--mock-data"]
    flags = [*base, *WORDS, "--data-path", str(tmp_path / "prompts.jsonl"), "--train-iters", "2"]
    done = run_ranks([*task, "--group-size", "4", "--answer-tokens", "6", *flags], {})
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("| reward: ") == 2
    lines = (tmp_path / "format.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    assert sorted(record["completion"].split()) == sorted(record["prompt"].split()[:-1])
