"""Questions whose answer is JSON: fields and rows of a picture, under names or a schema that the question gives."""

from __future__ import annotations

import json
from random import Random
from typing import Any, NamedTuple

from training.records import Field, Record
from training.samples import Question
from training.sheet import listed

MOST_LETTERS = 140  # of an answer; nearly each letter is a token, and an answer should end within 128
_MISSING = ("email", "tip", "color", "website", "height", "country", "tax", "notes", "phone", "gender")
_WHOLE = (
    "Extract the data as JSON.",
    "Extract all data as JSON.",
    "Give the {noun} as JSON.",
    "Return the {noun} as JSON.",
    "Convert the {noun} to JSON.",
    "Read the {noun} and answer in JSON.",
    "Turn this {noun} into JSON.",
)
_ANY = (  # what people ask who leave the rest to the schema
    "Extract the information.",
    "Extract the fields.",
    "Fill in the fields.",
    "Read the {noun}.",
    "What does the {noun} say?",
    "Describe the picture.",
    "What is in the picture?",
    "What do you see?",
)
_FIELDS = (
    "Give the {noun} as JSON with the fields {names}.",
    "Return JSON with {names}.",
    "Extract {names} as JSON.",
    "Extract the fields {names} from the {noun} as JSON.",
    "Answer in JSON with the keys {names}.",
    "Read {names} and answer as JSON.",
    "Give me {names} as a JSON object.",
)
_ROWS = (
    "List the {rows} as JSON with {names}.",
    "Give all {rows} as a JSON list with the fields {names}.",
    "Return a JSON array of the {rows} with {names}.",
    "Extract the {rows} as JSON: {names}.",
)
_BOTH = (
    "Give the {noun} as JSON with the fields {names} and a list {key} with {row_names}.",
    "Extract {names} and {key}, a list of objects with {row_names}, as JSON.",
)
_SCHEMA = (
    "Answer with JSON that fits this schema: {schema}",
    "Extract the data with this JSON schema: {schema}",
    "Use this JSON schema: {schema}",
    "Fill this schema from the picture: {schema}",
)
_EXAMPLE = ("Answer in this format: {example}", "Fill in this JSON: {example}", "Return JSON like {example}")


class Wanted(NamedTuple):
    """The object or list that an answer is."""

    fields: tuple[tuple[str, Field], ...] = ()  # keys and values
    rows_key: str = ""  # of the list of rows; empty: the list is the answer, or there is none
    row_keys: tuple[str, ...] = ()
    rows: tuple[tuple[Field, ...], ...] = ()

    def answer(self) -> str:
        listed_rows = ", ".join(_object(zip(self.row_keys, row, strict=True)) for row in self.rows)
        if self.rows and not self.rows_key:
            return f"[{listed_rows}]"
        more = [(self.rows_key, Field((), f"[{listed_rows}]"))] if self.rows else []
        return _object([*self.fields, *more])

    def schema(self) -> dict[str, Any]:
        rows = {"type": "array", "items": _schema(zip(self.row_keys, self.rows[0], strict=True))} if self.rows else {}
        if self.rows and not self.rows_key:
            return rows
        found = _schema(self.fields)
        if self.rows:
            found["properties"][self.rows_key] = rows
            found["required"].append(self.rows_key)
        return found

    def example(self) -> str:
        """The answer with types in the place of values: {"total": "number"}."""
        rows = tuple(Field(field.names, json.dumps(field.kind)) for field in (self.rows or ((),))[0])
        fields = tuple((key, Field(field.names, json.dumps(field.kind))) for key, field in self.fields)
        return self._replace(fields=fields, rows=(rows,) if rows else ()).answer()


def ask_json(rng: Random, record: Record) -> Question | None:
    """A question about the record, or None where its answer would be too long."""
    kind = rng.random()
    if kind < 0.15:
        wanted = _usual(record)
        return _question(rng.choice(_WHOLE).format(noun=record.noun), wanted)
    if kind < 0.4:
        wanted = _chosen(rng, record, 4, is_free=True)
        return _question(rng.choice((*_WHOLE, *_ANY)).format(noun=record.noun), wanted, wanted.schema())
    if kind < 0.75:
        return _named(rng, record)
    wanted = _chosen(rng, record, 3, is_free=True)
    if rng.random() < 0.5:
        return _question(rng.choice(_EXAMPLE).format(example=wanted.example()), wanted)
    schema = wanted.schema()
    if rng.random() < 0.5:
        schema.pop("required", None)
    return _question(rng.choice(_SCHEMA).format(schema=json.dumps(schema)), wanted)


