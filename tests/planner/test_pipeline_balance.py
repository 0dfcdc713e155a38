"""Predictions about a pipeline before it runs, and the layout that is proposed."""

from dataclasses import replace

import pytest

from megatron.config import parse_config
from megatron.config.stages import LAYOUT_FLAG, parse_layout
from megatron.models.plan import LANGUAGE_MODEL_HEAD, HeadSpec
from megatron.models.plans import model_plan
from megatron.parallel.pipeline.schedule import make_schedule
from megatron.parallel.pipeline.simulate import Times, simulate, time_table
from megatron.planner.memory import largest_process
from megatron.planner.pipeline_balance import (
    Costs,
    Durations,
    Pipeline,
    _candidates,
    layout_text,
    pipeline_rows,
)
from megatron.training.panel import size_rows

SHAPES = [("interleaved", 4, 4, 16), ("interleaved", 2, 2, 7), ("1f1b", 4, 1, 30)]
SHAPES += [("interleaved", 4, 2, 51), ("gpipe", 3, 1, 8), ("zero-bubble", 4, 1, 16)]


def alike(layers, head=1.95, again=0):
    """Return the costs of layers that take one unit each."""
    return Costs((Durations(1.0, 1.0 + again, 1.0),) * layers, Durations(head, head, head))


NETWORK = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --seq-length 8192 --swiglu "
    "--max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 16 --train-iters 5 "
    "--untie-embeddings-and-output-weights --lr 1e-4 --mock-data --vocab-size 128255 "
    "--tokenizer-type NullTokenizer --pipeline-model-parallel-size 4 --disable-bias-linear"
).split()


@pytest.mark.parametrize("again", [0, 1])
@pytest.mark.parametrize(("kind", "stages", "chunks", "micro_batches"), SHAPES)
def test_a_long_update_takes_what_all_of_its_simulation_takes(
    kind, stages, chunks, micro_batches, again
):
    counts = (2,) * (stages * chunks)
    costs = alike(sum(counts), again=again)
    tables = [
        time_table("", x, stages, chunks) for x in zip(*costs.part_times(counts), strict=True)
    ]
    schedule = make_schedule(kind, stages, chunks, micro_batches)
    whole = simulate(schedule, Times(*tables))
    pipeline = Pipeline(kind, stages, chunks, micro_batches)
    assert pipeline.time(counts, costs) == pytest.approx(whole.total, rel=1e-3)
    assert pipeline.bubble(counts, costs) == pytest.approx(whole.bubble, abs=1e-3)


@pytest.mark.parametrize(("kind", "stages", "chunks", "micro_batches"), SHAPES)
def test_a_proposal_has_all_layers_and_is_no_slower(kind, stages, chunks, micro_batches):
    pipeline = Pipeline(kind, stages, chunks, micro_batches)
    for layers in (stages * chunks, 3 * stages * chunks + 1):
        for costs in (alike(layers), alike(layers, 0.0), alike(layers, 40.0)):
            best = pipeline.best(costs)
            assert parse_layout(layout_text(best), layers, stages, "") == list(best)
            assert len(best) == stages * chunks
            each, left = divmod(layers, stages * chunks)
            even = tuple(each + (i < left) for i in range(stages * chunks))
            assert pipeline.time(best, costs) <= pipeline.time(even, costs) * 1.001


def test_extra_layers_are_adjacent_and_the_head_counts_as_layers():
    assert [*_candidates(5, 3, alike(5, 1.0))] == [(2, 2, 1), (1, 2, 2), (2, 1, 2)]
    # A head of 3 layers has a part of its own, or shares it with a single layer.
    assert [*_candidates(7, 4, alike(7, 3.0))] == [
        *((2, 2, 3, 0), (2, 3, 2, 0), (3, 2, 2, 0)),
        (2, 2, 2, 1),
    ]
    assert [*_candidates(1, 2, alike(1, 0.0))] == [(1, 0), (0, 1)]


def _costs(*flags):
    config = parse_config([*NETWORK, *flags], world_size=4).config
    return Costs.of(config, model_plan(config.model, 128256))


def _rows(*flags):
    config = parse_config([*NETWORK, *flags], world_size=4).config
    return dict(pipeline_rows(config, model_plan(config.model, 128256), 16, 4))


def test_candidates_are_compared_by_one_schedule(monkeypatch):
    made = []

    def make(*sizes):
        made.append(sizes)
        return make_schedule(*sizes)

    monkeypatch.setattr("megatron.planner.pipeline_balance.make_schedule", make)
    assert "smaller bubble" in _rows("--num-layers-per-virtual-pipeline-stage", "2")
    assert len(made) == 1


