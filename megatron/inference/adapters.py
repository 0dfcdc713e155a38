"""Adapters of one served model (LoRA): opened and checked before the model, loaded after it.

A folder is that of PEFT's files (`--saver peft`, `save_pretrained`) or of a run with --lora-rank,
whose checkpoints hold the base model too, so that it can be compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.checkpoint.compatibility import network_differences
from megatron.checkpoint.entries import Box, model_state
from megatron.checkpoint.huggingface.families import family_for
from megatron.checkpoint.huggingface.files import ADAPTER_CONFIG
from megatron.checkpoint.huggingface.peft import PeftReader, names_in, network_with, peft_names
from megatron.checkpoint.loading import open_root
from megatron.checkpoint.merged import network_in
from megatron.checkpoint.reader import NativeReader, Reader, restore
from megatron.config.adapters import ADAPTER_FIELDS, is_of_adapter
from megatron.config.generation import named_adapters
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.device import Device
from megatron.errors import CheckpointError, ConfigError
from megatron.inference.load import Loaded, open_existing, serving_context
from megatron.models.adapters import adapted_layers, linear_layers, plan_of
from megatron.parallel.adapter import Adapter, projections_of
from megatron.parallel.adapter_stack import AdapterRows, AdapterStack, StackedFactors
from megatron.parallel.layers import Linear

_SHOWN_ROWS = 8  # rows of the embedding by which two base models are compared
# Values of two base models may have been rounded to different formats of 16 bits.
_ROUNDING = 2**-7
_REMEDY = "serve the model that it was trained on with --load, or leave the adapter out"


class AdapterFiles(NamedTuple):
    """The files of an adapter, which fit the base model.

    Attributes:
        model: The base model's network with adapters of this one's sizes.
        reader: Reader of its tensors, which have our names.
        targets: The adapted projections of each linear layer that has any, by its name.
    """

    model: ModelConfig
    reader: Reader
    targets: Mapping[str, Sequence[str]]


class OpenedAdapter(NamedTuple):
    """An adapter whose files fit the base model.

    Attributes:
        flag: The flag and its value, for messages.
        name: The name by which requests choose it.
        files: Its files.
    """

    flag: str
    name: str
    files: AdapterFiles


def open_adapters(words: Sequence[str] | None, config: RunConfig) -> list[OpenedAdapter]:
    """Open adapters, and check that they are of the model that `config` loads.

    Args:
        words: Values of --serve-adapter, each NAME=FOLDER.
        config: The run, with the base model's network and its folder.

    Raises:
        CheckpointError: A folder holds no adapter, or one that is damaged, not supported, or of
            another model.
        ConfigError: Tensor ranks divide the base model's query groups.
    """
    named = named_adapters(words)
    if not named:
        return []
    options = config.checkpoint
    assert options.load is not None
    trust = options.allow_foreign_checkpoints
    if config.model.architecture != "gpt":
        raise CheckpointError(
            f"--serve-adapter: {options.load} holds a {config.model.architecture}, but adapters "
            "are those of a GPT: drop the flag"
        )
    groups, tensor = config.model.num_query_groups, config.parallel.tensor_model_parallel_size
    if config.model.group_query_attention and groups and groups < tensor:
        raise ConfigError(
            f"--serve-adapter: --tensor-model-parallel-size {tensor} divides the {groups} query "
            f"groups: use at most {groups}, or merge the adapter with --saver hf"
        )
    base = open_existing(options.load, step=options.ckpt_step, verify=False, allow_foreign=trust)
    opened = []
    for name, folder in named.items():
        flag = f"--serve-adapter {name}={folder}"
        try:
            files = _open_folder(Path(folder), config, base, allow_foreign=trust)
        except CheckpointError as error:
            raise CheckpointError(f"{flag}: {error}") from None
        opened.append(OpenedAdapter(flag, name, files))
    return opened


def add_to(loaded: Loaded, opened: Sequence[OpenedAdapter], device: Device) -> Loaded:
    """Return the model with adapters, of which each request chooses one or none. Collective.

    Args:
        loaded: The base model, whose layers are changed.
        opened: The adapters. Without any, the model stays as it is.
        device: The model's device.

    Raises:
        CheckpointError: An adapter is damaged.
    """
    if not opened:
        return loaded
    context = serving_context(loaded.config, loaded.layout, device)
    rows = AdapterRows(tuple(one.name for one in opened))
    parts: dict[str, list[StackedFactors]] = defaultdict(list)
    layers = {
        name: layer for name, layer in linear_layers(loaded.model) if isinstance(layer, Linear)
    }
    for index, one in enumerate(opened, 1):
        own = {name: layers[name] for name in one.files.targets if name in layers}
        for name, linear in own.items():
            plan = replace(plan_of(one.files.model), dropout=0.0)
            linear.adapter = Adapter(linear, one.files.targets[name], plan, context, name)
        state = model_state([loaded.model])
        entries = {name: entry for name, entry in state.items() if is_of_adapter(name)}
        restore(one.files.reader, entries, cast=True)
        for name, linear in own.items():
            assert isinstance(linear.adapter, Adapter)
            part = StackedFactors.of(index, linear.adapter, linear.weight)
            parts[name].append(part)
            linear.adapter = None
            # In a batch, zero times infinity would reach the other requests.
            if not (part.a.isfinite().all() and part.b.isfinite().all()):
                raise CheckpointError(
                    f"{one.flag}: the adapter of {name} has values that are not finite: export it "
                    "again, or train it with a lower --lr"
                )
    for name, found in parts.items():
        products = context.kernels.new_products()
        layers[name].adapter = AdapterStack(layers[name], found, rows, products, loaded.layout)
    return replace(loaded, adapters=rows)


def _open_folder(
    folder: Path, config: RunConfig, base: Reader, *, allow_foreign: bool
) -> AdapterFiles:
    if not folder.is_dir():
        raise CheckpointError("there is no such folder")
    if (folder / ADAPTER_CONFIG).is_file():
        return _open_peft(folder, config.model, base, allow_foreign=allow_foreign)
    reader = open_root(folder, verify=False, allow_foreign=allow_foreign)
    if reader is None:
        raise CheckpointError(
            f"the folder holds no adapter: give one with {ADAPTER_CONFIG}, or the --save folder of "
            "a run with --lora-rank"
        )
    if reader.meta["config"].get("model", {}).get("lora_rank") is None:
        raise CheckpointError(
            "the folder holds a whole model without adapters: serve it by itself with --load"
        )
    if isinstance(reader, NativeReader):
        reader.verify(only=is_of_adapter)  # the rest of it is as large as the base model
    sizes = network_in(reader)
    model = replace(config.model, **{name: getattr(sizes, name) for name in ADAPTER_FIELDS})
    differing = network_differences(model, reader)
    if differing:
        raise CheckpointError(
            f"the adapter is for another network ({next(iter(differing.values()))}): {_REMEDY}"
        )
    layers = adapted_layers(model, reader.meta["padded_vocab_size"])
    targets = {
        layer: tuple(linear.adapter)
        for layer, linear in layers.items()
        if isinstance(linear.adapter, Adapter)
    }
    _check_places(reader, targets)
    _compare(reader, base)
    return AdapterFiles(model, reader, targets)


def _open_peft(
    folder: Path, network: ModelConfig, base: Reader, *, allow_foreign: bool
) -> AdapterFiles:
    rows = base.meta["padded_vocab_size"]
    model = network_with(folder, network, allow_foreign=allow_foreign)
    # Those of experts cannot be chosen per request.
    every = adapted_layers(model, rows).items()
    layers = {name: layer for name, layer in every if isinstance(layer, Linear)}
    try:
        known = peft_names(model, layers, family_for(network, rows, None))
    except CheckpointError as error:
        raise CheckpointError(
            f"PEFT's files name other modules than this network has ({str(error).splitlines()[0]}):"
            " give the checkpoints of a run with --lora-rank"
        ) from None
    names = names_in(folder, known, allow_foreign=allow_foreign)
    reader = PeftReader(folder, model, names, remedy=_REMEDY, allow_foreign=allow_foreign)
    targets = {
        layer: [one for one in projections_of(linear) if f"model.{layer}.adapter.{one}.a" in names]
        for layer, linear in layers.items()
    }
    targets = {layer: found for layer, found in targets.items() if found}
    if not targets:
        raise CheckpointError(f"{folder} holds no tensors: export the adapter again")
    return AdapterFiles(model, reader, targets)


def _check_places(reader: Reader, targets: Mapping[str, Sequence[str]]) -> None:
    """Refuse a checkpoint with adapters of what is not a linear layer."""
    known = tuple(f"model.{layer}.adapter." for layer in targets)
    for name in reader.names():
        if name.startswith("model.") and is_of_adapter(name) and not name.startswith(known):
            raise CheckpointError(
                f"{name} cannot be chosen per request: merge the adapter into a model of its own "
                "with --saver hf, and serve that"
            )


def _compare(reader: Reader, base: Reader) -> None:
    """Refuse an adapter whose run had frozen other weights than the base model's.

    Norms, biases and some rows of the embedding are compared.
    """
    for name in reader.names():
        if not name.startswith("model.") or is_of_adapter(name) or name not in base.held:
            continue
        shape = tuple(map(min, reader.global_shape(name), base.global_shape(name)))
        if len(shape) == 2 and "embedding" in name:
            shape = (min(_SHOWN_ROWS, shape[0]), shape[1])
        elif len(shape) != 1:
            continue
        box = Box.whole(shape)
        theirs, ours = reader.read(name, box).float(), base.read(name, box).float()
        if not torch.allclose(theirs, ours, rtol=_ROUNDING, atol=1e-6):
            raise CheckpointError(
                f"the adapter was trained on another model ({name.removeprefix('model.')} differs "
                f"from {base.path}): {_REMEDY}"
            )
