"""The commands `saccade eval` and `saccade tune`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from saccade.apps.evaluation.chart import svg, text_chart, tuned_table
from saccade.apps.evaluation.client import Client
from saccade.apps.evaluation.questions import QuestionSet, load_questions
from saccade.apps.evaluation.report import as_json, check_markers, rewrite, scores, table, wrong_answers
from saccade.apps.evaluation.run import AskSettings, ScoredReply, ask_all
from saccade.apps.evaluation.serving import serving
from saccade.apps.evaluation.tune import (
    Measurement,
    advise,
    choose_sizes,
    measure,
    with_images_only,
    with_max_pixels,
)
from saccade.apps.evaluation.tune import as_json as tuned_json
from saccade.errors import ConfigError
from saccade.options.engine import Options
from saccade.util.plain_files import write_whole

_INTERRUPTED = 130  # as a shell reports Ctrl-C


@dataclass(frozen=True, slots=True)
class EvalTarget:
    """The server and the questions."""

    options: Options  # of the server to start; with a url only the model's name counts
    url: str | None = None  # a running server
    api_key: str | None = None
    questions: str | None = None  # folder or zip; None: the built-in set
    limit: int | None = None  # only the first so many questions
    concurrency: int = 32
    max_tokens: int = 256
    show_log: bool = False  # of the server to start

    def __post_init__(self) -> None:
        for name in ("limit", "concurrency", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be 1 or more, not {value}")

    def load(self) -> QuestionSet:
        return load_questions(self.questions, self.limit)

    @contextmanager
    def server(self) -> Iterator[str]:
        """The server's address, valid inside the context."""
        if self.url is not None:
            yield self.url
            return
        if sys.stderr.isatty():
            print(f"starting a server for {self.options.model or 'the built-in model'} ...", file=sys.stderr)
        with serving(self.options, show_log=self.show_log) as url:
            yield url

    @property
    def model(self) -> str | None:
        """The model name to request; None for a server of our own, which has one model."""
        return self.options.model if self.url is not None else None


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """Where results go, besides the terminal."""

    json: str | None = None
    markdown: tuple[str, ...] = ()  # files with marker lines to write between
    show_wrong: int = 0
    plot: str | None = None


@dataclass(slots=True)
class _Progress:
    """A progress bar, and the replies so far."""

    total: int
    label: str = "questions"
    answers: list[ScoredReply] = field(default_factory=list)
    bar: Any = None

    def __enter__(self) -> _Progress:
        self.bar = tqdm(total=self.total, desc=self.label, disable=None, file=sys.stderr)
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def add(self, one: ScoredReply) -> None:
        self.answers.append(one)
        right = sum(a.is_right for a in self.answers)
        self.bar.set_postfix_str(f"{right / len(self.answers):.1%} right", refresh=False)
        self.bar.update()


def evaluate(target: EvalTarget, output: ReportFiles) -> int:
    """The exit status: 1 if a goal is missed."""
    questions = target.load()
    for file in output.markdown:
        check_markers(file, "saccade eval")
    progress = _Progress(len(questions.questions))
    start = time.monotonic()
    try:
        with target.server() as url, progress:
            start = time.monotonic()
            answers = asyncio.run(_ask(target, url, questions, progress))
    except KeyboardInterrupt:
        count = f"{len(progress.answers)} of {len(questions.questions)}"
        print(f"interrupted after {count} questions", file=sys.stderr)
        if progress.answers:
            print(_findings(progress.answers, questions, output.show_wrong))
        return _INTERRUPTED
    count = f"{len(answers):,} question{'' if len(answers) == 1 else 's'}"
    summary = f"{count}, {target.concurrency} at a time, {time.monotonic() - start:.0f} s"
    text = _findings(answers, questions, output.show_wrong)
    print(f"{text}\n{summary}")
    _write_eval(output, answers, questions, summary)
    missed = [score.skill for score in scores(answers, questions) if score.is_missed]
    if missed:
        print(f"saccade: goals missed: {', '.join(missed)}", file=sys.stderr)
        return 1
    return 0


async def _ask(
    target: EvalTarget, url: str, questions: QuestionSet, progress: _Progress
) -> list[ScoredReply]:
    async with Client(url, target.api_key, target.concurrency) as client:
        info = await client.info(target.model)
        settings = AskSettings(info.model, target.max_tokens, target.concurrency)
        return await ask_all(client, questions, settings, progress.add)


def _findings(answers: list[ScoredReply], questions: QuestionSet, show_wrong: int) -> str:
    refused = [one for one in answers if one.reply.error is not None]
    lines = [table(scores(answers, questions))]
    if refused:
        first = f"{refused[0].question.id}: {refused[0].reply.error}"
        lines.append(f"{len(refused)} refused by the server and counted as wrong; the first was {first}")
    return "\n".join([*lines, *wrong_answers(answers, show_wrong)])


def _write_eval(
    output: ReportFiles, answers: list[ScoredReply], questions: QuestionSet, summary: str
) -> None:
    if output.json is not None:
        write_json(output.json, as_json(answers, questions))
    for file in output.markdown:
        rewrite(file, "saccade eval", f"```\n{table(scores(answers, questions))}\n{summary}\n```")


def tune(target: EvalTarget, sizes: Sequence[int] | None, output: ReportFiles) -> int:
    questions = with_images_only(target.load())
    for file in output.markdown:
        check_markers(file, "saccade tune")
    measured: list[Measurement] = []
    try:
        with target.server() as url:
            asyncio.run(_measure(target, url, questions, sizes, measured))
    except KeyboardInterrupt:
        print(f"interrupted after {len(measured)} settings", file=sys.stderr)
        _print_tuned(measured, questions)
        return _INTERRUPTED
    text = _print_tuned(measured, questions)
    advice = advise(measured, questions)
    if output.json is not None:
        write_json(output.json, tuned_json(measured, advice, questions))
    if output.plot is not None:
        write_whole(output.plot, svg(measured, advice, questions))
    for file in output.markdown:
        rewrite(file, "saccade tune", f"```\n{text}\n```")
    return 0


async def _measure(
    target: EvalTarget,
    url: str,
    questions: QuestionSet,
    sizes: Sequence[int] | None,
    measured: list[Measurement],
) -> None:
    """Measure one setting after the other, into `measured`."""
    async with Client(url, target.api_key, target.concurrency) as client:
        info = await client.info(target.model)
        # A salt of this run: cached images of an earlier run would make first tokens too fast.
        salt = {"cache_salt": f"tune-{uuid.uuid4().hex}"} if info.is_saccade else {}
        settings = AskSettings(info.model, target.max_tokens, target.concurrency, salt)
        for size in choose_sizes(sizes, info, questions):
            with _Progress(len(questions.questions), f"{size:,} pixels") as progress:
                setting = with_max_pixels(settings, size)
                measured.append(await measure(client, info, questions, setting, progress.add))


def _print_tuned(measured: Sequence[Measurement], questions: QuestionSet) -> str:
    if not measured:
        return ""
    advice = advise(measured, questions)
    lines = [f"recommended: max_pixels {advice.max_pixels:,}: {advice.reason}", *map(str, advice.cliffs)]
    text = "\n".join([tuned_table(measured), "", text_chart(measured, advice, questions), "", *lines])
    print(text)
    return text


def write_json(file: str, report: dict[str, Any]) -> None:
    write_whole(file, json.dumps(report, indent=1) + "\n")
