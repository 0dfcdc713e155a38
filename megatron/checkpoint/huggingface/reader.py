"""A Hugging Face folder behind the interface of our own checkpoints."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megatron.checkpoint.entries import DTYPES, Box, check_request
from megatron.checkpoint.huggingface.families import family_named
from megatron.checkpoint.huggingface.files import CONFIG, find_shards, inside
from megatron.checkpoint.huggingface.rules import Family, ParameterRule, Shape, present
from megatron.checkpoint.huggingface.settings import Settings, read_json
from megatron.checkpoint.manifest import describe
from megatron.config.model import ModelConfig
from megatron.config.run import RunOptions
from megatron.config.yaml_file import to_dict
from megatron.errors import CheckpointError

_FLOATS = ("F32", "F16", "BF16", "F64")
_OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
_SHOWN = 10  # problems listed in a message


class HFReader:
    """Reads safetensors of the known families under our names; see `checkpoint.reader.Reader`.

    Opening checks every name, shape and type against config.json and reads no tensor.

    Attributes:
        family: of the model.
        bare_names: the files leave the family's prefix out of tensor names.
        notices: lines for the user about what is different here.
    """

    format = "hf"
    iteration = 0

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError: what is missing, not known, or does not fit config.json."""
        self.path = path
        shards = find_shards(path)
        config_path = inside(path, CONFIG)
        values = read_json(config_path)
        self.family: Family = family_named(values.get("model_type"), config_path)
        self._architectures = values.get("architectures")
        described = self.family.read(Settings(values, config_path))
        model = described.model
        self.vocab, self.notices = described.vocab, described.notices
        self._held = {_modern(name): one for name, one in _open_shards(path, shards).items()}
        prefix = self.family.prefix
        self.bare_names = bool(prefix) and not any(n.startswith(prefix) for n in self._held)
        rules = self.family.rules(model, described.vocab)
        self._words = next(r.theirs[0] for r in rules if r.name == "model.embedding.word.weight")
        if self._has_own_head(model):
            model = replace(model, untie_embeddings_and_output_weights=True)
            rules = self.family.rules(model, described.vocab)
        found = [rule for rule in rules if any(self._name(n) in self._held for n in rule.theirs)]
        self._rules = {rule.name: rule for rule in present(rules, found)}
        self._check()
        self._check_copies(tied=not model.untie_embeddings_and_output_weights)
        self.meta = {
            "iteration": self.iteration,
            "consumed_train_samples": 0,
            "padded_vocab_size": described.vocab,
            "config": to_dict(RunOptions(model=model)),
            "notices": list(self.notices),
            "huggingface": {
                "family": self.family.name,
                "bare_names": self.bare_names,
                "window": described.window,
            },
        }

    def names(self) -> list[str]:
        return sorted(self._rules)

    def global_shape(self, name: str) -> Shape:
        return self._rule(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._held[self._name(self._rule(name).theirs[0])].dtype]

    def read(self, name: str, wanted: Box, *, global_shape: Shape) -> torch.Tensor:
        rule = self._rule(name)
        check_request(self.path, name, rule.shape, global_shape, wanted)
        whole = rule.form.join([self._held[self._name(one)].load() for one in rule.theirs])
        return whole[wanted.within(Box.whole(rule.shape))].contiguous()

    @property
    def architecture(self) -> str:
        """The class of `transformers` that the folder is of."""
        return self.family.architecture(frozenset(rule.piece for rule in self._rules.values()))

    def _rule(self, name: str) -> ParameterRule:
        if name not in self._rules:
            raise CheckpointError(f"{self.path}: holds no tensor {name!r}")
        return self._rules[name]

    def _name(self, name: str) -> str:
        """Of a tensor in the files."""
        return name.removeprefix(self.family.prefix) if self.bare_names else name

    def _check(self) -> None:
        """Raise CheckpointError unless the files hold what config.json describes, and no more."""
        problems: list[str] = []
        expected: dict[str, Shape] = {}
        for rule in self._rules.values():
            parts = {self._name(name): name for name in rule.theirs}
            expected |= dict(zip(parts, rule.shapes(), strict=True))
            kinds = {self._held[name].dtype for name in parts if name in self._held}
            if len(kinds) > 1:
                problems.append(f"{', '.join(parts)} have several types: {', '.join(kinds)}")
        for name, shape in expected.items():
            held = self._held.get(name)
            if held is None:
                problems.append(f"{name} is missing")
            elif held.shape != shape:
                problems.append(
                    f"{name} is {describe(held.dtype, held.shape)}, config.json says {list(shape)}"
                )
            elif held.dtype not in _FLOATS:
                problems.append(f"{name} is {held.dtype}: only plain floating point is read")
        for name in sorted(self._held.keys() - expected.keys()):
            copies = (self.family.tied_head, *self.family.word_copies)
            if name not in copies and not self.family.is_derived(name):
                problems.append(f"{name} has no place in a {self.family.name} model")
        if problems:
            problems = [*self._other_class(), *problems]
            more = f" and {len(problems) - _SHOWN} more" * (len(problems) > _SHOWN)
            raise CheckpointError(f"{self.path}: {'; '.join(problems[:_SHOWN])}{more}")

    def _other_class(self) -> list[str]:
        """What config.json says, where it is of a class that our networks are not."""
        named = self._architectures
        if not isinstance(named, list) or named in ([], [self.architecture]):
            return []
        return [
            f"config.json names the class {named[0]!s:.80}, which is not read; of this network "
            f"{self.architecture} is"
        ]

    def _has_own_head(self, model: ModelConfig) -> bool:
        """Whether files hold an output weight that config.json does not tell of."""
        if model.untie_embeddings_and_output_weights or not self.family.head_follows_files:
            return False
        return self.family.tied_head in self._held and not self._is_word_copy(self.family.tied_head)

    def _check_copies(self, *, tied: bool) -> None:
        for name in (*self.family.word_copies, *([self.family.tied_head] if tied else [])):
            if name in self._held and not self._is_word_copy(name):
                raise CheckpointError(
                    f"{self.path}: {name} differs from the word embeddings, although config.json "
                    "says tie_word_embeddings: set that to false in a copy, or remove the tensor"
                )

    def _is_word_copy(self, name: str) -> bool:
        """Whether a tensor is that of the word embeddings, as far as there is one."""
        words = self._held.get(self._name(self._words))
        return words is not None and torch.equal(self._held[name].load(), words.load())


