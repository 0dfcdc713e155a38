"""Weight averages: their values, layouts, checkpoints, evaluation and loading."""

from dataclasses import replace

import pytest
import torch

from megatron.checkpoint.loading import open_checkpoint
from megatron.checkpoint.merged import AveragedReader
from megatron.device import Device
from megatron.errors import CheckpointError
from megatron.inference.load import load_gpt
from megatron.optimizer.averages import LatestAverage
from megatron.parallel.layout import Layout
from megatron.planner.memory import estimate_memory
from megatron.tools.checkpoint import util
from megatron.training.step import Updates
from tests.checkpoint.states import read_all, read_whole
from tests.config.command import problems
from tests.distributed import run_sharing_memory
from tests.training.toy import build_toy, fingerprint, train_toy

PLAIN = "--hidden-dropout 0 --attention-dropout 0 --eval-iters 0".split()
EMA = ["--ema-decay", "0.6"]
LAWA = "--lawa-interval 2 --lawa-window 2".split()
KINDS = pytest.mark.parametrize("kind", [EMA, LAWA], ids=["ema", "lawa"])


def _weights(run):
    return {name: p.detach().clone() for name, p in run.named_parameters()}


def _averages(run):
    sets = run.optimizer.average.tensor_sets()
    named = run.optimizer.name_averages({"": sets["average."]})
    return {name: tensor.clone() for name, (tensor, _) in named.items()}


def _followed(flags, count):
    """Return the weights after each of several updates, and the run."""
    run = build_toy(Layout.single(), [*PLAIN, *flags, "--train-iters", str(count)])
    updates, seen = Updates(run), []
    for _ in range(count):
        updates.make(look_ahead=False)
        seen.append(_weights(run))
    return seen, run


def test_ema_is_the_formula():
    seen, run = _followed(EMA, 5)
    for name, average in _averages(run).items():
        expected = torch.zeros_like(average)
        for t, weights in enumerate(seen, start=1):
            kept = min(0.6, (t - 1) / t)
            expected = kept * expected + (1 - kept) * weights[name]
        torch.testing.assert_close(average, expected)


def test_lawa_is_the_mean_of_the_latest_snapshots():
    seen, run = _followed(LAWA, 7)
    for name, average in _averages(run).items():  # snapshots after 2, 4 and 6, two of which count
        torch.testing.assert_close(average, (seen[3][name] + seen[5][name]) / 2)


def test_masters_are_averaged():
    _, run = _followed([*EMA, "--bf16"], 3)
    assert {tensor.dtype for tensor in _averages(run).values()} == {torch.float32}
    distances = [
        (average.bfloat16().float() - average).abs().max().item()
        for average in _averages(run).values()
    ]
    assert max(distances) > 0  # it is not a mean of 16-bit weights


def test_an_update_that_is_left_out_does_not_count():
    run = build_toy(Layout.single(), [*PLAIN, *EMA, "--fp16", "--initial-loss-scale", "65536"])
    updates = Updates(run)
    applied = [updates.make(look_ahead=False).loss_scale for _ in range(4)]
    assert run.optimizer.average.count == run.optimizer.steps
    assert len(applied) == 4


LAYOUTS = [
    ("--zero-stage 1", {}),
    ("--zero-stage 2 --bf16", {}),
    ("--zero-stage 3", {}),
    ("--tensor-model-parallel-size 2", {"tensor": 2}),
    ("--pipeline-model-parallel-size 2", {"pipeline": 2}),
]


def _saved(layout, flags, folder):
    # With a large epsilon, gradients that are only rounding errors (of key biases) have no effect.
    words = [*PLAIN, *flags, "--adam-eps", "1e-4", "--save", str(folder), "--save-interval", "6"]
    train_toy(layout, words)


