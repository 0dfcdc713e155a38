"""Check that a checkpoint and a Hugging Face folder contain the same model.

    python tools/checkpoint/verify.py checkpoints/llama2-7b Llama-2-7b-hf

The checkpoint runs in our model and the folder in `transformers`, on the same random tokens, in
fp32 on the CPU, and the outputs are compared. `util.py --verify` does the same for the result of a
conversion before renaming it to its final name. The `transformers` model is built from our own
reading of config.json and safetensors, so nothing in the folder can choose which code runs. The
exit code is 0 if the outputs agree, or if nothing was compared because `transformers` is not
installed. It is 4 if the outputs differ, or if either model cannot be read.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.command import run_command
from megatron.config.arguments import ToolParser
from megatron.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.checkpoint.huggingface.reader import HFReader
    from megatron.checkpoint.reader import Reader
    from megatron.config.run import ModelRun
    from megatron.models.bert import BertModel

TOLERANCE = 1e-5
TOLERANCE_HELP = f"Largest difference, as a fraction of the largest logit. Default: {TOLERANCE:g}."
_RENAMED = ("backbone.", "embed_out.")  # tensors that transformers 5 renames during loading
_MIN_TIME_STEP = 1e-30
_TOKENS = (2, 64)  # [b, s]; shorter if the model's context is shorter


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the two models named on the command line and return the exit code."""
    parser = ToolParser("verify.py", __doc__)
    parser.add_argument("checkpoint", type=Path, help="Folder of checkpoints of any format.")
    parser.add_argument("folder", type=Path, help="Hugging Face folder of the same model.")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help=TOLERANCE_HELP)
    parser.add_trust()
    options = parser.read(argv)

    def work() -> None:
        check_tolerance("--tolerance", options.tolerance)
        from megatron.checkpoint.loading import open_any
        from megatron.tools.checkpoint import formats

        trust = options.allow_foreign_checkpoints
        source_format = open_any(options.checkpoint, verify=False, allow_foreign=trust).format
        loader = formats.LOADER_OF.get(source_format, source_format)
        load = argparse.Namespace(
            load_dir=options.checkpoint,
            loader=loader,
            saver="hf",
            hf_files=None,
            allow_foreign_checkpoints=trust,
            load_averaged_weights=False,
        )
        source = formats.LOADERS[loader](load)
        line = verify(
            source.reader,
            source.config,
            options.folder,
            tolerance=options.tolerance,
            allow_foreign=trust,
        )
        print(line.removeprefix("--verify: "))

    return run_command(work)


def check_tolerance(flag: str, tolerance: float) -> None:
    """Raise `ConfigError` unless the tolerance is 0 or more."""
    if not tolerance >= 0:  # also refuses NaN
        raise ConfigError(f"{flag} {tolerance:g}: give 0 or more, such as {TOLERANCE:g}")


def verify(
    reader: Reader,
    config: ModelRun,
    folder: Path,
    *,
    tolerance: float,
    allow_foreign: bool = False,
) -> str:
    """Compare the outputs of a checkpoint and a Hugging Face folder in fp32 on the CPU.

    Args:
        reader: The opened checkpoint.
        config: The configuration of the checkpoint's run.
        folder: The folder of the same model.
        tolerance: The largest difference allowed, as a fraction of the larger of 1 and the largest
            magnitude in the output.
        allow_foreign: Whether to accept files in the folder that other users own.

    Returns:
        A message for the user: the difference, or why nothing was compared.

    Raises:
        CheckpointError: The outputs differ, or the folder cannot be read.
    """
    if find_spec("transformers") is None:
        return "--verify: NOT CHECKED: transformers is not installed (pip install transformers)"
    from megatron.checkpoint.loading import open_hf

    hf_reader = open_hf(folder, allow_foreign=allow_foreign)
    inputs = random_inputs(config.model.max_position_embeddings, hf_reader.vocab)
    actual = megatron_outputs(reader, config, inputs)
    expected = transformers_outputs(hf_reader, inputs)
    lines = []
    for name, expected_output in expected.items():
        output = actual[name][..., : expected_output.shape[-1]]
        difference, largest = (
            (output - expected_output).abs().max().item(),
            expected_output.abs().max().item(),
        )
        lines.append(f"{name} differ by at most {difference:.2e} (largest {largest:.2f}, fp32)")
        if not difference <= tolerance * max(1.0, largest):
            raise CheckpointError(f"--verify: {lines[-1]}: more than {tolerance:g} of the largest")
    return f"--verify: {'; '.join(lines)}"


