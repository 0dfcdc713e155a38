"""Do two forms of one model compute the same? Ours against `transformers`, on random tokens.

The other model is built from our own reading of config.json and safetensors, so nothing of the
folder can choose what code runs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.huggingface.files import CONFIG, find_shards
from megatron.checkpoint.huggingface.reader import HFReader
from megatron.checkpoint.huggingface.settings import read_json
from megatron.checkpoint.reader import Reader, restore
from megatron.config.run import RunConfig, known
from megatron.device import Device
from megatron.errors import CheckpointError
from megatron.models.bert import BertModel
from megatron.models.construct import build_model
from megatron.models.gpt import GPTModel
from megatron.models.t5 import T5Model
from megatron.parallel.layout import Layout
from megatron.training.checkpointing import model_state

_NETWORKS: dict[str, type[BertModel] | type[GPTModel] | type[T5Model]] = {
    "bert": BertModel,
    "gpt": GPTModel,
    "t5": T5Model,
}
_TOKENS = (2, 64)  # [b, s], shorter where the model's context is


def verify(reader: Reader, config: RunConfig, folder: Path, *, tolerance: float) -> str:
    """Compare what a checkpoint gives with what those of a Hugging Face folder, in fp32 on the CPU.

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
    inputs = _random_inputs(known(config.model.max_position_embeddings), theirs_reader.vocab)
    ours = our_outputs(reader, config, inputs)
    theirs = their_outputs(theirs_reader, inputs)
    lines = []
    for name, expected in theirs.items():
        found = ours[name][..., : expected.shape[-1]]
        difference, largest = (found - expected).abs().max().item(), expected.abs().max().item()
        lines.append(f"{name} differ by at most {difference:.2e} (largest {largest:.2f}, fp32)")
        if not difference <= tolerance * max(1.0, largest):
            raise CheckpointError(f"--verify: {lines[-1]}: more than {tolerance:g} of it")
    return f"--verify: {'; '.join(lines)}"


@dataclass(frozen=True)
class Inputs:
    """What both models are given.

    Attributes:
        tokens: [b, s].
        types: [b, s], segments, for a BERT.
        padding: bool [b, s], True where there is a token, for a BERT and a T5's encoder.
        decoder_tokens: [b, d], for a T5.
    """

    tokens: Tensor
    types: Tensor
    padding: Tensor
    decoder_tokens: Tensor


def _random_inputs(positions: int, vocab: int) -> Inputs:
    generator, length = torch.Generator().manual_seed(0), min(_TOKENS[1], positions)
    tokens = torch.randint(vocab, (_TOKENS[0], length), generator=generator)
    types = torch.randint(2, tokens.shape, generator=generator)
    padding = torch.ones_like(tokens, dtype=torch.bool)
    padding[-1, length - length // 4 :] = False
    decoder = torch.randint(vocab, (_TOKENS[0], -(-length // 2)), generator=generator)
    return Inputs(tokens, types, padding, decoder)


@torch.no_grad()
def our_outputs(reader: Reader, config: RunConfig, inputs: Inputs) -> dict[str, Tensor]:
    """What a checkpoint's model gives, in fp32: logits, of a T5 both halves' states too; of a BERT
    what `_bert_outputs` has."""
    config = replace(config, precision=replace(config.precision, fp16=False, bf16=False))
    rows = reader.global_shape("model.embedding.word.weight")[0]
    network = _NETWORKS[config.model.architecture]
    model = build_model(network, config, Layout.single(), Device.cpu(), rows).eval()
    held = set(reader.names())
    state = {name: entry for name, entry in model_state([model]).items() if name in held}
    restore(reader, state, prefixes=("model.",), cast=True)
    if isinstance(model, GPTModel):
        return {"logits": model(inputs.tokens)}
    if isinstance(model, T5Model):
        both = (inputs.tokens, inputs.decoder_tokens, inputs.padding)
        encoder, decoder = (states.transpose(0, 1) for states in model.states(*both))
        return {
            "logits": model(*both),
            "encoder states": encoder[inputs.padding],
            "decoder states": decoder,
        }
    assert isinstance(model, BertModel)
    return _bert_outputs(model, held, inputs)


def _bert_outputs(model: BertModel, held: Collection[str], inputs: Inputs) -> dict[str, Tensor]:
    """Logits of tokens and of the order, as far as there are heads; else the pooled vector, and the
    hidden states of what is no padding."""
    found = model(inputs.tokens, inputs.padding, inputs.types)
    heads = {"order": found.order} if "model.binary_head.weight" in held else {}
    if "model.output.bias" in held:
        heads["logits"] = found.tokens[inputs.padding]
    if heads:
        return heads
    model.head = None
    hidden = model(inputs.tokens, inputs.padding, inputs.types)
    assert model.pooler is not None
    states = {"hidden states": hidden.transpose(0, 1)[inputs.padding]}
    return states | ({"pooled": model.pooler(hidden)} if "model.pooler.dense.bias" in held else {})


@torch.no_grad()
def their_outputs(reader: HFReader, inputs: Inputs) -> dict[str, Tensor]:
    """What `transformers` computes from a folder, in fp32."""
    model = their_model(reader).eval()
    if reader.family.name == "t5":
        found = model(
            inputs.tokens,
            attention_mask=inputs.padding,
            decoder_input_ids=inputs.decoder_tokens,
            output_hidden_states=True,
        )
        return {
            "logits": found.logits,
            "encoder states": found.encoder_last_hidden_state[inputs.padding],
            "decoder states": found.decoder_hidden_states[-1],
        }
    if reader.family.name != "bert":
        return {"logits": model(inputs.tokens).logits}
    found = model(inputs.tokens, attention_mask=inputs.padding, token_type_ids=inputs.types)
    match reader.architecture:
        case "BertModel":
            states = {"hidden states": found.last_hidden_state[inputs.padding]}
            return states | ({"pooled": found.pooler_output} if _has_pooler(reader) else {})
        case "BertForMaskedLM":
            return {"logits": found.logits[inputs.padding]}
        case "BertForNextSentencePrediction":
            return {"order": found.logits}
    return {
        "logits": found.prediction_logits[inputs.padding],
        "order": found.seq_relationship_logits,
    }


def _has_pooler(reader: HFReader) -> bool:
    """Of a BERT without heads: files for sentence vectors may lack it."""
    return "model.pooler.dense.weight" in reader.names()


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
    without = reader.architecture == "BertModel" and not _has_pooler(reader)
    pieces = {"add_pooling_layer": False} if without else {}
    model = getattr(transformers, reader.architecture)(config, **pieces).float()
    state = {
        name: tensor
        for file in sorted(set(find_shards(reader.path).values()))
        for name, tensor in load_file(file).items()
        if not reader.family.is_derived(name)
    }
    if reader.bare_names and reader.architecture != "BertModel":
        state = {reader.family.prefix + name: tensor for name, tensor in state.items()}
    own_head = reader.family.head_follows_files and reader.family.tied_head in state
    if own_head:  # it is tied from birth, whatever config.json says
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {reader.family.tied_head, *reader.family.word_copies, "cls.predictions.decoder.bias"}
    if unexpected or set(missing) - tied:
        raise CheckpointError(f"--verify: transformers lacks {missing}, has no place: {unexpected}")
    if not own_head:
        model.tie_weights()
    return model
