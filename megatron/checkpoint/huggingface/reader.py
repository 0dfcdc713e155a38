"""Read a Hugging Face folder through the `Reader` interface."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.checkpoint.entries import DTYPES, WORD_EMBEDDING, Box
from megatron.checkpoint.huggingface.families import family_named
from megatron.checkpoint.huggingface.files import CONFIG, find_shards, inside
from megatron.checkpoint.huggingface.rules import ParameterRule, Shape, present_rules
from megatron.checkpoint.huggingface.settings import Settings, read_json
from megatron.checkpoint.manifest import describe
from megatron.checkpoint.mapped import MappedFile
from megatron.checkpoint.reader import SHOWN, Reader, TensorMeta
from megatron.checkpoint.shard import Placement
from megatron.config.run import RunOptions
from megatron.config.yaml_file import to_dict
from megatron.errors import CheckpointError

_FLOATS = ("F32", "F16", "BF16", "F64")
# Names of tensors that contain all experts of a layer, which most families do not have.
_FUSED_EXPERTS = re.compile(r".*\.experts\.(?!\d+\.).*")
# The first BERT files call the weight and bias of a normalization gamma and beta.
_OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


@dataclass(frozen=True)
class _FileTensor:
    """A tensor in a file, whose values are read on demand."""

    file: MappedFile
    placement: Placement

    @property
    def dtype(self) -> str:
        """Safetensors' name for the tensor's type."""
        return self.placement.dtype

    @property
    def shape(self) -> Shape:
        """The tensor's shape."""
        return self.placement.shape

    def load(self) -> torch.Tensor:
        """Return the tensor, mapped from the file and read when it is used."""
        return self.file.tensor(self.placement)


