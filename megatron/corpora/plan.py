"""The plan of a corpus: which steps its documents go through, as plain data.

A plan is read from YAML or made from flags, printed, compared and stored beside the corpus. Nothing
here does any work: `stages` turns a plan into blocks for datatrove.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.data import TokenizerConfig
from megatron.config.fields import suggestion
from megatron.corpora.minhash import MinHash
from megatron.errors import ConfigError

# Written without spaces between words, so rules about words do not apply.
_UNSPACED = frozenset(("zh", "ja", "th", "lo", "km", "my", "bo"))


@dataclass(frozen=True)
class UrlStep:
    """Leave out pages whose address shows that they hold no text worth reading.

    Documents without an address pass.

    Attributes:
        also_domains: Domains to leave out in addition, without their suffix ("example").
    """

    also_domains: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExtractStep:
    """Take the main text out of HTML, which only WARC files hold.

    Attributes:
        min_characters: The length below which a page counts as empty.
    """

    min_characters: int = 1


@dataclass(frozen=True)
class FixStep:
    """Fix text that was decoded wrongly, HTML entities and curly quotes, as ftfy does.

    Attributes:
        newlines: Whether several empty lines in a row become one.
    """

    newlines: bool = True


@dataclass(frozen=True)
class LanguageStep:
    """Keep documents in some languages.

    Attributes:
        keep: The codes of the languages (ISO 639).
        probability: The smallest probability of the language.
    """

    keep: tuple[str, ...] = ("en",)
    probability: float = 0.3

    def __post_init__(self) -> None:
        """Refuse names and regions, which would leave out every document."""
        for code in self.keep:
            if not re.fullmatch("[a-z]{2,3}", code):
                raise ConfigError(f"--language {code}: give ISO 639 codes such as en or de")


@dataclass(frozen=True)
class QualityStep:
    """Keep documents that look like prose. A limit of 0 turns a rule off.

    Attributes:
        min_words: The smallest number of words.
        max_words: The largest number of words.
        min_word_length: The smallest mean length of a word in characters.
        max_word_length: The largest mean length.
        max_symbols: The largest number of "#" and ellipses per word.
        min_letters: The smallest share of words with a letter.
        stop_words: How many of "the", "be", "to", "of", "and", "that", "have", "with" must occur.
        max_bullets: The largest share of lines that begin with a bullet point.
        max_ellipses: The largest share of lines that end with an ellipsis.
        max_repeated: The largest share of lines that occurred before.
    """

    min_words: int = 50
    max_words: int = 100_000
    min_word_length: float = 3.0
    max_word_length: float = 10.0
    max_symbols: float = 0.1
    min_letters: float = 0.8
    stop_words: int = 2
    max_bullets: float = 0.9
    max_ellipses: float = 0.3
    max_repeated: float = 0.3


@dataclass(frozen=True)
class DuplicatesStep(MinHash):
    """Keep the first document of each group of near-duplicates."""


@dataclass(frozen=True)
class TasksStep:
    """Cut out whatever also occurs in the files of evaluation tasks.

    A run of `max_ngram` words that also occurs in a task is cut out with its surroundings, up to
    the ends of sentences. A text of a task that is shorter counts as a whole, if it has at least
    `min_ngram` words. What is left on either side becomes a document of its own.

    Attributes:
        files: The task files: JSON lines, TSV or plain text.
        keys: The keys or columns to read. All text is read if there are none.
        max_ngram: The number of words of a run.
        min_ngram: The number of words below which a text of a task is ignored.
        margin: The number of characters to cut on each side of a run.
        min_characters: The length below which a remaining part is left out.
        max_parts: The number of remaining parts above which the document is left out.
    """

    files: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    max_ngram: int = 13
    min_ngram: int = 8
    margin: int = 200
    min_characters: int = 200
    max_parts: int = 10


@dataclass(frozen=True)
class TokenizeStep:
    """Encode the documents as a `.bin`/`.idx` dataset for training.

    Attributes:
        tokenizer: The tokenizer, as in the flags of training.
        append_eod: Whether each document ends with the end-of-document id.
    """

    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    append_eod: bool = True


# The names of the steps in plans and reports, in the order in which they run.
STEPS: dict[str, type[Any]] = {
    "urls": UrlStep,
    "extract": ExtractStep,
    "fix": FixStep,
    "language": LanguageStep,
    "quality": QualityStep,
    "duplicates": DuplicatesStep,
    "tasks": TasksStep,
    "tokenize": TokenizeStep,
}


@dataclass(frozen=True)
class CorpusPlan:
    """A corpus: where its documents come from, and what happens to them.

    Attributes:
        input: Files, globs and folders.
        steps: The settings of each step by name, in the order of `STEPS`.
        text_key: The key of a document's text in JSON lines and parquet files.
        id_key: The key of its name. Documents without one are named by file and line.
        on_error: What to do with a line that is not a document: "stop", or "skip" to leave it out.
    """

    input: tuple[str, ...]
    steps: Mapping[str, Any]
    text_key: str = "text"
    id_key: str = "id"
    on_error: str = "stop"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for YAML and JSON."""
        steps = {name: dataclasses.asdict(step) for name, step in self.steps.items()}
        values = {**dataclasses.asdict(dataclasses.replace(self, steps={})), "steps": steps}
        plain: dict[str, Any] = json.loads(json.dumps(values))
        return plain


