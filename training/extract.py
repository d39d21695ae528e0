"""Questions whose answer is JSON: fields and rows of a picture, under names or a schema that the question gives."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from training.keys import Absent, absent, absent_in_rows, field_names, plural, row_field_names, rows_keys
from training.off_topic import OFF_TOPIC_KEYS
from training.records import Field, Record, number_field, spoken, text_field, yes_field
from training.samples import Picture, Question
from training.schemas import Schema, empty, optional
from training.sheet import Scene, listed

MOST_LETTERS = 220  # of an answer; nearly each letter is a token
_MOST_OF_BOTH = 400  # letters of a question and its answer: what a batch has room for
_OBJECTS = "a list of objects with "
_NUMBER = re.compile(r"(0|[1-9][0-9]{0,8})([.][0-9]{1,2})?")
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
_SCHEMA = (
    "Answer with JSON that fits this schema: {schema}",
    "Extract the data with this JSON schema: {schema}",
    "Use this JSON schema: {schema}",
    "Fill this schema from the picture: {schema}",
)
_EXAMPLE = ("Answer in this format: {example}", "Fill in this JSON: {example}", "Return JSON like {example}")
_AS_JSON = (
    "Answer in JSON with {names}.",
    "Answer as JSON with the keys {names}.",
    "Give JSON with {names}.",
    "Answer in this format: {example}",
)
_EXTREMES = {  # the most, the least; by what the picture is
    "chart": (
        ("Which bar is the largest?", "Which bar is the highest?", "What is the largest bar?", "Find the tallest bar."),
        (
            "Which bar is the smallest?",
            "Which bar is the lowest?",
            "What is the smallest bar?",
            "Find the shortest bar.",
        ),
    ),
    "receipt": (
        ("Which item is the most expensive?", "What is the most expensive item?", "Which item costs the most?"),
        ("Which item is the cheapest?", "What is the cheapest item?", "Which item costs the least?"),
    ),
    "table": (
        ("Which row has the largest {}?", "Which has the highest {}?", "Which has the most {}?"),
        ("Which row has the smallest {}?", "Which has the lowest {}?", "Which has the least {}?"),
    ),
}


class Part(NamedTuple):
    """A value of an answer, with its schema."""

    value: str  # as JSON
    schema: Schema
    example: str  # the value with types in the place of what is read: {"total": "number"}


class Member(NamedTuple):
    """A key of an object and what stands under it."""

    key: str
    part: Part
    about: str = ""  # what the value is like, where the key alone does not say it


def ask_json(rng: Random, record: Record) -> Question | None:
    """A question about the record, or None where its answer would be too long."""
    kind = rng.random()
    if kind < 0.12:
        return _question(rng.choice(_WHOLE).format(noun=record.noun), _usual(record))
    if kind < 0.24:
        return _asked_for(rng, record)
    is_optional = rng.random() < 0.3
    if kind < 0.52:
        part = _top(_chosen(rng, record, 4, is_free=True, is_optional=is_optional), is_bare=rng.random() < 0.2)
        schema = _written(rng, part.schema, is_optional=is_optional)
        return _question(rng.choice((*_WHOLE, *_ANY)).format(noun=record.noun), part, schema)
    if kind < 0.8:
        return _named(rng, record)
    part = _top(_chosen(rng, record, 3, is_free=True, is_optional=is_optional), is_bare=rng.random() < 0.2)
    if rng.random() < 0.5 and "null" not in part.value:
        return _question(rng.choice(_EXAMPLE).format(example=part.example), part)
    schema = _written(rng, part.schema, is_optional=is_optional)
    if rng.random() < 0.5:
        schema.pop("required", None)
    return _question(rng.choice(_SCHEMA).format(schema=json.dumps(schema)), part)


def _question(text: str, part: Part, schema: Schema | None = None) -> Question | None:
    if len(part.value) > MOST_LETTERS or len(part.value) + len(text) > _MOST_OF_BOTH:
        return None
    return Question("extract", text, part.value, (part.value,), schema=schema)


def _written(rng: Random, schema: Schema, *, is_optional: bool) -> Schema:
    return optional(rng, schema) if is_optional else schema


def _named(rng: Random, record: Record) -> Question | None:
    """The question names the keys, with or without quotation marks."""
    members = _chosen(rng, record, 4, is_free=False, is_optional=True)
    mark = '"' if rng.random() < 0.4 else ""
    if len(members) == 1 and members[0].about.startswith(_OBJECTS):
        names = members[0].about.removeprefix(_OBJECTS)
        text = rng.choice(_ROWS).format(rows=record.rows_names[0], names=names)
        return _question(text, _top(members, is_bare=True))
    names = listed([f"{mark}{one.key}{mark}" + (f" ({one.about})" if one.about else "") for one in members])
    return _question(rng.choice(_FIELDS).format(noun=record.noun, names=names), _top(members))


def _asked_for(rng: Random, record: Record) -> Question | None:
    """A question about one thing, whose answer is put under keys."""
    if record.rows and (not record.fields or rng.random() < 0.6):
        return _asked_for_row(rng, record)
    index = rng.randrange(len(record.fields))
    field, names = record.fields[index], field_names(record)[index]
    if field.kind == "boolean":
        return None
    key = rng.choice(names)
    noun = spoken(key)
    text = rng.choice((f"What is the {noun}?", f"Read the {noun}.", f"Find the {noun}.", f"Give me the {noun}."))
    part = _object([Member(key if rng.random() < 0.5 else names[0], _single(rng, field))])
    return _in_json(rng, text, part)


def _asked_for_row(rng: Random, record: Record) -> Question | None:
    """The row that a question names, or that has the most or least of something."""
    labels = [row[0].value for row in record.rows]
    columns = [i for i, field in enumerate(record.rows[0]) if field.kind in ("number", "integer")]
    if not columns or len(set(labels)) < len(labels):
        return None
    column = rng.choice(columns)
    values = [float(row[column].value) for row in record.rows]
    if rng.random() < 0.35:
        index = rng.randrange(len(values))
        name = json.loads(labels[index])
        text = rng.choice(("Give {} as JSON.", "Read {}.", "What about {}?", "Extract the data of {}.")).format(name)
    else:
        is_most = rng.random() < 0.6
        ordered = sorted(values, reverse=is_most)
        if len(values) < 2 or abs(ordered[0] - ordered[1]) * 15 < max(values):
            return None
        index = values.index(ordered[0])
        text = rng.choice(_EXTREMES[record.noun][0 if is_most else 1]).format(record.rows[0][column].names[-1])
    row = record.rows[index]
    order = [0, column] if rng.random() < 0.8 else [column, 0]
    names = row_field_names(record)
    keys = _keys(rng, [names[i] for i in order], is_free=True)
    return _in_json(rng, text, _object([Member(k, _single(rng, row[i])) for k, i in zip(keys, order, strict=True)]))


def _in_json(rng: Random, text: str, part: Part) -> Question | None:
    """Mostly held to the schema, else asked for in words."""
    if rng.random() < 0.7:
        return _question(text, part, _written(rng, part.schema, is_optional=rng.random() < 0.2))
    names = listed(list(part.schema["properties"]))
    return _question(f"{text} {rng.choice(_AS_JSON).format(names=names, example=part.example)}", part)


class AnswerScene:
    """Another scene, some of whose plain questions are answered in JSON."""

    def __init__(self, scene: Scene) -> None:
        self._scene, self.skills, self.pictures = scene, scene.skills, scene.pictures
        self._plain = [skill for skill in scene.skills if skill not in ("extract", "caption", "json")]

    skills: tuple[str, ...]
    pictures: tuple[Picture, ...]

    def ask(self, rng: Random, skill: str) -> Question | None:
        if skill != "extract" or rng.random() > 0.12:
            return self._scene.ask(rng, skill)
        plain = self._scene.ask(rng, rng.choice(self._plain))
        return plain and _answered(rng, plain)


def _answered(rng: Random, plain: Question) -> Question | None:
    """The question with its one key as the value of an object."""
    if len(plain.keys) != 1 or plain.schema or plain.tools or plain.keys == OFF_TOPIC_KEYS:
        return None
    (said,) = plain.keys
    if " is " in said:  # part of a sentence, no answer by itself
        return None
    names: tuple[str, ...] = ("answer", "answer", "answer", "result", "response")
    if said in ("yes", "no") and rng.random() < 0.7:
        field = yes_field(names, said == "yes")
    elif _NUMBER.fullmatch(said):
        field = number_field(("answer", "count", "number") if "ow many" in plain.text else (*names, "value"), said)
    elif said in plain.answer or said in ("yes", "no"):
        field = text_field(names, said)
    else:
        return None
    return _in_json(rng, plain.text, _object([Member(rng.choice(field.names), _single(rng, field))]))


# --- what is asked for --------------------------------------------------------------------------------------------


def _usual(record: Record) -> Part:
    """All of the record under its usual names, in the order it is read."""
    members = [Member(field.names[0], _single(None, field)) for field in record.fields]
    if record.rows:
        keys = [field.names[0] for field in record.rows[0]]
        at = len(members) if record.rows_at is None else record.rows_at
        members.insert(at, Member(record.rows_names[0], _rows(None, keys, record.rows)))
    return _top(members, is_bare=not record.fields)


def _chosen(rng: Random, record: Record, most: int, *, is_free: bool, is_optional: bool) -> list[Member]:
    """Some fields in any order, or rows or columns, or both: in the order of keys."""
    has_rows = bool(record.rows) and (not record.fields or rng.random() < 0.55)
    has_fields = bool(record.fields) and (not has_rows or rng.random() < 0.6)
    count = rng.randint(1, 3 if has_rows else most)
    names = field_names(record)
    some = rng.sample(range(len(names)), min(count, len(names))) if has_fields else []
    if rng.random() < 0.5:
        some.sort()
    keys = _keys(rng, [names[i] for i in some], is_free=is_free)
    members = [Member(key, _single(rng, record.fields[i])) for key, i in zip(keys, some, strict=True)]
    if rng.random() < (0.3 if is_optional and is_free else 0.08):
        _add_absent(rng, members, absent(record), is_optional=is_optional)
    if has_rows:
        more = _columns(rng, record, keys) if rng.random() < 0.3 else []
        more = more or [_row_member(rng, record, keys, is_free=is_free, is_optional=is_optional)]
        at = rng.randint(0, len(members))
        members[at:at] = more
    return members


def _row_member(rng: Random, record: Record, taken: list[str], *, is_free: bool, is_optional: bool) -> Member:
    """All rows with some of their fields."""
    width = len(record.rows[0])
    columns = sorted(rng.sample(range(width), rng.randint(min(2, width), min(3, width))))
    names = row_field_names(record)
    keys = _keys(rng, [names[i] for i in columns], is_free=is_free)
    rows = [[_single(rng, row[i]) for i in columns] for row in record.rows]
    kinds = [part.schema for part in rows[0]]
    extra: list[Member] = []
    if rng.random() < (0.15 if is_optional and is_free else 0.04):
        _add_absent(rng, extra, absent_in_rows(record), is_optional=is_optional)
    objects = [
        _object([*(Member(k, p._replace(schema=s)) for k, p, s in zip(keys, row, kinds, strict=True)), *extra])
        for row in rows
    ]
    about = _OBJECTS + listed([*keys, *(one.key for one in extra)])
    return Member(_rows_key(rng, record, taken), _array(objects), about)


def _columns(rng: Random, record: Record, taken: list[str]) -> list[Member]:
    """One or two columns as lists of plain values. Words that occur twice are left out: a set of them, or all?"""
    names, found = row_field_names(record), []
    for index in sorted(rng.sample(range(len(names)), rng.randint(1, min(2, len(names))))):
        fields = [row[index] for row in record.rows]
        is_text = fields[0].kind == "string"
        if is_text and len({field.value for field in fields}) < len(fields):
            return []
        key = plural(rng.choice(names[index][:2]))
        if index == 0 and rng.random() < 0.5:
            key = _rows_key(rng, record, taken)
        about = "a list of strings" if is_text else "a list of numbers"
        found.append(Member(key, _array([_single(None, field) for field in fields]), about))
    keys = [*taken, *(one.key for one in found)]
    return found if len(set(keys)) == len(keys) else []


def _rows_key(rng: Random, record: Record, taken: list[str]) -> str:
    names = rows_keys(record)
    first = names[:2] if rng.random() < 0.6 else names
    return next((name for name in (*rng.sample(first, len(first)), *names) if name not in taken), "rows")


def _add_absent(rng: Random, members: list[Member], some: list[Absent], *, is_optional: bool) -> None:
    """One or two keys, anywhere, of which the picture says nothing."""
    keys = [member.key.lower() for member in members]
    some = [one for one in some if one.name not in keys]
    for one in rng.sample(some, min(len(some), rng.choice((1, 1, 2)))):
        part = Part(empty(one.kind, is_optional=is_optional), {"type": one.kind}, json.dumps(one.kind))
        members.insert(rng.randint(0, len(members)), Member(one.name, part))


def _keys(rng: Random, names: list[tuple[str, ...]], *, is_free: bool) -> list[str]:
    """A key for each field, no two the same; `is_free` ones are also written in other ways."""
    keys: list[str] = []
    style = rng.random() if is_free else 1.0
    for some in names:
        name = some[0] if rng.random() < 0.45 else rng.choice(some)
        if style < 0.08:
            name = name.replace("_", " ").title()
        elif style < 0.2:
            head, *tail = name.split("_")
            name = head + "".join(part.capitalize() for part in tail)
        keys.append(name if name not in keys else f"{name}_{len(keys) + 1}")
    return keys


# --- values and their schemas -------------------------------------------------------------------------------------


def _single(rng: Random | None, field: Field) -> Part:
    """A whole number may be held to be any number."""
    kind = "number" if rng and field.kind == "integer" and rng.random() < 0.3 else field.kind
    return Part(field.value, {"type": kind}, json.dumps(kind))


def _object(members: Sequence[Member]) -> Part:
    value, example = (
        "{" + ", ".join(f'"{key}": {text}' for key, text in pairs) + "}"
        for pairs in ([(m.key, m.part.value) for m in members], [(m.key, m.part.example) for m in members])
    )
    properties = {member.key: member.part.schema for member in members}
    return Part(value, {"type": "object", "properties": properties, "required": list(properties)}, example)


def _array(parts: Sequence[Part]) -> Part:
    first = parts[0]
    return Part(
        f"[{', '.join(p.value for p in parts)}]", {"type": "array", "items": first.schema}, f"[{first.example}]"
    )


def _rows(rng: Random | None, keys: Sequence[str], rows: Sequence[Sequence[Field]]) -> Part:
    return _array([_object([Member(k, _single(rng, f)) for k, f in zip(keys, row, strict=True)]) for row in rows])


def _top(members: list[Member], *, is_bare: bool = False) -> Part:
    """The whole answer; a single list may stand `is_bare`, without an object around it."""
    if is_bare and len(members) == 1 and members[0].part.value.startswith("["):
        return members[0].part
    return _object(members)