class HFReader(Reader):
    """A Hugging Face folder of a known family, with its tensors under native names.

    `meta` contains iteration and consumed_train_samples (both 0), padded_vocab_size, config (the
    network), and huggingface (the family, and whether tensor names lack its prefix).

    Attributes:
        family: The family of the model.
        vocab: Number of rows of the word embedding.
        bare_names: Whether tensor names in the files lack the family's prefix.
        architecture: The model's class in `transformers`.
    """

    format = "hf"
    iteration = 0

    def __init__(self, path: Path, *, allow_foreign: bool = False) -> None:
        """Open a folder, and check every name, shape and dtype against config.json.

        Values are read only of tensors that may repeat another one, to compare the two.

        Args:
            path: The folder.
            allow_foreign: Accept files owned by other users.

        Raises:
            CheckpointError: A file is missing, damaged or refused, a key of config.json is missing
                or not supported, or the tensors contradict config.json or each other.
        """
        self.path, self.allow_foreign = path, allow_foreign
        shards = find_shards(path, allow_foreign=allow_foreign)
        config_path = inside(path, CONFIG)
        values = read_json(config_path, allow_foreign=allow_foreign)
        self.family = family_named(values.get("model_type"), config_path)
        description = self.family.read(Settings(values, config_path))
        head = self.family.tied_head
        self.vocab = description.vocab
        self._files = _open_shards(path, shards, allow_foreign)
        model = self.family.without_missing_layers(self._files, description.model)
        prefix = self.family.prefix
        self.bare_names = bool(prefix) and not any(n.startswith(prefix) for n in self._files)
        rules = self.family.rules(model, self.vocab)
        self._word_embedding = next(
            rule.hf_names[0] for rule in rules if rule.name == WORD_EMBEDDING
        )
        tied = not model.untie_embeddings_and_output_weights
        # Files may contain an output weight that config.json does not mention.
        if tied and self.family.head_follows_files and not self._is_embedding_copy(head):
            model, tied = replace(model, untie_embeddings_and_output_weights=True), False
            rules = self.family.rules(model, self.vocab)
        present = [
            rule for rule in rules if any(self._name(n) in self._files for n in rule.hf_names)
        ]
        self._rules: dict[str, ParameterRule] = {}
        self._copies: dict[str, str] = {}  # for each copy, the tensor that it repeats
        for rule in present_rules(rules, present):
            original = self._rules.setdefault(rule.name, rule)
            if original is not rule:
                self._copies[self._name(rule.hf_names[0])] = self._name(original.hf_names[0])
        pieces = frozenset(rule.piece for rule in self._rules.values())
        self.architecture = self.family.architecture(pieces)
        self._check(values.get("architectures"))
        self.tensors = dict[str, TensorMeta]()
        for name, rule in self._rules.items():
            first = self._files[self._name(rule.hf_names[0])]
            self.tensors[name] = TensorMeta(rule.shape, DTYPES[first.dtype])
        for name in (*self.family.embedding_copies, *([head] if tied else [])):
            if not self._is_embedding_copy(name):
                raise CheckpointError(
                    f"{path}: {name} differs from the word embeddings, although config.json says "
                    "tie_word_embeddings: set it to false in a copy of the folder, or remove the "
                    "tensor"
                )
        for name, source in self._copies.items():
            if name in self._files and not torch.equal(
                self._files[name].load(), self._files[source].load()
            ):
                raise CheckpointError(
                    f"{path}: {name} differs from {source}, but must be a copy of it, because our "
                    "networks have a single tensor for both"
                )
        origin = {"family": self.family.name, "bare_names": self.bare_names}
        self.meta = {
            "iteration": self.iteration,
            "consumed_train_samples": 0,
            "padded_vocab_size": self.vocab,
            "config": to_dict(RunOptions(model=model)),
            "huggingface": origin,
        }

    def _read(self, name: str, box: Box) -> torch.Tensor:
        def load(hf_name: str) -> torch.Tensor:
            return self._files[self._name(hf_name)].load()

        return self._rules[name].join(load, box, self.dtype(name))

    def chunks(self, name: str) -> list[Box]:
        """Return a box for each expert if experts have separate tensors, otherwise a single box.

        Args:
            name: The tensor's name.
        """
        rule = self._rules[name]
        return [rule.box(part) for part in range(rule.parts)]

    def _name(self, name: str) -> str:
        """Return the name that a tensor has in the files."""
        return name.removeprefix(self.family.prefix) if self.bare_names else name

    def _check(self, architectures: object) -> None:
        """Check that the files contain exactly the tensors that config.json implies."""
        problems: list[str] = []
        fused = [name for name in sorted(self._files) if _FUSED_EXPERTS.fullmatch(name)]
        if fused and any(rule.experts for rule in self._rules.values()):
            raise CheckpointError(
                f"{self.path}: {fused[0]} contains all experts of a layer, but in files of this "
                "family each expert has its own tensors: save the model again with "
                "save_pretrained of transformers"
            )
        # A different class may explain other problems, but is not a problem by itself.
        if isinstance(architectures, list) and architectures not in ([], [self.architecture]):
            problems.append(
                f"config.json names the class {architectures[0]!s:.80}, which is not supported: "
                f"this network's class is {self.architecture}"
            )
        only_class = len(problems)
        expected: dict[str, Shape] = {}
        for rule in self._rules.values():
            parts = {self._name(name): name for name in rule.hf_names}
            expected |= dict(zip(parts, rule.shapes(), strict=True))
            kinds = {self._files[name].dtype for name in parts if name in self._files}
            if len(kinds) > 1:
                problems.append(f"{', '.join(parts)} have several types: {', '.join(kinds)}")
        for name, shape in expected.items():
            tensor = self._files.get(name)
            if tensor is None:
                problems.append(f"{name} is missing")
            elif tensor.shape != shape:
                actual = describe(tensor.dtype, tensor.shape)
                problems.append(f"{name} is {actual}, but config.json says {list(shape)}")
            elif tensor.dtype not in _FLOATS:
                problems.append(f"{name} is {tensor.dtype}: only plain floating point is read")
        copies = (self.family.tied_head, *self.family.embedding_copies, *self._copies)
        for name in sorted(self._files.keys() - expected.keys()):
            if name not in copies and not re.fullmatch(self.family.derived, name):
                problems.append(f"{name} does not exist in a {self.family.name} model")
        if len(problems) > only_class:
            more = f" and {len(problems) - SHOWN} more" * (len(problems) > SHOWN)
            raise CheckpointError(f"{self.path}: {'; '.join(problems[:SHOWN])}{more}")

    def _is_embedding_copy(self, name: str) -> bool:
        """Return whether a tensor is absent or equals the word embeddings."""
        tensor, embedding = self._files.get(name), self._files.get(self._name(self._word_embedding))
        return tensor is None or (
            embedding is not None and torch.equal(tensor.load(), embedding.load())
        )


def _open_shards(
    folder: Path, shards: Mapping[str, Path], allow_foreign: bool
) -> dict[str, _FileTensor]:
    """Return all tensors in the files by name, renaming old BERT parameters to their current names.

    Args:
        folder: The folder, for messages.
        shards: The file of each tensor, as `find_shards` returns it.
        allow_foreign: Accept files owned by other users.

    Raises:
        CheckpointError: A file is damaged or refused, two files contain the same tensor, or the
            tensors differ from those in the index.
    """
    tensors: dict[str, _FileTensor] = {}
    for path in sorted(set(shards.values())):
        file = MappedFile(path, allow_foreign=allow_foreign)
        for name, placement in file.header().items():
            if name in tensors:
                raise CheckpointError(f"{path}: {name} is in {tensors[name].file.path.name} too")
            tensors[name] = _FileTensor(file, placement)
    if "" not in shards:
        missing = sorted(shards.keys() - tensors.keys()) + sorted(tensors.keys() - shards.keys())
        if missing:
            raise CheckpointError(f"{folder}: index and files disagree about {missing[0]}")
    modern = {}
    for name, tensor in tensors.items():
        old = next((old for old in _OLD_NORMS if name.endswith(old)), "")
        modern[name.removesuffix(old) + _OLD_NORMS.get(old, "")] = tensor
    return modern
