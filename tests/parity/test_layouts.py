"""Every layout trains as one process does: losses and gradient norms from the same seed."""

import pytest

from megatron.parallel.layout import Layout
from tests.distributed import run_distributed
from tests.training.toy import train_toy

FLAGS = """
    --hidden-dropout 0 --attention-dropout 0 --num-layers 4 --global-batch-size 8
    --eval-interval 100 --eval-iters 0
""".split()

# processes, axes, further flags. Between them every size, every schedule and every sharding
# stands alone once and in company.
LAYOUTS = [
    (2, "", ""),
    (4, "", "--zero-stage 1"),
    (4, "", "--zero-stage 1 --overlap-grad-reduce --overlap-param-gather"),
    (2, "", "--zero-stage 2"),
    (2, "tensor=2", ""),
    (2, "tensor=2", "--sequence-parallel"),
    (2, "tensor=2", "--qk-layernorm --disable-bias-linear --add-qkv-bias"),
    (4, "tensor=4", "--sequence-parallel"),
    (4, "tensor=2", "--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce"),
    (4, "tensor=2", "--zero-stage 2"),
    (2, "pipeline=2", ""),
    (2, "pipeline=2", "--num-layers-per-virtual-pipeline-stage 1"),
    (2, "pipeline=2", "--pipeline-schedule gpipe"),
    (2, "pipeline=2", "--pipeline-schedule zero-bubble"),
    (2, "pipeline=2", "--pipeline-model-parallel-layout Et|tttL"),
    (2, "pipeline=2", "--untie-embeddings-and-output-weights"),
    (4, "pipeline=4", ""),
    (4, "pipeline=4", "--pipeline-schedule zero-bubble"),
    (4, "pipeline=2", ""),
    (4, "pipeline=2", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    (4, "pipeline=2", "--num-layers-per-virtual-pipeline-stage 1 --overlap-grad-reduce"),
    (4, "pipeline=2", "--pipeline-schedule zero-bubble --overlap-grad-reduce"),
    (2, "context=2", ""),
    (2, "context=2", "--cp-comm-type a2a"),
    (4, "context=2", "--use-distributed-optimizer"),
    (4, "context=4", ""),
    (4, "tensor=2 context=2", "--sequence-parallel"),
    (4, "context=2 pipeline=2", ""),
    (4, "tensor=2 pipeline=2", ""),
    (4, "tensor=2 pipeline=2", "--sequence-parallel"),
    (4, "tensor=2 pipeline=2", "--sequence-parallel --pipeline-schedule zero-bubble"),
    (8, "tensor=2 pipeline=2", "--sequence-parallel --use-distributed-optimizer"),
    (8, "tensor=2 context=2 pipeline=2", "--sequence-parallel"),
    (8, "tensor=2 pipeline=4", "--sequence-parallel"),
]
NETWORKS = ("--untie", "--qk-layernorm")  # flags of the network, which one process has too


def _train(layout, flags):
    recorder, _ = train_toy(layout, flags)
    return recorder.values("lm loss"), recorder.values("grad-norm")


def _flags(sizes, more):
    names = {
        "tensor": "--tensor-model-parallel-size",
        "pipeline": "--pipeline-model-parallel-size",
        "context": "--context-parallel-size",
    }
    flags = [*FLAGS, *more.split()]
    for axis, size in sizes.items():
        flags += [names[axis], str(size)]
    return flags


@pytest.mark.parametrize(("world", "axes", "more"), LAYOUTS)
def test_losses_and_norms_equal_the_single_process(world, axes, more):
    sizes = {name: int(size) for name, size in (axis.split("=") for axis in axes.split())}
    single = more if any(name in more for name in NETWORKS) else ""
    losses, norms = _train(Layout.single(), _flags({}, single))
    for rank_losses, rank_norms in run_distributed(world, _train, _flags(sizes, more), **sizes):
        assert rank_losses == pytest.approx(losses, rel=1e-5)
        assert rank_norms == pytest.approx(norms, rel=1e-4)