@KINDS
def test_every_layout_saves_the_same(tmp_path, kind):
    alone = {}
    for precision in ([], ["--bf16"]):
        folder = tmp_path / f"alone{len(precision)}"
        _saved(Layout.single(), [*kind, *precision], folder)
        alone["--bf16" in precision] = read_all(folder)
    for index, (flags, sizes) in enumerate(LAYOUTS):
        folder = tmp_path / str(index)
        run_sharing_memory(2, _saved, [*kind, *flags.split()], folder, **sizes)
        expected, found = alone["--bf16" in flags], read_all(folder)
        assert found.keys() == expected.keys()
        averages = [name for name in expected if name.startswith(("average.", "snapshot"))]
        assert len(averages) in (len(expected) // 4, len(expected) // 2, len(averages))
        for name in averages:
            assert found[name].dtype == torch.float32
            tolerance = 1e-3 if "--bf16" in flags else 1e-5
            torch.testing.assert_close(found[name], expected[name], rtol=1e-2, atol=tolerance)


def _resumed(layout, flags, folder):
    """Return fingerprints of the averages and of everything else, without and with a restart."""

    def digest(run):
        sets = run.optimizer.average.tensor_sets()
        named = run.optimizer.name_averages(sets)
        return fingerprint(run), {name: t.tolist() for name, (t, _) in named.items()}

    steps = ["--save", str(folder), "--save-interval", "3"]
    _, whole = train_toy(layout, [*PLAIN, *flags])
    train_toy(layout, [*PLAIN, *flags, *steps, "--exit-interval", "3"])
    _, resumed = train_toy(layout, [*PLAIN, *flags, "--load", str(folder)])
    return digest(whole) == digest(resumed)


@KINDS
def test_resuming_is_bit_for_bit(tmp_path, kind):
    assert _resumed(Layout.single(), [*kind, "--bf16"], tmp_path / "0")
    for index, flags in enumerate((["--zero-stage", "2", "--bf16"], ["--zero-stage", "3"])):
        folder = tmp_path / str(index + 1)
        assert run_sharing_memory(2, _resumed, [*kind, *flags], folder) == [True, True]


def test_an_average_may_begin_and_windows_may_change(tmp_path, capsys):
    save = ["--save", str(tmp_path / "0"), "--save-interval", "4", "--exit-interval", "4"]
    train_toy(Layout.single(), [*PLAIN, *save])
    load = ["--load", str(tmp_path / "0")]
    run = build_toy(Layout.single(), [*PLAIN, *EMA, *load])
    assert "no average of this kind: the average starts here" in capsys.readouterr().out
    assert run.optimizer.average.count == 0
    save[1] = str(tmp_path / "1")
    train_toy(Layout.single(), [*PLAIN, *LAWA, *save])
    load = ["--load", save[1]]
    short = build_toy(Layout.single(), [*PLAIN, *LAWA, *load])
    long = build_toy(Layout.single(), [*PLAIN, *LAWA, "--lawa-window", "4", *load])
    for run in (short, long):
        assert len(run.optimizer.average.tensor_sets()) == 1 + 2
    first, second = _averages(short), _averages(long)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_window_takes_no_more_snapshots_than_it_has_room_for():
    average, asked = LatestAverage([torch.zeros(3)], 1, 2), []

    def is_saved(name):
        asked.append(name)
        return len(asked) < 5

    assert list(average.prepare(is_saved, 7)) == asked
    assert len(asked) == 2
    assert average.count == 7


def _evaluations(layout, flags):
    recorder, run = train_toy(layout, flags)
    values = {name: recorder.values(name) for record in recorder.records for name in record}
    return values, fingerprint(run)


@pytest.mark.parametrize("flags", ["", "--bf16 --zero-stage 2", "--zero-stage 3"])
def test_evaluation_of_the_average_leaves_the_weights_alone(flags):
    words = [*PLAIN, *flags.split(), "--eval-iters", "2", *LAWA]
    run = (
        (lambda words: run_sharing_memory(2, _evaluations, words)[-1])
        if flags
        else (lambda words: _evaluations(Layout.single(), words))
    )
    plain, expected = run(words)
    values, found = run([*words, "--eval-averaged-weights"])
    assert found == expected
    averaged = {name for name in values if "of averaged weights" in name}
    assert averaged
    assert not any("of averaged weights" in name for name in plain)
    assert values["lm loss"] == plain["lm loss"]


def test_the_average_loads_as_weights(tmp_path):
    save = ["--save", str(tmp_path), "--save-interval", "6"]
    _, run = train_toy(Layout.single(), [*PLAIN, *EMA, "--bf16", *save])
    expected = {name: t.bfloat16() for name, t in _averages(run).items()}
    reader = open_checkpoint(tmp_path)
    averaged = AveragedReader(reader)
    for name, tensor in expected.items():
        assert torch.equal(read_whole(averaged, f"model.{name}"), tensor)
    assert not torch.equal(
        read_whole(reader, "model.layers.0.mlp.up.weight"),
        expected["layers.0.mlp.up.weight"],
    )
    flags = ["--load", str(tmp_path), "--load-averaged-weights", "--finetune", "--bf16"]
    tuned = build_toy(Layout.single(), [*PLAIN, *flags])
    assert tuned.progress.iteration == 0
    for name, p in tuned.named_parameters():
        assert torch.equal(p, expected[name])
    for name, (master, _) in tuned.optimizer.named_tensors().items():
        if name.endswith(".master"):  # not rounded to 16 bits
            assert torch.equal(master, expected[name.removesuffix(".master")].float())


def test_inference_and_export_of_the_average(tmp_path):
    save = ["--save", str(tmp_path / "run"), "--save-interval", "6"]
    _, run = train_toy(Layout.single(), [*PLAIN, *EMA, *save])
    expected = _averages(run)
    config = run.config
    options = type(config.checkpoint)(load=save[1], load_averaged_weights=True)
    loaded = load_gpt(save[1], Device.cpu(), config=replace(config, checkpoint=options))
    for name, p in loaded.model.named_parameters():
        count = len(expected[name])
        assert torch.equal(p[:count], expected[name]), name
    words = f"--model-type GPT --loader native --saver native --load-dir {save[1]}"
    words += f" --save-dir {tmp_path}/out --load-averaged-weights"
    assert util.main(words.split()) in (0, None)
    written = read_all(tmp_path / "out")
    for name, tensor in expected.items():
        assert torch.equal(written[f"model.{name}"], tensor)
    assert not any(name.startswith("average.") for name in written)


def test_a_checkpoint_without_an_average_is_refused(tmp_path):
    save = ["--save", str(tmp_path), "--save-interval", "6"]
    train_toy(Layout.single(), [*PLAIN, *save])
    with pytest.raises(CheckpointError, match="--load-averaged-weights: .* has no averages"):
        build_toy(
            Layout.single(),
            [*PLAIN, "--load", str(tmp_path), "--load-averaged-weights", "--finetune"],
        )


@KINDS
def test_the_planner_counts_it(kind):
    run = build_toy(Layout.single(), [*PLAIN, *kind])
    plain = build_toy(Layout.single(), PLAIN)
    parameters = sum(p.numel() for p in run.parameters())
    before, after = (
        estimate_memory(each.config, each.plan, each.layout, 1).optimizer for each in (plain, run)
    )
    assert after - before == 4 * parameters * (2 if kind == LAWA else 1)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--ema-decay 0.9 --lawa-interval 5", "--ema-decay 0.9 and --lawa-interval 5 cannot be"),
        (
            "--ema-decay 0.9 --save x --save-interval 1 --ckpt-format torch_dist",
            "--ema-decay with --ckpt-format torch_dist, whose files cannot contain averages",
        ),
        ("--eval-averaged-weights", "--eval-averaged-weights requires --ema-decay or"),
        ("--lawa-window 3", "--lawa-window 3 requires --lawa-interval"),
        ("--load x --load-averaged-weights", "--load-averaged-weights: the optimizer's states"),
    ],
)
def test_refusals(flags, problem):
    assert any(line.startswith(problem) for line in problems(flags)), problems(flags)
