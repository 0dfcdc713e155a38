"""`--fine-grained-activation-offloading`: activations in host memory until the backward pass."""

import weakref

import pytest
import torch

from megatron.config.training import OFFLOADED_MODULES
from megatron.device import QueuedCopy
from megatron.parallel import offload
from megatron.parallel.layout import Layout
from megatron.parallel.offload import HostActivations
from tests.distributed import run_sharing_memory, toy_device
from tests.training.toy import fingerprint, train_toy

FLAGS = "--train-iters 2 --eval-iters 0 --swiglu --attention-dropout 0 --hidden-dropout 0".split()
LATENT = (
    "--multi-latent-attention --kv-lora-rank 12 --q-lora-rank 12 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 8 --normalization RMSNorm --qk-layernorm"
).split()
ROTARY = ["--position-embedding-type", "rope"]
MIXTURE = "--num-experts 4 --moe-layer-freq [0,1] --hidden-dropout 0.1".split()
NETWORKS = {
    "dense": [],
    "gated heads": [*ROTARY, "--attention-output-gate", "--qk-layernorm"],
    "latent": [*ROTARY, *LATENT],
    "mixture": MIXTURE,
    "parallel": [*ROTARY, "--parallel-residual"],
    "further tokens": [*ROTARY, "--mtp-num-layers", "1"],
}


def _offloaded(modules, least=1):
    return [
        *("--fine-grained-activation-offloading", "--offload-modules", *modules),
        *("--min-offloaded-tensor-size", str(least)),
    ]


class _LateQueue:
    """A queue on a CPU whose copies happen only when something waits for them.

    Like a GPU's, it does not keep its tensors alive.
    """

    def __init__(self, device):
        self.waiting = []

    def wait_for_device(self):
        pass

    def copy(self, target, source):
        copied = _Late(self)
        self.waiting.append((copied, weakref.ref(target), weakref.ref(source)))
        return copied


class _Late(QueuedCopy):
    def __init__(self, queue):
        super().__init__(None)
        self.queue = queue

    def delay_device(self):
        waiting = self.queue.waiting
        while any(copied is self for copied, _, _ in waiting):
            _, target, source = waiting.pop(0)
            if target() is not None:
                assert source() is not None, "the tensor was freed before it was copied"
                target().copy_(source())


def _train(layout, words):
    recorder, run = train_toy(layout, [*FLAGS, *words])
    stores = [part.layers.host_activations for part in run.parts]
    sent = sum(store.bytes_sent for store in stores if store is not None)
    return recorder.values("lm loss"), recorder.values("grad-norm"), fingerprint(run), sent


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(offload, "CopyStream", _LateQueue)


@pytest.mark.parametrize("network", NETWORKS)
def test_training_is_the_same_to_the_bit(network, late):
    words = NETWORKS[network]
    modules = [
        name
        for name in OFFLOADED_MODULES
        if network == "mixture" or name not in ("expert_fc1", "moe_act")
    ]
    *plain, _ = _train(Layout.single(), words)
    *found, sent = _train(Layout.single(), [*words, *_offloaded(modules)])
    assert found == plain
    assert sent > 0


def test_each_module_sends_its_tensors(late):
    """Elements per token and layer for h = 32 and f = 64, in 2 x 4 micro-batches of 16 tokens.

    Layer 1 has a dense MLP, layer 2 has experts, two of which process each token.
    """
    *plain, _ = _train(Layout.single(), [*MIXTURE, *FLAGS])
    tokens, h, f = 2 * 4 * 16, 32, 64
    expected = {
        "attn_norm": 2 * h,  # the residual stream
        "qkv_linear": 2 * h,
        "core_attn": 2 * 4 * h,
        "attn_proj": 2 * h,
        "mlp_norm": 2 * h,
        "mlp": h + 3 * f + f,  # without a fused kernel: gate, SiLU of the gate, and up
        "expert_fc1": 2 * h,
        "moe_act": 2 * 3 * f,
    }
    if toy_device().is_gpu:
        del expected["mlp"], expected["moe_act"]  # fused kernels keep fewer tensors
    for module, numbers in expected.items():
        words = [*MIXTURE, *FLAGS, *_offloaded([module], least=16 * h)]
        *found, sent = _train(Layout.single(), words)
        assert found == plain, module
        assert sent == 4 * tokens * numbers, (module, sent / (4 * tokens))


def _both(layout, words, more):
    return [_train(layout, [*words, *options])[:-1] for options in ([], more)]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"pipeline": 2}, ["--pipeline-model-parallel-size", "2"]),
        ({"tensor": 2}, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
        ({}, ["--use-distributed-optimizer"]),
    ],
    ids=["pipeline", "tensor", "data"],
)
def test_training_is_the_same_in_layouts(sizes, words):
    more = _offloaded(["attn_norm", "core_attn", "mlp"])
    for plain, found in run_sharing_memory(2, _both, words, more, **sizes):
        assert found == plain


def test_tensors_leave_the_device_and_return_one_module_ahead():
    store = HostActivations(torch.device("cpu"), frozenset({"core_attn"}), 10)
    keeping = store.offloading("core_attn")
    weight = torch.nn.Parameter(torch.randn(8, 8))
    small = torch.randn(3, requires_grad=True)
    x, calls = torch.randn(4, 8, requires_grad=True), []
    store.begin_pass([weight])
    for _ in range(5):
        with keeping():
            x = (x @ weight).tanh() * small.mean()
        calls.append(store._last)
    assert all(call.previous is other for call, other in zip(calls, [None, *calls], strict=False))
    away = [[kept.source is None for kept in call.tensors()] for call in calls]
    assert all(all(one) for one in away[:3]), "the first modules' tensors are in host memory"
    assert not any(any(one) for one in away[3:]), "the latest modules' tensors are on the device"
    held = [kept.host.shape for call in calls for kept in call.tensors()]
    assert {shape.numel() for shape in held} == {32}, "no weights, and nothing small"

    seen = []
    real = store._fetch
    store._fetch = lambda call: (seen.append(calls.index(call)), real(call))[1]
    (gradient,) = torch.autograd.grad(x.sum(), weight)
    order = list(dict.fromkeys(seen))
    assert order == [4, 3, 2, 1, 0], "each module's tensors return while the next one's are used"
    assert not any(call.tensors() for call in calls), "autograd has freed them"
    assert gradient.any()


def test_other_modules_keep_their_tensors_on_the_device():
    store = HostActivations(torch.device("cpu"), frozenset({"mlp"}), 1)
    with store.offloading("core_attn")():
        y = torch.randn(4, requires_grad=True).exp()
    y.sum().backward()
    assert (store.bytes_sent, store._last) == (0, None)
