"""Results of `saccade tune` as a table, as bars for the terminal and as an SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from saccade.apps.evaluation.questions import QuestionSet
from saccade.apps.evaluation.tune import Advice, Measurement
from saccade.apps.svg import Panel, color_of, curve, document, legend, text

_BAR = 20  # characters
_MAX_BARS = 2  # groups beside the whole; more do not fit a terminal


def tuned_table(measured: Sequence[Measurement]) -> str:
    lines = ["max_pixels  accuracy  worst skill       tokens/picture  first token  requests in KV"]
    for one in measured:
        skill, share = one.worst()
        tokens = _cell(one.tokens_per_image, ".1f")
        fit = _cell(one.concurrency, ",")
        quality = f"{one.accuracy:>9.1%}  {f'{skill} {share:.0%}':<17}"
        cost = f"{tokens:>14} {one.first_token_ms:>9.0f} ms {fit:>15}"
        lines.append(f"{one.max_pixels:>10,} {quality} {cost}")
    return "\n".join(lines)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def text_chart(measured: Sequence[Measurement], advice: Advice, questions: QuestionSet) -> str:
    """A bar per setting for all questions, and for the groups that lose most."""
    groups = questions.grouped()
    names = [cliff.group for cliff in advice.cliffs][:_MAX_BARS]
    lines = ["max_pixels  " + "  ".join(f"{name:<{_BAR + 5}}" for name in ["all", *names]).rstrip()]
    for one in measured:
        shares = [one.accuracy, *(one.of(groups[name]) for name in names)]
        bars = "  ".join(f"{_bar(share)} {share:>4.0%}" for share in shares)
        mark = "  <- recommended" if one.max_pixels == advice.max_pixels else ""
        lines.append(f"{one.max_pixels:>10,}  {bars}{mark}")
    return "\n".join(lines)


def _bar(share: float) -> str:
    filled = round(share * _BAR)
    return "█" * filled + "·" * (_BAR - filled)


def svg(measured: Sequence[Measurement], advice: Advice, questions: QuestionSet) -> str:
    """Accuracy of each group against pixels on a logarithmic axis, the recommendation marked."""
    sizes = [one.max_pixels for one in measured]
    panel = Panel(56, 464, 46, (min(sizes), max(sizes)), (0.0, 1.0), is_log=True)
    x = panel.at(advice.max_pixels, 0)[0]
    lowest = min(measured, key=lambda one: one.max_pixels)
    # By accuracy at the left end, since curves meet at the right.
    groups = dict(sorted(questions.grouped().items(), key=lambda item: -lowest.of(item[1])))
    percents = {percent / 100: f"{percent} %" for percent in range(0, 101, 20)}
    parts = [
        text(panel.left, 22, f"{questions.name}: accuracy against max_pixels", size=15),
        *panel.axes("max_pixels", {pixels: f"{pixels:,}" for pixels in sizes}, percents, tick=5),
        panel.upright(advice.max_pixels),
        text(
            x,
            panel.top - 8,
            f"recommended: {advice.max_pixels:,}",
            "middle" if x < panel.right - 60 else "end",
        ),
        *_curves(panel, measured, list(groups.values())),
        *legend(panel.right + 20, panel.top + 20, list(groups)),
    ]
    return document(680, 350, parts)


def _curves(panel: Panel, measured: Sequence[Measurement], groups: Sequence[Sequence[str]]) -> Iterator[str]:
    for row, skills in enumerate(groups):
        points = [panel.at(one.max_pixels, one.of(skills)) for one in measured]
        yield curve(points, color_of(row))
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color_of(row)}"/>' for x, y in points)
