"""Passages and questions: their files, the vectors of passages, and the matching of answers.

The files are in DPR's formats: passages are lines `id <tab> text <tab> title` after a header, and
questions are lines `question <tab> ['answer', ...]`.
"""

from __future__ import annotations

import ast
import csv
import functools
import json
import re
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.config.model import ModelConfig
from megatron.durable import atomic_file, storage_errors
from megatron.errors import ConfigError, DataError
from megatron.tokenizer import Tokenizer

# The errors that numpy raises for a file that is damaged or not in npz format.
_BROKEN = (
    *(OSError, ValueError, TypeError, KeyError, EOFError, MemoryError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)
_MAX_ID = 2**63 - 1  # the largest id of a passage, because ids are stored as int64


class Passage(NamedTuple):
    """A passage of the corpus that is searched."""

    id: int
    text: str
    title: str


class Question(NamedTuple):
    """A question with the answers that count as correct."""

    text: str
    answers: tuple[str, ...]


def _rows(path: str, flag: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of a tab-separated file, each preceded by its location for messages."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.reader(file, delimiter="\t")
            for row in reader:
                yield f"{flag} {path}, line {reader.line_num}", row
    except OSError as error:
        raise DataError(f"{flag} {path}: {error.strerror}: give a text file") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{flag} {path}: not tab-separated UTF-8 text ({error}): give a file in this format"
        ) from error


def read_passages(path: str) -> Iterator[Passage]:
    """Yield the passages in the --evidence-data-path file, whose first line is a header.

    Raises:
        DataError: The file cannot be read or has no passages, or a line does not have a number, a
            text and a title.
    """
    count = -1
    for count, (where, row) in enumerate(_rows(path, "--evidence-data-path")):
        if count == 0:
            continue
        try:
            passage_id, text, title = row
            passage = Passage(int(passage_id), text, title)
            if abs(passage.id) > _MAX_ID:
                raise ValueError
        except ValueError:
            raise DataError(
                f"{where}: expected a number, a text and a title, separated by tabs, but found "
                f"{len(row)} columns: {' | '.join(row)[:80]!r}: fix the line"
            ) from None
        yield passage
    if count < 1:
        raise DataError(
            f"--evidence-data-path {path}: there are no passages after the header line: give "
            "another file"
        )


def read_questions(path: str, flag: str) -> list[Question]:
    """Return the questions of a file.

    The answers are a list in the notation of Python or JSON, which is parsed and never executed.

    Raises:
        DataError: The file cannot be read or has no questions, or a line does not have a question
            and a list of answers.
    """
    questions = []
    for where, row in _rows(path, flag):
        try:
            text, answer_list = row
            answers = ast.literal_eval(answer_list)
            if not isinstance(answers, list) or not all(
                isinstance(answer, str) for answer in answers
            ):
                raise ValueError
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            raise DataError(
                f"{where}: expected a question, a tab and a list of answers such as ['one', "
                "'two']: fix the line"
            ) from None
        questions.append(Question(text, tuple(answers)))
    if not questions:
        raise DataError(f"{flag} {path}: there are no questions: give another file")
    return questions


class PaddedTexts(NamedTuple):
    """Token ids of texts, int64 `[b, s]`, and a mask that is False at padding, bool `[b, s]`."""

    tokens: NDArray[np.int64]
    mask: NDArray[np.bool_]


def pad_texts(
    texts: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    length: int,
    shape: tuple[int, int] | None = None,
) -> PaddedTexts:
    """Put texts between [CLS] and [SEP], truncate them to `length` tokens and pad them.

    Args:
        texts: The token ids of the texts.
        tokenizer: The tokenizer of a BERT.
        length: The maximum length of a text, including [CLS] and [SEP].
        shape: The shape of the result. Rows beyond the texts are padding. By default, there are no
            such rows, and all texts are padded to the length of the longest.
    """
    rows = [[tokenizer.cls, *text[: length - 2], tokenizer.sep] for text in texts]
    shape = shape or (len(rows), max(map(len, rows)))
    tokens, mask = np.full(shape, tokenizer.pad, np.int64), np.zeros(shape, bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = row, True
    return PaddedTexts(tokens, mask)


def ids_of_passage(title: str, text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of `title [SEP] text`."""
    return [
        *tokenizer.tokenize_with_special(title),
        tokenizer.sep,
        *tokenizer.tokenize_with_special(text),
    ]


def check_positions(model: ModelConfig, length: int) -> None:
    """Check that a model has positions for texts of `length` tokens.

    Raises:
        ConfigError: It has too few.
    """
    positions = model.max_position_embeddings
    if model.position_embedding_type == "learned_absolute" and length > positions:
        raise ConfigError(
            f"--retriever-seq-length {length}: the model has {positions} positions: give at most "
            f"{positions}"
        )


class PassageVectors(NamedTuple):
    """The vectors of passages.

    Attributes:
        ids: The id of each passage, int64 `[n]`.
        vectors: The vector of each passage, fp16 `[n, e]`.
    """

    ids: NDArray[np.int64]
    vectors: NDArray[np.float16]

    @staticmethod
    def joined(parts: Sequence[PassageVectors]) -> PassageVectors:
        """Return the passages of all parts, sorted by id.

        Raises:
            DataError: Two passages have the same id.
        """
        ids = np.concatenate([part.ids for part in parts])
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        if (duplicates := ids[:-1][ids[1:] == ids[:-1]]).size:
            raise DataError(
                f"--evidence-data-path: passage {duplicates[0]} occurs twice: remove one of the two"
            )
        return PassageVectors(ids, np.concatenate([part.vectors for part in parts])[order])

    def save(self, path: Path, origin: dict[str, Any]) -> None:
        """Write the vectors to a file in numpy's npz format.

        Args:
            path: The file.
            origin: A description of the model and the passages.

        Raises:
            StorageError: The file cannot be written.
        """
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(path) as file:
                text = np.array(json.dumps(origin, sort_keys=True))
                np.savez(file, numbers=self.ids, vectors=self.vectors, origin=text)

    @staticmethod
    def load(path: Path) -> tuple[PassageVectors, dict[str, Any]]:
        """Return the vectors in a file, and the description passed to `save` as `origin`.

        Raises:
            ConfigError: The file was not written by `save`, for example a Megatron-LM pickle.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                ids, vectors = arrays["numbers"], arrays["vectors"]
                origin = json.loads(str(arrays["origin"]))
            is_sound = ids.dtype == np.int64 and vectors.dtype == np.float16
            is_sound = is_sound and isinstance(origin, dict)
            if not is_sound or vectors.ndim != 2 or ids.shape != vectors.shape[:1]:
                raise ValueError("unexpected arrays")
            return PassageVectors(ids, vectors), origin
        except _BROKEN as error:
            raise ConfigError(
                f"--embedding-path {path}: not a file of vectors that this task wrote ({error}; "
                "Megatron-LM's pickles are not read): give the path of a new file"
            ) from None


# The first letters of the Unicode categories of characters within words and between words.
_WITHIN_WORDS, _BETWEEN_WORDS = "LNM", "ZC"


@functools.lru_cache(maxsize=1 << 16)
def _category(character: str) -> str:
    return unicodedata.category(character)[0]


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, as in DPR (Karpukhin et al., 2020).

    The text is normalized to NFD. A word is a sequence of letters, digits and marks, or any other
    single character except spaces and control characters.
    """
    words: list[str] = []
    letters: list[str] = []
    for character in unicodedata.normalize("NFD", text):
        category = _category(character)
        if category in _WITHIN_WORDS:
            letters.append(character)
            continue
        if letters:
            words.append("".join(letters).lower())
            letters = []
        if category not in _BETWEEN_WORDS:
            words.append(character.lower())
    if letters:
        words.append("".join(letters).lower())
    return words


def contains_words(text: str, answers: Sequence[str]) -> bool:
    """Return whether the words of one of the answers occur consecutively in a text.

    Case is ignored.
    """
    words = words_of(text)
    for answer in map(words_of, answers):
        size = len(answer)
        if any(words[start : start + size] == answer for start in range(len(words) - size + 1)):
            return True
    return False


def contains_pattern(text: str, answers: Sequence[str]) -> bool:
    """Return whether one of the answers, which are regular expressions, matches within a text.

    Case and invalid expressions are ignored.
    """
    text = unicodedata.normalize("NFD", text)
    for answer in answers:
        try:
            pattern = re.compile(
                unicodedata.normalize("NFD", answer), re.IGNORECASE | re.UNICODE | re.MULTILINE
            )
        except re.error:
            continue
        if pattern.search(text):
            return True
    return False


MATCHES: dict[str, Callable[[str, Sequence[str]], bool]] = {
    "string": contains_words,
    "regex": contains_pattern,
}
"""The function for each value of --faiss-match."""
