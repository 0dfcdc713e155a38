"""An update rule from outside the package, which needs whole matrices."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from megatron.optimizer import rules
from megatron.optimizer.rules import SGD, AdamW
from megatron.parallel.layout import Layout
from tests.distributed import run_distributed
from tests.optimizer.stepping import step
from tests.parallel.buffers import new_buffer, new_optimizer
from tests.training.toy import train_toy


@dataclass(frozen=True)
class Orthogonal:
    """w = w - lr U V^T, with the gradient's singular vectors, which Muon approximates."""

    momentum: float = 0.5

    state_names = ("velocity",)
    needs_whole = True
    joins_rows = False

    def bind(self, tensors, library):
        assert all(weight.ndim > 1 for weight in tensors.weights)

        def update(step, /, *, weight_decay):
            applies = 1 - step.found_nonfinite
            state = tensors.state["velocity"]
            members = zip(tensors.weights, tensors.copies, tensors.gradients, state, strict=True)
            for weight, copy, gradient, velocity in members:
                found = gradient.float().nan_to_num() / step.gradient_scale
                moved = self.momentum * velocity + found
                velocity.copy_(applies * moved + (1 - applies) * velocity)
                left, _, right = torch.linalg.svd(velocity.flatten(0, -2), full_matrices=False)
                direction = (left @ right).view_as(weight)
                weight.sub_(applies * step.lr * (direction + weight_decay * weight))
                if copy is not None:
                    copy.copy_(weight)

        return update


def _choose(name, parameter):
    """Choose SGD for "plain", orthogonalization for other matrices, and Adam for the rest."""
    if "plain" in name:
        return SGD(0.0)
    return Orthogonal() if parameter.ndim > 1 else AdamW(0.9, 0.95, 1e-8)


SHAPES = {
    "a.weight": (24, 10),
    "a.bias": (24,),
    "b.weight": (7, 24),
    "b.bias": (7,),
    "c.weight": (2, 5, 7),
    "plain.weight": (3, 10),
}


def _updates(layout, stage, dtype, bucket_bytes):
    """Return the weights after three updates, and the names of the states on this process."""
    generator = torch.Generator().manual_seed(0)
    named = {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }
    gradients = new_buffer(
        named.items(),
        layout,
        accumulate_in_fp32=True,
        bucket_bytes=bucket_bytes,
        zero_stage=stage,
        overlap=True,
        whole=[name for name, p in named.items() if _choose(name, p).needs_whole],
    )
    optimizer = new_optimizer(named.items(), gradients, layout=layout, rules=_choose)
    for update in range(3):
        gradients.zero()
        with gradients.micro_batch(is_last=True):
            seeds = range(layout.data.rank, 4, layout.data.size)
            total = torch.zeros(())
            for seed in seeds:
                drawn = torch.Generator().manual_seed(100 * update + seed)
                for p in named.values():
                    # Small whole numbers, whose sums are exact in any order.
                    factor = torch.randint(-3, 4, p.shape, generator=drawn).float()
                    total = total + (p.float() * factor).sum()
            (total / len(seeds)).backward()
        gradients.reduce()
        assert step(optimizer, 1e-2, 0.1).applied
    held = {name: tuple(t.shape) for name, (t, _) in optimizer.named_tensors().items()}
    return {name: p.tolist() for name, p in named.items()}, held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
def test_whole_matrices_under_every_stage(dtype, bucket_bytes):
    alone, states = _updates(Layout.single(), 0, dtype, bucket_bytes)
    assert states["a.weight.velocity"] == (24, 10)
    assert "a.bias.exp_avg" in states
    assert "plain.weight.velocity" not in states
    for stage in (0, 1, 2):
        ranks = run_distributed(2, _updates, stage, dtype, bucket_bytes)
        for weights, _ in ranks:
            for name, values in weights.items():
                expected = torch.tensor(alone[name])
                torch.testing.assert_close(torch.tensor(values), expected, rtol=1e-5, atol=1e-6)
        if stage == 0:
            continue
        for name in ("a.weight", "b.weight", "c.weight"):
            holders = [held for _, held in ranks if f"{name}.velocity" in held]
            assert len(holders) == 1  # exactly one process
            elements = torch.Size(SHAPES[name]).numel()
            assert holders[0][f"{name}.velocity"] == (elements,)
        for _, held in ranks:  # both have a share of the work
            assert any(name.endswith("velocity") for name in held)


def _part_of(layout):
    named = {"a.weight": nn.Parameter(torch.randn(24, 10))}
    gradients = new_buffer(named.items(), layout, accumulate_in_fp32=True, zero_stage=1)
    with pytest.raises(AssertionError, match="a.weight: its update rule needs the whole tensor"):
        new_optimizer(named.items(), gradients, layout=layout, rules=_choose)


def test_a_plan_that_cuts_the_matrix_is_refused():
    run_distributed(2, _part_of)


def _train(layout, flags):
    """Train with --optimizer redefined, in this process only."""
    rules.RULES["sgd"] = lambda config: _choose
    recorder, run = train_toy(layout, ["--optimizer", "sgd", "--lr", "0.01", *flags])
    kinds = {name.rpartition(".")[2] for name in run.optimizer.named_tensors()}
    return recorder.values("lm loss"), kinds


def test_a_run_with_a_rule_from_outside(monkeypatch):
    monkeypatch.setitem(rules.RULES, "sgd", rules.RULES["sgd"])
    losses, kinds = _train(Layout.single(), [])
    assert kinds == {"velocity", "exp_avg", "exp_avg_sq"}
    assert min(losses) < losses[0]
    for stage in ("0", "1"):
        flags = ["--zero-stage", stage, "--overlap-grad-reduce"]
        for ours, _ in run_distributed(2, _train, flags):
            assert ours == pytest.approx(losses, rel=1e-3)
