"""What a load showed: percentiles, throughput, and how many requests kept to the service levels."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from saccade.apps.bench.load import LoadResult, Result
from saccade.util.plain_files import write_whole

SHARES = (50, 90, 99)
LATE_MS = 5.0  # of the clients' p99: beyond it times are the clients' too
_KINDS = ("ttft_ms", "itl_ms", "e2e_ms")
_TITLES = {"ttft_ms": "first token", "itl_ms": "between tokens", "e2e_ms": "whole request"}
_SPLIT = {"with images": True, "text alone": False}


class Slo(NamedTuple):
    """Service levels in milliseconds, of the 99th percentile."""

    ttft_ms: float = 500.0
    itl_ms: float = 25.0


class Figures(NamedTuple):
    """Figures of some requests. Percentiles are those of `SHARES`."""

    requests: int
    errors: int
    seconds: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float  # requests that kept to both levels
    ttft_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]
    e2e_ms: tuple[float, ...]

    def keeps(self, slo: Slo) -> bool:
        """Whether the 99th percentiles do, and nothing failed."""
        if self.errors or not self.requests or self.ttft_ms[-1] > slo.ttft_ms:
            return False
        return not self.itl_ms or self.itl_ms[-1] <= slo.itl_ms


def figures(results: Sequence[Result], slo: Slo, within: Sequence[Result] | None = None) -> Figures:
    """Rates are over the time of `within`, else of the results themselves."""
    good = [result for result in results if result.sample.error is None]
    seconds = _seconds(results if within is None else within)
    gaps = [gaps_ms(result) for result in good]
    is_good = [
        ttft_ms(r) <= slo.ttft_ms and _p99(gap) <= slo.itl_ms for r, gap in zip(good, gaps, strict=True)
    ]
    rate = 1 / seconds if seconds else 0.0
    return Figures(
        requests=len(good),
        errors=len(results) - len(good),
        seconds=seconds,
        requests_per_s=len(good) * rate,
        prompt_tokens_per_s=sum(r.sample.prompt_tokens for r in good) * rate,
        output_tokens_per_s=sum(r.sample.output_tokens for r in good) * rate,
        goodput_per_s=sum(is_good) * rate,
        ttft_ms=_percentiles([ttft_ms(result) for result in good]),
        itl_ms=_percentiles([ms for gap in gaps for ms in gap]),
        e2e_ms=_percentiles([1e3 * (result.sample.end - result.due) for result in good]),
    )


def groups(results: Sequence[Result], names: Sequence[str]) -> dict[str, list[Result]]:
    """Results by part. One that mixes requests with and without images is also split by that."""
    by_name: dict[str, list[Result]] = {}
    for part, name in enumerate(names):
        members = [result for result in results if result.part == part]
        halves = {kind: [r for r in members if r.has_images == has] for kind, has in _SPLIT.items()}
        by_name[name] = members
        if all(halves.values()):
            by_name |= {f"{name}, {kind}": half for kind, half in halves.items()}
    return {name: members for name, members in by_name.items() if members}


def figures_by_group(results: Sequence[Result], names: Sequence[str], slo: Slo) -> dict[str, Figures]:
    """Rates of a part's two kinds are over the time of the part, so that they add up to its own."""
    return {
        name: figures(group, slo, [result for result in results if result.part == group[0].part])
        for name, group in groups(results, names).items()
    }


def table(rows: dict[str, Figures]) -> str:
    lines = []
    for name, row in rows.items():
        lines.append(
            f"{name}: {row.requests} requests in {row.seconds:.1f} s, {row.errors} errors; "
            f"{row.requests_per_s:.2f} requests/s, {row.goodput_per_s:.2f} within the service levels, "
            f"{row.prompt_tokens_per_s:.0f} prompt tokens/s, {row.output_tokens_per_s:.0f} output tokens/s"
        )
        lines.append(f"  {'ms':<16}" + "".join(f"{f'p{share}':>10}" for share in SHARES))
        for kind in _KINDS:
            lines.append(f"  {_TITLES[kind]:<16}" + "".join(f"{ms:>10.1f}" for ms in getattr(row, kind)))
    return "\n".join(lines)


def errors_of(results: Sequence[Result]) -> dict[str, int]:
    """The most common first."""
    texts = [result.sample.error for result in results if result.sample.error]
    return dict(sorted(((text, texts.count(text)) for text in set(texts)), key=lambda pair: -pair[1]))


def client_warning(load: LoadResult) -> str | None:
    """A warning if the clients were too busy for their own times."""
    late = 1e3 * _p99(load.lag)
    if late <= LATE_MS:
        return None
    return (
        f"the clients were late themselves, by {late:.1f} ms at p99: times include that; use more "
        "--processes, or another machine for the load"
    )


def write_csv(path: Path, results: Sequence[Result], names: Sequence[str]) -> None:
    """A line for each request."""
    begin = min((result.due for result in results), default=0.0)
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(
        ["part", "has_images", "at_s", "ttft_ms", "e2e_ms", "prompt_tokens", "output_tokens", "error"]
    )
    for part, has_images, due, sample in results:
        ttft = f"{1e3 * (sample.token_times[0] - due):.2f}" if sample.token_times else ""
        times = [f"{due - begin:.4f}", ttft, f"{1e3 * (sample.end - due):.2f}"]
        tokens = [sample.prompt_tokens, sample.output_tokens]
        writer.writerow([names[part], int(has_images), *times, *tokens, sample.error or ""])
    write_whole(path, file.getvalue())


def as_json(row: Figures) -> dict[str, Any]:
    percentiles = {
        kind: dict(zip([f"p{s}" for s in SHARES], getattr(row, kind), strict=False)) for kind in _KINDS
    }
    return {**row._asdict(), **percentiles}


def _seconds(results: Sequence[Result]) -> float:
    good = [result for result in results if result.sample.error is None]
    return max([r.sample.end for r in good], default=0.0) - min([r.due for r in good], default=0.0)


def ttft_ms(result: Result) -> float:
    return 1e3 * (result.sample.token_times[0] - result.due)


def gaps_ms(result: Result) -> list[float]:
    return [float(ms) for ms in 1e3 * np.diff(result.sample.token_times)]


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99)) if values else 0.0


def _percentiles(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in np.percentile(values, SHARES)) if values else ()
