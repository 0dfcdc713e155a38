"""What a finetuned model is to find, and how good its guesses are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron.models.plan import HeadSpec
from tasks import confusion, correlation
from tasks.results import Numbers, format_table

HEADS = ("classification_head", "multichoice_head")  # Megatron's names


@dataclass(frozen=True)
class Guesses:
    """Labels and guesses of some samples, in their order: numbers of classes, or numbers."""

    labels: tuple[float, ...]
    guesses: tuple[float, ...]

    @staticmethod
    def joined(parts: Iterable[Guesses]) -> Guesses:
        """Those of all parts."""
        every = list(parts)
        return Guesses(
            tuple(label for part in every for label in part.labels),
            tuple(guess for part in every for guess in part.guesses),
        )


@dataclass(frozen=True)
class Target:
    """One of some classes, or a number.

    Attributes:
        task: its name.
        classes: their names, in order; none: a number.
        span: lowest and highest number; None: classes.
        texts: of a sample: 1, or as many as there are classes, one of which is right.
        scores: names in `numbers` whose mean the best checkpoint is chosen by.
    """

    task: str
    classes: tuple[str, ...] = ()
    span: tuple[int, int] | None = None
    texts: int = 1
    scores: tuple[str, ...] = ("accuracy",)

    @property
    def head_name(self) -> str:
        """The name of the last layer."""
        return HEADS[self.texts > 1]

    @property
    def head(self) -> HeadSpec:
        """The head of the model that is to find it."""
        outputs = 1 if self.span is not None else len(self.classes) // self.texts
        return HeadSpec(outputs, self.texts)

    @property
    def score_name(self) -> str:
        """What `score` is, in words."""
        return self.scores[0] if len(self.scores) == 1 else f"mean of {' and '.join(self.scores)}"

    def score(self, numbers: Numbers) -> float:
        """The task's score in GLUE: the mean where it names two."""
        return sum(float(numbers[name]) for name in self.scores) / len(self.scores)

    def numbers(self, found: Guesses) -> Numbers:
        """Of all samples together, by name."""
        if self.span is not None:
            return correlation.summary(found.labels, found.guesses)
        return confusion.summary(self._matrix(found))

    def table(self, found: Guesses) -> str:
        """A row a class, or a row for the labels from each whole number to the next."""
        if self.span is not None:
            rows = correlation.band_rows(found.labels, found.guesses, self.span)
            return format_table(correlation.BAND_TITLES, rows)
        rows = confusion.class_rows(self._matrix(found), self.classes)
        return format_table(confusion.CLASS_TITLES, rows)

    def details(self, found: Guesses) -> dict[str, Any]:
        """What the numbers do not say: how often each class was taken for each, [class][guess]."""
        if self.span is not None:
            return {}
        return {"classes": list(self.classes), "counts": self._matrix(found)}

    def _matrix(self, found: Guesses) -> confusion.Matrix:
        return confusion.count(found.labels, found.guesses, len(self.classes))
