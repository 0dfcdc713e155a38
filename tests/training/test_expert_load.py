"""The experts' load: equal in every layout, counted once, shown in words and charts."""

import json

import numpy as np
import pytest

from megatron.models.plans import model_plan
from megatron.parallel.layout import Layout
from megatron.training.expert_load import ExpertLoad
from megatron.training.loop import standard_callbacks, train
from megatron.training.writers import open_writers
from tests.distributed import run_distributed
from tests.training.toy import build_toy, train_toy

EXPERTS, SAMPLES, LENGTH, CHOSEN = 4, 4, 16, 2
FLAGS = """
    --hidden-dropout 0 --attention-dropout 0 --num-layers 4 --num-experts 4
    --moe-layer-freq [0]+[1]*3 --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear
    --train-iters 4 --log-interval 2 --eval-iters 0 --eval-interval 100
""".split()


def _loads(layout, *flags):
    recorder, run = train_toy(layout, [*FLAGS, *flags])
    assert set(recorder.loads) == ({2, 4} if layout.world.is_last or recorder.loads else set())
    return {
        i: {k: v.tolist() for k, v in load.layers.items()} for i, load in recorder.loads.items()
    }


def _in_processes(count, flags):
    words = flags.split()
    sizes = {
        name: int(words[words.index(flag) + 1])
        for name, flag in (
            ("tensor", "--tensor-model-parallel-size"),
            ("context", "--context-parallel-size"),
            ("pipeline", "--pipeline-model-parallel-size"),
            ("expert", "--expert-model-parallel-size"),
        )
        if flag in words
    }
    return run_distributed(count, _loads, *words, **sizes)


@pytest.fixture(scope="module")
def one_process():
    return _loads(Layout.single())


def test_shares_of_two_updates_by_layer(one_process):
    assert list(one_process) == [2, 4]
    assert [list(load) for load in one_process.values()] == [[1, 2, 3], [1, 2, 3]]
    tokens = 2 * SAMPLES * LENGTH * CHOSEN  # of two updates
    for load in one_process.values():
        for shares in load.values():
            assert sum(shares) == EXPERTS
            counts = np.array(shares) * tokens / EXPERTS
            np.testing.assert_array_equal(counts, counts.round())
            assert counts.max() <= tokens / CHOSEN  # a token chooses an expert at most once
    assert one_process[2] != one_process[4]


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (2, ""),
        (2, "--expert-model-parallel-size 2"),
        (2, "--tensor-model-parallel-size 2"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        (2, "--context-parallel-size 2"),
        (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
        (2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
        (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"),
    ],
)
def test_every_layout_counts_the_same_tokens(processes, flags, one_process):
    for loads in _in_processes(processes, flags):
        assert loads == one_process


@pytest.mark.parametrize(
    ("flags", "same"),
    [
        ("", True),
        ("--expert-model-parallel-size 2", True),
        ("--tensor-model-parallel-size 2", True),
        ("--pipeline-model-parallel-size 2", True),
        ("--tensor-model-parallel-size 2 --sequence-parallel", False),
        ("--context-parallel-size 2", False),
    ],
)
def test_layouts_that_drop_other_tokens_are_those_of_the_guide(flags, same):
    """The table in docs/experts.md lists these layouts."""
    capacity = " --moe-expert-capacity-factor 1.0 --moe-token-drop-policy position"
    expected = _loads(Layout.single(), *capacity.split())
    for loads in _in_processes(2, flags + capacity):
        assert (loads == expected) is same


def test_dense_models_have_none(capfd):
    recorder, _ = train_toy(Layout.single(), ["--train-iters", "1", "--log-interval", "1"])
    assert not recorder.loads
    assert "expert" not in capfd.readouterr().out


def test_one_line_and_a_warning_only_if_there_is_a_reason(capfd):
    _loads(Layout.single())
    lines = [line for line in capfd.readouterr().out.splitlines() if "expert load" in line]
    assert len(lines) == 2
    assert lines[0].startswith(" expert load (1.00: even) | layer 1: ")
    even = ExpertLoad({0: np.ones(4), 1: np.array([0.5, 1.0, 1.0, 1.5])})
    assert even.line() == (
        " expert load (1.00: even) | layer 0: 1.00 to 1.00 | layer 1: 1.50 to 0.50 |"
    )
    assert even.warning() is None
    uneven = np.zeros(16)
    uneven[[2, 3, 4, 5]] = 1.0
    uneven[7] = 12.0
    assert ExpertLoad({0: np.ones(16), 5: uneven}).warning() == (
        " experts without tokens since the last log line: layer 5: 0, 1, 6, 8, 9, 10, 11, 12, "
        "and 3 more | experts with more than 4 times an even share of the tokens: layer 5: 7 (12.0)"
    )


def test_the_load_is_relative_to_an_even_share():
    config = build_toy(Layout.single(), FLAGS).config
    plan = model_plan(config.model, 104)
    load = ExpertLoad.of(plan, [8, 0, 4, 4, 1, 1, 1, 1, 0, 0, 0, 0]).layers
    assert {layer: shares.tolist() for layer, shares in load.items()} == {
        1: [2, 0, 1, 1], 2: [1, 1, 1, 1], 3: [0, 0, 0, 0]
    }  # fmt: skip
    assert ExpertLoad({3: load[3]}).warning() is None  # nothing was counted


def test_the_picture_is_white_where_even_red_above_and_blue_below():
    picture = ExpertLoad({0: np.array([1.0, 0.0, 9.0]), 1: np.array([2.0, 0.5, 1.0])}).picture()
    assert picture.dtype == np.uint8
    squares = picture[8::16, 8::16].tolist()
    assert squares[0] == [[255, 255, 255], [0, 0, 255], [255, 0, 0]]
    assert squares[1] == [[255, 128, 128], [128, 128, 255], [255, 255, 255]]


def test_curves_a_picture_and_one_field(tmp_path):
    path = tmp_path / "metrics.jsonl"
    flags = ["--tensorboard-dir", str(tmp_path), "--metrics-jsonl", str(path)]
    run = build_toy(Layout.single(), [*FLAGS, *flags, "--tensorboard-log-interval", "3"])
    writers = open_writers(run.config, is_log_rank=True)
    train(run, standard_callbacks(run, writers)[0])
    for writer in writers:
        writer.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    loads = [record for record in records if "expert load" in record]
    assert [record["iteration"] for record in loads] == [2, 4]
    assert set(loads[0]) == {"iteration", "consumed samples", "time", "expert load"}
    assert list(loads[0]["expert load"]) == ["1", "2", "3"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    (first, second) = events.Images("expert-load")
    assert (first.step, second.step) == (2, 4)
    assert (first.height, first.width) == (3 * 16, EXPERTS * 16)
    for layer, shares in loads[1]["expert load"].items():
        for name, value in (("busiest", max(shares)), ("idlest", min(shares))):
            point = events.Scalars(f"expert-load/layer {layer} {name}")[1]
            assert (point.step, point.value) == (4, pytest.approx(value, abs=1e-3))
