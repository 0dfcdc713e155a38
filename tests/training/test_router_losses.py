"""The losses of expert routers, layer by layer, in the metrics files."""

import pytest

from megatron.parallel.layout import Layout
from tests.distributed import run_sharing_memory
from tests.training.toy import train_toy

WORDS = (
    "--num-layers 4 --num-experts 4 --moe-layer-freq [1]+[0]+[1]*2 --train-iters 2 "
    "--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --global-batch-size 4 "
    "--micro-batch-size 2 --hidden-dropout 0 --attention-dropout 0"
).split()
NAMES, LAYERS = ("z_loss", "load_balancing_loss"), (0, 2, 3)


def _records(layout, words):
    recorder, _ = train_toy(layout, words)
    return recorder.records


def _of_layers(record):
    return {name: value for name, value in record.items() if name.startswith("moe/")}


def test_each_layer_has_its_losses_and_the_log_has_their_means():
    records = _records(Layout.single(), [*WORDS, "--moe-per-layer-logging"])
    assert len(records) >= 2
    for record in records:
        tags = {f"moe/{name}_layer_{layer}" for name in NAMES for layer in LAYERS}
        assert {*_of_layers(record)} == tags
        for name in NAMES:
            each = [record[f"moe/{name}_layer_{layer}"] for layer in LAYERS]
            assert record[name] == pytest.approx(sum(each) / 3)
            assert len(set(each)) == 3


def test_without_the_flag_only_the_means_are_written():
    assert not any(_of_layers(record) for record in _records(Layout.single(), WORDS))


def test_pipeline_stages_and_data_ranks_add_their_parts():
    words = [*WORDS, "--moe-per-layer-logging", "--pipeline-model-parallel-size", "2"]
    one = _records(Layout.single(), words[:-2])
    for records in run_sharing_memory(4, _records, words, pipeline=2):
        for ours, theirs in zip(records, one, strict=False):
            assert _of_layers(ours) == pytest.approx(_of_layers(theirs), rel=1e-4)
