"""`--optimizer-cpu-offload`: the update in host memory equals the usual one."""

import math

import pytest
import torch

from megatron.optimizer.rules import AdamW, OffloadedUpdate, OverlappedUpdate
from megatron.optimizer.update import Step, UpdateTensors
from megatron.parallel.layout import Layout
from tests.distributed import run_sharing_memory
from tests.training.toy import build_toy, train_toy

FLAGS = "--hidden-dropout 0 --attention-dropout 0 --global-batch-size 8 --eval-iters 0".split()
OFFLOAD = "--optimizer-cpu-offload"


def _train(layout, flags):
    recorder, run = train_toy(layout, flags)
    state = {name: tensor.tolist() for name, (tensor, _) in run.optimizer.named_tensors().items()}
    return recorder.values("lm loss"), recorder.values("grad-norm"), state


OVERLAP = "--overlap-cpu-optimizer-d2h-h2d"


def _with_and_without(layout, flags):
    offloaded = [*flags, OFFLOAD]
    return [_train(layout, words) for words in (offloaded, [*offloaded, OVERLAP], flags)]


@pytest.mark.parametrize("precision", ["--fp16 --initial-loss-scale 1024", "--bf16", ""])
@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_losses_are_the_same_to_the_bit(stage, precision):
    flags = [*FLAGS, "--zero-stage", stage, *precision.split()]
    for offloaded, overlapped, plain in run_sharing_memory(2, _with_and_without, flags):
        assert offloaded == plain
        assert overlapped == plain


class _LateQueue:
    """A queue whose copies happen only when something waits for them or for later copies."""

    def __init__(self, log, name):
        self.log, self.name, self.waiting, self.done = log, name, [], 0

    def wait_for_device(self):
        self.log.append(f"{self.name} follows")

    def copy(self, target, source):
        self.waiting.append((target, source))
        return _Late(self, self.done + len(self.waiting))


class _Late:
    def __init__(self, queue, count):
        self.queue, self.count = queue, count

    def wait(self):
        queue = self.queue
        while queue.done < self.count:
            target, source = queue.waiting.pop(0)
            target.copy_(source)
            queue.done += 1
        queue.log.append(f"{queue.name} {self.count}")

    delay_device = wait


class _Logged(AdamW):
    """An update rule that logs when it runs."""

    log: list[str] = []

    def bind(self, tensors, library):
        update = super().bind(tensors, library)

        def run(step, /, *, weight_decay):
            self.log.append("update")
            update(step, weight_decay=weight_decay)

        return run


def test_each_piece_is_updated_as_soon_as_its_gradients_have_arrived(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    sizes = (5, 7, 2, 9)
    first = [torch.randn(size, generator=generator) for size in sizes]
    log = []
    monkeypatch.setattr(_Logged, "log", log)

    def update_of(kind, **options):
        parts = [weight.clone() for weight in first]
        gradients = [torch.full_like(weight, math.nan) for weight in first]
        states = {
            name: [torch.zeros_like(weight) for weight in first] for name in AdamW.state_names
        }
        weights = [weight.clone() for weight in first]
        tensors = UpdateTensors(weights, [None] * len(sizes), gradients, states)
        return kind(_Logged(0.9, 0.99, 1e-8), tensors, parts, **options), parts, gradients

    queues = _LateQueue(log, "gradients"), _LateQueue(log, "weights")
    # Pieces of at least 40 bytes: the first two tensors and the other two.
    ours = update_of(OverlappedUpdate, queues=queues, piece_bytes=40)
    plain = update_of(OffloadedUpdate)
    for count in range(1, 4):
        fresh = [torch.randn(size, generator=generator) for size in sizes]
        number = torch.tensor(float(count))
        step = Step(0.1, number, torch.tensor(2.0), torch.tensor(0.0))
        for update, _, gradients in (ours, plain):
            for gradient, new in zip(gradients, fresh, strict=True):
                gradient.copy_(new)
            log.clear()
            update(step, weight_decay=0.1)
            if update is ours[0]:
                done = 4 * count - 4
                assert log == [
                    *("gradients follows", "weights follows"),
                    *(f"gradients {done + 2}", "update", f"gradients {done + 4}", "update"),
                    f"weights {done + 4}",
                ]
        assert not any(torch.equal(a, b) for a, b in zip(ours[1], first, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(ours[1], plain[1], strict=True))


def test_weights_and_their_copies_share_no_memory():
    run = build_toy(Layout.single(), [*FLAGS, OFFLOAD])
    before = [p.detach().clone() for p in run.parameters()]
    places = {p.untyped_storage().data_ptr() for p in run.parameters()}
    (group, _) = run.optimizer._groups
    assert all(w.weight.untyped_storage().data_ptr() not in places for w in group.weights)
    assert all(torch.equal(a, b) for a, b in zip(before, run.parameters(), strict=True))


@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_offloading_may_begin_and_end_at_a_checkpoint(tmp_path, precision):
    flags = [*FLAGS, *precision]
    losses, _, state = _train(Layout.single(), flags)
    steps = ["--save-interval", "2", "--exit-interval", "2"]
    for part, options in enumerate([[], [OFFLOAD], []]):
        load = ["--load", str(tmp_path / str(part - 1))] if part else []
        words = [*flags, *options, *load, "--save", str(tmp_path / str(part)), *steps]
        ours, _, last = _train(Layout.single(), words)
        assert ours == losses[2 * part : 2 * part + 2]
    assert last == state


def _resumed(layout, folder, flags):
    saves = ["--save", str(folder), "--save-interval", "2"]
    whole = _train(layout, [*FLAGS, *flags, *saves])
    again = _train(layout, [*FLAGS, *flags, "--load", str(folder), "--ckpt-step", "4"])
    return whole, again


@pytest.mark.parametrize("precision", ["--bf16", ""])
@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_a_resumed_run_continues_to_the_bit(tmp_path, stage, precision):
    flags = [OFFLOAD, "--zero-stage", stage, *precision.split()]
    for whole, again in run_sharing_memory(2, _resumed, tmp_path, flags):
        assert again[0] == whole[0][4:]
        assert again[1:] == (whole[1][4:], whole[2])
