"""Rules for converting between Hugging Face tensors and our parameters; the `Family` class.

In this package, "our" tensors and modules and "native" names are those of this program. Each family
has a table that maps our modules to Hugging Face modules. The shapes follow from the network's
plan, and the conversion (a `TensorConversion`) from the kind of parameter. A conversion only
rearranges values, so `join` and `split` are exact inverses.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import megatron.models.plan as plans
from megatron.checkpoint.entries import Box
from megatron.checkpoint.huggingface.settings import MAX_VALUE, Settings
from megatron.config.model import ModelConfig
from megatron.models.mixture_plan import MixturePlan
from megatron.models.plans import model_plan
from megatron.models.recurrent_plan import GatedDeltaNetPlan, MambaPlan, ParallelMambaPlan

Shape = tuple[int, ...]
Names = Iterator[tuple[str, Sequence[str]]]

KINDS = ("weight", "bias")
_IN_LAYER = re.compile(r"(.*layers\.\d+|mtp\.\d+\.layer)\.(.+)")


class TensorConversion(NamedTuple):
    """A conversion between one or more Hugging Face tensors and one of our parameters.

    Attributes:
        join: Function that converts Hugging Face tensors to our parameter.
        split: Function that converts our parameter to Hugging Face tensors.
    """

    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], list[Tensor]]


def grouped(groups: int, heads: Sequence[int], *, is_fused: bool = False) -> TensorConversion:
    """Return the conversion that orders queries [n d, ...], keys and values [g d, ...] by group.

    Both formats rotate channel i of a head together with channel i + d/2, so the order of rows
    within a head stays the same.

    Args:
        groups: The number of groups, g.
        heads: Heads per group in each Hugging Face tensor, such as n / g queries, one key and one
            value.
        is_fused: Whether the files store a single tensor [h, 3 n d] (or a bias [3 n d]) of all
            queries, then all keys, then all values, as GPT-2 does.
    """

    def join(parts: Sequence[Tensor]) -> Tensor:
        if is_fused:
            parts = _transposed(parts[0]).chunk(len(heads))
        by_group = [part.unflatten(0, (groups, -1)) for part in parts]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def split(whole: Tensor) -> list[Tensor]:
        by_group = whole.unflatten(0, (groups, sum(heads), -1))
        parts = [part.flatten(0, 2) for part in by_group.split(list(heads), dim=1)]
        return [_transposed(torch.cat(parts))] if is_fused else parts

    return TensorConversion(join, split)


def halves(size: int, rotated: range) -> Tensor:
    """Return the permutation of a head's channels that turns adjacent pairs into two halves.

    Some families rotate channels 2i and 2i + 1 together, whereas we rotate i and i + r/2.

    Args:
        size: The number of channels of a head, d.
        rotated: The r channels that rotate; the others stay where they are.

    Returns:
        For each of our channels, the corresponding channel in the files, int64 [d].
    """
    order = torch.arange(size)
    order[rotated.start : rotated.stop] = torch.tensor(rotated).view(-1, 2).t().flatten()
    return order


def by_head(part: Tensor, order: Tensor) -> Tensor:
    """Permute the rows of a projection within each head.

    Args:
        part: The rows of all heads, [n d, ...].
        order: For each row of a head in the result, its row in `part`, [d].
    """
    return part.unflatten(0, (-1, len(order)))[:, order.to(part.device)].flatten(0, 1)


def _transposed(x: Tensor) -> Tensor:
    return x.t() if x.dim() == 2 else x


SAME = TensorConversion(lambda parts: parts[0], lambda whole: [whole])
# A matrix that is [in, out] in GPT-2 files and [out, in] here. A bias is unchanged.
TRANSPOSED = TensorConversion(
    lambda parts: _transposed(parts[0]), lambda whole: [_transposed(whole)]
)
# Gate and up projections [f, h], which are one tensor [2, f, h] here.
STACKED = TensorConversion(
    lambda parts: torch.stack(tuple(parts)), lambda whole: list(whole.unbind(0))
)


@dataclass(frozen=True)
class ParameterRule:
    """The correspondence between one of our parameters and Hugging Face tensors.

    Attributes:
        name: The native name of the parameter.
        shape: The shape of our parameter.
        hf_names: Names of the corresponding Hugging Face tensors, expert by expert.
        conversion: The conversion between these tensors and our parameter, or one expert's slice of
            it.
        piece: The optional part of the model that the parameter belongs to, which a folder may lack
            entirely; "" if the parameter is required.
        experts: The size of the first dimension if the files store each expert in separate tensors,
            otherwise 0.
    """

    name: str
    shape: Shape
    hf_names: tuple[str, ...]
    conversion: TensorConversion
    piece: str = ""
    experts: int = 0

    @property
    def converted_shape(self) -> Shape:
        """The shape of the result of `conversion`: the parameter, or one expert's slice of it."""
        return self.shape[1:] if self.experts else self.shape

    @property
    def parts(self) -> int:
        """The number of parts of the parameter that correspond to separate tensors."""
        return max(1, self.experts)

    def box(self, part: int) -> Box:
        """Return the box of the parameter that a part covers.

        Args:
            part: The index of the part (of the expert, if experts have separate tensors).
        """
        if not self.experts:
            return Box.whole(self.shape)
        inner = self.converted_shape
        return Box((part, *(0 for _ in inner)), (1, *inner))

    def shapes(self) -> list[Shape]:
        """Return the shapes of the Hugging Face tensors, in the order of `hf_names`."""
        parts = self.conversion.split(torch.empty(self.converted_shape, device="meta"))
        return [tuple(part.shape) for part in parts] * self.parts

    def join(self, load: Callable[[str], Tensor], box: Box, dtype: torch.dtype) -> Tensor:
        """Return the values in a box of our parameter, reading only the experts in the box.

        Args:
            load: Function that returns the Hugging Face tensor with a given name.
            box: The box of our parameter.
            dtype: The dtype of the parameter.
        """
        names_per_part = len(self.hf_names) // self.parts

        def read(part_index: int, part: Box) -> Tensor:
            names = self.hf_names[part_index * names_per_part : (part_index + 1) * names_per_part]
            part_box = self.box(part_index)
            values = self.conversion.join([load(name) for name in names]).view(part_box.shape)
            return values[part.slices_in(part_box)]

        if not self.experts:
            return read(0, box).contiguous()
        result = torch.empty(box.shape, dtype=dtype)
        for expert in range(box.offset[0], box.end[0]):
            common = self.box(expert).intersect(box)
            if common is not None:
                result[common.slices_in(box)] = read(expert, common)
        return result

    def split(self, read: Callable[[Box], Tensor], index: int) -> Tensor:
        """Return one of the Hugging Face tensors, reading only the expert that it belongs to.

        Args:
            read: Function that returns a box of our parameter.
            index: The index of the tensor in `hf_names`.
        """
        part, position = divmod(index, len(self.hf_names) // self.parts)
        return self.conversion.split(read(self.box(part)).view(self.converted_shape))[position]


def present_rules(
    rules: Sequence[ParameterRule], present: Iterable[ParameterRule]
) -> list[ParameterRule]:
    """Return the rules of required parameters and of optional parts that the folder contains.

    Args:
        rules: All rules.
        present: The rules of parameters that the folder contains.
    """
    pieces = {rule.piece for rule in present} | {""}
    return [rule for rule in rules if rule.piece in pieces]


class Key(NamedTuple):
    """A key of config.json whose value is that of a network flag.

    Attributes:
        key: The key in config.json.
        field: The field of `ModelConfig`.
        kind: The method of `Settings` that reads the value.
        default: The default if config.json lacks the key. None means that the key is required.
        max_value: The largest accepted value, if the value is a size.
    """

    key: str
    field: str
    kind: str = "size"
    default: Any = None
    max_value: int = MAX_VALUE


def read_keys(settings: Settings, keys: Iterable[Key]) -> dict[str, Any]:
    """Return the network flags that correspond to keys of config.json.

    Raises:
        CheckpointError: A value is missing, has the wrong type or is out of range.
    """
    flags = {}
    for key in keys:
        bounds = (key.max_value,) if key.kind == "size" else ()
        flags[key.field] = getattr(settings, key.kind)(key.key, key.default, *bounds)
    return flags


@dataclass(frozen=True)
class ModelDescription:
    """The network that a config.json describes.

    Attributes:
        model: The network, expressed in our flags.
        vocab: Number of rows of the word embedding.
    """

    model: ModelConfig
    vocab: int


@dataclass(frozen=True)
class Family(ABC):
    """A family of models that share the keys of config.json and the names of tensors.

    Attributes:
        name: The `model_type` in config.json.
        language_model: The `transformers` class of the language model.
        prefix: Prefix of all tensor names except the head's. Some files leave it out.
        module_prefix: Prefix of the modules in `transformers`, if it differs from that of the
            tensors in files. PEFT uses it.
        tied_head: Name of the output's weight, under which files may repeat the word embeddings.
        head_follows_files: Whether the output has its own weight if the files contain one that
            differs from the word embeddings, even if config.json says that the two are tied.
        embedding_copies: Other names under which files may store the word embeddings.
        pieces: The optional part of the model that each of our modules belongs to, by module name.
            Files may lack all of an optional part.
        keys: Keys of config.json that correspond to a network flag.
        fixed: Keys of config.json for which our networks support only one value, with that value.
        tied: Whether the output shares the word embeddings if config.json does not say. None means
            that the family does not have the key `tie_word_embeddings`.
        vocab: The vocabulary size if config.json lacks it. None means that config.json must contain
            it.
        derived: Regular expression for the names of tensors that are derived from config.json, such
            as masks and rotary frequencies. They are not read.
        head_activates: Whether the head has its own activation function, chosen by --openai-gelu.
        stacks_experts: Whether one tensor contains all experts of a layer.
        whole_names: Suffixes of the names of tensors that are not the weight or bias of a module.
    """

    name: str
    language_model: str
    prefix: str = ""
    module_prefix: str | None = None
    tied_head: str = "lm_head.weight"
    head_follows_files: bool = False
    embedding_copies: tuple[str, ...] = ()
    pieces: Mapping[str, str] = field(default_factory=dict)
    keys: tuple[Key, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    tied: bool | None = None
    vocab: int | None = None
    derived: str = ""
    head_activates: bool = False
    stacks_experts: bool = False
    whole_names: tuple[str, ...] = ()

    def architecture(self, pieces: frozenset[str]) -> str:
        """Return the name of a model's class in `transformers`.

        Args:
            pieces: The optional parts that the model has.
        """
        return self.language_model

    def read(self, settings: Settings) -> ModelDescription:
        """Return the network and the vocabulary size that a config.json describes.

        Raises:
            CheckpointError: A key is missing or invalid, or our networks do not support its value.
                The message names the key.
        """
        flags = read_keys(settings, self.keys)
        if self.tied is not None:
            is_tied = settings.boolean("tie_word_embeddings", self.tied)
            flags["untie_embeddings_and_output_weights"] = not is_tied
        for key, value in {"model_type": self.name, **self.fixed}.items():
            settings.must_be(key, value)
        model, vocab = self.network(settings, flags), settings.size("vocab_size", self.vocab)
        settings.refuse_unread_keys()
        return ModelDescription(model, vocab)

    @abstractmethod
    def network(self, settings: Settings, flags: dict[str, Any]) -> ModelConfig:
        """Return the network that a config.json describes.

        Args:
            settings: The keys of config.json. A key that is never read is refused.
            flags: The flags that have been read from `keys`, and the flag for tied embeddings.

        Raises:
            CheckpointError: A key is missing or invalid, or our networks do not support its value.
        """

    def write(self, model: ModelConfig, vocab: int) -> dict[str, Any]:
        """Return the content of config.json for a network.

        Settings that the family cannot express are approximated; `families.mismatches` lists them.

        Args:
            model: The network.
            vocab: Number of rows of the word embedding.
        """
        values = {key.key: getattr(model, key.field) for key in self.keys}
        if self.tied is not None:
            values["tie_word_embeddings"] = not model.untie_embeddings_and_output_weights
        return {"model_type": self.name, "vocab_size": vocab, **values}

    def without_missing_layers(self, names: Collection[str], model: ModelConfig) -> ModelConfig:
        """Return the network without the optional layers that the files lack.

        Args:
            names: The names of the files' tensors.
            model: The network that config.json describes.
        """
        return model

    @abstractmethod
    def names(self, model: ModelConfig) -> Names:
        """Yield each of our modules with the corresponding Hugging Face modules, in file order."""

    def rules(self, model: ModelConfig, vocab: int) -> list[ParameterRule]:
        """Return the rules of all parameters, in the order of the files.

        A parameter that the files repeat has a rule for each copy.

        Args:
            model: The network.
            vocab: Number of rows of the word embedding.
        """
        plan = model_plan(model, vocab)
        shapes, layers = parameter_shapes(plan), layers_of(plan)
        rules = []
        for module_name, hf_modules in self.names(model):
            parameters = {
                f"{module_name}.{kind}": kind for kind in KINDS if f"{module_name}.{kind}" in shapes
            }
            if module_name in shapes:  # a parameter that is not in a module
                parameters = {module_name: "weight"}
            if not parameters:
                continue  # a module that this network, or this layer, does not have
            match = _IN_LAYER.fullmatch(module_name)
            conversion, experts = SAME, 0
            if match:
                layer, module = layers[match.group(1)], match.group(2)
                is_separate = module.startswith("mlp.experts.") and not self.stacks_experts
                if is_separate and isinstance(layer.mlp, MixturePlan):
                    experts = layer.mlp.router.experts
                conversion = self.conversion(layer, module, len(hf_modules) // max(1, experts))
            piece = self.pieces.get(module_name.partition(".")[0], "")
            for name, kind in parameters.items():
                names = tuple(self.tensor_name(hf_module, kind) for hf_module in hf_modules)
                rules.append(
                    ParameterRule(f"model.{name}", shapes[name], names, conversion, piece, experts)
                )
        return rules

    def tensor_name(self, module: str, kind: str) -> str:
        """Return the name of the weight or bias of a Hugging Face module.

        Args:
            module: The module, or a tensor whose name is among `whole_names`.
            kind: "weight" or "bias".
        """
        return module if module.endswith(self.whole_names) else f"{module}.{kind}"

    def conversion(self, layer: plans.LayerPlan, module: str, tensors: int) -> TensorConversion:
        """Return the conversion between Hugging Face tensors and the parameters of a module.

        Args:
            layer: The layer that contains the module.
            module: The native name of the module in the layer.
            tensors: The number of Hugging Face tensors that a parameter combines, or one expert's
                slice of it if the files store each expert in separate tensors.
        """
        if module == "attention.qkv":
            mixer = attention_of(layer)
            in_group = (mixer.heads // mixer.kv_heads, 1, 1)
            return grouped(mixer.kv_heads, in_group, is_fused=tensors == 1)
        if module == "cross_attention.key_value":
            assert layer.cross_attention is not None
            return grouped(layer.cross_attention.heads, (1, 1))
        return STACKED if tensors > 1 else SAME


def layers_of(plan: plans.ModelPlan) -> dict[str, plans.LayerPlan]:
    """Return the plan of each layer by native name, such as "layers.3"."""
    first = plan.encoder_layers  # the decoder's first layer, if there is a decoder
    stacks = {"": plan.layers}
    if first:
        stacks = {"encoder.": plan.layers[:first], "decoder.": plan.layers[first:]}
    layers = {
        f"{k}layers.{i}": layer for k, stack in stacks.items() for i, layer in enumerate(stack)
    }
    ahead = plans.multi_token_plan(plan)
    depths = () if ahead is None else ahead.layers
    return layers | {f"mtp.{depth}.layer": layer for depth, layer in enumerate(depths)}


def parameter_shapes(plan: plans.ModelPlan) -> dict[str, Shape]:
    """Return the shapes of a network's parameters by native name."""
    table, hidden, modules = plan.embedding, plan.hidden, dict[str, dict[str, Shape]]()
    rows = {"word": table.vocabulary, "position": table.positions, "token_type": table.token_types}
    for kind, count in rows.items():
        if count:
            modules[f"embedding.{kind}"] = {"weight": (count, hidden)}
    if table.norm is not None:
        modules["embedding.norm"] = norm_shapes(table.norm, hidden)
    for name, layer in layers_of(plan).items():
        modules |= {f"{name}.{module}": shapes for module, shapes in layer_shapes(layer).items()}
    for stack in ("encoder.", "decoder.") if plan.encoder_layers else ("",):
        modules[f"{stack}final_norm"] = norm_shapes(plan.final_norm, hidden)
        if plan.position_bias is not None:
            shape = (plan.position_bias.buckets, plan.position_bias.heads)
            modules[f"{stack}position_bias"] = {"weight": shape}
    ahead = plans.multi_token_plan(plan)
    for depth in range(0 if ahead is None else ahead.depths):
        norms = ("embedding_norm", "hidden_norm", "final_norm")
        modules |= {f"mtp.{depth}.{name}": norm_shapes(plan.final_norm, hidden) for name in norms}
        modules[f"mtp.{depth}.projection"] = linear_shapes((hidden,), 2 * hidden, bias=False)
    square = linear_shapes((hidden,), hidden)
    for head in plan.heads:
        match head:
            case plans.OutputPlan():
                modules["output"] = linear_shapes((head.vocabulary,), hidden, bias=head.bias)
                if head.tied:
                    del modules["output"]["weight"]
            case plans.MaskedTokenPlan():
                modules |= {"head.dense": square, "head.norm": norm_shapes(head.norm, hidden)}
            case plans.ClassifierPlan():
                name = "pooler.dense" if head.kind == "pooler" else head.kind
                modules[name] = linear_shapes((head.outputs,), hidden, bias=head.bias)
    return {
        f"{module}.{kind}".removesuffix("."): shape
        for module, shapes in modules.items()
        for kind, shape in shapes.items()
    }


def norm_shapes(norm: plans.NormPlan, size: int) -> dict[str, Shape]:
    """Return the shapes of a normalization's parameters: weight, bias, both or none."""
    has = {"weight": norm.weight, "bias": norm.bias}
    return dict.fromkeys((kind for kind in KINDS if has[kind]), (size,))


def linear_shapes(outputs: Shape, inputs: int, *, bias: bool = True) -> dict[str, Shape]:
    """Return the shapes of a linear layer's parameters.

    Args:
        outputs: The output dimensions, which come first in the weight.
        inputs: The input dimension.
        bias: Whether there is a bias.
    """
    return {"weight": (*outputs, inputs)} | ({"bias": outputs} if bias else {})


def attention_of(layer: plans.LayerPlan) -> plans.AttentionPlan:
    """Return a layer's mixer, which must be self-attention."""
    assert isinstance(layer.mixer, plans.AttentionPlan), layer.mixer
    return layer.mixer


def layer_shapes(layer: plans.LayerPlan) -> dict[str, dict[str, Shape]]:
    """Return the parameter shapes in a layer, by module and kind ("weight" or "bias").

    The kind is "" for a parameter that is not in a module.
    """
    hidden, cross, norm = layer.hidden, layer.cross_attention, norm_shapes(layer.norm, layer.hidden)
    modules: dict[str, dict[str, Shape]] = {}
    for name, part in (("attention", layer.mixer), ("mlp", layer.mlp)):
        if part is not None and layer.norms_input:
            modules[f"{name}_norm"] = norm
        if part is not None and layer.norms_output:
            modules[f"{name}_output_norm"] = norm
    if layer.shares_norm:
        del modules["mlp_norm"]
    modules |= mixer_shapes(layer.mixer)
    match layer.mlp:
        case plans.MLPPlan() as dense:
            modules |= mlp_shapes("mlp", dense)
        case MixturePlan() as mixture:
            experts = mixture.router.experts
            bias = mixture.router.bias
            modules["mlp.router"] = linear_shapes((experts,), hidden, bias=bias)
            if mixture.router.bias_rate is not None:
                modules["mlp.router.expert_bias"] = {"": (experts,)}
            for name, shapes in mlp_shapes("mlp.experts", mixture.expert).items():
                modules[name] = {kind: (experts, *shape) for kind, shape in shapes.items()}
            if mixture.shared is not None:
                modules |= mlp_shapes("mlp.shared", mixture.shared)
            if mixture.gates_shared:
                modules["mlp.shared_gate"] = {"": (1, hidden)}
            if mixture.weighs_shared:
                modules["mlp.coefficient"] = {"weight": (2, hidden), "bias": (2,)}
    if cross is not None:
        modules |= {
            "cross_norm": norm,
            "cross_attention.query": linear_shapes((cross.query,), hidden, bias=cross.bias),
            "cross_attention.key_value": linear_shapes((2 * cross.query,), hidden, bias=cross.bias),
            "cross_attention.output": linear_shapes((hidden,), cross.query, bias=cross.bias),
        }
    return modules


def mixer_shapes(mixer: plans.MixerPlan | None) -> dict[str, dict[str, Shape]]:
    """Return the parameter shapes in a layer's mixer, by module and kind; {} without a mixer."""
    match mixer:
        case ParallelMambaPlan():
            parallel = mamba_shapes(mixer.mamba).items()
            return attention_shapes(mixer) | {
                name.replace("attention.", "attention.mamba."): shapes for name, shapes in parallel
            }
        case plans.AttentionPlan():
            return attention_shapes(mixer)
        case MambaPlan():
            return mamba_shapes(mixer)
        case GatedDeltaNetPlan():
            return delta_net_shapes(mixer)
    return {}


def attention_shapes(mixer: plans.AttentionPlan) -> dict[str, dict[str, Shape]]:
    """Return the parameter shapes in self-attention, by module and kind."""
    modules: dict[str, dict[str, Shape]]
    if isinstance(mixer, plans.LatentAttentionPlan):
        modules = latent_shapes(mixer)
    else:
        bias = mixer.bias or mixer.qkv_bias
        modules = {
            "attention.qkv": linear_shapes((mixer.qkv,), mixer.hidden, bias=bias),
            "attention.output": linear_shapes((mixer.hidden,), mixer.query, bias=mixer.bias),
        }
        if mixer.qk_norm is not None:
            for name, size in zip(("query", "key"), mixer.norm_sizes, strict=True):
                modules[f"attention.{name}_norm"] = norm_shapes(mixer.qk_norm, size)
    if mixer.softmax == "learnable":
        modules["attention.sinks"] = {"": (mixer.heads,)}
    return modules


def mamba_shapes(mixer: MambaPlan) -> dict[str, dict[str, Shape]]:
    """Return the parameter shapes in a Mamba-2 mixer, by module and kind."""
    channels = mixer.convolved
    heads: dict[str, Shape] = {"": (mixer.heads,)}
    return {
        "attention.input": linear_shapes((sum(mixer.widths),), mixer.hidden, bias=mixer.bias),
        "attention.convolution": {
            "weight": (channels, mixer.convolution),
            "bias": (channels,),
        },
        **{f"attention.{name}": heads for name in ("decay", "skip", "time_step")},
        **({"attention.norm": {"": (mixer.inner,)}} if mixer.normalizes else {}),
        "attention.output": linear_shapes((mixer.hidden,), mixer.inner, bias=mixer.bias),
    }


def latent_shapes(mixer: plans.LatentAttentionPlan) -> dict[str, dict[str, Shape]]:
    """Return the parameter shapes in latent attention, by module and kind."""
    heads, hidden, rank = mixer.heads, mixer.hidden, mixer.query_rank
    sizes = {
        "query_up": (heads * mixer.key_size, rank or hidden),
        "latent_down": (mixer.rank + mixer.rope_size, hidden),
        "latent_up": (heads * (mixer.nope_size + mixer.value_size), mixer.rank),
    }
    if rank is not None:
        sizes["query_down"] = (rank, hidden)
    modules = {
        f"attention.{name}": linear_shapes((outputs,), inputs, bias=False)
        for name, (outputs, inputs) in sizes.items()
    }
    modules["attention.output"] = linear_shapes(
        (hidden,), heads * mixer.value_size, bias=mixer.bias
    )
    if mixer.qk_norm is not None:
        modules["attention.latent_norm"] = norm_shapes(mixer.qk_norm, mixer.rank)
        if rank is not None:
            modules["attention.query_norm"] = norm_shapes(mixer.qk_norm, rank)
    return modules


def delta_net_shapes(mixer: GatedDeltaNetPlan) -> dict[str, dict[str, Shape]]:
    """Return the parameter shapes in a gated delta net, by module and kind."""
    return {
        "attention.input": {"weight": (sum(mixer.widths), mixer.hidden)},
        "attention.convolution": {"weight": (mixer.convolved, mixer.convolution)},
        "attention.decay": {"": (mixer.value_heads,)},
        "attention.time_step": {"": (mixer.value_heads,)},
        "attention.norm": {"weight": (mixer.value_size,)},
        "attention.output": {"weight": (mixer.hidden, mixer.values)},
    }


def mlp_shapes(name: str, mlp: plans.MLPPlan) -> dict[str, dict[str, Shape]]:
    """Return the parameter shapes in an MLP, by module and kind.

    Args:
        name: The name of the MLP in its layer.
        mlp: The MLP's plan.
    """
    up = (2, mlp.inner) if mlp.gated else (mlp.inner,)
    return {
        f"{name}.up": linear_shapes(up, mlp.hidden, bias=mlp.bias),
        f"{name}.down": linear_shapes((mlp.hidden,), mlp.inner, bias=mlp.bias),
    }


def expert_names(modules: Mapping[str, Sequence[str]], experts: int) -> dict[str, Sequence[str]]:
    """Return the Hugging Face modules in a layer, with those of each expert in turn.

    Args:
        modules: The names of Hugging Face modules in the layer, by native module name. In the names
            of experts, {} stands for the index.
        experts: The number of experts.
    """
    return {
        module: [name.format(index) for index in range(experts) for name in names]
        if module.startswith("mlp.experts.")
        else names
        for module, names in modules.items()
    }


def layer_names(prefix: str, hf_prefix: str, modules: Mapping[str, Sequence[str]]) -> Names:
    """Yield each of our modules in a layer with the corresponding Hugging Face modules.

    Args:
        prefix: The native name of the layer.
        hf_prefix: The Hugging Face name of the layer.
        modules: The names of Hugging Face modules in the layer, by native module name.
    """
    for module, names in modules.items():
        yield f"{prefix}.{module}", [f"{hf_prefix}.{name}" for name in names]
