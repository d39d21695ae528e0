"""Scoring: when a reply counts as right. Standard library only, as training uses the same rules."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

OTHER_NUMBER = "#"  # in `forbidden`: any number that is not in `answers`
OTHER_QUOTE = '"'  # in `forbidden`: any quoted text that is not in `answers`

Match = Literal["any", "all", "exact", "json"]
MATCHES: tuple[str, ...] = get_args(Match)
_CALL = re.compile(r"\s*<tool_call>(.*)</tool_call>\s*", re.DOTALL)
_GUESSES = 20  # common answers that are tried as a constant guess


@dataclass(frozen=True, slots=True)
class AnswerRule:
    """What a right reply contains, whatever its wording."""

    answers: tuple[str, ...]
    match: Match = "any"
    forbidden: tuple[str, ...] = ()  # no whole word of these; OTHER_NUMBER and OTHER_QUOTE are patterns

    def is_right(self, reply: str) -> bool:
        if self.match == "json":
            return any(_same_json(answer, reply) for answer in self.answers)
        text = _normalised(reply)
        answers = [_normalised(answer) for answer in self.answers]
        if self.match == "exact":
            return text.removesuffix(".") in [answer.removesuffix(".") for answer in answers]
        matches = [_holds(text, answer) for answer in answers]
        is_there = all(matches) if self.match == "all" else any(matches)
        if not is_there:
            return False
        return not any(_contradicts(text, answers, word) for word in self.forbidden)

    @property
    def reply(self) -> str:
        """The shortest reply that is right."""
        return " ".join(self.answers) if self.match == "all" else self.answers[0]


def chance(rules: Sequence[AnswerRule]) -> float:
    """The accuracy of the best constant reply, which needs no image."""
    guesses = Counter(rule.reply for rule in rules).most_common(_GUESSES)
    right = [sum(rule.is_right(guess) for rule in rules) for guess, _ in guesses]
    return max(right, default=0) / max(1, len(rules))


def field_chance(rules: Sequence[AnswerRule]) -> float:
    """The share of JSON values that the best constant reply gets right."""
    guesses = [guess for guess, _ in Counter(rule.reply for rule in rules).most_common(_GUESSES)]
    outcomes = [[json_fields(rule.reply, guess) for rule in rules] for guess in guesses]
    return max(
        (sum(one.right for one in row) / sum(one.total for one in row) for row in outcomes), default=0.0
    )


def _normalised(text: str) -> str:
    return " ".join(text.lower().split())


def _holds(text: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None


def _contradicts(text: str, answers: Sequence[str], forbidden: str) -> bool:
    if forbidden == OTHER_NUMBER:
        return any(number not in answers for number in re.findall(r"\d+", text))
    if forbidden == OTHER_QUOTE:
        return any(quoted not in answers for quoted in re.findall(r'"([^"]*)"', text))
    return _holds(text, _normalised(forbidden))


class Fields(NamedTuple):
    """How much of a reply in JSON is right."""

    right: int
    total: int
    is_valid: bool  # the reply is JSON at all


def json_fields(expected: str, reply: str) -> Fields:
    """Compares value by value: each has to stand at its place."""
    values = _values(_parsed(expected)[1])
    try:
        call, value = _parsed(reply)
    except ValueError:
        return Fields(0, len(values), is_valid=False)
    reply_values = _values(value) if call == _parsed(expected)[0] else {}
    right = sum(path in reply_values and _is_same(reply_values[path], one) for path, one in values.items())
    return Fields(right, len(values), is_valid=True)


def _same_json(expected: str, reply: str) -> bool:
    try:
        call, value = _parsed(reply)
    except ValueError:
        return False
    is_call, expected_value = _parsed(expected)
    return (call, _unordered(value)) == (is_call, _unordered(expected_value))


def _parsed(text: str) -> tuple[bool, Any]:
    """The value, and whether it is the call of a tool. ValueError if it is no JSON."""
    call = _CALL.fullmatch(text)
    try:
        return call is not None, json.loads(call[1] if call else text)
    except RecursionError:
        raise ValueError("the reply is nested too deeply") from None


def _values(value: Any, path: tuple[str | int, ...] = ()) -> dict[tuple[str | int, ...], Any]:
    """The values that hold no others, by the way to them; an empty object or list counts as a value."""
    leaves: dict[tuple[str | int, ...], Any] = {}
    for key, part in _members(value):
        leaves |= _values(part, (*path, key))
    return leaves or {path: value}


def _members(value: Any) -> Iterable[tuple[str | int, Any]]:
    match value:
        case dict():
            return value.items()
        case list():
            return enumerate(value)
    return ()


def _is_same(one: Any, two: Any) -> bool:
    return (one, isinstance(one, bool)) == (two, isinstance(two, bool))  # 1 is not true


def _unordered(value: Any) -> Any:
    """Lists compare as multisets, since objects in an image have no order."""
    if isinstance(value, list):
        return sorted(json.dumps(item, sort_keys=True) for item in value)
    return value
