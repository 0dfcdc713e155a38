"""Small networks, each as a checkpoint of ours and as a folder in Megatron Core's format."""

import pytest

from megatron.checkpoint.loading import open_checkpoint
from tests.checkpoint.core.core_files import to_core
from tests.distributed import run_distributed
from tests.training.toy import train_toy

SAVE = "--save-interval 2 --exit-interval 2 --eval-iters 0 --num-layers 4".split()
_LLAMA = """
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2
    --qk-layernorm
""".split()
_MIXTURE = """
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 12 --moe-layer-freq 1
    --moe-shared-expert-intermediate-size 8 --moe-shared-expert-gate
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias
""".split()
NETWORKS = {
    "GPT-2": [],
    "Llama": _LLAMA,
    "another gate": [*_LLAMA[1:], "--quick-geglu"],
    "gated attention": [*_LLAMA, "--attention-output-gate"],
    "mixture": [*_LLAMA, *_MIXTURE],
    "mixture with biases": _MIXTURE,
    "mixture with biases of routers": [*_MIXTURE, "--moe-router-bias"],
    "mixture in every second layer": [*_LLAMA, *_MIXTURE, "--moe-layer-freq", "2"],
    "bf16": [*_LLAMA, *_MIXTURE, "--bf16"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a network's checkpoint folder and the folder that Megatron Core would have written."""
    made = {}

    def make(network):
        if network not in made:
            root = tmp_path_factory.mktemp("core")
            words = [*SAVE, *NETWORKS[network], "--save", str(root / "native")]
            run_distributed(1, _train, words)
            reader = open_checkpoint(root / "native")
            for form in ("stacked", "by layer"):
                to_core(reader, root / form, stacked=form == "stacked")
            made[network] = root
        return made[network]

    return make


@pytest.fixture(scope="module")
def natives(request, tmp_path_factory):
    """Return a function that returns the native checkpoint of one of a module's `NETWORKS`."""
    made = {}

    def make(network):
        if network not in made:
            made[network] = tmp_path_factory.mktemp("native")
            words = [*SAVE, *request.module.NETWORKS[network], "--save", str(made[network])]
            run_distributed(1, _train, words)
        return made[network]

    return make


def _train(layout, words):
    train_toy(layout, words)
