"""GPT split over tensor ranks: the same start, loss and gradients as on one process."""

import pytest
import torch

from megatron.config.precision import PrecisionConfig
from megatron.models.gpt import GPTModel
from megatron.parallel.layout import Layout
from megatron.parallel.parameter import spec_of
from tests.distributed import run_distributed
from tests.models.small import LLAMA, VOCAB, batch, config, gpt, loss_and_gradients

NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
NETWORKS = {
    "gpt2": NO_DROPOUT,
    "llama": LLAMA,
    "plain": {**NO_DROPOUT, "masked_softmax_fusion": False, "swiglu": True},
}


def take_part(full, parameter):
    spec = spec_of(parameter)
    box = zip(spec.offset, parameter.shape, strict=True)
    return full[tuple(slice(start, start + size) for start, size in box)]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("size", [2, 4])
def test_parts_start_as_slices_of_the_whole(network, size):
    flags = {**NETWORKS[network]}
    if "num_query_groups" in flags:
        flags["num_query_groups"] = 4
    whole = dict(gpt(flags).named_parameters())
    seen = dict.fromkeys(whole, 0)
    for rank in range(size):
        part = gpt(flags, layout=Layout.at(rank, size, tensor=size))
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, take_part(whole[name], parameter)), name
            seen[name] += parameter.numel()
    for name, parameter in whole.items():
        copies = size if spec_of(parameter).split_dim is None else 1
        assert seen[name] == copies * parameter.numel(), name


def _train_split(layout, flags):
    model = gpt(flags, layout=layout)
    loss, grads = loss_and_gradients(model)
    with torch.no_grad():
        logits = model(batch()[0])
    return loss, logits, grads


@pytest.mark.parametrize("network", NETWORKS)
def test_tensor_parallel_equals_one_process(network):
    flags = NETWORKS[network]
    whole = gpt(flags)
    loss, grads = loss_and_gradients(whole)
    logits = whole(batch()[0]).detach()
    results = run_distributed(2, _train_split, flags, tensor=2)
    torch.testing.assert_close(torch.cat([r[1] for r in results], -1), logits, rtol=0, atol=1e-5)
    for rank, (part_loss, _, part_grads) in enumerate(results):
        torch.testing.assert_close(part_loss, loss, rtol=1e-5, atol=0)
        shapes = GPTModel(
            config(**flags),
            PrecisionConfig(),
            Layout.at(rank, 2, tensor=2),
            padded_vocab_size=VOCAB,
            device=torch.device("meta"),
        )
        for name, parameter in shapes.named_parameters():
            expected = take_part(grads[name], parameter)
            torch.testing.assert_close(part_grads[name], expected, rtol=1e-5, atol=1e-6, msg=name)
