"""Tuning of max_pixels: run the same questions at several settings, and recommend one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from saccade.apps.evaluation.client import Client, QuestionRefused, ServerInfo
from saccade.apps.evaluation.questions import QuestionSet
from saccade.apps.evaluation.run import AskSettings, OnAnswer, ScoredReply, accuracy, ask_all, request_body
from saccade.costs import blocks_for
from saccade.errors import ConfigError

_TIMED = 20  # questions for time to first token, one at a time
_MAX_SIZES = 8
_CLIFF = 0.1  # loss of accuracy between two settings that is reported


@dataclass(frozen=True, slots=True)
class Measurement:
    max_pixels: int
    answers: Sequence[ScoredReply]
    first_token_ms: float  # median, one request at a time, images not cached
    tokens_per_image: float | None  # None if the server does not say
    concurrency: int | None  # requests of mean size that fit the KV cache

    @property
    def accuracy(self) -> float:
        return accuracy(self.answers)

    def worst(self) -> tuple[str, float]:
        """The skill with the lowest accuracy."""
        skills = dict.fromkeys(one.question.skill for one in self.answers)
        return min(((skill, self.of([skill])) for skill in skills), key=lambda pair: pair[1])

    def of(self, skills: Sequence[str]) -> float:
        return accuracy([one for one in self.answers if one.question.skill in skills])


@dataclass(frozen=True, slots=True)
class Cliff:
    """The largest loss of a group between two adjacent settings."""

    group: str
    above: int  # max_pixels
    below: int
    before: float  # accuracy
    after: float

    def __str__(self) -> str:
        fall = f"from {self.before:.0%} to {self.after:.0%}"
        return f"{self.group}: falls {fall} between {self.above:,} and {self.below:,} pixels"


@dataclass(frozen=True, slots=True)
class Advice:
    max_pixels: int
    reason: str
    cliffs: Sequence[Cliff]


def with_images_only(questions: QuestionSet) -> QuestionSet:
    """Questions without images do not depend on max_pixels."""
    with_images = [question for question in questions.questions if question.images]
    if not with_images:
        raise ConfigError(f"no question of {questions.name} has a picture, so there is nothing to tune")
    return replace(questions, questions=with_images)


def choose_sizes(options: Sequence[int] | None, info: ServerInfo, questions: QuestionSet) -> list[int]:
    """The given sizes, checked and largest first; or halving from the largest size that matters."""
    if options is not None:
        return _checked(options, info)
    areas = [size.width * size.height for size in questions.sizes()]
    top = min(filter(None, (max(areas), info.max_pixels)))
    sizes = [top >> step for step in range(_MAX_SIZES)]
    count = sum(size > min(areas) for size in sizes) + 1  # the last one shrinks every image
    return sizes[:count]


def _checked(options: Sequence[int], info: ServerInfo) -> list[int]:
    sizes = sorted(set(options), reverse=True)
    if sizes[-1] < 1:
        raise ConfigError(f"max_pixels must be 1 or more, not {sizes[-1]}")
    if info.max_pixels is not None and sizes[0] > info.max_pixels:
        limit = f"{info.max_pixels:,}, the server's limit, which requests can only lower"
        remedy = f"ask for less, or start saccade serve --max-pixels {sizes[0]} and give its --url"
        raise ConfigError(f"max_pixels {sizes[0]:,} is above {limit}; {remedy}")
    return sizes


async def measure(
    client: Client, info: ServerInfo, questions: QuestionSet, settings: AskSettings, on_answer: OnAnswer
) -> Measurement:
    """One setting. First tokens are timed first, while no image is cached."""
    first_token_ms = await _first_token_ms(client, questions, settings)
    answers = await ask_all(client, questions, settings, on_answer)
    billed_answers = [one for one in answers if one.reply.image_tokens is not None]
    tokens = sum(one.reply.image_tokens or 0 for one in billed_answers)
    images = sum(len(one.question.images) for one in billed_answers)
    per_image = tokens / images if images else None
    fit = _concurrency(info, billed_answers)
    return Measurement(max_pixels_of(settings), answers, first_token_ms, per_image, fit)


def with_max_pixels(settings: AskSettings, max_pixels: int) -> AskSettings:
    extra = {**settings.extra, "mm_processor_kwargs": {"max_pixels": max_pixels}}
    return AskSettings(settings.model, settings.max_tokens, settings.concurrency, extra)


def max_pixels_of(settings: AskSettings) -> int:
    return int(settings.extra["mm_processor_kwargs"]["max_pixels"])


async def _first_token_ms(client: Client, questions: QuestionSet, settings: AskSettings) -> float:
    every = max(1, len(questions.questions) // _TIMED)
    times: list[float] = []
    refusal = ""
    for question in questions.questions[::every][:_TIMED]:
        try:
            times.append(await client.first_token(request_body(questions, question, settings)))
        except QuestionRefused as error:
            refusal = str(error)
    if not times:
        message = f"the server refuses every request with max_pixels {max_pixels_of(settings):,}: {refusal}"
        raise ConfigError(message)
    return statistics.median(times) * 1e3


def _concurrency(info: ServerInfo, answers: Sequence[ScoredReply]) -> int | None:
    if info.kv_blocks is None or info.block_size is None or not answers:
        return None
    tokens = [one.reply.prompt_tokens + one.reply.answer_tokens for one in answers]
    blocks = statistics.mean(blocks_for(count, info.block_size) for count in tokens)
    return int(info.kv_blocks // blocks)


def advise(measured: Sequence[Measurement], questions: QuestionSet) -> Advice:
    """The smallest setting whose accuracy is at most one standard error (paired) below the best."""
    best = max(measured, key=lambda one: (one.accuracy, one.max_pixels))
    cheapest = min((one for one in measured if is_as_good(one, best)), key=lambda one: one.max_pixels)
    return Advice(cheapest.max_pixels, _reason(cheapest, best, measured), find_cliffs(measured, questions))


def is_as_good(one: Measurement, best: Measurement) -> bool:
    loss, error = paired_loss(one, best)
    return loss <= error


def paired_loss(one: Measurement, best: Measurement) -> tuple[float, float]:
    """The loss of accuracy of `one` against `best`, and its standard error."""
    differences = [b.is_right - a.is_right for a, b in zip(one.answers, best.answers, strict=True)]
    if len(differences) < 2:
        return statistics.mean(differences), 0.0
    return statistics.mean(differences), statistics.stdev(differences) / math.sqrt(len(differences))


def _reason(setting: Measurement, best: Measurement, measured: Sequence[Measurement]) -> str:
    saved = ""
    largest = max(measured, key=lambda one: one.max_pixels)
    if setting.tokens_per_image and largest.tokens_per_image and setting is not largest:
        share = setting.tokens_per_image / largest.tokens_per_image
        saved = f"; it takes {share:.0%} of the tokens of {largest.max_pixels:,}"
    if setting is best:
        best_measured = f"{setting.accuracy:.1%} is the best measured"
        return f"{best_measured}, and no smaller setting is within noise of it{saved}"
    loss, error = paired_loss(setting, best)
    noise = f"a loss of {loss:.1%} with a standard error of {error:.1%}"
    comparison = f"{best.accuracy:.1%} at {best.max_pixels:,}, {noise}"
    return f"{setting.accuracy:.1%} is within noise of the best, {comparison}{saved}"


def find_cliffs(measured: Sequence[Measurement], questions: QuestionSet) -> list[Cliff]:
    """The largest loss of each group, if it is above `_CLIFF`; the largest first."""
    steps = sorted(measured, key=lambda one: -one.max_pixels)
    cliffs = []
    for group, skills in questions.grouped().items():
        falls = [
            Cliff(group, above.max_pixels, below.max_pixels, above.of(skills), below.of(skills))
            for above, below in pairwise(steps)
        ]
        deepest = max(falls, key=_depth, default=None)
        if deepest is not None and _depth(deepest) >= _CLIFF:
            cliffs.append(deepest)
    return sorted(cliffs, key=_depth, reverse=True)


def _depth(cliff: Cliff) -> float:
    return cliff.before - cliff.after


def as_json(measured: Sequence[Measurement], advice: Advice, questions: QuestionSet) -> dict[str, Any]:
    return {
        "questions": questions.name,
        "total": len(questions.questions),
        "recommended": advice.max_pixels,
        "reason": advice.reason,
        "cliffs": [str(cliff) for cliff in advice.cliffs],
        "settings": [
            {
                "max_pixels": one.max_pixels,
                "accuracy": one.accuracy,
                "groups": {group: one.of(skills) for group, skills in questions.grouped().items()},
                "tokens_per_picture": one.tokens_per_image,
                "first_token_ms": one.first_token_ms,
                "concurrency": one.concurrency,
            }
            for one in measured
        ],
    }
