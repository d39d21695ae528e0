"""Samples from a seed: `sample(seed)` is always the same pictures and questions (given the same fonts).

Two streams never meet: training uses `TRAIN`, evaluation `HELD_OUT`. A seed is a number within a stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

from training.calls import TextToolScene, ToolScene
from training.canvas import FRAMES
from training.charts import BarScene, TableScene
from training.choices import ABOUT, ChoiceScene
from training.clips import ClipScene
from training.compare import CompareScene
from training.extract import MOST_LETTERS, AnswerScene
from training.pages import SMALLEST_PRINT, PageScene
from training.pages import SMALLEST_TRAINED as SMALLEST_PRINT_TRAINED
from training.photos import read_photos, rough
from training.reading import SMALLEST, SMALLEST_TRAINED, TextScene
from training.refusals import HELD_OUT_SOURCES, TRAINED_ON, ClosedScene, Held, RefuseClip, RefuseScene, Sources
from training.samples import FIRST_SKILLS, SKILLS, Question, Sample
from training.several import SeveralScene
from training.shapes import ShapeScene
from training.sheet import Scene, Sheet, sheet
from training.talk import TalkScene

TRAIN = "train"
HELD_OUT = "held out"
SMALLEST_SIDE, LARGEST_SIDE = 6, 20  # tokens: 96 and 320 pixels
MOST_TOKENS = 400  # the image processor reduces larger pictures to this
PAGE_SKILLS = ("document", "extract", "tool")  # asked about pages, and with long questions
_EXTREME_ASPECT = 2.0
_A4 = 2**0.5


class Shape(NamedTuple):
    """How large the pictures of a sample are, and how many."""

    columns: int  # tokens
    rows: int
    pictures: int = 1
    frames: int = 1  # of a video, an even number; 1 is a still picture

    @property
    def groups(self) -> int:
        """Frame groups: what the tower takes at once."""
        return max(1, self.frames // FRAMES)


class Plan(NamedTuple):
    """What a training sample should be like."""

    level: float = 1.0  # 0..1: how long texts are; training starts low
    smallest_text: int = SMALLEST
    smallest_print: int = SMALLEST_PRINT
    odd: float = 0.35  # share of pictures whose size is no multiple of a token's
    is_varied: bool = True  # tables have any headings, and questions on the way to finding a cell
    rough: float = 0.0  # share of drawings that look photographed or compressed
    outside: Sources = HELD_OUT_SOURCES  # what to refuse
    closed: float = 0.08  # share of pictures to refuse that are asked for JSON
    most_json: int = 140  # letters of it: an answer should end within 128 tokens


EVALUATION = Plan(odd=1.0, is_varied=False)
TRAINING = Plan(
    smallest_text=SMALLEST_TRAINED,
    smallest_print=SMALLEST_PRINT_TRAINED,
    rough=0.25,
    outside=TRAINED_ON,
    most_json=MOST_LETTERS,  # some longer ones, so that lists are not ended early
)
_DRAWINGS = EVALUATION._replace(closed=0.0)  # nothing to refuse


class Plans(NamedTuple):
    training: Plan = TRAINING
    held_out: Plan = EVALUATION


def plans(photos: Path | None) -> Plans:
    """With the photos of a folder: train/ to train on, held_out/ from other sources."""
    if photos is None:
        return Plans()
    own, other = (read_photos(photos / name) for name in ("train", "held_out"))
    return Plans(
        TRAINING._replace(outside=TRAINED_ON._replace(photos=own)),
        EVALUATION._replace(outside=HELD_OUT_SOURCES._replace(photos=other)),
    )


def draw_shape(rng: Random, skill: str | None = None) -> Shape:
    """A size that suits the skill: charts need room, several pictures must fit one prompt."""
    if skill in ("several", "compare"):
        return Shape(rng.randint(6, 10), rng.randint(6, 10), rng.choice((2, 2, 3, 4)))
    if skill in PAGE_SKILLS and rng.random() < 0.7:
        return _page_shape(rng)
    if skill == "video":
        return Shape(rng.randint(6, 12), rng.randint(6, 12), frames=rng.choice((4, 4, 6, 8)))
    low = 9 if skill in ("chart", "table", *PAGE_SKILLS) else SMALLEST_SIDE
    while True:
        wide = rng.random() < 0.08  # what a large wide or tall picture is reduced to
        columns, rows = rng.randint(low, 28 if wide else LARGEST_SIDE), rng.randint(low, 28 if wide else LARGEST_SIDE)
        aspect = max(columns, rows) / min(columns, rows)
        if columns * rows <= MOST_TOKENS and aspect <= _EXTREME_ASPECT and rng.random() < 150 / (columns * rows):
            return Shape(columns, rows)


def _page_shape(rng: Random) -> Shape:
    """A4, upright or across, or a narrow receipt."""
    if rng.random() < 0.2:
        return Shape(rng.randint(9, 11), rng.randint(16, 20))
    short = rng.randint(11, 16)
    long = round(short * _A4)
    return Shape(long, short) if rng.random() < 0.15 else Shape(short, long)


def sample(
    seed: int,
    stream: str = HELD_OUT,
    *,
    skill: str | None = None,
    shape: Shape | None = None,
    turns: int = 1,
    plan: Plan = EVALUATION,
) -> Sample:
    """The sample of a seed. Without a skill, skills take turns with the seed."""
    rng = Random(f"{stream}/{seed}")
    skill = skill or SKILLS[seed % len(SKILLS)]
    shape = shape or draw_shape(rng, skill)
    while True:
        is_outside = skill == "refuse" or (skill == "extract" and rng.random() < plan.closed)
        scene = _outside(rng, shape, plan, stream, skill) if is_outside else _scene(rng, skill, shape, plan)
        first = scene.ask(rng, skill)
        if first is not None and _fits(first, plan):
            break
    questions = [first]
    for _ in range(turns - 1):
        more = scene.ask(rng, rng.choice(scene.skills))
        if more is not None and _fits(more, plan) and all(more.text != q.text for q in questions):
            questions.append(more)
    pictures = scene.pictures
    if skill != "refuse" and plan.rough:
        is_small = skill in PAGE_SKILLS
        pictures = tuple(
            replace(picture, image=rough(rng, picture.image, is_small=is_small))
            if rng.random() < plan.rough
            else picture
            for picture in pictures
        )
    return Sample(pictures, tuple(questions), is_video=shape.frames > 1 and bool(pictures))


def _fits(question: Question, plan: Plan) -> bool:
    return question.skill != "extract" or len(question.answer) <= plan.most_json


def held_out(count: int, skills: tuple[str, ...] = FIRST_SKILLS, plan: Plan = EVALUATION) -> Iterator[Sample]:
    """The first `count` evaluation samples, the skills in turn."""
    return (sample(seed, skill=skills[seed % len(skills)], plan=plan) for seed in range(count))


def typed(rng: Random, question: Question) -> str:
    """A question as people type it: sometimes without capitals or question mark, sometimes polite."""
    text = question.text
    if rng.random() < 0.12:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.1 and question.skill != "chat":
        text = text.rstrip("?.")
    if rng.random() < 0.04 and question.skill != "chat":
        text = f"Please answer: {text}"
    return text


def _scene(rng: Random, skill: str, shape: Shape, plan: Plan) -> Scene:
    if skill == "chat":
        return TalkScene()
    sheets = [sheet(rng, shape.columns, shape.rows, plan.odd) for _ in range(shape.pictures)]
    if skill == "video":
        return ClipScene(rng, sheets[0], _frames(rng, shape))
    if skill == "compare":
        return CompareScene(rng, sheets, plan.level)
    if skill == "choice":
        return _with_choices(rng, shape, plan)
    if skill == "several":
        return SeveralScene(rng, sheets, plan.level)
    if skill == "tool" and rng.random() < 0.1:
        return TextToolScene(rng)
    if skill in PAGE_SKILLS:
        return _data_scene(rng, skill, sheets[0], plan)
    fits_data = shape.columns >= 8 and shape.rows >= 7
    if skill == "caption" and rng.random() < 0.4:
        skill = rng.choice(("words", "numbers", "chart", "table") if fits_data else ("words", "numbers"))
    if skill == "chart":
        return BarScene(rng, sheets[0])
    if skill == "table":
        return TableScene(rng, sheets[0], is_varied=plan.is_varied)
    if skill in ("words", "numbers") or (skill in ("color", "absent") and rng.random() < 0.1):
        text = skill if skill in ("words", "numbers") else "words"
        return TextScene(rng, sheets[0], text, plan.level, smallest=plan.smallest_text)
    return ShapeScene(rng, sheets[0], skill)


def _data_scene(rng: Random, skill: str, sheet: Sheet, plan: Plan) -> Scene:
    """A page, or for other skills than documents also a table, a chart or shapes."""
    kind = 0.0 if skill == "document" else rng.random()
    scene: PageScene | TableScene | BarScene | ShapeScene
    if kind < 0.5:
        scene = PageScene(rng, sheet, plan.smallest_print)
    elif kind < 0.7:
        scene = TableScene(rng, sheet, is_varied=plan.is_varied)
    elif kind < 0.85:
        scene = BarScene(rng, sheet)
    else:
        scene = ShapeScene(rng, sheet, "extract")
    if skill == "extract":
        return AnswerScene(scene)
    return ToolScene(rng, scene) if skill == "tool" else scene


def _frames(rng: Random, shape: Shape) -> int:
    """Sometimes an odd number, so that the last frame group is half empty."""
    return shape.frames - 1 if shape.frames > 4 and rng.random() < 0.15 else shape.frames


def _with_choices(rng: Random, shape: Shape, plan: Plan) -> Scene:
    about = [s for s in ABOUT if s not in ("chart", "table") or (shape.columns >= 9 and shape.rows >= 9)]
    return ChoiceScene(_scene(rng, rng.choice(about), shape, plan))


def _outside(rng: Random, shape: Shape, plan: Plan, stream: str, skill: str) -> Scene:
    """Photographs and textures, of which is asked what is asked of drawings."""
    sheets = [sheet(rng, shape.columns, shape.rows, plan.odd) for _ in range(shape.pictures)]
    if skill == "extract":
        return ClosedScene(rng, sheets, plan.outside, _asked("one", stream), _held(stream))
    if shape.frames > 1:
        return RefuseClip(rng, sheets[0], _frames(rng, shape), plan.outside, _asked("video", stream))
    if shape.pictures > 1:
        return RefuseScene(rng, sheets, plan.outside, _asked("several", stream))
    return RefuseScene(rng, sheets, plan.outside, _asked("one", stream))


@cache
def _asked(about: str, stream: str) -> tuple[str, ...]:
    """Questions about drawings, from seeds that are used for nothing else."""
    own = {"video": ("video",), "several": ("several", "compare")}
    skills = own.get(about) or tuple(s for s in SKILLS if s not in ("chat", "refuse", "several", "compare", "video"))
    seeds = range(2 * 10**9, 2 * 10**9 + 300)
    samples = (sample(seed, stream, skill=skills[seed % len(skills)], plan=_DRAWINGS) for seed in seeds)
    return tuple(question.text for made in samples for question in made.questions)


@cache
def _held(stream: str) -> tuple[Held, ...]:
    """Such questions that are held to a schema."""
    seeds = range(3 * 10**9, 3 * 10**9 + 120)
    samples = (sample(seed, stream, skill="extract", turns=6, plan=_DRAWINGS) for seed in seeds)
    return tuple((one.text, dict(one.schema)) for made in samples for one in made.questions if one.schema)
