"""What a soak prints: tables by tenths of the run, drift over its last half, a verdict. Measures nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from benchmarks.soak_load import KINDS
from benchmarks.soak_watch import MEASURES, Sample, Watch, percentile, theil_sen

Slopes = dict[str, float | None]
_WINDOWS = 10
_HEADS = ("RSS MiB", "USS MiB", "fds", "thr", "kids")  # of MEASURES
_MAX_SHOWN = 5  # different failures
_SHOWN_MIB = 0.5  # by which an owner of memory must have changed


class Answer(NamedTuple):
    """One request and how it went."""

    kind: str
    at: float  # seconds since the soak began
    seconds: float
    status: int  # 0: the connection broke
    is_refused: bool  # the server was full, and said so
    problem: str | None  # why it should not have gone like this

    @property
    def outcome(self) -> str:
        if self.problem:
            return "failed"
        return "refused" if self.is_refused else "answered"


class Fill(NamedTuple):
    """Shares of caches that hold something."""

    at: float
    kv: float
    encoder: float


@dataclass
class Run:
    """All that was measured."""

    watch: Watch
    seconds: float
    began: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)

    @property
    def failures(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.problem]

    @property
    def has_failed(self) -> bool:
        return bool(self.failures or self.watch.deaths or not self.answers)

    def as_json(self) -> dict[str, Any]:
        processes = {name: [s._asdict() for s in samples] for name, samples in self.watch.samples.items()}
        answers = [answer._asdict() for answer in self.answers]
        fills = [fill._asdict() for fill in self.fills]
        return {"summary": summary(self), "samples": processes, "fills": fills, "answers": answers}


# --- drift ------------------------------------------------------------------------------------------------------------


def drift(run: Run) -> Slopes:
    """Slopes over the last half, an hour: MiB or counts of processes, milliseconds by kind of request."""
    half = run.seconds / 2
    slopes: Slopes = {}
    for name, samples in run.watch.samples.items():
        for measure in MEASURES:
            slopes[f"{name} {measure}"] = theil_sen([(s.at, getattr(s, measure)) for s in samples if s.at >= half])
    for kind in KINDS:
        points = [(a.at, a.seconds * 1e3) for a in run.answers if a.kind == kind and a.at >= half and not a.problem]
        slopes[f"{kind} ms"] = theil_sen(points)
    return slopes


def growth(samples: Sequence[Sample], since: float) -> list[str]:
    """By owner of memory: the last tenth since then against the first."""
    late = [sample for sample in samples if sample.at >= since]
    tenth = max(1, len(late) // _WINDOWS)
    changes = {}
    for owner in {owner for sample in late for owner in sample.owners}:
        first, last = (
            median(sample.owners.get(owner, 0.0) for sample in part) for part in (late[:tenth], late[-tenth:])
        )
        changes[owner] = last - first
    ordered = sorted(changes.items(), key=lambda change: -abs(change[1]))
    return [f"{owner} {change:+.1f}" for owner, change in ordered if abs(change) >= _SHOWN_MIB]


def verdicts(run: Run, steady: float) -> list[str]:
    """A sentence for each process, and one for the requests. `steady`: MiB an hour that count as no growth."""
    slopes = drift(run)
    return [*(_process_verdict(name, slopes, run, steady) for name in run.watch.samples), _request_verdict(run)]


def _process_verdict(name: str, slopes: Slopes, run: Run, steady: float) -> str:
    slope = slopes[f"{name} uss"]
    if slope is None:
        return f"{name}: too few samples"
    leaks = [measure for measure in ("fds", "threads") if (slopes[f"{name} {measure}"] or 0) >= 1]
    trend = "steady"
    if slope > steady:
        trend = "still growing"
        if name == "engine":
            trend += _filling(run)
    more = "; descriptors and threads steady"
    if leaks:
        more = f"; {' and '.join(leaks)} grow"
    parts = growth(run.watch.samples[name], run.seconds / 2)
    owners = f" ({', '.join(parts)} MiB)" if parts else ""
    return f"{name}: memory {trend}, {slope:+.1f} MiB an hour over the last half{owners}{more}"


def _filling(run: Run) -> str:
    """A cache that fills is no leak: its size is set, and growth ends with it."""
    late = [fill for fill in run.fills if fill.at >= run.seconds / 2]
    if not late:
        return ""
    names = [name for name in ("kv", "encoder") if getattr(late[-1], name) > getattr(late[0], name) + 0.01]
    shares = [f"{name} cache from {getattr(late[0], name):.0%} to {getattr(late[-1], name):.0%}" for name in names]
    return f" ({', '.join(shares)} full meanwhile)" if shares else ""


def _request_verdict(run: Run) -> str:
    counts = Counter(answer.outcome for answer in run.answers)
    text = f"requests: {len(run.answers)}, {counts['refused']} refused, {counts['failed']} failed"
    problems = Counter(f"{answer.kind}: {answer.problem}" for answer in run.failures)
    causes = [f"{count} x {problem}" for problem, count in problems.most_common(_MAX_SHOWN)]
    return "; ".join([text, *causes, *run.watch.deaths])


def summary(run: Run) -> dict[str, Any]:
    slopes = {name: None if slope is None else round(slope, 3) for name, slope in drift(run).items()}
    counts = Counter(answer.outcome for answer in run.answers)
    return {"minutes": round(run.seconds / 60, 2), **counts, "deaths": run.watch.deaths, "drift_per_hour": slopes}


# --- tables -----------------------------------------------------------------------------------------------------------


def print_report(run: Run, steady: float) -> None:
    slopes = drift(run)
    for line in (*_process_table(run, slopes), "", *_latency_table(run, slopes), "", *verdicts(run, steady)):
        print(line)


def _process_table(run: Run, slopes: Slopes) -> list[str]:
    """Medians of memory, the most of everything else, in each tenth."""
    names = list(run.watch.samples)
    widths = (9, 9, 5, 5, 5)
    group = sum(widths)
    lines = [
        " " * 8 + "".join(f"{name:>{group}}" for name in names) + f"{'full':>16}",
        f"{'minutes':>8}" + "".join(f"{m:>{w}}" for _ in names for m, w in zip(_HEADS, widths, strict=True)),
    ]
    lines[1] += f"{'KV':>8}{'encoder':>8}"
    for window in range(_WINDOWS):
        cells = f"{(window + 1) * run.seconds / _WINDOWS / 60:8.1f}"
        for name in names:
            inside = _inside(run, window, run.watch.samples[name])
            cells += _process_cells(inside, widths) if inside else " " * group
        fills = _inside(run, window, run.fills)
        lines.append(cells + (f"{fills[-1].kv:8.0%}{fills[-1].encoder:8.0%}" if fills else ""))
    drifts = [slopes[f"{name} {measure}"] for name in names for measure in MEASURES]
    return [*lines, f"{'drift/h':>8}" + "".join(f"{_signed(s):>{w}}" for s, w in zip(drifts, widths * 2, strict=False))]


def _process_cells(samples: Sequence[Sample], widths: Sequence[int]) -> str:
    memory = [f"{median(getattr(sample, measure) for sample in samples):.1f}" for measure in MEASURES[:2]]
    counts = [str(max(getattr(sample, measure) for sample in samples)) for measure in MEASURES[2:]]
    return "".join(f"{cell:>{width}}" for cell, width in zip((*memory, *counts), widths, strict=True))


def _latency_table(run: Run, slopes: Slopes) -> list[str]:
    """Milliseconds, p50/p99, in each tenth."""
    lines = [f"{'ms, p50/p99':14}{'count':>7}" + "".join(f"{w + 1:>12}" for w in range(_WINDOWS)) + f"{'drift/h':>10}"]
    for kind in KINDS:
        answers = [answer for answer in run.answers if answer.kind == kind and not answer.problem]
        if answers:
            cells = "".join(f"{_latency(_inside(run, w, answers)):>12}" for w in range(_WINDOWS))
            lines.append(f"{kind:14}{len(answers):7}{cells}{_signed(slopes[f'{kind} ms']):>10}")
    return lines


def _signed(slope: float | None) -> str:
    if slope is None:
        return "-"
    return f"{slope:+.1f}" if abs(slope) < 100 else f"{slope:+.0f}"


def _latency(answers: Sequence[Answer]) -> str:
    ends = [percentile((answer.seconds * 1e3 for answer in answers), share) for share in (0.5, 0.99)]
    return "/".join("-" if end is None else f"{end:.0f}" for end in ends)


def _inside(run: Run, window: int, things: Sequence[Any]) -> list[Any]:
    """Those of one tenth of the run; the last has what came after the end, too."""
    first = window * run.seconds / _WINDOWS
    length = run.seconds / _WINDOWS
    end = float("inf") if window == _WINDOWS - 1 else first + length
    return [thing for thing in things if first <= thing.at < end]
