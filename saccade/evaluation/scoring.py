"""Scoring: when a reply counts as right. Standard library only, as training uses the same rules."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

OTHER_NUMBER = "#"  # in `forbidden`: any number that is not in `answers`
OTHER_QUOTE = '"'  # in `forbidden`: any quoted text that is not in `answers`

Match = Literal["any", "all", "exact", "json"]
MATCHES: tuple[str, ...] = get_args(Match)
_GUESSES = 20  # common answers that are tried as a constant guess


@dataclass(frozen=True, slots=True)
class Rule:
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
        held = [_holds(text, answer) for answer in answers]
        is_there = all(held) if self.match == "all" else any(held)
        return is_there and not any(_contradicts(text, answers, word) for word in self.forbidden)

    @property
    def reply(self) -> str:
        """The shortest reply that is right."""
        return " ".join(self.answers) if self.match == "all" else self.answers[0]


def chance(rules: Sequence[Rule]) -> float:
    """The accuracy of the best constant reply, which needs no image."""
    guesses = Counter(rule.reply for rule in rules).most_common(_GUESSES)
    right = [sum(rule.is_right(guess) for rule in rules) for guess, _ in guesses]
    return max(right) / len(rules) if rules else 0.0


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


def _same_json(expected: str, given: str) -> bool:
    try:
        return bool(_unordered(json.loads(given)) == _unordered(json.loads(expected)))
    except ValueError:
        return False


def _unordered(value: Any) -> Any:
    """Lists compare as multisets, since objects in an image have no order."""
    if isinstance(value, list):
        return sorted(json.dumps(item, sort_keys=True) for item in value)
    return value
