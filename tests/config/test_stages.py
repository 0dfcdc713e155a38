"""Which layers are on which stage."""

import pytest

from megatron.config.parallel import ParallelConfig
from megatron.config.stages import chunks_of, parts_of_stage, plan_parts
from megatron.errors import ConfigError
from tests.config.command import problems


def _counts(num_layers, stages, **flags):
    parts = plan_parts(num_layers, ParallelConfig(pipeline_model_parallel_size=stages, **flags))
    assert [layer for part in parts for layer in part.layers] == list(range(num_layers))
    assert [part.embedding for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.head for part in parts] == [False] * (len(parts) - 1) + [True]
    return [len(part.layers) for part in parts]


def test_one_stage_holds_all():
    parts = plan_parts(4, ParallelConfig())
    assert len(parts) == 1
    assert (parts[0].layers, parts[0].embedding, parts[0].head) == (range(4), True, True)


def test_even_stages_and_virtual_stages():
    assert _counts(8, 4) == [2, 2, 2, 2]
    assert _counts(8, 2, num_layers_per_virtual_pipeline_stage=2) == [2, 2, 2, 2]
    assert _counts(8, 2, num_virtual_stages_per_pipeline_rank=4) == [1] * 8
    assert chunks_of(8, ParallelConfig(pipeline_model_parallel_size=2,
                                       num_layers_per_virtual_pipeline_stage=1)) == 4  # fmt: skip


def test_a_stage_holds_every_so_many_parts():
    config = ParallelConfig(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1)
    parts = plan_parts(4, config)
    assert [part.layers.start for part in parts_of_stage(parts, 0, 2)] == [0, 2]
    assert [part.layers.start for part in parts_of_stage(parts, 1, 2)] == [1, 3]


def test_uneven_stages():
    assert _counts(10, 4, decoder_first_pipeline_num_layers=2,
                   decoder_last_pipeline_num_layers=2) == [2, 3, 3, 2]  # fmt: skip
    assert _counts(7, 2, decoder_last_pipeline_num_layers=3) == [4, 3]
    ends = {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3}
    assert _counts(4, 2, **ends) == [1, 3]


def test_embedding_and_loss_count_as_layers():
    both = {
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    }
    assert _counts(6, 4, **both) == [1, 2, 2, 1]
    assert _counts(7, 4, account_for_loss_in_pipeline_split=True) == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("text", "layers", "stages", "counts"),
    [
        ("Ett|tt|tt|tL", 7, 4, [2, 2, 2, 1]),
        ("Et*3|(tt|)*2tL", 8, 4, [3, 2, 2, 1]),
        ("E|t*2|t,t|L", 4, 2, [0, 2, 2, 0]),
    ],
)
def test_layout_strings(text, layers, stages, counts):
    assert _counts(layers, stages, pipeline_model_parallel_layout=text) == counts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tt|tL", "begin with E"),
        ("Ett|t", "end with L"),
        ("Ett|tEL", "must appear once"),
        ("Ett|tL", "has 3 layers, not --num-layers 4"),
        ("Et|t|ttL", "3 parts do not divide"),
        ("Et(t|tL", "not closed"),
        ("Et)t|tL", "not opened"),
        ("Exx|L", "cannot read"),
        ("Et*99999|L", "more than"),
        ("*3E|L", "repeats nothing"),
    ],
)
def test_layout_strings_that_do_not_fit(text, message):
    with pytest.raises(ConfigError, match=message):
        _counts(4, 2, pipeline_model_parallel_layout=text)


def test_layers_that_do_not_divide_say_what_to_do():
    with pytest.raises(ConfigError, match=r"--num-layers 7 .*use a multiple of 2"):
        _counts(7, 2)
    with pytest.raises(ConfigError, match="does not divide 6 layers"):
        _counts(6, 2, num_layers_per_virtual_pipeline_stage=2)
    counted = {"account_for_loss_in_pipeline_split": True}
    with pytest.raises(
        ConfigError, match=r"--num-layers 6 with loss = 7 does not divide evenly over"
    ):
        _counts(6, 2, **counted)


