"""The pipeline's bubble, measured with imposed stage times, matches the prediction."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.config.parser import parse_config
from megatron.errors import ConfigError, StorageError
from megatron.parallel.layout import Layout
from megatron.parallel.pipeline.schedule import Operation, make_schedule
from megatron.parallel.pipeline.simulate import Times, simulate, time_table
from megatron.training.callbacks import profiling
from megatron.training.callbacks.profiling import bubble_line
from megatron.training.callbacks.scalars import Scalars
from megatron.training.forward import DirectForward
from megatron.training.loop import standard_callbacks, train
from megatron.training.timers import Bubble, OperationClock, compare_with_prediction
from pretrain_gpt import GPTRecipe
from tests.distributed import run_distributed
from tests.training.toy import TOY, Recorder, build_toy

NAMES = ("pipeline-bubble", "pipeline-bubble predicted")
FORWARD, BACKWARD = 0.08, 0.12  # seconds; the toy model itself takes a few milliseconds
FLAGS = """
    --hidden-dropout 0 --attention-dropout 0 --num-layers 4 --global-batch-size 4
    --eval-interval 100 --eval-iters 0 --log-pipeline-bubble
""".split()


class _Slow(torch.autograd.Function):
    """The identity, with delays."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward_seconds)
        return gradient, None, None


class _SlowRecipe(GPTRecipe):
    """A GPT whose parts take at least this long; `factors` stretch the stages' times."""

    def __init__(self, factors):
        self.factors = factors

    def forward(self, part, batch, hidden, config, tokenizer, layout):
        result = super().forward(part, batch, hidden, config, tokenizer, layout)
        factor = self.factors[layout.pipeline.rank]
        times = (factor * FORWARD, factor * BACKWARD)
        if isinstance(result, torch.Tensor):
            return _Slow.apply(result, *times)
        return {name: _Slow.apply(value, *times) for name, value in result.items()}


def _agree(measured, predicted, imposed):
    """Return whether an iteration is close to its prediction, and one to the imposed times.

    Other work on the machine makes stages wait longer, but not in every iteration.
    """
    limit = 0.15 * imposed
    pairs = zip(measured, predicted, strict=True)
    return min(abs(a - b) for a, b in pairs) < limit and any(
        abs(value - imposed) < limit for value in measured
    )


class _Ending(Recorder):
    """A writer that ends the run by its kill switch once the times agree."""

    def __init__(self, imposed, switch):
        super().__init__()
        self._imposed, self._switch = imposed, switch

    def write(self, scalars, iteration, samples, **options):
        super().write(scalars, iteration, samples, **options)
        if NAMES[0] in scalars and _agree(*map(self.values, NAMES), self._imposed):
            self._switch.touch()


def _measure(layout, factors, flags, imposed, switch):
    words = [*FLAGS, *flags, "--train-iters", "60", "--kill-switch-file", str(switch)]
    run = build_toy(layout, [*words, "--pipeline-model-parallel-size", str(len(factors))])
    run.recipe, recorder = _SlowRecipe(factors), _Ending(imposed, Path(switch))
    run.forward = DirectForward(run.recipe.forward)
    train(run, standard_callbacks(run, [recorder])[0])
    return [recorder.values(name) for name in (*NAMES, "lm loss")]


def _imposed(kind, factors, chunks):
    stages = len(factors)
    tables = [
        time_table("", [factor * seconds * chunks for factor in factors], stages, chunks)
        for seconds in (FORWARD, BACKWARD)
    ]
    nothing = time_table("", [0.0], stages, chunks)
    return simulate(make_schedule(kind, stages, chunks, 4), Times(*tables, nothing)).bubble


@pytest.mark.parametrize(
    ("kind", "factors", "flags"),
    [
        ("1f1b", (1, 1), []),
        ("1f1b", (0.5, 1.5), []),
        ("interleaved", (0.3, 0.9), ["--num-layers-per-virtual-pipeline-stage", "1"]),
    ],
    ids=["even", "uneven", "interleaved"],
)
def test_bubble_measured_predicted_and_imposed_agree(kind, factors, flags, tmp_path):
    imposed = _imposed(kind, factors, 2 if kind == "interleaved" else 1)
    switch = str(tmp_path / "agreed")
    results = run_distributed(2, _measure, factors, flags, imposed, switch, pipeline=2)
    assert results[0][:2] == [[], []]  # the last rank reports
    measured, predicted, losses = results[-1]
    assert len(measured) == len(losses)
    assert _agree(measured, predicted, imposed), (measured, predicted, imposed)


def _losses(layout, flags):
    run, recorder = build_toy(layout, [*FLAGS[:-1], "--train-iters", "4", *flags]), Recorder()
    train(run, standard_callbacks(run, [recorder])[0])
    return recorder.values("lm loss"), recorder.values("pipeline-bubble")


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_measuring_changes_no_loss(schedule):
    flags = ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", schedule]
    plain, none = run_distributed(2, _losses, flags, pipeline=2)[-1]
    timed, bubbles = run_distributed(2, _losses, [*flags, FLAGS[-1]], pipeline=2)[-1]
    assert timed == plain
    assert none == []
    assert all(0 < bubble < 1 for bubble in bubbles)


