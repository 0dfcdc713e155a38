"""Each layout rule, on small tensors whose rows are easy to read."""

import pytest
import torch

from megatron.checkpoint.entries import Box, LazyTensor, flatten, model_state
from megatron.checkpoint.huggingface.families import families
from megatron.checkpoint.huggingface.mamba import by_group
from megatron.checkpoint.huggingface.rules import (
    SAME,
    STACKED,
    TRANSPOSED,
    ParameterRule,
    TensorConversion,
    grouped,
    parameter_shapes,
)
from megatron.checkpoint.huggingface.settings import Settings
from megatron.config.model import ModelConfig
from megatron.models.bert import BertModel
from megatron.models.gpt import GPTModel
from megatron.models.plans import model_plan
from megatron.models.t5 import T5Model
from megatron.parallel.build import BuildContext
from megatron.parallel.layout import Layout
from tests.checkpoint.huggingface.models import CASES
from tests.config.command import parse


def test_queries_keys_and_values_are_ordered_by_group() -> None:
    q = torch.tensor([[1], [2], [3], [4], [5], [6], [7], [8]])  # 4 heads of 2 rows
    k, v = torch.tensor([[10], [11], [12], [13]]), torch.tensor([[20], [21], [22], [23]])
    rows = grouped(2, (2, 1, 1)).join([q, k, v]).flatten().tolist()
    assert rows == [1, 2, 3, 4, 10, 11, 20, 21, 5, 6, 7, 8, 12, 13, 22, 23]


def test_the_fused_matrix_of_gpt2_is_ordered_by_head() -> None:
    columns = torch.tensor([[1, 2, 3, 4, 10, 20, 30, 40, 100, 200, 300, 400]])  # 2 heads of 2
    rows = grouped(2, (1, 1, 1), is_fused=True).join([columns]).flatten().tolist()
    assert rows == [1, 2, 10, 20, 100, 200, 3, 4, 30, 40, 300, 400]


def test_rows_of_projections_are_ordered_by_group() -> None:
    """Two groups, with two rows of the first projection and one of the second each."""
    rows = torch.tensor([[1], [2], [3], [4], [10], [20]])
    conversion = by_group(2, (4, 2))
    joined = conversion.join([rows])
    assert joined.flatten().tolist() == [1, 2, 10, 3, 4, 20]
    (back,) = conversion.split(joined)
    assert torch.equal(back, rows)


@pytest.mark.parametrize(
    ("form", "shapes"),
    [
        (SAME, [(3, 4)]),
        (TRANSPOSED, [(3, 4)]),
        (STACKED, [(5, 4), (5, 4)]),
        (grouped(2, (3, 1, 1)), [(18, 4), (6, 4), (6, 4)]),
        (grouped(6, (1, 1, 1)), [(18,), (18,), (18,)]),
        (grouped(3, (1, 1, 1), is_fused=True), [(4, 27)]),
        (grouped(3, (1, 1, 1), is_fused=True), [(27,)]),
        (grouped(3, (1, 1)), [(9, 4), (9, 4)]),
        (TRANSPOSED, [(3,)]),
    ],
)
def test_split_undoes_join(form, shapes) -> None:
    parts = [torch.randn(shape) for shape in shapes]
    back = form.split(form.join(parts))
    assert len(back) == len(parts)
    assert all(torch.equal(one, other) for one, other in zip(back, parts, strict=True))


def test_a_box_of_experts_is_read_from_the_tensors_of_those_experts() -> None:
    whole = torch.arange(48.0).view(4, 6, 2)  # 4 experts, each stored as halves of 3 rows
    halved = TensorConversion(lambda parts: torch.cat(tuple(parts)), lambda x: list(x.chunk(2)))
    names = tuple(f"{expert}.{half}" for expert in range(4) for half in "ab")
    rule = ParameterRule("experts", (4, 6, 2), names, halved, experts=4)
    tensors = dict(zip(names, whole.view(8, 3, 2), strict=True))
    assert rule.shapes() == [(3, 2)] * 8
    for box in (Box((0, 0, 0), (4, 6, 2)), Box((1, 3, 1), (2, 2, 1)), Box((0, 5, 0), (4, 1, 2))):
        read: list[str] = []

        def load(name: str, read: list[str] = read) -> torch.Tensor:
            read.append(name)
            return tensors[name]

        found = rule.join(load, box, torch.float32)
        slices = box.slices_in(Box.whole((4, 6, 2)))
        assert torch.equal(found, whole[slices])
        assert {int(name[0]) for name in read} == {*range(box.offset[0], box.end[0])}
    for index, name in enumerate(names):
        one = rule.split(lambda box: whole[box.slices_in(Box.whole((4, 6, 2)))], index)
        assert torch.equal(one, tensors[name])


@pytest.mark.parametrize("name", CASES)
def test_rules_take_every_tensor_once(name: str) -> None:
    config = CASES[name].config
    family = families()[config["model_type"]]
    described = family.read(Settings(config, "config.json"))
    rules = family.rules(described.model, described.vocab)
    theirs = [one for rule in rules for one in rule.hf_names]
    assert len(theirs) == len(set(theirs))
    assert len({rule.name for rule in rules}) == len(rules)


def test_a_lazy_tensor_reads_when_it_is_used_and_keeps_nothing() -> None:
    reads = []

    def read() -> torch.Tensor:
        reads.append(1)
        return torch.arange(6.0).view(2, 3)

    tensor = LazyTensor((2, 3), torch.float32, read)
    assert (tensor.shape, tensor.dtype, tensor.numel(), tensor.element_size()) == (
        (2, 3),
        torch.float32,
        6,
        4,
    )
    assert not reads
    values = tensor.detach().to("cpu").contiguous()
    assert type(values) is torch.Tensor
    assert torch.equal(values, read())
    assert torch.equal(tensor + 1, read() + 1)
    assert len(reads) == 4


def _built(model: ModelConfig, vocab: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters and saved buffers of a network without memory."""
    network = {"bert": BertModel, "t5": T5Model}.get(model.architecture, GPTModel)
    context = BuildContext(Layout.single(), device=torch.device("meta"))
    built = network(model_plan(model, vocab), context)
    return {
        name.removeprefix("model."): tuple(entry.global_shape)
        for name, entry in flatten(model_state([built]))
    }


@pytest.mark.parametrize("name", CASES)
def test_shapes_are_those_of_the_network(name: str) -> None:
    config = CASES[name].config
    described = families()[config["model_type"]].read(Settings(config, "config.json"))
    shapes = parameter_shapes(model_plan(described.model, described.vocab))
    assert shapes == _built(described.model, described.vocab)


@pytest.mark.parametrize(
    ("architecture", "flags"),
    [
        ("gpt", "--mtp-num-layers 2 --position-embedding-type rope"),
        ("gpt", "--mtp-num-layers 1 --position-embedding-type none --normalization RMSNorm"),
        ("gpt", "--untie-embeddings-and-output-weights --swiglu --add-qkv-bias"),
        ("gpt", "--num-experts 4 --moe-shared-expert-intermediate-size 8 --moe-router-topk 2"),
        ("bert", ""),
        ("t5", "--decoder-seq-length 16 --decoder-num-layers 2"),
    ],
)
def test_shapes_are_those_of_networks_that_hugging_face_lacks(
    architecture: str, flags: str
) -> None:
    model = parse(flags, architecture=architecture).config.model
    assert parameter_shapes(model_plan(model, 128)) == _built(model, 128)