class _Held:
    """A tensor in a file: its type's name in safetensors, its shape, its values on demand."""

    def __init__(self, path: Path, name: str, dtype: str, shape: Shape) -> None:
        self.path, self.name, self.dtype, self.shape = path, name, dtype, shape

    def load(self) -> torch.Tensor:
        """The values; pages of the file until something is computed from them."""
        try:
            with safe_open(self.path, framework="pt") as file:
                return file.get_tensor(self.name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path}: {self.name}: {error}") from error


def _modern(name: str) -> str:
    """The first BERT's files call a normalization's weight and bias gamma and beta."""
    for old, new in _OLD_NORMS.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _open_shards(folder: Path, shards: dict[str, Path]) -> dict[str, _Held]:
    """All tensors of the files; CheckpointError where they are not those of the index."""
    held: dict[str, _Held] = {}
    for path in sorted(set(shards.values())):
        with ExitStack() as stack:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: not a safetensors file: {error}") from error
            for name in file.keys():  # noqa: SIM118  not a dict
                if name in held:
                    raise CheckpointError(f"{path}: {name} is in {held[name].path.name} too")
                part = file.get_slice(name)
                held[name] = _Held(path, name, part.get_dtype(), tuple(part.get_shape()))
    if "" not in shards:
        missing = sorted(shards.keys() - held.keys()) + sorted(held.keys() - shards.keys())
        if missing:
            raise CheckpointError(f"{folder}: index and files disagree about {missing[0]}")
    return held
