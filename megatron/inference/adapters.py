"""LoRA adapters for a served model, opened and checked before the model is loaded, then added.

An adapter's folder contains PEFT's files (`--saver peft`, `save_pretrained`) or the checkpoints of
a run with --lora-rank. Such checkpoints also contain the base model, which is compared with the
served one.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.checkpoint.compatibility import network_differences
from megatron.checkpoint.entries import Box, model_state
from megatron.checkpoint.huggingface.files import ADAPTER_CONFIG
from megatron.checkpoint.huggingface.peft import family_in, peft_names
from megatron.checkpoint.huggingface.peft_reader import (
    PeftReader,
    names_in,
    network_with,
    tensor_names,
)
from megatron.checkpoint.loading import open_root
from megatron.checkpoint.merged import network_in
from megatron.checkpoint.reader import NativeReader, PaddedReader, Reader, restore
from megatron.config.adapters import ADAPTER_FIELDS, is_adapter_parameter
from megatron.config.generation import named_adapters
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.device import Device
from megatron.errors import CheckpointError, ConfigError
from megatron.inference.load import Loaded, open_existing, serving_context
from megatron.kernels.grouped import choose_grouped_product
from megatron.models.adapters import (
    OUTPUT_LAYER,
    AdapterTarget,
    adapted_layers,
    is_target,
    linear_layers,
    plan_of,
)
from megatron.models.head import Output
from megatron.parallel.adapter import WHOLE, Adapter, projections_of
from megatron.parallel.adapter_stack import (
    AdapterRows,
    AdapterStack,
    ExpertAdapterStack,
    LayerAdapter,
)
from megatron.parallel.expert_linear import ExpertAdapter, ExpertLinear

_COMPARED_ROWS = 8  # embedding rows to compare between two base models
# The two base models may have been rounded to different 16-bit formats.
_ROUNDING = 2**-7
_REMEDY = "serve the model that it was trained on with --load, or drop the adapter"


class AdapterFiles(NamedTuple):
    """The files of an adapter that fits the base model.

    Attributes:
        model: The network of the base model with this adapter.
        reader: Reader of the adapter's tensors under our names.
        targets: The adapted projections of each adapted linear layer, by the layer's name.
    """

    model: ModelConfig
    reader: Reader
    targets: Mapping[str, Sequence[str]]


class OpenedAdapter(NamedTuple):
    """An opened adapter that fits the base model.

    Attributes:
        flag: The flag and its value, for messages.
        name: The name of the adapter in requests.
        files: The adapter's files.
    """

    flag: str
    name: str
    files: AdapterFiles


def open_adapters(values: Sequence[str] | None, config: RunConfig) -> list[OpenedAdapter]:
    """Open adapters, and check that they belong to the model that `config` loads.

    Args:
        values: Values of --serve-adapter, each NAME=FOLDER.
        config: The run, with the base model's network and its folder.

    Raises:
        CheckpointError: The base model is not a GPT, or cannot be opened; or a folder has no
            adapter, or the adapter is damaged, not supported, or trained on a different model.
        ConfigError: There are more tensor ranks than query groups in the base model.
    """
    folders = named_adapters(values)
    if not folders:
        return []
    options = config.checkpoint
    assert options.load is not None
    trust = options.allow_foreign_checkpoints
    if config.model.architecture != "gpt":
        raise CheckpointError(
            f"--serve-adapter: {options.load} contains a {config.model.architecture} model, but "
            "only GPT models can have adapters: drop the flag"
        )
    groups, tensor = config.model.num_query_groups, config.parallel.tensor_model_parallel_size
    if config.model.group_query_attention and groups and groups < tensor:
        raise ConfigError(
            f"--serve-adapter: --tensor-model-parallel-size {tensor} is more than the {groups} "
            f"query groups, which would be split: use at most {groups}, or merge the adapter with "
            "--saver hf"
        )
    base = open_existing(options.load, step=options.ckpt_step, verify=False, allow_foreign=trust)
    opened = []
    for name, folder in folders.items():
        flag = f"--serve-adapter {name}={folder}"
        try:
            files = _open_folder(Path(folder), config, base, allow_foreign=trust)
        except CheckpointError as error:
            raise CheckpointError(f"{flag}: {error}") from None
        opened.append(OpenedAdapter(flag, name, files))
    return opened


def add_to(loaded: Loaded, opened: Sequence[OpenedAdapter], device: Device) -> Loaded:
    """Add adapters to a model, and return it. Collective.

    Each request selects one of the adapters, or none.

    Args:
        loaded: The base model. Its layers are changed.
        opened: The adapters. If there are none, the model is not changed.
        device: The model's device.

    Raises:
        CheckpointError: An adapter is damaged, or has values that are not finite.
    """
    if not opened:
        return loaded
    context = serving_context(loaded.config, loaded.layout, device)
    rows = AdapterRows(tuple(adapter.name for adapter in opened))
    factors: dict[str, list[LayerAdapter]] = defaultdict(list)
    layers = dict(linear_layers(loaded.model))
    for index, adapter in enumerate(opened, 1):
        adapted = {name: layers[name] for name in adapter.files.targets if name in layers}
        plan = replace(plan_of(adapter.files.model), dropout=0.0)
        for name, linear in adapted.items():
            if isinstance(linear, ExpertLinear):
                linear.adapter = ExpertAdapter(linear, plan, context)
            else:
                linear.adapter = Adapter(linear, adapter.files.targets[name], plan, context, name)
        state = model_state([loaded.model])
        entries = {name: entry for name, entry in state.items() if is_adapter_parameter(name)}
        # Adapters of the output layer may have been padded differently.
        count, size = loaded.model.plan.embedding.vocabulary, loaded.tokenizer.vocab_size
        restore(PaddedReader(adapter.files.reader, rows=count, entries=size), entries, cast=True)
        for name, linear in adapted.items():
            assert isinstance(linear.adapter, Adapter | ExpertAdapter)
            stacked = LayerAdapter.of(index, linear.adapter, linear.weight)
            factors[name].append(stacked)
            linear.adapter = None
            # In a batch, zero times infinity would affect other requests.
            if not (stacked.a.isfinite().all() and stacked.b.isfinite().all()):
                raise CheckpointError(
                    f"{adapter.flag}: the adapter of {name} has values that are not finite: export "
                    "it again, or train it with a lower --lr"
                )
    for name, layer_factors in factors.items():
        linear = layers[name]
        if isinstance(linear, ExpertLinear):
            product = choose_grouped_product(
                context.device, context.compute_dtype, context.kernels.library
            )
            linear.adapter = ExpertAdapterStack(layer_factors, rows, product)
        else:
            products, is_output = context.kernels.new_products(), isinstance(linear, Output)
            linear.adapter = AdapterStack(
                linear, layer_factors, rows, products, loaded.layout, of_outputs=is_output
            )
    return replace(loaded, adapters=rows)


def _open_folder(
    folder: Path, config: RunConfig, base: Reader, *, allow_foreign: bool
) -> AdapterFiles:
    if not os.path.isdir(folder):
        raise CheckpointError("there is no such folder")
    if os.path.isfile(folder / ADAPTER_CONFIG):
        return _open_peft(folder, config.model, base, allow_foreign=allow_foreign)
    reader = open_root(folder, verify=False, allow_foreign=allow_foreign)
    if reader is None:
        raise CheckpointError(
            f"the folder has no adapter: give a folder with {ADAPTER_CONFIG}, or the --save folder "
            "of a run with --lora-rank"
        )
    if reader.meta["config"].get("model", {}).get("lora_rank") is None:
        raise CheckpointError("the folder has a whole model without adapters: serve it with --load")
    if isinstance(reader, NativeReader):
        # The other tensors are as large as the base model.
        reader.verify(only=is_adapter_parameter)
    sizes = network_in(reader)
    model = replace(config.model, **{name: getattr(sizes, name) for name in ADAPTER_FIELDS})
    differing = network_differences(model, reader)
    if differing:
        raise CheckpointError(
            f"the adapter is for a different network ({next(iter(differing.values()))}): {_REMEDY}"
        )
    layers = adapted_layers(model, reader.meta["padded_vocab_size"])
    targets = {
        layer: tuple(linear.adapter)
        for layer, linear in layers.items()
        if isinstance(linear.adapter, Adapter | ExpertAdapter)
    }
    _check_targets(reader, targets)
    _compare(reader, base)
    return AdapterFiles(model, reader, targets)


def _open_peft(
    folder: Path, network: ModelConfig, base: Reader, *, allow_foreign: bool
) -> AdapterFiles:
    rows = base.meta["padded_vocab_size"]
    model, stacked = network_with(folder, network, allow_foreign=allow_foreign)
    # Names of experts' tensors depend on which of their weights have adapters.
    names = [
        OUTPUT_LAYER if isinstance(layer, Output) else name
        for name, layer in adapted_layers(replace(model, use_dora=False), rows).items()
        if not isinstance(layer, ExpertLinear)
        or any(is_target(AdapterTarget(name, WHOLE), pattern) for pattern in stacked)
    ]
    layers = adapted_layers(replace(model, lora_target_modules=tuple(names)), rows)
    base_family = (base.meta.get("huggingface") or {}).get("family")
    peft_tensors = tensor_names(folder, allow_foreign=allow_foreign)
    try:
        family = family_in(peft_tensors, model, layers, rows, base=base_family)
        known = peft_names(model, layers, family, rows)
    except CheckpointError as error:
        raise CheckpointError(
            "PEFT's files name modules that this network does not have "
            f"({str(error).splitlines()[0]}): give the checkpoints of a run with --lora-rank"
        ) from None
    available = names_in(folder, known, allow_foreign=allow_foreign)
    reader = PeftReader(folder, model, available, remedy=_REMEDY, allow_foreign=allow_foreign)
    targets = {
        layer: [
            projection
            for projection in projections_of(linear)
            if f"model.{layer}.adapter.{projection}.a" in available
        ]
        for layer, linear in layers.items()
    }
    targets = {layer: projections for layer, projections in targets.items() if projections}
    if not targets:
        raise CheckpointError(f"{folder} has no tensors: export the adapter again")
    return AdapterFiles(model, reader, targets)


def _check_targets(reader: Reader, targets: Mapping[str, Sequence[str]]) -> None:
    """Reject a checkpoint with adapters on anything but linear layers."""
    known = tuple(f"model.{layer}.adapter." for layer in targets)
    for name in reader.names():
        if name.startswith("model.") and is_adapter_parameter(name) and not name.startswith(known):
            raise CheckpointError(
                f"{name} cannot be chosen per request: merge the adapter into a separate model "
                "with --saver hf, and serve that model"
            )


def _compare(reader: Reader, base: Reader) -> None:
    """Reject an adapter if the frozen weights of its run differ from the base model's.

    Only norms, biases and a few rows of the embedding are compared.
    """
    for name in reader.names():
        if not name.startswith("model.") or is_adapter_parameter(name) or name not in base.tensors:
            continue
        shape = tuple(map(min, reader.global_shape(name), base.global_shape(name)))
        if len(shape) == 2 and "embedding" in name:
            shape = (min(_COMPARED_ROWS, shape[0]), shape[1])
        elif len(shape) != 1:
            continue
        box = Box.whole(shape)
        run_weight, base_weight = reader.read(name, box).float(), base.read(name, box).float()
        if not torch.allclose(run_weight, base_weight, rtol=_ROUNDING, atol=1e-6):
            raise CheckpointError(
                f"the adapter was trained on a different model ({name.removeprefix('model.')} "
                f"differs from {base.path}): {_REMEDY}"
            )
