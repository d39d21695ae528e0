"""What pruning saves and costs: the built-in model is asked about drawn videos, `python -m benchmarks.video_pruning`.

A video shows four shapes of the world that the model was trained on (in pictures, never in videos). In a third of them
nothing changes, in a third one shape moves, in a third one appears halfway. Half of them have fresh noise in every
frame. The same tokens are also saved in two other ways: by smaller frames, and by tokens that are drawn by lot.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from saccade import LLM, SamplingParams
from saccade.apps.evaluation.image_noise import Grain, add_grain
from saccade.apps.evaluation.scoring import AnswerRule, chance
from saccade.media import video_pruning
from saccade.types.media import Size
from training.canvas import KINDS, Canvas, noise_field, outline
from training.palette import NAMES, background, shade

SIDE = 160  # pixels: 10 x 10 tokens
RATES = (0.0, 0.25, 0.5, 0.75, 0.9)
WAYS = ("still", "moving", "late")
PLACES = {"top left": (0.22, 0.22), "top right": (0.78, 0.22), "center": (0.5, 0.5), "bottom": (0.5, 0.82)}
GREEDY = SamplingParams(temperature=0, max_tokens=24)


class Asked(NamedTuple):
    about: str  # "resting": a shape that does not change; or the way of the one that does
    text: str
    rule: AnswerRule


@dataclass(frozen=True)
class Film:
    frames: np.ndarray  # [frames, SIDE, SIDE, 3]
    questions: tuple[Asked, ...]


def film(seed: int) -> Film:
    rng = Random(f"video pruning/{seed}")
    way, count = WAYS[seed % len(WAYS)], rng.choice((8, 12, 16))
    kinds, colors = rng.sample(KINDS, 4), rng.sample(NAMES, 4)
    shades = {color: shade(rng, color) for color in colors}
    paper, _ = background(rng, list(shades.values()))
    corners = {kind: outline(kind, rng.uniform(16, 24), rng) for kind in kinds}
    shown = []
    has_noise = rng.random() < 0.5
    for index in range(count):
        canvas = Canvas((SIDE, SIDE), (SIDE, SIDE), paper)
        for (kind, color), place in zip(zip(kinds, colors, strict=True), PLACES.values(), strict=True):
            at = place if kind != kinds[-1] else _actor(way, index, count)
            if at is not None:
                canvas.shape(*corners[kind], (at[0] * SIDE, at[1] * SIDE), shades[color], (0, 0))
        grain = Grain(rng.randrange(800), rng.randrange(800), 5 if has_noise else 0)
        shown.append(np.asarray(add_grain(canvas.image, noise_field(), grain)))
    return Film(np.stack(shown), tuple(_questions(rng, way, list(zip(kinds, colors, strict=True)))))


def _actor(way: str, index: int, count: int) -> tuple[float, float] | None:
    """Where the last shape is: at the bottom, from the left to the right, or nowhere at first."""
    if way == "late" and index < count // 2:
        return None
    if way == "moving":
        return 0.2 + 0.6 * index / (count - 1), 0.82
    return PLACES["bottom"]


def _questions(rng: Random, way: str, shapes: list[tuple[str, str]]) -> Iterator[Asked]:
    still = rng.randrange(len(shapes) - 1)
    (kind, color), place = shapes[still], list(PLACES)[still]
    wrong = [tuple(n for n in names if n != own) for names, own in ((NAMES, color), (KINDS, kind))]
    yield Asked("resting", f"What color is the {kind}?", AnswerRule((color,), "all", wrong[0]))
    yield Asked("resting", f"What shape is {color}?", AnswerRule((kind,), "all", wrong[1]))
    others = tuple(w for w in ("top", "bottom", "left", "right", "center", "middle") if w not in place.split())
    yield Asked("resting", f"Where is the {color} {kind}?", AnswerRule((place,), "all", others))
    if way != "still":
        kind, color = shapes[-1]
        wrong = [tuple(n for n in names if n != own) for names, own in ((NAMES, color), (KINDS, kind))]
        yield Asked(way, f"What color is the {kind}?", AnswerRule((color,), "all", wrong[0]))
        yield Asked(way, f"What shape is {color}?", AnswerRule((kind,), "all", wrong[1]))


# --- asking -------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    tokens: float  # of a video, on average
    right: dict[str, float]  # by what the question is about
    seconds: float


def ask(llm: LLM, films: Sequence[Film], **kwargs: Any) -> Result:
    start, right, tokens = time.perf_counter(), {}, []
    for shown in films:
        chats = [_chat(shown.frames, asked.text) for asked in shown.questions]
        outs = llm.chat(chats, GREEDY, mm_processor_kwargs=kwargs, use_tqdm=False)
        tokens.append(outs[0].bill.video_tokens)
        for asked, out in zip(shown.questions, outs, strict=True):
            for name in ("all", asked.about):
                right.setdefault(name, []).append(asked.rule.is_right(out.outputs[0].text))
    shares = {name: sum(found) / len(found) for name, found in right.items()}
    return Result(sum(tokens) / len(tokens), shares, time.perf_counter() - start)


def _chat(frames: np.ndarray, text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "video", "video": frames}, {"type": "text", "text": text}]}]


def smaller(pruned: float, whole: float) -> int:
    """Pixels of a frame at which all groups together have about as many tokens."""
    side = max(1, round(math.sqrt(pruned / whole) * SIDE / 16))
    return (side * 16) ** 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--videos", type=int, default=60)
    torch.set_num_threads(2)
    films = [film(seed) for seed in range(parser.parse_args().videos)]
    rules = [asked.rule for shown in films for asked in shown.questions]
    print(f"{len(films)} videos, {len(rules)} questions; the best constant reply gets {chance(rules):.1%} right")
    columns = ("all", "resting", "moving", "late")
    print("| | tokens a video | " + " | ".join(columns) + " | seconds |\n|" + " --- |" * (len(columns) + 3))
    whole = None
    for rate in RATES:
        found = _fresh(films, video_pruning=rate)
        whole = whole or found
        _print(f"pruning {rate:g}", found, columns)
        if rate:
            limit = smaller(found.tokens, whole.tokens)
            _print(f"frames of {limit} pixels", _fresh(films, max_video_pixels=limit), columns)
            with patch.object(video_pruning, "changes", _by_lot):
                _print(f"pruning {rate:g}, by lot", _fresh(films, video_pruning=rate), columns)


def _by_lot(frames: np.ndarray, cells: Size) -> np.ndarray:
    return np.random.default_rng(frames.sum()).permutation(cells.width * cells.height)


def _fresh(films: Sequence[Film], **kwargs: Any) -> Result:
    """Nothing is at hand from the run before."""
    llm = LLM(use_tqdm=False, kv_cache_gb=0.1, min_pixels=256)
    try:
        return ask(llm, films, **kwargs)
    finally:
        llm.close()


def _print(name: str, found: Result, columns: Sequence[str]) -> None:
    shares = " | ".join(f"{found.right[column]:.1%}" for column in columns)
    print(f"| {name} | {found.tokens:.0f} | {shares} | {found.seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