@pytest.mark.parametrize(
    ("layers", "stages", "first", "last", "message"),
    [
        (8, 3, 1, None, "--decoder-first-pipeline-num-layers 1 leaves 7 of --num-layers 8 for the "
         "other 2 stages of --pipeline-model-parallel-size 3, which does not divide evenly: "),
        (4, 2, 1, 2, "--decoder-first-pipeline-num-layers 1 and --decoder-last-pipeline-num-layers "
         "2 leaves 1 of --num-layers 4 for the other 0 stages of "),
        (4, 1, 4, None, "--decoder-first-pipeline-num-layers 4: one stage holds all layers: give "),
        (4, 1, 2, 2, "one stage holds all layers: "),
        (4, 3, 1, 3, "-num-layers 3: stage 1 (counted from 0) of --pipeline-model-parallel-size "),
    ],
)  # fmt: skip
def test_given_ends_that_do_not_fit(layers, stages, first, last, message):
    ends = {"decoder_first_pipeline_num_layers": first, "decoder_last_pipeline_num_layers": last}
    with pytest.raises(ConfigError) as caught:
        _counts(layers, stages, **ends)
    assert message in str(caught.value)


def test_a_stage_of_nothing_is_refused_but_a_part_is_not():
    """In `Et||t|tL`, the second stage has one part without layers and one with a layer."""
    with pytest.raises(ConfigError, match=r"layout E\|\|tttL: stage 1 \(counted from"):
        _counts(3, 3, pipeline_model_parallel_layout="E||tttL")
    with pytest.raises(ConfigError, match=r"stage 1 \(counted from 0\) .* would have no"):
        _counts(3, 3, pipeline_model_parallel_layout="E||t|tt||L")
    assert _counts(3, 2, pipeline_model_parallel_layout="Et||t|tL") == [1, 0, 1, 1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_layers_per_virtual_pipeline_stage": 1, "num_virtual_stages_per_pipeline_rank": 2},
         "--num-layers-per-virtual-pipeline-stage 1 and --num-virtual-stages-per-pipeline-rank 2 "
         "both set the number of virtual stages: use one of them"),
        ({"decoder_first_pipeline_num_layers": 1, "account_for_loss_in_pipeline_split": True},
         "--decoder-first-pipeline-num-layers 1 and counting embedding or loss as a layer both "
         "distribute layers: use one of them"),
        ({"pipeline_model_parallel_layout": "Ett|ttL", "decoder_last_pipeline_num_layers": 2},
         "--pipeline-model-parallel-layout Ett|ttL cannot be combined with "
         "--decoder-last-pipeline-num-layers 2, because both distribute layers: use one of them"),
        ({"pipeline_model_parallel_layout": "Ett|ttL",
          "account_for_embedding_in_pipeline_split": True},
         "--pipeline-model-parallel-layout Ett|ttL cannot be combined with "
         "--account-for-embedding-in-pipeline-split, because both distribute layers: use one of "
         "them"),
    ],
)  # fmt: skip
def test_two_answers(flags, message):
    with pytest.raises(ConfigError) as caught:
        _counts(4, 2, **flags)
    assert caught.value.problems == [message]


def test_a_first_stage_of_the_embedding_alone():
    assert _counts(6, 4, decoder_first_pipeline_num_layers=0) == [0, 2, 2, 2]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--num-layers-per-virtual-pipeline-stage 0", "must be at least 1"),
        ("--num-virtual-stages-per-pipeline-rank -1", "must be at least 1"),
        ("--decoder-first-pipeline-num-layers -1", "must be at least 0"),
        ("--decoder-last-pipeline-num-layers -1", "must be at least 0"),
    ],
)
def test_impossible_numbers(words, line):
    both = f"--pipeline-model-parallel-size 2 {words}"
    assert problems(both, world_size=2) == [f"{words}: {line}"]
