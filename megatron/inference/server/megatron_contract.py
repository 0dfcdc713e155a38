"""The fields of Megatron-LM's `PUT /api`, its rules in its order, and its very messages.

Three things are stricter than Megatron's own server: true and false are no integers, every prompt
must be a string, and a length penalty has bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.inference.request import MOST_LENGTH_PENALTY
from megatron.inference.server.errors import ApiError
from megatron.inference.server.limits import MAX_PROMPTS

Values = Mapping[str, Any]
MAX_TOP_K = 1000
MAX_TEMPERATURE = 100.0


@dataclass(frozen=True)
class Rule:
    """What must hold, and what is said where it does not.

    Attributes:
        holds: of the field's value and the values of this and the earlier fields.
        message: Megatron's.
        absent_too: it is asked of the default as well.
        always: 400 under `--legacy-status-codes` too, as Megatron has it.
    """

    holds: Callable[[Any, Values], bool]
    message: str
    absent_too: bool = False
    always: bool = False


@dataclass(frozen=True)
class ContractField:
    """A field, its default, and its rules in the order in which they are asked."""

    name: str
    default: Any
    help: str
    schema: dict[str, Any]
    rules: tuple[Rule, ...] = field(default=())


def _is_integer(value: Any, _: Values) -> bool:
    return type(value) is int


def _is_float(value: Any, _: Values) -> bool:
    return type(value) is float


def _is_boolean(value: Any, _: Values) -> bool:
    return type(value) is bool


def _is_temperature(value: Any, _: Values) -> bool:
    return type(value) in (int, float) and 0 < value <= MAX_TEMPERATURE


def _is_list_of_strings(value: Any, _: Values) -> bool:
    return isinstance(value, list) and all(isinstance(prompt, str) for prompt in value)


def _always(holds: Callable[[Any, Values], bool], message: str) -> Rule:
    return Rule(holds, message, always=True)


def _switch(name: str, help_text: str, *more: Rule) -> ContractField:
    rule = Rule(_is_boolean, f"{name} must be a boolean value")
    return ContractField(name, False, help_text, {"type": "boolean"}, (rule, *more))


def _fraction(name: str, help_text: str, *rules: Rule) -> ContractField:
    return ContractField(name, 0.0, help_text, {"type": "number"}, rules)


_PROMPTS = "prompts is not a list of strings"
_TEMPERATURE = "temperature must be a positive number less than or equal to 100.0"
_TOP_K = "top_k must be equal to or greater than 0 and less than or equal to 1000"

CONTRACT: tuple[ContractField, ...] = (
    ContractField(
        "prompts",
        None,
        "texts to go on from",
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        (
            _always(_is_list_of_strings, _PROMPTS),
            _always(lambda v, _: len(v) > 0, "prompts is empty"),
            _always(
                lambda v, _: len(v) <= MAX_PROMPTS, f"Maximum number of prompts is {MAX_PROMPTS}"
            ),
        ),
    ),
    ContractField(
        "tokens_to_generate",
        64,
        "tokens of the answer, at most; 0 with logprobs scores the prompts",
        {"type": "integer", "minimum": 0},
        (
            Rule(_is_integer, "tokens_to_generate must be an integer greater than 0"),
            Rule(
                lambda v, _: v >= 0,
                "tokens_to_generate must be an integer greater than or equal to 0",
            ),
        ),
    ),
    _switch(
        "logprobs",
        "tell the log probability of every token, those of the prompt too",
        Rule(
            lambda v, seen: v or seen["tokens_to_generate"] > 0,
            "tokens_to_generate=0 implies logprobs should be True",
            absent_too=True,
        ),
    ),
    ContractField(
        "temperature",
        1.0,
        "divides the scores before a token is drawn",
        {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TEMPERATURE},
        (Rule(_is_temperature, _TEMPERATURE),),
    ),
    ContractField(
        "top_k",
        0,
        "draw among the so many most likely tokens; 1: the most likely; 0: all",
        {"type": "integer", "minimum": 0, "maximum": MAX_TOP_K},
        (
            Rule(
                _is_integer,
                "top_k must be an integer equal to or greater than 0 and less than or equal to "
                "1000",
            ),
            Rule(lambda v, _: 0 <= v <= MAX_TOP_K, _TOP_K),
        ),
    ),
    _fraction(
        "top_p",
        "draw among the most likely tokens that together have this probability; 0: all",
        Rule(_is_float, "top_p must be a positive float less than or equal to 1.0"),
        Rule(
            lambda v, seen: not (v > 0 and seen["top_k"] > 0),
            "cannot set both top-k and top-p samplings.",
        ),
        Rule(lambda v, _: 0 <= v <= 1, "top_p must be less than or equal to 1.0"),
    ),
    _fraction(
        "top_p_decay",
        "after each token top_p is multiplied by this; 0: it stays",
        Rule(_is_float, "top_p_decay must be a positive float less than or equal to 1.0"),
        Rule(lambda _, seen: seen["top_p"] != 0, "top_p_decay cannot be set without top_p"),
        Rule(lambda v, _: 0 <= v <= 1, "top_p_decay must be less than or equal to 1.0"),
    ),
    _fraction(
        "top_p_bound",
        "top_p does not decay below this",
        Rule(_is_float, "top_p_bound must be a positive float less than or equal to top_p"),
        Rule(lambda _, seen: seen["top_p"] != 0, "top_p_bound cannot be set without top_p"),
        Rule(
            lambda v, seen: 0 < v <= seen["top_p"],
            "top_p_bound must be greater than 0 and less than top_p",
        ),
    ),
    _switch(
        "add_BOS",
        "put the end-of-document token before each prompt",
        Rule(
            lambda v, seen: v or all(seen["prompts"]),
            "Empty prompts require add_BOS=true",
            absent_too=True,
        ),
    ),
    _switch("stop_on_double_eol", "end an answer after an empty line"),
    _switch("stop_on_eol", "end an answer after a line"),
    _switch("prevent_newline_after_colon", "never choose a new line right after a colon"),
    ContractField(
        "random_seed",
        -1,
        "the same seed gives the same answers",
        {"type": "integer", "minimum": 0},
        (
            Rule(_is_integer, "random_seed must be integer"),
            Rule(lambda v, _: v >= 0, "random_seed must be a positive integer"),
        ),
    ),
    _switch("no_log", "do not write this request to the server's log"),
    ContractField(
        "beam_width",
        None,
        "search for the so many best answers instead of drawing",
        {"type": "integer", "minimum": 1},
        (
            Rule(_is_integer, "beam_width must be integer"),
            Rule(lambda v, _: v >= 1, "beam_width must be an integer > 1"),
            Rule(
                lambda _, seen: len(seen["prompts"]) == 1,
                "When doing beam_search, batch size must be 1",
            ),
        ),
    ),
    ContractField(
        "stop_token",
        50256,
        "of beam search: ends an answer; absent: the tokenizer's end of document",
        {"type": "integer"},
        (Rule(_is_integer, "stop_token must be an integer"),),
    ),
    ContractField(
        "length_penalty",
        1.0,
        "of beam search: a score is divided by the length to this power",
        {"type": "number", "minimum": -MOST_LENGTH_PENALTY, "maximum": MOST_LENGTH_PENALTY},
        (
            Rule(_is_float, "length_penalty must be a float"),
            Rule(
                lambda v, _: abs(v) <= MOST_LENGTH_PENALTY,
                f"length_penalty must be a float from {-MOST_LENGTH_PENALTY:g} to "
                f"{MOST_LENGTH_PENALTY:g}",
            ),
        ),
    ),
)

# (name, whether it must be there, message), asked before anything else.
_NAMES = (
    ("prompts", True, "prompts argument required"),
    ("max_len", False, "max_len is no longer used.  Replace with tokens_to_generate"),
    ("sentences", False, "sentences is no longer used.  Replace with prompts"),
)


def read_contract(body: Mapping[str, Any]) -> dict[str, Any]:
    """Every field's value. Fields that Megatron does not know are passed over, as it does.

    Raises:
        ApiError: the first rule that does not hold.
    """
    for name, wanted, message in _NAMES:
        if (name in body) != wanted:
            raise ApiError(400, message, field=name)
    values: dict[str, Any] = {}
    for each in CONTRACT:
        given = each.name in body
        value = values[each.name] = body[each.name] if given else each.default
        for rule in each.rules:
            if (given or rule.absent_too) and not rule.holds(value, values):
                raise ApiError(400, rule.message, field=each.name, always=rule.always)
    return values


def describe_contract() -> dict[str, Any]:
    """The JSON schema of a request."""
    properties = {}
    for each in CONTRACT:
        default = {} if each.default is None else {"default": each.default}
        properties[each.name] = {**each.schema, **default, "description": each.help}
    return {"type": "object", "properties": properties, "required": ["prompts"]}
