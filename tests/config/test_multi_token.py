"""Flags of multi-token prediction."""

import pytest

from megatron.config.parser import parse_config
from megatron.errors import ConfigError

_BASE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 2 --lr 1e-3 --train-iters 2 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 100 --position-embedding-type rope"
)


def _problems(flags: str, world_size: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"{_BASE} {flags}".split(), world_size=world_size)
    return list(caught.value.problems)


def test_each_loss_is_weighed_by_its_share_of_the_factor():
    model = parse_config(
        f"{_BASE} --mtp-num-layers 4 --mtp-loss-scaling-factor 0.2".split(), world_size=1
    ).config.model
    assert model.mtp_loss_weight == 0.05
    assert parse_config(_BASE.split(), world_size=1).config.model.mtp_num_layers is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mtp-loss-scaling-factor 0.3", "requires --mtp-num-layers"),
        ("--mtp-num-layers 0", "--mtp-num-layers 0"),
        ("--mtp-num-layers 1 --position-embedding-type learned_absolute", "are rope or none"),
        ("--mtp-num-layers 1 --teacher-load x", "cannot be combined with distillation"),
        ("--mtp-num-layers 1 --ckpt-format legacy --save x", "target of --ckpt-format legacy"),
        ("--mtp-num-layers 1 --mtp-use-repeated-layer", "its own layer"),
        ("--mtp-num-layers 1 --mtp-standalone", "on the last pipeline stage"),
        ("--mtp-num-layers 1 --mtp-hybrid-override-pattern M", "like the model's last layer"),
        ("--mtp-num-layers 1 --mtp-detach-heads", "train the whole network"),
        ("--mtp-num-layers 1 --freeze-base-for-mtp", "use --freeze"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(flags, message):
    assert any(message in line for line in _problems(flags)), _problems(flags)


def test_layout_strings_may_name_the_layers():
    words = f"{_BASE} --mtp-num-layers 2 --pipeline-model-parallel-size 2 "
    for layout in ("Ettt|tL", "Ettt|tmmL", "Ettt|t(m)*2L"):
        parallel = parse_config(
            [*words.split(), "--pipeline-model-parallel-layout", layout], world_size=2
        )
        assert parallel.config.parallel.pipeline_model_parallel_layout == layout
    layout = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout"
    (line,) = _problems(f"--mtp-num-layers 2 {layout} Ettt|tmL", 2)
    assert "names 1 layer of multi-token prediction (m), and --mtp-num-layers is 2" in line
    (line,) = _problems(f"{layout} Ettt|tmL", 2)
    assert "--mtp-num-layers is not given" in line
    assert any(
        "in the last part" in x for x in _problems(f"--mtp-num-layers 1 {layout} Etm|tttL", 2)
    )
