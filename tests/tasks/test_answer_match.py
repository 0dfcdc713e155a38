"""Answers in passages, matched as in DPR."""

import pytest

from megatron.tasks.passages import contains_pattern, contains_words, words_of


def test_words_are_runs_of_letters_digits_and_marks_or_single_signs():
    text = "U.S. won 3-2;\u00a0\u0130stanbul caf\u00e9\u200b!"
    assert words_of(text) == ["u", ".", "s", ".", "won", "3", "-", "2", ";"] + [
        "i\u0307stanbul",
        "cafe\u0301",
        "!",
    ]


@pytest.mark.parametrize(
    ("answer", "holds"),
    [
        ("paris", True),
        ("PARIS", True),
        ("Pari", False),
        ("the city of Paris", True),
        ("city Paris", False),
        ("2,000", True),
        ("000 people", True),
        ("cafe\u0301", True),  # decomposed, unlike the passage
        ("people .", True),
        ("people. And", False),
    ],
)
def test_the_words_of_an_answer_follow_each_other(answer, holds):
    assert contains_words("In the City of Paris a caf\u00e9 has 2,000 people.", [answer]) == holds
    assert (
        contains_words("In the City of Paris a caf\u00e9 has 2,000 people.", ["x", answer]) == holds
    )


def test_patterns_are_searched_in_the_whole_passage():
    assert contains_pattern("It was\nin June 1914.", [r"^in jun[ei] \d{4}"])
    assert not contains_pattern("It was in July.", [r"^july", "(broken"])