def default_steps(languages: tuple[str, ...] = ("en",), seed: int = 1234) -> dict[str, Any]:
    """Return the usual steps from a crawl to its text.

    Args:
        languages: The languages to keep.
        seed: The seed of MinHash.
    """
    quality = QualityStep(stop_words=2 if languages == ("en",) else 0)
    if _UNSPACED.intersection(languages):
        quality = QualityStep(min_words=0, max_word_length=0.0, stop_words=0)
    return {
        "urls": UrlStep(),
        "extract": ExtractStep(),
        "fix": FixStep(),
        "language": LanguageStep(languages),
        "quality": quality,
        "duplicates": DuplicatesStep(seed=seed),
    }


def plan_from_dict(data: Any, source: str) -> CorpusPlan:
    """Return the plan of a YAML file's values.

    Args:
        data: The values, as `CorpusPlan.to_dict` returns them; missing ones have their defaults.
        source: The file, to be named in messages.

    Raises:
        ConfigError: Steps, keys or values are unknown or do not fit.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: expected keys such as `input:` and `steps:`")
    values = dict(data)
    steps = values.pop("steps", None)
    if not isinstance(steps, Mapping):
        raise ConfigError(f"{source}: steps: expected one step per key, of {', '.join(STEPS)}")
    for name in steps:
        _expect(name, STEPS, f"{source}: steps")
    built = {
        name: _build(kind, steps[name], f"{source}: steps.{name}")
        for name, kind in STEPS.items()
        if name in steps
    }
    plan: CorpusPlan = _build(CorpusPlan, {**values, "steps": built}, source)
    if plan.on_error not in ("stop", "skip"):
        raise ConfigError(f"{source}: on_error {plan.on_error!r}: give stop or skip")
    return plan


def _expect(name: Any, known: Any, where: str) -> None:
    if name not in known:
        hint = suggestion(str(name), known) or f": known are {', '.join(known)}"
        raise ConfigError(f"{where}: unknown {name!r}{hint}")


def _build(kind: type[Any], data: Any, where: str) -> Any:
    """Make a record from plain values, checking their names and types."""
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected settings such as a: 1, got {data!r}")
    types_ = typing.get_type_hints(kind)
    fields = {one.name: one for one in dataclasses.fields(kind)}
    values = {}
    for name, value in data.items():
        _expect(name, fields, where)
        values[name] = _fit(types_[name], value, f"{where}.{name}")
    for name, one in fields.items():
        no_default = dataclasses.MISSING
        if name not in values and one.default is no_default and one.default_factory is no_default:
            raise ConfigError(f"{where}: {name} is missing")
    return kind(**values)


def _fit(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build(typing.cast(type, kind), value, where)
    origin = typing.get_origin(kind)
    if origin is types.UnionType:
        options = typing.get_args(kind)
        return None if value is None else _fit(options[0], value, where)
    if origin is tuple:
        many = [value] if isinstance(value, str) else value
        if isinstance(many, list | tuple) and all(isinstance(one, str) for one in many):
            return tuple(many)
        raise ConfigError(f"{where}: expected a list of texts, got {value!r}")
    if origin is not None:
        return value  # the steps, which are built already
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{where}: expected {kind.__name__}, got {value!r}")
    if kind in (int, float) and value < 0:
        raise ConfigError(f"{where}: {value} is negative")
    return value
