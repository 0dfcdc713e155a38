"""fp32 runs on a GPU, with fused kernels, equal those on a CPU."""

import pytest

from megatron.device import Device
from megatron.kernels.library import find_library
from megatron.parallel.layout import Layout
from tests.parity.layouts import MUON
from tests.training.test_adapters_of_mixers import ADAPTERS, NETWORKS
from tests.training.toy import CPU, train_toy

DEVICE = Device.pick()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU"),
]
# Without dropout, because each device draws its own masks.
_STILL = "--hidden-size 64 --train-iters 20 --lr 1e-3 --min-lr 1e-4 --attention-dropout 0 "
_STILL += "--hidden-dropout 0 --eval-interval 10"
_LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
_LLAMA += "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"


_CHUNKS = "--no-rope-freq 2 --attention-chunk-size 5 --qk-l2-norm --reset-attention-mask "
_CHUNKS += "--attention-temperature-scale 0.5 --attention-temperature-floor 3"
_EVALUATED = "--eval-iters 1 --eval-interval 2"
_EXPERTS = "--num-experts 8 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 1e-3"
_MIXTURE = f"{_EXPERTS} --moe-ffn-hidden-size 32"


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("gpt", ""),
        ("gpt", _LLAMA),
        ("gpt", "--squared-relu --cross-entropy-fusion-impl linear --reset-attention-mask"),
        ("gpt", "--no-bias-gelu-fusion --apply-layernorm-1p --no-masked-softmax-fusion"),
        ("gpt", f"{_LLAMA} --qk-layernorm {_MIXTURE}"),
        ("gpt", f"--moe-expert-capacity-factor 1 {_MIXTURE}"),
        ("gpt", f"{_LLAMA} --lora-rank 4 --use-dora"),
        ("gpt", f"{_LLAMA} {_MIXTURE} --lora-rank 4"),
        ("gpt", f"{_LLAMA} --lora-rank 4 --frozen-weights-dtype nf4 --ffn-hidden-size 128"),
        ("gpt", f"--moe-ffn-hidden-size 64 {_EXPERTS} --lora-rank 4 --frozen-weights-dtype fp8"),
        ("gpt", f"{NETWORKS['latent']} {ADAPTERS['latent']} {_EVALUATED}"),
        ("gpt", f"{NETWORKS['delta']} {ADAPTERS['delta']} {_EVALUATED}"),
        ("gpt", f"{NETWORKS['mamba']} {ADAPTERS['mamba']} {_EVALUATED}"),
        ("gpt", f"{_LLAMA} {_CHUNKS}"),
        ("gpt", f"{_LLAMA} {MUON}"),
        ("gpt", f"{_LLAMA} {_MIXTURE} {MUON}"),
        ("bert", ""),
        ("t5", ""),
        ("t5", "--position-embedding-type relative --geglu"),
    ],
)
def test_a_run_gives_the_losses_of_a_cpu(kind, flags):
    assert find_library(DEVICE.torch_device).library is not None
    words = [*_STILL.split(), *flags.split()]
    ours, theirs = (train_toy(Layout.single(), words, kind, on)[0] for on in (DEVICE, CPU))
    names = {name for record in theirs.records for name in record if "loss" in name}
    assert {"lm loss", "lm loss validation"} <= names
    for name in sorted(names - {"loss-scale"}):
        assert ours.values(name) == pytest.approx(theirs.values(name), rel=1e-4), name
    assert ours.values("grad-norm") == pytest.approx(theirs.values("grad-norm"), rel=1e-3)
