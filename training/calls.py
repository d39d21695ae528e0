"""Scenes with tools: the answer is a call whose arguments are read from the picture, or a plain one."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import NamedTuple, Protocol

from training import chat
from training.records import Field, Record, spoken
from training.samples import Picture, Question, Tool
from training.sheet import Scene, listed
from training.talk import TalkScene
from training.tool_names import ANY_REQUEST, any_name, any_tool, idle_tool, text_tool

MOST_LETTERS = 150  # of a call; nearly each letter is a token
_MOST_TOOL_LETTERS = 300  # of all tools that are shown
_SAVE = ("save", "record", "store", "send", "add", "log", "submit")
_LOOK_UP = (  # what a value of the picture is good for elsewhere: name, keys it takes, ways to ask for it
    (
        "get_weather",
        "Get the weather of a city.",
        "city",
        ("What is the weather in this city?", "Get the weather there."),
    ),
    ("call_phone", "Call a phone number.", "phone", ("Call the phone number.", "Please call them.")),
    (
        "convert_money",
        "Convert an amount.",
        "amount",
        ("Convert the amount to dollars.", "What is the amount in euros?"),
    ),
    ("convert_money", "Convert an amount.", "total", ("Convert the total to dollars.", "What is the total in euros?")),
    ("find_person", "Find a person by name.", "name", ("Find this person.", "Look up the person.")),
    ("add_event", "Add a date to the calendar.", "date", ("Add the date to my calendar.", "Put it into the calendar.")),
    ("find_shop", "Find a shop.", "shop", ("Find this shop.", "Where is this shop?")),
    ("search", "Search the web.", "title", ("Search for the title.", "Search for this title.")),
    ("track_order", "Track an order by its number.", "number", ("Track this order.", "Where is my order?")),
)
_OTHERS = (  # tools that fit no picture
    ("set_timer", "Set a timer.", {"minutes": "integer"}),
    ("play_song", "Play a song.", {"song": "string"}),
    ("turn_light", "Turn a light on or off.", {"room": "string", "on": "boolean"}),
    ("send_message", "Send a message.", {"person": "string", "text": "string"}),
    ("get_time", "Get the time in a city.", {"city": "string"}),
)
_MORE = ((1, 2), (0, 1, 1, 2, 3), (0, 0, 1))  # how many of those, by the number of tools that fit


class DataScene(Scene, Protocol):
    def record(self) -> Record: ...


class Action(NamedTuple):
    """A tool, how to ask for it, and the arguments of the call."""

    tool: Tool
    ways: tuple[str, ...]
    arguments: tuple[tuple[str, Field], ...]
    is_saving: bool = False  # may also be asked for by ANY_REQUEST

    @property
    def name(self) -> str:
        return str(self.tool["function"]["name"])

    def call(self) -> str:
        arguments = ", ".join(f'"{key}": {field.value}' for key, field in self.arguments)
        return chat.call(f'{{"name": "{self.name}", "arguments": {{{arguments}}}}}')


class ToolScene:
    """Another scene, asked with tools. A conversation has the same tools throughout."""

    skills: tuple[str, ...] = ("tool",)

    def __init__(self, rng: Random, scene: DataScene) -> None:
        self.scene, self.pictures = scene, scene.pictures
        self._plain = [skill for skill in scene.skills if skill not in ("extract", "caption", "json")]
        self.actions = _actions(rng, scene.record())
        self.tools = _shown(rng, [action.tool for action in self.actions])
        self._last: str | None = None  # what the tool that was called last will return

    pictures: tuple[Picture, ...]

    def ask(self, rng: Random, skill: str) -> Question | None:
        if self._last is not None and rng.random() < 0.5:
            return self._returned(rng)
        if not self.actions or rng.random() < 0.25:
            plain = self.scene.ask(rng, rng.choice(self._plain))
            return plain and replace(plain, skill="tool", tools=self.tools)
        action = rng.choice(self.actions)
        self._last = action.name
        answer = action.call()
        is_any = action.is_saving and len(self.actions) == 1 and rng.random() < 0.4
        text = rng.choice(ANY_REQUEST if is_any else action.ways)
        return Question("tool", text, answer, (answer,), tools=self.tools)

    def _returned(self, rng: Random) -> Question:
        """A tool's answer, which the model says in a sentence."""
        self._last = None
        value = str(rng.randint(1, 999)) if rng.random() < 0.5 else rng.choice(("done", "ok", "saved", "sunny", "sent"))
        shown = value if value.isdigit() else json.dumps(value)
        said = rng.choice((shown, f'{{"result": {shown}}}'))
        return Question("tool", said, f"The result is {value}.", (value,), tools=self.tools, role="tool")


class TextToolScene:
    """A request without a picture, for a tool or for none."""

    skills: tuple[str, ...] = ("tool",)
    pictures: tuple[Picture, ...] = ()

    def __init__(self, rng: Random) -> None:
        name, description, key, self._text, value = text_tool(rng)
        self._action = Action(tool(name, description, {key: Field((), value).kind}), (), ((key, Field((), value)),))
        self.tools = _shown(rng, [self._action.tool], usual=0.0)

    def ask(self, rng: Random, skill: str) -> Question | None:
        if rng.random() < 0.2:
            talk = TalkScene().ask(rng, "chat")
            return None if talk.keys == ("cannot",) else replace(talk, skill="tool", tools=self.tools)
        answer = self._action.call()
        return Question("tool", self._text, answer, (answer,), tools=self.tools)


