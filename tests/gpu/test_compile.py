"""torch.compile of a block with kernels on, and torch.export of a model, on a GPU."""

import pytest
import torch

from megatron.config.precision import PrecisionConfig
from megatron.device import Device
from megatron.kernels.library import find_library
from megatron.models.gpt import GPTModel
from megatron.models.norm import Stream
from megatron.parallel.parameter import initialize
from tests.kernels.test_operators import cases, operators
from tests.models.small import LLAMA, VOCAB, config, new_context, plan

DEVICE = Device.pick()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICE.is_gpu, reason="needs a GPU"),
]
S, B, H = 256, 2, 512
SIZES = {"hidden_size": H, "kv_channels": 64, "num_attention_heads": 8, "ffn_hidden_size": 1024}
SIZES |= {"num_layers": 1, "max_position_embeddings": S}
STILL = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def new_model(flags):
    assert find_library(DEVICE.torch_device).library is not None
    network, numbers = config(**{**flags, **SIZES}), PrecisionConfig(bf16=True)
    context = new_context(network, numbers, device=DEVICE.torch_device, dtype=torch.bfloat16)
    model = GPTModel(plan(network), context)
    initialize(model.named_parameters(), seed=1)
    return model


@pytest.mark.parametrize("flags", [LLAMA, STILL, {}], ids=["llama", "gpt", "dropout"])
def test_a_block_compiles_whole_and_gives_the_same_loss(flags):
    model = new_model(flags)
    block = model.layers["0"]
    generator = torch.Generator().manual_seed(1)
    x, wanted = torch.randn(2, S, B, H, generator=generator).to(DEVICE.torch_device)
    rotation = next(iter(model.rotation(torch.arange(S, device=x.device))), None)
    seen = []

    def note(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return torch._inductor.compile(graph, inputs)

    def run(block):
        leaf = x.bfloat16().requires_grad_()
        DEVICE.seed(1)
        out = block(Stream(leaf), None, rotation).join()
        loss = (out.float() - wanted).square().mean()
        loss.backward()
        grads = {name: p.grad.float() for name, p in model.layers.named_parameters()}
        model.zero_grad()
        return loss.item(), {"x": leaf.grad.float(), **grads}

    loss, grads = run(block)
    torch.compiler.reset()
    ours, our_grads = run(torch.compile(block, fullgraph=True))
    # The compiler draws different random numbers, so dropout would use different masks.
    assert ours == pytest.approx(loss, rel=1e-3 if flags else 2e-2)
    if flags:
        for name, theirs in grads.items():
            assert (our_grads[name] - theirs).norm() <= 2e-2 * theirs.norm(), name
    torch.compiler.reset()
    torch.compile(block, fullgraph=True, backend=note)(Stream(x.bfloat16()), None, rotation)
    assert {"megatron.add_norm_forward.default", "megatron.activation_forward.default"} <= set(seen)


@pytest.mark.parametrize("flags", [LLAMA, STILL], ids=["llama", "gpt"])
def test_a_model_is_exported(flags):
    model = new_model(flags).eval()
    tokens = torch.arange(2 * S, device=DEVICE.torch_device).view(2, S) % VOCAB
    exported = torch.export.export(model, (tokens,))
    assert any("megatron" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(tokens), model(tokens), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", sorted(operators()))
def test_fake_versions_and_gradients(name):
    library = find_library(DEVICE.torch_device).library
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for case, arguments in cases():
        if case == name:
            there = [
                x.detach().to(DEVICE.torch_device).requires_grad_(x.requires_grad)
                if isinstance(x, torch.Tensor)
                else x
                for x in arguments
            ]
            operator = operators()[name].overload
            torch.library.opcheck(operator, (library.path, *there), test_utils=checks)
