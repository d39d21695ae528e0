"""Batches for the training forward: conversations as arrays, all pictures of a batch of one size."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from random import Random

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from training import chat
from training.canvas import FRAMES, NUM_LINKS, PATCH, TOKEN
from training.samples import SKILLS, UNKNOWN, Picture, Sample
from training.scenes import EVALUATION, HELD_OUT, PAGE_SKILLS, TRAIN, TRAINING, Plan, Shape, draw_shape, sample, typed
from training.tokenizer import token_id

Array = npt.NDArray[np.generic]
Arrays = dict[str, Array]

IGNORED = -100  # target of a token that is not part of an answer
# Skills that need a shape or a length of their own: mixed with no others but some pictures to refuse.
_GROUPS = (("several", "compare"), PAGE_SKILLS, ("video",))
_REFUSED = 0.06  # of a batch of such a group
_KEY = re.compile(r' ?"[^"]*":')  # of a JSON object
_SYSTEM = ("You are a helpful assistant.", "Answer the question about the picture.", "You are Saccade.", "Be brief.")


@dataclass(frozen=True, slots=True)
class BatchSizes:
    patches: int = 160_000  # of 8x8 pixels, in one batch
    text: int = 128  # tokens of text per sample; several questions about a picture fill them
    page_text: int = 352  # where questions bring a schema or tools


@dataclass(frozen=True, slots=True)
class Mix:
    """What to draw next: steered by the trainer as it goes."""

    weights: tuple[float, ...]  # per skill
    plan: Plan = field(default=TRAINING)


class Encoder:
    """Conversations to token ids, with picture tokens expanded and answers marked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.pad, self.start, self.end, self.image, self.video = (
            token_id(tokenizer, name) for name in (chat.END_OF_TEXT, chat.START, chat.END, chat.IMAGE, chat.VIDEO)
        )
        self._answering = [self.start, *tokenizer.encode("assistant\n").ids]

    def turn(self, text: str, skill: int, *, has_given_keys: bool = False) -> tuple[list[int], list[int]]:
        """Ids of some turns and, for each, the skill it is an answer for, or -1.

        Keys that a schema gives are no part of the answer, nor is the brace before them: a grammar writes them.
        """
        encoded = self.tokenizer.encode(text)
        ids = encoded.ids
        skills, reach = [-1] * len(ids), len(self._answering)
        for place in range(len(ids) - reach):
            if ids[place : place + reach] == self._answering:
                last = ids.index(self.end, place)
                first = place + reach + has_given_keys
                skills[first : last + 1] = [skill] * (last + 1 - first)
        for key in _KEY.finditer(text) if has_given_keys else ():
            for index, (start, end) in enumerate(encoded.offsets):
                if key.start() <= start and end <= key.end():
                    skills[index] = -1
        return ids, skills

    def conversation(self, rng: Random, made: Sample, room: int, *, plain: bool) -> tuple[list[int], list[int]]:
        """As many of the sample's questions as fit `room` tokens; picture tokens are not expanded yet."""
        ids: list[int] = []
        skills: list[int] = []
        media = 1 if made.is_video else len(made.pictures)
        system = rng.choice(_SYSTEM) if not plain and rng.random() < 0.1 else ""
        if made.questions[0].tools:
            ids, skills = self.turn(chat.tools_turn(made.questions[0].tools, system), -1)
        elif system:
            ids, skills = self.turn(chat.turn("system", system), -1)
        for index, question in enumerate(made.questions):
            text = question.text if plain else typed(rng, question)
            is_text_first = not plain and rng.random() < 0.2
            shown = media if index == 0 else 0
            asked = chat.user(text, shown, is_text_first=is_text_first, is_video=made.is_video)
            if question.role == "tool":
                asked = chat.turn("tool", question.text)
            more_ids, more_skills = self.turn(
                asked + chat.assistant(question.answer),
                SKILLS.index(question.skill),
                has_given_keys=question.schema is not None,
            )
            if index and len(ids) + len(more_ids) > room:
                break
            ids, skills = ids + more_ids, skills + more_skills
        return ids, skills


