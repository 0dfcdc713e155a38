"""The kinds of `make demo`: their flags fit together."""

import pytest

from megatron.config.parser import parse_config
from megatron.models.arithmetic import flops_per_token
from megatron.models.plans import model_plan
from megatron.tools.demo_kinds import KINDS, VOCAB_SIZE


def _config(name):
    kind = KINDS[name]
    rest = "--micro-batch-size 4 --train-iters 1 --mock-data --tokenizer-type NullTokenizer"
    words = [*kind.training_flags, *rest.split(), "--vocab-size", str(VOCAB_SIZE)]
    architecture = kind.script.removeprefix("pretrain_").removesuffix(".py")
    return parse_config(words, world_size=2, architecture=architecture).config


@pytest.mark.parametrize("name", KINDS)
def test_the_flags_of_a_kind_fit_together(name):
    assert _config(name).model.hidden_size == 128
    assert KINDS[name].choice == ("" if name == "gpt" else f" MODEL={name}")


def test_the_mixture_computes_as_much_for_a_token_as_the_gpt():
    dense, mixture = (
        flops_per_token(model_plan(config.model, VOCAB_SIZE), config.data.seq_length)
        for config in (_config("gpt"), _config("moe"))
    )
    assert dense < mixture < 1.01 * dense  # the routers
