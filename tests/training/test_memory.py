"""The memory estimate: exact where it is arithmetic, and growing with what costs memory."""

from megatron.config.parser import parse_config
from megatron.training.memory import estimate_memory
from tests.training.toy import TOY


def _estimate(*flags):
    config = parse_config([*TOY, "--train-iters", "1", *flags], world_size=1).config
    return estimate_memory(config, 1000, 104)


def test_bytes_of_what_is_kept_for_each_parameter():
    fp32, bf16, sgd = _estimate(), _estimate("--bf16"), _estimate("--optimizer", "sgd")
    assert (fp32.parameters, fp32.gradients, fp32.optimizer) == (4000, 4000, 8000)
    assert (bf16.parameters, bf16.gradients, bf16.optimizer) == (2000, 4000, 12000)
    assert sgd.optimizer == 4000
    assert _estimate("--fp16").gradients == 2000


def test_shared_states_shrink_with_the_processes():
    def sharded(*flags):
        config = parse_config([*TOY, "--train-iters", "1", "--bf16", *flags], world_size=4).config
        return estimate_memory(config, 1000, 104, replicas=4)

    first, second = sharded("--use-distributed-optimizer"), sharded("--zero-stage", "2")
    assert (first.parameters, first.gradients, first.optimizer) == (2000, 4000, 3000)
    assert (second.parameters, second.gradients, second.optimizer) == (2000, 1000, 3000)
    assert sharded() == _estimate("--bf16")


def test_recomputation_and_plain_attention_move_the_activations():
    full = ("--recompute-granularity", "full", "--recompute-method", "uniform",
            "--recompute-num-layers", "1")  # fmt: skip
    plain = _estimate("--no-masked-softmax-fusion").activations
    assert _estimate(*full).activations < _estimate().activations < plain
    selective = ("--no-masked-softmax-fusion", "--recompute-granularity", "selective")
    assert _estimate(*selective).activations < plain
    assert _estimate("--micro-batch-size", "2").activations == 2 * _estimate().activations


def test_units_are_readable():
    assert "MiB" in _estimate().describe()
