"""Runs a question set against a server, many questions at a time, and scores the replies."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from saccade.apps.evaluation.client import Client, ModelReply
from saccade.apps.evaluation.questions import Question, QuestionSet


@dataclass(frozen=True, slots=True)
class ScoredReply:
    question: Question
    reply: ModelReply
    is_right: bool


@dataclass(frozen=True, slots=True)
class AskSettings:
    model: str
    max_tokens: int = 256
    concurrency: int = 32
    extra: Mapping[str, Any] = field(default_factory=dict)  # further fields of every request


def request_body(questions: QuestionSet, question: Question, settings: AskSettings) -> dict[str, Any]:
    """Images first, then the video, then the text; greedy."""
    images = [questions.image(ref) for ref in question.images]
    urls = [f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}" for image in images]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    if question.video:
        parts.append({"type": "video_url", "video_url": {"url": _video_url(questions, question)}})
    return {
        "model": settings.model,
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": question.text}]}],
        "temperature": 0,
        "max_tokens": settings.max_tokens,
        **settings.extra,
        **question.request,
    }


def _video_url(questions: QuestionSet, question: Question) -> str:
    """The frames after each other, in the form that vLLM and Saccade take."""
    frames = [questions.image(ref) for ref in question.video]
    kind = frames[0].media_type.replace("image/", "video/", 1)
    return f"data:{kind};base64,{','.join(base64.b64encode(frame.data).decode() for frame in frames)}"


OnAnswer = Callable[[ScoredReply], None]


async def ask_all(
    client: Client, questions: QuestionSet, settings: AskSettings, on_answer: OnAnswer
) -> list[ScoredReply]:
    """Replies in the order of the set; `on_answer` is called with each as it arrives."""
    answers: dict[int, ScoredReply] = {}
    queue = iter(enumerate(questions.questions))

    async def work(mine: Iterator[tuple[int, Question]]) -> None:
        for index, question in mine:  # all workers share one iterator
            reply = await client.ask(request_body(questions, question, settings))
            answers[index] = score(question, reply)
            on_answer(answers[index])

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(settings.concurrency, len(questions.questions))):
                group.create_task(work(queue))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None  # all are the same: the server is gone
    return [answers[index] for index in range(len(answers))]


def score(question: Question, reply: ModelReply) -> ScoredReply:
    return ScoredReply(question, reply, reply.error is None and question.rule.is_right(reply.text))


def accuracy(answers: Sequence[ScoredReply]) -> float:
    return sum(answer.is_right for answer in answers) / max(1, len(answers))
