"""Layer patterns in the notation of Megatron Core's flags: `[1,0,1]`, `([0]*1+[1]*3)*2`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from megatron.config.fields import MAX_LAYERS

_LIST = r"\[((?:[01](?:,[01])*)?)\]"
_IN_PARENTHESES = re.compile(rf"\({_LIST}\)")
_REPEATED = re.compile(rf"{_LIST}\*([0-9]{{1,5}})")
_SUM = re.compile(rf"{_LIST}\+{_LIST}(?!\*)")
_MAX_PASSES = 32  # each pass halves the number of sums and removes innermost parentheses


def read_pattern(text: str, layers: int, *, others: str = "a number") -> tuple[bool, ...]:
    """Return whether a pattern selects each layer.

    Args:
        text: Lists of ones and zeros that `+`, `*` and parentheses combine as in Python, without
            spaces.
        layers: The number of layers of the model.
        others: Other values that the flag accepts, for the message.

    Raises:
        ValueError: The text is not such a pattern, or has the wrong number of entries.
    """

    def repeat(match: re.Match[str]) -> str:
        entries, times = match[1].split(",") if match[1] else [], int(match[2])
        if len(entries) * times > MAX_LAYERS:  # checked before the list is built
            raise ValueError(f"expected at most {MAX_LAYERS} layers")
        return f"[{','.join(entries * times)}]"

    for _ in range(_MAX_PASSES):
        if len(text) > 4 * MAX_LAYERS:
            raise ValueError(f"expected at most {MAX_LAYERS} layers")
        before = text
        text = _IN_PARENTHESES.sub(r"[\1]", text)
        text = _REPEATED.sub(repeat, text)
        text = _SUM.sub(lambda match: f"[{','.join(filter(None, match.groups()))}]", text)
        if text == before:
            break
    if not re.fullmatch(_LIST, text):
        raise ValueError(f"expected {others}, or a pattern such as ([0]*1+[1]*3)")
    entries = text[1:-1].replace(",", "")
    if len(entries) != layers:
        raise ValueError(
            f"it names {len(entries)} layer{'s' * (len(entries) != 1)}, but the model has "
            f"{layers}: give an entry for each"
        )
    return tuple(entry == "1" for entry in entries)


def layer_pattern(chosen: Iterable[bool]) -> str:
    """Return the text of a flag that chooses layers, such as "[1,0,1]"."""
    return f"[{','.join(str(int(is_chosen)) for is_chosen in chosen)}]"