@dataclass(frozen=True)
class Inputs:
    """The inputs of both models.

    Attributes:
        tokens: Token ids [b, s].
        types: Segment ids [b, s] for a BERT.
        padding: The padding mask [b, s] of a BERT or T5 encoder, True at tokens, False at padding.
        decoder_tokens: Token ids [b, d] for the decoder of a T5.
    """

    tokens: Tensor
    types: Tensor
    padding: Tensor
    decoder_tokens: Tensor


def random_inputs(positions: int, vocab: int) -> Inputs:
    """Return reproducible random inputs for a model with this context length and vocabulary."""
    import torch

    generator, length = torch.Generator().manual_seed(0), min(_TOKENS[1], positions)
    tokens = torch.randint(vocab, (_TOKENS[0], length), generator=generator)
    types = torch.randint(2, tokens.shape, generator=generator)
    padding = torch.ones_like(tokens, dtype=torch.bool)
    padding[-1, length - length // 4 :] = False
    decoder = torch.randint(vocab, (_TOKENS[0], -(-length // 2)), generator=generator)
    return Inputs(tokens, types, padding, decoder)


def megatron_outputs(reader: Reader, config: ModelRun, inputs: Inputs) -> dict[str, Tensor]:
    """Return the outputs of a checkpoint's model in fp32, by name.

    These are the logits [b, s, v] or, for a reward model, the rewards [b, 1]. A T5 also has encoder
    and decoder states. A BERT has the outputs of its heads or, without heads, its hidden states.
    """
    import torch

    from megatron.checkpoint.entries import model_state
    from megatron.checkpoint.reader import restore
    from megatron.device import Device
    from megatron.models.bert import BertModel
    from megatron.models.build import build_model, run_context
    from megatron.models.gpt import GPTModel
    from megatron.models.t5 import T5Model
    from megatron.parallel.layout import Layout

    networks: dict[str, type[BertModel] | type[GPTModel] | type[T5Model]] = {
        "bert": BertModel,
        "gpt": GPTModel,
        "t5": T5Model,
    }
    config = replace(config, precision=replace(config.precision, fp16=False, bf16=False))
    rows = reader.global_shape("model.embedding.word.weight")[0]
    network = networks[config.model.architecture]
    model = build_model(
        network, config, run_context(config, Layout.single(), Device.cpu()), rows
    ).eval()
    names = set(reader.names())
    state = {name: entry for name, entry in model_state([model]).items() if name in names}
    restore(reader, state, prefixes=("model.",), cast=True)
    with torch.no_grad():
        if isinstance(model, BertModel):
            return _bert_outputs(model, names, inputs)
        if isinstance(model, GPTModel):
            scores = model(inputs.tokens)
            return {"rewards": scores[:, -1:]} if model.score is not None else {"logits": scores}
        assert isinstance(model, T5Model)
        t5_inputs = (inputs.tokens, inputs.decoder_tokens, inputs.padding)
        encoder, decoder = (states.transpose(0, 1) for states in model.states(*t5_inputs))
        return {
            "logits": model(*t5_inputs),
            "encoder states": encoder[inputs.padding],
            "decoder states": decoder,
        }


def _bert_outputs(model: BertModel, names: Collection[str], inputs: Inputs) -> dict[str, Tensor]:
    """Return the logits for tokens and sentence order from the heads in the checkpoint.

    Without heads, return the hidden states of unpadded tokens, and the pooled vector if any.
    """
    output = model(inputs.tokens, inputs.padding, inputs.types)
    heads = {"order": output.order} if "model.binary_head.weight" in names else {}
    if "model.output.bias" in names:
        heads["logits"] = output.tokens[inputs.padding]
    if heads:
        return heads
    model.head = None
    hidden = model(inputs.tokens, inputs.padding, inputs.types)
    assert model.pooler is not None
    states = {"hidden states": hidden.transpose(0, 1)[inputs.padding]}
    return states | ({"pooled": model.pooler(hidden)} if "model.pooler.dense.bias" in names else {})


def transformers_outputs(reader: HFReader, inputs: Inputs) -> dict[str, Tensor]:
    """Return the outputs of a folder's model in `transformers`, named as in `megatron_outputs`."""
    import torch

    model, padding = transformers_model(reader).eval(), inputs.padding
    with torch.no_grad():
        if reader.architecture == "T5ForConditionalGeneration":
            output = model(
                inputs.tokens,
                attention_mask=padding,
                decoder_input_ids=inputs.decoder_tokens,
                output_hidden_states=True,
            )
            return {
                "logits": output.logits,
                "encoder states": output.encoder_last_hidden_state[padding],
                "decoder states": output.decoder_hidden_states[-1],
            }
        if not reader.architecture.startswith("Bert"):
            is_reward = reader.architecture.endswith("ForSequenceClassification")
            if is_reward:
                model.config.pad_token_id = -1  # nothing is padding: the last token has the reward
            return {"rewards" if is_reward else "logits": model(inputs.tokens).logits}
        output = model(inputs.tokens, attention_mask=padding, token_type_ids=inputs.types)
    match reader.architecture:
        case "BertModel":
            states = {"hidden states": output.last_hidden_state[padding]}
            return states | ({"pooled": output.pooler_output} if _has_pooler(reader) else {})
        case "BertForMaskedLM":
            return {"logits": output.logits[padding]}
        case "BertForNextSentencePrediction":
            return {"order": output.logits}
    return {"logits": output.prediction_logits[padding], "order": output.seq_relationship_logits}


def _has_pooler(reader: HFReader) -> bool:
    """Return whether a BERT without heads has a pooler. Sentence encoders may lack one."""
    return "model.pooler.dense.weight" in reader.names()


def transformers_model(reader: HFReader) -> Any:
    """Build the folder's model in `transformers`, with the class from our table of families.

    Raises:
        CheckpointError: The tensors are not exactly those that `transformers` expects.
    """
    import torch
    import transformers

    from megatron.checkpoint.huggingface.files import CONFIG, find_shards
    from megatron.checkpoint.huggingface.settings import read_json
    from megatron.checkpoint.mapped import MappedFile

    trust = reader.allow_foreign
    values = read_json(reader.path / CONFIG, allow_foreign=trust)
    kind, values = values.pop("model_type"), {**values, "dtype": "float32"}
    values.pop("torch_dtype", None)
    # Our reader accepts only the default, which versions of `transformers` write differently.
    values.pop("time_step_limit", None)
    if kind == "nemotron_h":
        # transformers clamps time steps to at least this value in prefill. Its decode steps do not,
        # and neither does Megatron Core, which trained these models.
        values["time_step_min"] = _MIN_TIME_STEP
    config = transformers.AutoConfig.for_model(kind, **values)
    config._attn_implementation = config._experts_implementation = "eager"  # allows odd sizes
    if kind == "falcon":  # the eager attention of transformers 5 adds ALiBi's biases twice
        config._attn_implementation = "sdpa"
    lacks_pooler = reader.architecture == "BertModel" and not _has_pooler(reader)
    extra = {"add_pooling_layer": False} if lacks_pooler else {}
    model = getattr(transformers, reader.architecture)(config, **extra).float()
    family = reader.family
    files = sorted(set(find_shards(reader.path, allow_foreign=trust).values()))
    state = {
        name: file.tensor(location)
        for file in (MappedFile(path, allow_foreign=trust) for path in files)
        for name, location in file.header().items()
        if not re.fullmatch(family.derived, name)
    }
    if values.get("num_nextn_predict_layers"):
        # These layers predict further tokens. transformers lacks them, and ignores their tensors
        # only if they follow 61 others, as in the published models.
        layers = values["num_hidden_layers"]
        state = {name: tensor for name, tensor in state.items() if _layer(name) < layers}
    if reader.bare_names and reader.architecture != "BertModel":
        state = {family.prefix + name: tensor for name, tensor in state.items()}
    # transformers 5 also fuses experts during loading.
    if any(".experts." in name or name.startswith(_RENAMED) for name in state):
        transformers.utils.logging.disable_progress_bar()
        model, loading = getattr(transformers, reader.architecture).from_pretrained(
            None, config=config, state_dict=state, output_loading_info=True
        )
        if any(loading.values()):
            raise CheckpointError(f"--verify: transformers cannot load the tensors: {loading}")
        return model.float()
    has_own_head = family.head_follows_files and family.tied_head in state
    if has_own_head:  # `transformers` first ties the head, regardless of config.json
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {family.tied_head, *family.embedding_copies, "cls.predictions.decoder.bias"}
    if unexpected or set(missing) - tied:
        raise CheckpointError(
            f"--verify: transformers lacks {missing} and does not recognize {unexpected}"
        )
    if not has_own_head:
        model.tie_weights()
    return model


def _layer(name: str) -> int:
    """Return the number of the layer that has a tensor, or -1 for tensors outside of layers."""
    found = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
    return int(found[1]) if found else -1
