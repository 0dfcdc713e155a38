"""Runs with moments, masters and gradients in fewer bits."""

import pytest
import torch

from megatron.errors import ConfigError
from megatron.parallel.layout import Layout
from megatron.planner.memory import estimate_memory
from megatron.training.panel import size_rows
from tests.config.command import parse, problems
from tests.distributed import run_sharing_memory
from tests.training.toy import build_toy, fingerprint, losses_of, train_toy

AWARE = "--use-precision-aware-optimizer"
PLAIN = "--bf16 --adam-beta2 0.95 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0"
FORMATS = {
    "bf16": "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "fp16": "--exp-avg-dtype fp16 --exp-avg-sq-dtype fp16 --main-params-dtype fp16",
    "fp8": "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp8",
    "gradients": "--exp-avg-dtype bf16 --main-grads-dtype bf16",
}


def _flags(name, more=""):
    return f"{PLAIN} {AWARE} {FORMATS[name]} {more}".split()


def test_the_loss_after_100_iterations():
    length = "--train-iters 100 --micro-batch-size 4 --num-layers 1"
    expected = losses_of(Layout.single(), f"{PLAIN} {length}".split())
    for name in FORMATS:
        ours = losses_of(Layout.single(), _flags(name, length))
        assert ours != expected
        assert sum(ours[-10:]) / 10 == pytest.approx(sum(expected[-10:]) / 10, rel=5e-3), name


def _in_stages(layout):
    """Return the losses with each allowed combination of stage and format."""
    found = {}
    for stage in range(4):
        for name in FORMATS:
            if (stage, name) != (3, "fp16"):  # stage 3's shards are the fp32 weights
                more = f"--zero-stage {stage} --clip-grad 0"
                found[stage, name] = losses_of(layout, _flags(name, more))
    offload = losses_of(
        layout, _flags("fp8", "--zero-stage 1 --clip-grad 0 --optimizer-cpu-offload")
    )
    return found, offload


def test_stages_and_offloading():
    (found, offload), *_ = run_sharing_memory(2, _in_stages)
    assert offload == found[1, "fp8"]
    for name in FORMATS:
        alone = losses_of(Layout.single(), _flags(name, "--clip-grad 0"))
        for stage in range(3 + (name != "fp16")):
            assert found[stage, name] == pytest.approx(alone, rel=2e-3), (stage, name)
    # Without scales, only the last bits before rounding depend on where shards start.
    for stage in (1, 2):
        assert found[stage, "bf16"] == pytest.approx(found[0, "bf16"], rel=1e-4)


def _resume(layout, words, folder):
    """Return fingerprints of an uninterrupted run and of one saved and loaded in between."""
    steps = f"--save {folder}/{layout.world.size} --save-interval 3".split()
    _, whole = train_toy(layout, words)
    train_toy(layout, [*words, *steps, "--exit-interval", "3"])
    load = ["--load", steps[1]]
    recorder, resumed = train_toy(layout, [*words, *load])
    return fingerprint(whole), fingerprint(resumed), recorder.values("lm loss")


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
def test_resuming_in_the_same_layout_is_bit_for_bit(tmp_path, name):
    words = _flags(name)
    whole, resumed, losses = _resume(Layout.single(), words, tmp_path)
    assert whole == resumed
    sharded = [*words, "--zero-stage", "2"]
    for one, other, _ in run_sharing_memory(2, _resume, sharded, tmp_path):
        assert one == other
    # Load the checkpoint of two processes on one.
    train_toy(Layout.single(), [*words, "--load", f"{tmp_path}/2"])
    ours = losses_of(Layout.single(), [*words, "--load", f"{tmp_path}/2"])
    assert ours == pytest.approx(losses, rel=3e-3)


def test_formats_may_change_at_a_checkpoint(tmp_path, capsys):
    plain = PLAIN.split()
    expected = losses_of(Layout.single(), plain)
    steps = ["--save-interval", "2", "--exit-interval", "2"]
    found, previous = [], []
    for part, words in enumerate([plain, _flags("fp8"), plain]):
        save = ["--save", str(tmp_path / str(part)), *steps]
        found += losses_of(Layout.single(), [*words, *previous, *save])
        previous = ["--load", str(tmp_path / str(part))]
        told = capsys.readouterr().out
        if part == 1:
            assert "changed since the checkpoint: --exp-avg-dtype fp8 instead of" in told
    assert found == pytest.approx(expected, rel=5e-3)


def test_other_programs_read_fp32(tmp_path):
    """Megatron-LM's files hold fp32 states, whatever the run uses."""
    words = _flags("fp8", "--ckpt-format legacy --save-interval 2 --exit-interval 2")
    train_toy(Layout.single(), [*words, "--save", str(tmp_path)])
    (file,) = tmp_path.glob("iter_0000002/mp_rank_00/model_optim_rng.pt")
    states = torch.load(file, weights_only=False)["optimizer"]["optimizer"]["state"]
    assert {state["exp_avg_sq"].dtype for state in states.values()} == {torch.float32}


@pytest.mark.parametrize("name", FORMATS)
def test_the_planner_counts_the_bytes(name):
    run = build_toy(Layout.single(), _flags(name))
    states = run.optimizer._named_states().values()
    held = sum(state.nbytes if isinstance(state, torch.Tensor) else 0 for state, _ in states) + sum(
        state.numel() * (state.nbytes / len(state._codes))
        for state, _ in states
        if not isinstance(state, torch.Tensor)
    )  # without the padding of small tensors
    estimate = estimate_memory(run.config, run.plan, run.layout, 1)
    assert estimate.optimizer == pytest.approx(held, rel=1e-3)
    rows = dict(size_rows(run.config, 1, run.plan))
    assert "per process less than in fp32" in rows["optimizer states"]
    if name == "gradients":
        assert estimate.gradients == 2 * sum(p.numel() for p in run.parameters())
        assert {g.dtype for g in run.gradients.views(lambda p: True)} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--exp-avg-dtype bf16", "--exp-avg-dtype bf16 requires --use-precision-aware-optimizer"),
        (
            f"{AWARE} --exp-avg-dtype bf16 --optimizer muon",
            "--use-precision-aware-optimizer with --optimizer muon: its states are in fp32",
        ),
        (f"{AWARE} --main-params-dtype fp16", "--main-params-dtype fp16 requires --bf16 or --fp16"),
        (
            f"{AWARE} --main-params-dtype fp16 --bf16 --zero-stage 3",
            "--main-params-dtype fp16 with --zero-stage 3, whose shards already are the fp32",
        ),
        (
            f"{AWARE} --main-params-dtype fp16 --bf16 --optimizer-cpu-offload",
            "--main-params-dtype fp16 with --optimizer-cpu-offload: weights in host memory are in",
        ),
        (f"{AWARE} --main-grads-dtype bf16", "--main-grads-dtype bf16 requires --bf16"),
        (
            f"{AWARE} --main-grads-dtype bf16 --bf16 --accumulate-allreduce-grads-in-fp32",
            "--main-grads-dtype bf16 with --accumulate-allreduce-grads-in-fp32: drop one",
        ),
    ],
)
def test_refusals(flags, problem):
    assert any(line.startswith(problem) for line in problems(flags)), problems(flags)


def test_notices():
    told = parse(f"{AWARE} --exp-avg-sq-dtype fp8").notices
    assert any("--exp-avg-sq-dtype fp8 with --adam-beta2 0.999" in line for line in told)
    told = parse(AWARE).notices
    assert any("--use-precision-aware-optimizer has no effect without" in line for line in told)
    with pytest.raises(ConfigError):
        parse("--exp-avg-dtype int8")