def test_a_heavy_head_is_noticed_and_the_proposed_layout_is_not_improved_further():
    rows = _rows("--num-layers-per-virtual-pipeline-stage", "2")
    assert rows["pipeline"].startswith(
        "interleaved, 4 stages x 4 virtual; estimated pipeline bubble: 1"
    )
    layout = rows["smaller bubble"].split("'")[1]
    assert layout == "Ett|(tt|)*11(ttt|)*2tt|L"
    assert list(_rows("--pipeline-model-parallel-layout", layout)) == ["pipeline"]
    # The stated memory is what the proposed run itself would state.
    taken = [*NETWORK, "--pipeline-model-parallel-layout", layout]
    config = parse_config(taken, world_size=4).config
    memory = largest_process(config, model_plan(config.model, 128256), 4).amount
    assert rows["smaller bubble"].endswith(f"(memory per process at most about {memory})")


def test_a_layout_that_saves_little_is_not_proposed():
    assert ", and 4% less time, with " in _rows("--num-layers", "64")["smaller bubble"]
    assert list(_rows("--num-layers", "96")) == ["pipeline"]


@pytest.mark.parametrize(
    "flags",
    [
        "--num-layers-per-virtual-pipeline-stage 2",
        "--num-layers 31 --account-for-embedding-in-pipeline-split",
        "--decoder-first-pipeline-num-layers 5 --decoder-last-pipeline-num-layers 7",
        "",
    ],
)
def test_a_proposal_names_the_flags_that_it_cannot_stand_beside(flags):
    told = _rows(*flags.split())["smaller bubble"].partition(" (memory")[0]
    proposal = told.split(LAYOUT_FLAG)[1]
    layout, _, instead = proposal.partition(" instead of ")
    left = " ".join(flags.split())
    for flag in filter(None, instead.split(" and ")):
        assert flag in left
        left = left.replace(flag, "")
    # The remaining flags can be combined with the layout.
    assert "pipeline" in _rows(*left.split(), LAYOUT_FLAG, layout.split("'")[1])


def test_a_head_on_one_vector_of_a_sample_takes_no_time():
    config = parse_config(NETWORK, world_size=4).config
    config = replace(config, model=replace(config.model, architecture="bert"))
    heads = (LANGUAGE_MODEL_HEAD, HeadSpec(outputs=2))
    plans = [model_plan(config.model, 128256, head) for head in heads]
    assert list(dict(pipeline_rows(config, plans[1], 16, 4))) == ["pipeline"]
    told = [dict(size_rows(config, 4, plan)) for plan in plans]
    assert "smaller bubble" in told[0]
    assert "smaller bubble" not in told[1]


def test_numbers_in_8_bits_make_the_head_count_for_more_layers():
    heavy = _costs("--bf16")
    heavier = _costs("--bf16", "--fp8-format", "hybrid")
    assert heavy.head == heavier.head
    assert 1.2 < heavier.head_in_layers / heavy.head_in_layers < 2


def test_recomputation_is_one_more_forward_pass_of_a_layer():
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    kept, again = _costs().layers[0], _costs(*full.split()).layers[0]
    assert (again.forward, again.weights) == (kept.forward, kept.weights)
    assert again.inputs == pytest.approx(kept.inputs + kept.forward)


def test_two_parts_of_a_stage_are_reported_and_one_is_not():
    two = _rows("--num-layers-per-virtual-pipeline-stage", "4")["pipeline"]
    assert two.startswith("interleaved, 4 stages x 2 virtual; estimated pipeline bubble: ")
    assert _rows()["pipeline"].startswith("1f1b, 4 stages; estimated pipeline bubble: ")


def test_pipelines_of_one_shape_are_equal_whatever_was_computed():
    pipeline = Pipeline("1f1b", 4, 1, 16)
    assert pipeline.bubble(pipeline.best(_costs()), _costs()) > 0
    assert pipeline == Pipeline("1f1b", 4, 1, 16) != Pipeline("1f1b", 4, 1, 17)


def test_one_stage_has_nothing_to_tell():
    config = parse_config([*NETWORK, "--pipeline-model-parallel-size", "1"], world_size=4).config
    assert not list(pipeline_rows(config, model_plan(config.model, 128256), 4, 4))


def test_a_part_takes_as_long_as_the_slower_of_device_and_host():
    costs = replace(alike(4, head=2.0), host=(4.0, 4.0, 4.0, 4.0, 1.0))
    first, last = costs.part_times((2, 2))
    assert first == Durations(2 + 2 / 3, 2 + 4 / 3, 2)  # the host finishes 2 later
    assert last == Durations(4, 4, 4)  # the head hides it
    slow_head = replace(costs, host=(4.0, 4.0, 4.0, 4.0, 7.0))
    assert slow_head.part_times((2, 2)) == [first, Durations(5, 6, 4)]
    assert alike(4, head=2.0).part_times((2, 2)) == [Durations(2, 2, 2), last]