def positions(ids: list[int], media: int, shape: Shape) -> tuple[npt.NDArray[np.int32], list[int]]:
    """M-RoPE positions [3, expanded tokens] and where pictures begin; in `ids` one `media` stands for each."""
    parts, starts = [], []
    at, place, run = 0, 0, 0
    grid = np.indices((shape.groups, shape.rows, shape.columns), dtype=np.int32).reshape(3, -1)
    for token in [*ids, media]:  # the last one only closes the text before it
        if token != media:
            run += 1
            continue
        parts.append(np.broadcast_to(np.arange(at, at + run, dtype=np.int32), (3, run)))
        at, place, run = at + run, place + run, 0
        starts.append(place)
        parts.append(grid + at)
        at, place = at + max(shape.rows, shape.columns), place + grid.shape[1]
    return np.concatenate(parts[:-1], axis=1), starts[:-1]


def collate(encoder: Encoder, rng: Random, samples: list[Sample], shape: Shape, text: int, *, plain: bool) -> Arrays:
    """One batch. Samples with fewer pictures than `shape` has leave blank ones, which go nowhere (slot B * T).

    A frame group of a video is a picture here, of `FRAMES` frames.
    """
    tokens = shape.groups * shape.columns * shape.rows  # of a picture, or of a video
    length = shape.pictures * (tokens + 2) + text
    count, total = len(samples), len(samples) * shape.pictures * shape.groups
    height, width = shape.rows * TOKEN, shape.columns * TOKEN
    frames = (FRAMES,) if shape.frames > 1 else ()
    out: Arrays = {
        "pixels": np.zeros((total, *frames, height, width, 3), np.uint8),
        "glyphs": np.zeros((total, height // PATCH, width // PATCH), np.uint8),
        "colors": np.zeros((total, height // PATCH, width // PATCH), np.uint8),
        "links": np.zeros((NUM_LINKS, total, height // PATCH, width // PATCH), np.uint8),
        "ids": np.full((count, length), encoder.pad, np.int32),
        "positions": np.zeros((3, count, length), np.int32),
        "targets": np.full((count, length), IGNORED, np.int32),
        "skills": np.full((count, length), -1, np.int8),
        "slots": np.full((total, shape.columns * shape.rows), count * length, np.int32),
    }
    for row, made in enumerate(samples):
        media = 1 if made.is_video else len(made.pictures)
        room = length - media * (tokens - 1)
        ids, skills = encoder.conversation(rng, made, room, plain=plain)
        _put_text(out, encoder, row, ids[:room], skills[:room], shape)
        first = row * shape.pictures * shape.groups
        if made.is_video:
            _put_video(out, first, made)
        else:
            for index, picture in enumerate(made.pictures):
                _put_picture(out, first + index, picture)
    # Found here, because to look for them on a GPU is to wait for it.
    out["answers"] = np.flatnonzero(out["targets"] != IGNORED)
    return out


def _put_picture(out: Arrays, at: int, picture: Picture) -> None:
    out["pixels"][at] = np.asarray(picture.resized())
    out["glyphs"][at], out["colors"][at] = picture.glyphs, picture.colors
    if picture.links is not None:
        out["links"][:, at] = picture.links


def _put_video(out: Arrays, first: int, made: Sample) -> None:
    """Frame groups; an odd last frame is shown twice. Patches that change within a group have no label."""
    pictures = [*made.pictures, *made.pictures[-1:]][: -(-len(made.pictures) // FRAMES) * FRAMES]
    for index in range(0, len(pictures), FRAMES):
        one, two = pictures[index : index + FRAMES]
        at = first + index // FRAMES
        out["pixels"][at] = np.stack([np.asarray(one.resized()), np.asarray(two.resized())])
        out["glyphs"][at] = np.where(one.glyphs == two.glyphs, one.glyphs, UNKNOWN)
        out["colors"][at] = np.where(one.colors == two.colors, one.colors, UNKNOWN)


def _put_text(out: Arrays, encoder: Encoder, row: int, ids: list[int], skills: list[int], shape: Shape) -> None:
    length, media = out["ids"].shape[1], encoder.video if shape.frames > 1 else encoder.image
    tokens = shape.groups * shape.columns * shape.rows
    where, starts = positions(ids, media, shape)
    repeats = [tokens if token == media else 1 for token in ids]
    expanded, marks = np.repeat(ids, repeats), np.repeat(skills, repeats)
    count = len(expanded)
    out["ids"][row, :count] = expanded
    out["positions"][:, row, :count] = where
    out["skills"][row, : count - 1] = marks[1:]  # a token's target is the next token
    out["targets"][row, : count - 1] = np.where(marks[1:] >= 0, expanded[1:], IGNORED)
    slots = out["slots"].reshape(len(out["ids"]), shape.pictures, tokens)
    for index, start in enumerate(starts):
        slots[row, index] = row * length + start + np.arange(tokens)


def train_batch(encoder: Encoder, seed: int, sizes: BatchSizes, mix: Mix) -> Arrays:
    """The batch of a seed: one size of picture, skills by weight, several questions about each picture."""
    rng = Random(f"{TRAIN} batch/{seed}")
    weights = dict(zip(SKILLS, mix.weights, strict=True))
    group = _drawn_group(rng, weights)
    fits_data = bool(group) or rng.random() < 0.6
    shape = draw_shape(rng, group[0] if group else "chart" if fits_data else None)
    if group:
        own = {name: weights[name] for name in group}
        weights = own | {"refuse": sum(own.values()) * _REFUSED}
    else:
        weights |= {name: 0.0 for other in _GROUPS for name in other}
        if not fits_data and min(shape.columns, shape.rows) < 9:
            weights |= {"chart": 0.0, "table": 0.0}
        else:  # the share that small pictures could not take
            weights |= {name: weights[name] / 0.7 for name in ("chart", "table")}
    chosen = rng.choices(list(weights), list(weights.values()), k=_batch_count(shape, sizes.patches))
    samples = [
        sample(seed * 4096 + i, TRAIN, skill=skill, shape=shape, turns=5, plan=mix.plan)
        for i, skill in enumerate(chosen)
    ]
    text = sizes.page_text if group == PAGE_SKILLS else sizes.text
    return collate(encoder, rng, samples, shape, text, plain=False)


def _drawn_group(rng: Random, weights: dict[str, float]) -> tuple[str, ...]:
    """One of the groups by its weight, or none: skills of any picture."""
    mark = rng.random() * sum(weights.values())
    for group in _GROUPS:
        mark -= sum(weights[name] for name in group)
        if mark < 0:
            return group
    return ()


def _batch_count(shape: Shape, patches: int) -> int:
    """Samples that fill so many patches of pixels."""
    return max(1, patches // (4 * shape.columns * shape.rows * shape.pictures * shape.frames))


def held_out_batch(encoder: Encoder, seed: int, sizes: BatchSizes, plan: Plan = EVALUATION) -> Arrays:
    """Evaluation samples of one picture size, one question each, all skills in turn."""
    rng = Random(f"{HELD_OUT} batch/{seed}")
    group = {5: _GROUPS[0], 4: _GROUPS[1], 3: _GROUPS[2]}.get(seed % 6, ())
    shape = draw_shape(rng, group[0] if group else "chart")
    grouped = {name for other in _GROUPS for name in other}
    skills = group or tuple(s for s in SKILLS if s not in grouped)
    count = max(len(skills), _batch_count(shape, sizes.patches // 2))
    samples = [
        sample(10**9 + seed * 4096 + i, HELD_OUT, skill=skills[i % len(skills)], shape=shape, plan=plan)
        for i in range(count)
    ]
    text = sizes.page_text if group == PAGE_SKILLS else sizes.text
    return collate(encoder, rng, samples, shape, text, plain=True)