def _question(text: str, wanted: Wanted, schema: dict[str, Any] | None = None) -> Question | None:
    answer = wanted.answer()
    if len(answer) > MOST_LETTERS:
        return None
    return Question("extract", text, answer, (answer,), schema=schema)


def _named(rng: Random, record: Record) -> Question | None:
    """The question names the keys, with or without quotation marks."""
    wanted = _chosen(rng, record, 4, is_free=False)
    if not wanted.rows and rng.random() < 0.06:
        taken = {name for field in record.fields for name in field.names}
        more = rng.choice([name for name in _MISSING if name not in taken])
        wanted = wanted._replace(fields=(*wanted.fields, (more, Field((more,), "null"))))
    mark = '"' if rng.random() < 0.4 else ""
    names = listed([f"{mark}{key}{mark}" for key, _ in wanted.fields]) if wanted.fields else ""
    row_names = listed([f"{mark}{key}{mark}" for key in wanted.row_keys]) if wanted.rows else ""
    if not wanted.rows:
        text = rng.choice(_FIELDS).format(noun=record.noun, names=names)
    elif not wanted.fields:
        wanted = wanted._replace(rows_key="")
        text = rng.choice(_ROWS).format(rows=record.rows_names[0], names=row_names)
    else:
        key = f"{mark}{wanted.rows_key}{mark}"
        text = rng.choice(_BOTH).format(noun=record.noun, names=names, key=key, row_names=row_names)
    return _question(text, wanted)


def _usual(record: Record) -> Wanted:
    """All of the record under its usual names."""
    fields = tuple((field.names[0], field) for field in record.fields)
    if not record.rows:
        return Wanted(fields)
    keys = tuple(field.names[0] for field in record.rows[0])
    return Wanted(fields, record.rows_names[0] if fields else "", keys, record.rows)


def _chosen(rng: Random, record: Record, most: int, *, is_free: bool) -> Wanted:
    """Some fields in any order, or the rows with some of their fields, or both."""
    has_rows = bool(record.rows) and (not record.fields or rng.random() < 0.5)
    has_fields = bool(record.fields) and (not has_rows or rng.random() < 0.4)
    count = rng.randint(1, 2 if has_rows else most)
    some = rng.sample(record.fields, min(count, len(record.fields))) if has_fields else []
    keys = _keys(rng, some, is_free=is_free)
    fields = tuple(zip(keys, some, strict=True))
    if not has_rows:
        return Wanted(fields)
    width = len(record.rows[0])
    columns = sorted(rng.sample(range(width), rng.randint(min(2, width), min(3, width))))
    rows = tuple(tuple(row[column] for column in columns) for row in record.rows)
    row_keys = tuple(_keys(rng, list(rows[0]), is_free=is_free))
    rows_key = next((n for n in rng.sample(record.rows_names, len(record.rows_names)) if n not in keys), "rows")
    if is_free and not fields and rng.random() < 0.2:
        rows_key = ""
    return Wanted(fields, rows_key, row_keys, rows)


def _keys(rng: Random, fields: list[Field], *, is_free: bool) -> list[str]:
    """A key for each field, no two the same; `is_free` ones are also written in other ways."""
    keys: list[str] = []
    style = rng.random() if is_free else 1.0
    for field in fields:
        name = field.names[0] if rng.random() < 0.6 else rng.choice(field.names)
        if style < 0.1:
            name = name.capitalize()
        elif style < 0.2:
            head, *tail = name.split("_")
            name = head + "".join(part.capitalize() for part in tail)
        keys.append(name if name not in keys else f"{name}_{len(keys) + 1}")
    return keys


def _object(pairs: Any) -> str:
    return "{" + ", ".join(f'"{key}": {field.value}' for key, field in pairs) + "}"


def _schema(pairs: Any) -> dict[str, Any]:
    kinds = {key: {"type": field.kind} for key, field in pairs}
    return {"type": "object", "properties": kinds, "required": list(kinds)}
