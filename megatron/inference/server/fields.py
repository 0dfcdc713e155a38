"""What a request may hold, as tables: they are checked against and described in OpenAPI."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.fields import suggestion
from megatron.inference.server.errors import ApiError

JsonSchema = dict[str, Any]
_SHOWN = 64  # characters of a name that is not ours
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}


@dataclass(frozen=True)
class Field:
    """One field of a request.

    Attributes:
        name: in the JSON object.
        kind: int, float (integers too), bool or str; dict or list: `schema` says what, and the
            endpoint itself looks into it.
        help: what it does.
        default: where it is absent or null.
        least, most: bounds of a number, inclusive.
        required: it may not be absent or null.
        schema: for OpenAPI, where kind and bounds do not say it all.
    """

    name: str
    kind: type
    help: str
    default: Any = None
    least: float | None = None
    most: float | None = None
    required: bool = False
    schema: JsonSchema | None = None

    def describe(self) -> JsonSchema:
        """Its JSON schema."""
        shape: JsonSchema = (
            dict(self.schema) if self.schema is not None else {"type": _TYPES[self.kind]}
        )
        if self.least is not None:
            shape["minimum"] = self.least
        if self.most is not None:
            shape["maximum"] = self.most
        if self.default is not None:
            shape["default"] = self.default
        return {**shape, "description": self.help}

    def read(self, value: Any) -> Any:
        """A value of its kind and within its bounds.

        Raises:
            ApiError: 400.
        """
        if self.schema is not None:
            return value
        # bool is a subclass of int: its values are no numbers here.
        is_number = type(value) is int or (type(value) is float and self.kind is float)
        if not (is_number if self.kind in (int, float) else type(value) is self.kind):
            raise ApiError(400, f"{self.name}: give {_WORDS[self.kind]}", field=self.name)
        if is_number:
            self._check_range(value)
        return self.kind(value)

    def _check_range(self, value: float) -> None:
        low = -math.inf if self.least is None else self.least
        high = math.inf if self.most is None else self.most
        if not low <= value <= high:
            raise ApiError(400, f"{self.name} {value}: give {self._range()}", field=self.name)

    def _range(self) -> str:
        low = None if self.least is None else _plain(self.least)
        high = None if self.most is None else _plain(self.most)
        if low is None or high is None:
            return f"{low} or more" if low is not None else f"at most {high}"
        return f"{low} to {high}"


def _plain(bound: float) -> str:
    """A seed's too: no 9.22337e+18."""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


@dataclass(frozen=True)
class Unsupported:
    """A field of OpenAI's that is refused by name.

    Attributes:
        harmless: values that ask for nothing, which pass; null always does.
        reason: what is missing and what to do.
    """

    name: str
    reason: str
    harmless: tuple[Any, ...] = ()


def read_fields(
    body: Mapping[str, Any], fields: Sequence[Field], unsupported: Sequence[Unsupported]
) -> dict[str, Any]:
    """Every field's value, defaults filled in.

    Raises:
        ApiError: 400, about the first mistake.
    """
    known = {field.name: field for field in fields}
    refused = {field.name: field for field in unsupported}
    for name, value in body.items():
        if name in refused and value is not None and value not in refused[name].harmless:
            raise ApiError(400, f"{name} is not supported: {refused[name].reason}", field=name)
        if name not in known and name not in refused:
            shown = name[:_SHOWN]
            hint = suggestion(shown, known)
            raise ApiError(400, f"there is no field {shown!r}{hint}", field=shown)
    values = {}
    for field in fields:
        given = body.get(field.name)
        if given is None and field.required:
            raise ApiError(400, f"{field.name} is required", field=field.name)
        values[field.name] = field.default if given is None else field.read(given)
    return values


def schema_of(fields: Sequence[Field]) -> JsonSchema:
    """The JSON schema of a request."""
    return {
        "type": "object",
        "properties": {field.name: field.describe() for field in fields},
        "required": [field.name for field in fields if field.required],
    }