def _shown(rng: Random, fitting: list[Tool], usual: float = 0.6) -> tuple[Tool, ...]:
    """These tools among others that have nothing to do with the request, in any order; `usual`: share of known ones."""
    known = rng.sample(_OTHERS, 3)
    more = [tool(*(one if rng.random() < usual else idle_tool(rng))) for one in known]
    tools = [*fitting, *more[: rng.choice(_MORE[len(fitting)])]]
    while len(tools) > max(1, len(fitting)) and len(chat.tools_turn(tools)) > _MOST_TOOL_LETTERS:
        tools.pop()
    by_name = {one["function"]["name"]: one for one in tools}
    return tuple(rng.sample(list(by_name.values()), len(by_name)))


def tool(name: str, description: str, kinds: dict[str, str]) -> Tool:
    """A tool as a request gives it."""
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _actions(rng: Random, record: Record) -> list[Action]:
    """One or two tools that fit the record, with different names."""
    makers = [_save_fields, _save_fields, _look_up, _any_named, _any_named] if record.fields else []
    makers += [_save_row] if record.rows else []
    found: list[Action] = []
    for _ in range(rng.randint(1, 2)):
        made = rng.choice(makers)(rng, record) if makers else None
        if made is None or len(made.call()) > MOST_LETTERS:
            continue
        if all(made.name != other.name and not {*made.ways} & {*other.ways} for other in found):
            found.append(made)
    return found


def _save_fields(rng: Random, record: Record) -> Action:
    fields = rng.sample(record.fields, rng.randint(1, min(3, len(record.fields))))
    keys = [field.names[0] for field in fields]
    verb = rng.choice(_SAVE)
    noun = spoken(keys[0]) if len(keys) == 1 else record.noun
    names = listed([spoken(key) for key in keys])
    ways: tuple[str, ...] = (f"{verb.capitalize()} the {names}.", f"Please {verb} the {names}.")
    if len(keys) > 1:
        ways += (f"{verb.capitalize()} the {noun}.", f"{verb.capitalize()} this {noun}.")
    made = tool(
        f"{verb}_{noun}", f"{verb.capitalize()} the {names}.", {k: f.kind for k, f in zip(keys, fields, strict=True)}
    )
    return Action(made, ways, tuple(zip(keys, fields, strict=True)), is_saving=len(keys) > 1)


def _any_named(rng: Random, record: Record) -> Action | None:
    """A tool whose name says little, with fields under any of their names."""
    fields = rng.sample(record.fields, rng.randint(1, min(3, len(record.fields))))
    keys: list[str] = []
    for field in fields:
        free = [name for name in field.names if name not in keys]
        if not free:
            return None
        keys.append(rng.choice(free))
    name, description, ways = any_tool(rng)
    made = tool(name, description, {k: f.kind for k, f in zip(keys, fields, strict=True)})
    return Action(made, ways, tuple(zip(keys, fields, strict=True)), is_saving=True)


def _look_up(rng: Random, record: Record) -> Action | None:
    by_name = {field.names[0]: field for field in record.fields}
    fitting = [one for one in _LOOK_UP if one[2] in by_name]
    if not fitting:
        return None
    name, description, key, ways = rng.choice(fitting)
    field = by_name[key]
    return Action(tool(name, description, {key: field.kind}), ways, ((key, field),))


def _save_row(rng: Random, record: Record) -> Action | None:
    """A row by its first field, which the question names; or the bar of a chart that is the largest."""
    largest = _largest(record) if record.noun == "chart" and rng.random() < 0.3 else None
    row = largest or rng.choice(record.rows)
    name = row[0].value.strip('"')
    if sum(other[0].value == row[0].value for other in record.rows) > 1:
        return None
    fields = [row[0], *rng.sample(row[1:], rng.randint(1, min(2, len(row) - 1)))]
    keys = [field.names[0] for field in fields]
    verb, noun = rng.choice(_SAVE), record.rows_names[0].removesuffix("s")
    ways: tuple[str, ...] = (f"{verb.capitalize()} {name}.", f"{verb.capitalize()} the {noun} {name}.")
    if largest:
        ways = tuple(f"{verb.capitalize()} the {word} {noun}." for word in ("largest", "highest", "tallest"))
    called = any_name(rng, verb, noun) if rng.random() < 0.35 else f"{verb}_{noun}"
    made = tool(called, f"{verb.capitalize()} one {noun}.", {k: f.kind for k, f in zip(keys, fields, strict=True)})
    return Action(made, ways, tuple(zip(keys, fields, strict=True)))


def _largest(record: Record) -> tuple[Field, ...] | None:
    """The row with the largest second value, where it is clearly larger than the next."""
    ordered = sorted(record.rows, key=lambda row: float(row[1].value))
    first, second = float(ordered[-1][1].value), float(ordered[-2][1].value)
    return ordered[-1] if first > 1.2 * second else None
