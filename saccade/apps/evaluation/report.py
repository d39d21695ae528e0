"""Results of `saccade eval` as a table, as JSON, and inside a Markdown file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.apps.evaluation.questions import QuestionSet
from saccade.apps.evaluation.run import ScoredReply, accuracy
from saccade.apps.evaluation.scoring import AnswerRule, chance, field_chance, json_fields
from saccade.errors import ConfigError
from saccade.util.plain_files import read_text, write_whole

_MAX_BYTES = 64 << 20
_ANSWERED = "not refused"  # the line for replies that are no refusals


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one skill, or of a group with a goal."""

    skill: str  # or the group's name
    right: int
    total: int
    chance: float  # accuracy of the best constant reply
    goal: float | None
    is_group: bool = False

    @property
    def accuracy(self) -> float:
        return self.right / self.total

    @property
    def is_missed(self) -> bool:
        return self.goal is not None and self.accuracy < self.goal

    @property
    def verdict(self) -> str:
        if self.goal is None:
            return ""
        return f"{self.goal:.0%} {'missed' if self.is_missed else 'met'}"


def scores(answers: Sequence[ScoredReply], questions: QuestionSet) -> list[Score]:
    """Scores by skill, in the order of the set; then the groups with a goal of their own."""
    by_skill: dict[str, list[ScoredReply]] = {question.skill: [] for question in questions.questions}
    for one in answers:
        by_skill[one.question.skill].append(one)
    rows = [_score(skill, mine, questions.goals.get(skill)) for skill, mine in by_skill.items() if mine]
    for name, skills in questions.grouped().items():
        mine = [one for skill in skills for one in by_skill[skill]]
        if mine and name in questions.goals and name not in by_skill:
            rows.append(_score(name, mine, questions.goals[name], is_group=True))
    for skill, mine in by_skill.items():
        rows += _json_scores(
            skill, [one for one in mine if one.question.rule.match == "json"], questions.goals
        )
    return rows + _refusal_score(answers, questions)


def _refusal_score(answers: Sequence[ScoredReply], questions: QuestionSet) -> list[Score]:
    """How many replies do not refuse, of those about images and videos that can be answered about."""
    if not questions.refusal:
        return []
    refuses = AnswerRule((questions.refusal,)).is_right
    mine = [
        one
        for one in answers
        if (one.question.images or one.question.video) and not refuses(one.question.rule.reply)
    ]
    if not mine:
        return []
    right = sum(not refuses(one.reply.text) for one in mine)
    return [Score(_ANSWERED, right, len(mine), 1.0, questions.goals.get(_ANSWERED), is_group=True)]


def _json_scores(skill: str, mine: Sequence[ScoredReply], goals: Mapping[str, float]) -> list[Score]:
    """How many values of replies in JSON are right, and how many replies are JSON at all."""
    if not mine:
        return []
    rules = [one.question.rule for one in mine]
    each = [json_fields(one.question.rule.reply, one.reply.text) for one in mine]
    fields = f"{skill} fields"
    valid = f"{skill} valid"
    right = sum(one.right for one in each)
    total = sum(one.total for one in each)
    return [
        Score(fields, right, total, field_chance(rules), goals.get(fields), is_group=True),
        Score(valid, sum(one.is_valid for one in each), len(each), 1.0, goals.get(valid), is_group=True),
    ]


def _score(name: str, mine: Sequence[ScoredReply], goal: float | None, *, is_group: bool = False) -> Score:
    rules = [one.question.rule for one in mine]
    return Score(name, sum(one.is_right for one in mine), len(mine), chance(rules), goal, is_group)


def table(rows: Sequence[Score]) -> str:
    """One line per skill. `guessing` is the accuracy of the best constant reply."""
    width = max([len("skill"), *(len(s.skill) for s in rows)])
    heading = "goal" if any(s.goal is not None for s in rows) else ""
    right = sum(s.right for s in rows if not s.is_group)
    total = sum(s.total for s in rows if not s.is_group)
    lines = [f"{'skill':<{width}}  right    of  accuracy  guessing  {heading}"]
    for s in rows:
        shares = f"{s.accuracy:>9.1%} {s.chance:>9.0%}"
        lines.append(f"{s.skill:<{width}} {s.right:>6} {s.total:>5} {shares}  {s.verdict}")
    lines.append(f"{'all':<{width}} {right:>6} {total:>5} {right / max(1, total):>9.1%}")
    return "\n".join(line.rstrip() for line in lines)


def wrong_answers(answers: Sequence[ScoredReply], count: int) -> list[str]:
    """The first wrong ones: question, expected reply, actual reply."""
    wrong = [one for one in answers if not one.is_right][: max(0, count)]
    return [
        f"{one.question.id}: {one.question.text}\n  expected {one.question.rule.reply!r}, got "
        + (f"an error: {one.reply.error}" if one.reply.error else repr(one.reply.text))
        for one in wrong
    ]


def as_json(answers: Sequence[ScoredReply], questions: QuestionSet) -> dict[str, Any]:
    rows = scores(answers, questions)
    return {
        "questions": questions.name,
        "total": len(answers),
        "right": sum(one.is_right for one in answers),
        "refused": sum(one.reply.error is not None for one in answers),
        "accuracy": accuracy(answers),
        "skills": {s.skill: _score_json(s) for s in rows if not s.is_group},
        "groups": {s.skill: _score_json(s) for s in rows if s.is_group},
        "answers": [
            {"id": one.question.id, "skill": one.question.skill, "right": one.is_right, **_reply_json(one)}
            for one in answers
        ],
    }


def _score_json(score: Score) -> dict[str, Any]:
    goal = {"goal": score.goal} if score.goal is not None else {}
    shares = {"accuracy": score.accuracy, "guessing": score.chance}
    return {"right": score.right, "total": score.total, **shares, **goal}


def _reply_json(one: ScoredReply) -> dict[str, Any]:
    return {"reply": one.reply.text} if one.reply.error is None else {"error": one.reply.error}


def check_markers(file: str, command: str) -> None:
    """Check the file before the run, which may take an hour."""
    if not re.search(_block(command), read_text(file, _MAX_BYTES), re.DOTALL):
        message = f"{file} has no lines <!-- {command} --> and <!-- end of {command} --> to write between"
        raise ConfigError(message)


def rewrite(file: str, command: str, text: str) -> None:
    """Put `text` between the two marker lines of a Markdown file."""
    block = f"<!-- {command} -->\n{text.strip()}\n<!-- end of {command} -->"
    content = re.sub(_block(command), lambda _: block, read_text(file, _MAX_BYTES), flags=re.DOTALL)
    write_whole(file, content)


def _block(command: str) -> str:
    return rf"<!-- {re.escape(command)} -->.*?<!-- end of {re.escape(command)} -->"
