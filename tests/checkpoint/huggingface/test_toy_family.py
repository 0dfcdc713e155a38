"""A family defined outside the package is imported and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.entries import Box
from megatron.checkpoint.huggingface import families
from megatron.checkpoint.huggingface.reader import HFReader
from megatron.checkpoint.loading import open_checkpoint
from megatron.errors import CheckpointError
from tests.checkpoint.huggingface.models import write_folder
from tests.checkpoint.huggingface.toy_family import Toy
from tests.tools.test_checkpoint_util import assert_same, convert, tensors_in

CONFIG = {
    "architectures": ["ToyForCausalLM"],
    "model_type": "toy",
    "width": 8,
    "inner": 12,
    "blocks": 2,
    "heads": 4,
    "groups": 2,
    "head_width": 3,
    "context": 16,
    "vocab_size": 11,
    "torch_dtype": "float32",
}
BLOCK = {
    "before.weight": (8,),
    "before.bias": (8,),
    "see.ask.weight": (12, 8),
    "see.ask.bias": (12,),
    "see.find.weight": (6, 8),
    "see.find.bias": (6,),
    "see.tell.weight": (6, 8),
    "see.tell.bias": (6,),
    "see.out.weight": (8, 12),
    "between.weight": (8,),
    "between.bias": (8,),
    "think.up.weight": (12, 8),
    "think.down.weight": (8, 12),
}
OUTSIDE = {
    "hear.weight": (11, 8),
    "where.weight": (16, 8),
    "after.weight": (8,),
    "after.bias": (8,),
    "say.weight": (11, 8),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(families, "FAMILIES", [*families.FAMILIES, Toy()])  # the table line
    shapes = OUTSIDE | {f"block.{i}.{name}": shape for i in (0, 1) for name, shape in BLOCK.items()}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return write_folder(tmp_path / "toy", CONFIG, tensors)


def test_it_comes_in_and_goes_out_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    native, exported = tmp_path / "native", tmp_path / "exported"
    assert convert("hf", "native", folder, native) == 0
    reader, theirs = open_checkpoint(native), tensors_in(folder)
    assert reader is not None

    def ours(name: str) -> torch.Tensor:
        shape = reader.global_shape(name)
        return reader.read(name, Box.whole(shape), global_shape=shape)

    assert torch.equal(ours("model.layers.1.mlp.up.weight"), theirs["block.1.think.up.weight"])
    queries = ours("model.layers.0.attention.qkv.bias").view(2, 12)[:, :6].flatten()
    assert torch.equal(queries, theirs["block.0.see.ask.bias"])
    assert convert("native", "hf", native, exported) == 0
    assert_same(tensors_in(exported), theirs)
    assert json.loads((exported / "config.json").read_text()) == CONFIG


def test_what_it_does_not_say_is_refused(folder: Path, tmp_path: Path) -> None:
    wrong = {**CONFIG, "inner": 13}
    (folder / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(CheckpointError, match=r"block\.0\.think\.up\.weight is .* says \[13, 8\]"):
        HFReader(folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "gate": 2}))
    with pytest.raises(CheckpointError, match="gate: not supported"):
        HFReader(folder)


def test_without_its_line_it_is_not_known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "FAMILIES", families.FAMILIES[:-1])
    with pytest.raises(CheckpointError, match="model_type 'toy' is not supported"):
        HFReader(folder)
