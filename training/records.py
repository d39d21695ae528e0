"""What a scene tells as data: fields and rows, with the names that JSON keys may have for them."""

from __future__ import annotations

import json
from typing import NamedTuple


class Field(NamedTuple):
    """One value."""

    names: tuple[str, ...]  # keys it may go by, the usual one first
    value: str  # as JSON, with the digits as they are drawn: `12.50`, `"Rome"`, `true`

    @property
    def kind(self) -> str:
        """Its type in a JSON schema."""
        if self.value.startswith('"'):
            return "string"
        if self.value in ("true", "false"):
            return "boolean"
        return "number" if "." in self.value else "integer"


class Record(NamedTuple):
    """The data of a picture, in the order it is read."""

    noun: str  # what the picture is: "receipt"
    fields: tuple[Field, ...] = ()
    rows: tuple[tuple[Field, ...], ...] = ()  # all rows have the same fields
    rows_names: tuple[str, ...] = ("rows",)  # keys that the list of rows may go by; also what a question calls them
    rows_at: int | None = None  # how many fields are read before the rows; None: all


def text_field(names: tuple[str, ...], text: str) -> Field:
    return Field(names, json.dumps(text))


def number_field(names: tuple[str, ...], text: str) -> Field:
    """A number as it is drawn."""
    return Field(names, text)


def yes_field(names: tuple[str, ...], is_so: bool) -> Field:
    return Field(names, "true" if is_so else "false")


def spoken(name: str) -> str:
    """A key as a word of a sentence."""
    return {"from": "sender", "to": "recipient"}.get(name, name.replace("_", " "))