def test_waiting_beyond_the_schedule_is_seen():
    """Two stages, one micro-batch: forward 1 s, backward 2 s, and a stage that starts 3 s late."""
    schedule = make_schedule("1f1b", 2, 1, 1)
    operations = [1.0, 1.0, 1.0, 2.0, 0.0, 0.0]  # counts and seconds of the three kinds
    on_time = torch.tensor([[6.0, *operations], [4.0, *operations]], dtype=torch.float64)
    assert compare_with_prediction(on_time, schedule) == pytest.approx((0.5, 0.5, 6.0, 6.0))
    late = on_time + torch.tensor([3.0] + [0.0] * 6)
    assert compare_with_prediction(late, schedule) == pytest.approx((6 / 9, 0.5, 9.0, 6.0))


def test_the_prediction_takes_the_mean_of_each_chunks_operations():
    """Two micro-batches: each chunk's forward takes 1 or 2 s on average, its backward 3 or 4."""
    schedule = make_schedule("interleaved", 2, 2, 2)
    times = Times(*(((a, b), (a, b)) for a, b in ((1.0, 2.0), (3.0, 4.0), (0.0, 0.0))))
    expected = simulate(schedule, times)
    sums = [*(2.0, 2.0, 2.0, 4.0), *(2.0, 6.0, 2.0, 8.0), *(0.0, 0.0, 0.0, 0.0)]
    stages = torch.tensor([[expected.total, *sums]] * 2, dtype=torch.float64)
    bubble = (expected.bubble, expected.bubble, expected.total, expected.total)
    assert compare_with_prediction(stages, schedule) == pytest.approx(bubble)


def test_a_clock_adds_up_the_times_of_each_kind_and_chunk():
    waited = []
    device = SimpleNamespace(
        now=0.0,
        synchronize=lambda: waited.append("device"),
        seconds_between=lambda start, end: end - start,
    )
    device.mark = lambda: device.now
    layout = SimpleNamespace(world=SimpleNamespace(barrier=lambda: waited.append("ranks")))
    clock = OperationClock(device, layout)
    update = [
        (Operation("forward", 0, 0), 1.0),
        (Operation("send_activation", 0, 0, 1), 2.0),
        (Operation("forward", 0, 1), 4.0),
        (Operation("backward", 0, 1), 8.0),
        (Operation("forward", 1, 0), 16.0),
        (Operation("backward_weight", 0, 1), 32.0),
        (Operation("send_gradient", 0, 0, 1), 64.0),
    ]
    for _ in range(2):
        clock.start()
        device.now += 128.0
        for operation, seconds in update:
            clock.before(operation)
            device.now += seconds
        clock.stop()
        span, *sums = clock.read(2).tolist()
        assert span == 128.0 + 63.0  # until the end of the last computation
        assert sums == [*(2, 17, 1, 4), *(0, 0, 1, 8), *(0, 0, 1, 32)]
    assert waited == ["device", "ranks", "device"] * 2


def test_the_line_shows_means():
    bubbles = [Bubble(0.1, 0.2, 1.0, 1.2), Bubble(0.3, 0.2, 2.0, 2.2)]
    assert bubble_line(bubbles) == (
        " pipeline bubble | measured: 20.00% of 1500.0 ms | predicted: 20.00% of 1700.0 ms |"
    )


def test_without_a_pipeline_there_is_nothing_to_measure():
    with pytest.raises(ConfigError, match="--log-pipeline-bubble: a single pipeline stage"):
        parse_config([*TOY, "--train-iters", "1", "--log-pipeline-bubble"], world_size=1)


def test_a_single_process_has_no_clock():
    assert build_toy(Layout.single()).operation_clock is None


def test_a_line_every_log_interval_has_the_mean_since_the_last(monkeypatch, capsys):
    class Values:
        """A writer that keeps the values of each iteration. The disk is full after the third."""

        def __init__(self):
            self.found = {}

        def write(self, scalars, iteration, samples, **_):
            if iteration > 3:
                raise StorageError("the disk is full")
            self.found[iteration, samples] = scalars["pipeline-bubble"]

    def bubble(stages, _):
        return Bubble(stages.item() / 10, 0.2, 1.0, 1.0)

    monkeypatch.setattr(profiling, "compare_with_prediction", bubble)
    monkeypatch.setattr(profiling, "schedule_of", lambda *_: None)
    progress = SimpleNamespace(iteration=0, consumed_samples=0)
    clock = SimpleNamespace(read=lambda _: torch.tensor(float(progress.iteration)))
    run = SimpleNamespace(
        parts=[None],
        layout=Layout.single(),
        is_log_rank=True,
        progress=progress,
        config=SimpleNamespace(logging=SimpleNamespace(log_interval=2)),
    )
    callback = profiling.PipelineBubble(clock, Scalars([values := Values()]))
    lines = []
    for progress.iteration in range(1, 6):
        progress.consumed_samples = 10 * progress.iteration
        callback.after_step(run, SimpleNamespace(ordinary=[True]), None)
        lines.append(capsys.readouterr().out)
    assert [line[:36] for line in lines] == [
        "",
        " pipeline bubble | measured: 15.00% ",
        "",
        "WARNING: the disk is full. Training ",
        "",
    ]
    assert "\n pipeline bubble | measured: 35.00% " in lines[3]
    assert values.found == pytest.approx({(i, 10 * i): i / 10 for i in range(1, 4)})
