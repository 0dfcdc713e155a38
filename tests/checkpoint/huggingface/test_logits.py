"""A loaded folder computes the same logits as the reference models, in every layout."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.entries import model_state
from megatron.checkpoint.huggingface.reader import HFReader
from megatron.checkpoint.reader import PaddedReader, restore
from megatron.config.resolve import resolve
from megatron.config.run import ModelRun, narrow
from megatron.config.stages import parts_of_stage, plan_parts
from megatron.config.yaml_file import from_dict
from megatron.device import Device
from megatron.models.build import build_model, run_context
from megatron.models.gpt import GPTModel
from megatron.parallel.layout import Layout
from tests.checkpoint.huggingface.models import (
    CASES,
    LAYERS,
    POSITIONS,
    logits,
    tensors_of,
    write_folder,
)
from tests.distributed import run_distributed

TOKENS = torch.randint(70, (2, POSITIONS), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def _logits(layout: Layout, folder: Path) -> torch.Tensor | None:
    """Return this rank's part of the logits of `TOKENS`, from its part of the folder's tensors."""
    reader = HFReader(folder)
    config = narrow(resolve(from_dict(reader.meta["config"], str(folder)), 1), ModelRun)
    parallel = replace(config.parallel, pipeline_model_parallel_size=layout.pipeline.size)
    (part,) = parts_of_stage(
        plan_parts(LAYERS, parallel), layout.pipeline.rank, layout.pipeline.size
    )
    rows = -(-reader.vocab // layout.tensor.size) * layout.tensor.size
    model = build_model(
        GPTModel, config, run_context(config, layout, Device.cpu()), rows, part
    ).eval()
    restore(PaddedReader(reader, rows=rows, entries=reader.vocab), model_state([model]))
    hidden = None
    if not part.embedding:
        hidden = torch.empty(POSITIONS, len(TOKENS), config.model.hidden_size)
        dist.recv(hidden, src=0)
    out = model(TOKENS, hidden=hidden)
    if part.head:
        return out
    dist.send(out, dst=1)
    return None


def _all_logits(layout: Layout, folders: list[Path]) -> list[torch.Tensor | None]:
    return [_logits(layout, folder) for folder in folders]


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"pipeline": 2}, {"expert": 2}], ids=str)
def test_logits_are_the_models_in_every_layout(sizes: dict[str, int], tmp_path: Path) -> None:
    folders = [
        write_folder(tmp_path / name, case.config, tensors_of(case), shards=3)
        for name, case in CASES.items()
    ]
    by_rank = [_all_logits(Layout.single(), folders)]
    if sizes:
        by_rank = run_distributed(2, _all_logits, folders, **sizes)
    for (name, case), parts in zip(CASES.items(), zip(*by_rank, strict=True), strict=True):
        found = torch.cat([part for part in parts if part is not None], dim=-1)
        expected = logits(case, tensors_of(case), TOKENS).float()
        assert expected.std() > 0.3, name
        found = found[..., : case.config["vocab_size"]]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, msg=name)


def test_the_same_model_of_gpt2_without_the_prefix(tmp_path: Path) -> None:
    """The first GPT-2 files have names without a prefix, masks in every layer, and a copy of the
    tied word embeddings as head."""
    case = CASES["gpt2"]
    tensors = tensors_of(case)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 4, 4) for layer in range(LAYERS)}
    head = {"lm_head.weight": tensors["transformer.wte.weight"].clone()}
    folder = write_folder(tmp_path, case.config, {**bare, **masks, **head})
    torch.testing.assert_close(
        _logits(Layout.single(), folder),
        logits(case, tensors, TOKENS).float(),
        rtol=0,
        atol=1e-5,
    )
