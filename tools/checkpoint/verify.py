"""Do two forms of one model compute the same? Ours against `transformers`, on random tokens.

The other model is built from our own reading of config.json and safetensors, so nothing of the
folder can choose what code runs.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.hf.files import CONFIG, find_shards
from megatron.checkpoint.hf.reader import HFReader
from megatron.checkpoint.hf.settings import read_json
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.restore import restore
from megatron.config.run import RunConfig, known
from megatron.device import Device
from megatron.errors import CheckpointError
from megatron.models.gpt import GPTModel
from megatron.parallel.layout import Layout
from megatron.training.checkpointing import model_state

_TOKENS = (2, 64)  # [b, s], shorter where the model's context is


def verify(reader: Reader, config: RunConfig, folder: Path, *, tolerance: float) -> str:
    """Compare logits of a checkpoint with those of a Hugging Face folder, in fp32 on the CPU.

    Args:
        reader: the checkpoint.
        config: its run.
        folder: of the same model.
        tolerance: largest difference, as a share of the largest logit (of 1 where that is less).

    Returns:
        A line for the user: the difference, or why nothing was compared.

    Raises:
        CheckpointError: the logits differ.
    """
    if find_spec("transformers") is None:
        return "--verify: NOT CHECKED: transformers is not installed (pip install transformers)"
    theirs_reader = HFReader(folder)
    length = min(_TOKENS[1], known(config.model.max_position_embeddings))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(theirs_reader.vocab, (_TOKENS[0], length), generator=generator)
    ours = our_logits(reader, config, tokens)[..., : theirs_reader.vocab]
    theirs = their_logits(theirs_reader, tokens)
    difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    text = f"logits differ by at most {difference:.2e} (largest logit {largest:.2f}, fp32)"
    if not difference <= tolerance * max(1.0, largest):
        raise CheckpointError(f"--verify: {text}: more than {tolerance:g} of it")
    return f"--verify: {text}"


@torch.no_grad()
def our_logits(reader: Reader, config: RunConfig, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [b, s, rows] of a checkpoint for tokens [b, s], in fp32."""
    config = replace(config, precision=replace(config.precision, fp16=False, bf16=False))
    rows = reader.global_shape("model.embedding.word.weight")[0]
    model = GPTModel.from_config(config, Layout.single(), Device.cpu(), rows).eval()
    restore(reader, model_state([model]), prefixes=("model.",), cast=True)
    logits: torch.Tensor = model(tokens)
    return logits


@torch.no_grad()
def their_logits(reader: HFReader, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [b, s, vocabulary] that `transformers` computes from a folder, in fp32."""
    model = their_model(reader).eval()
    logits: torch.Tensor = model(tokens).logits
    return logits


def their_model(reader: HFReader) -> Any:
    """The folder's model, of the class that our table of families names.

    Raises:
        CheckpointError: `transformers` has no place for a tensor, or misses one.
    """
    import transformers
    from safetensors.torch import load_file

    values = read_json(reader.path / CONFIG)
    kind, values = values.pop("model_type"), {**values, "dtype": "float32"}
    values.pop("torch_dtype", None)
    config = transformers.AutoConfig.for_model(kind, **values)
    config._attn_implementation = "eager"
    model = getattr(transformers, reader.family.architecture)(config).float()
    state = {
        name: tensor
        for file in sorted(set(find_shards(reader.path).values()))
        for name, tensor in load_file(file).items()
        if not reader.family.is_derived(name)
    }
    if reader.bare_names:
        state = {reader.family.prefix + name: tensor for name, tensor in state.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise CheckpointError(f"--verify: transformers lacks {missing}, has no place: {unexpected}")
    model.tie_weights()
    return model
