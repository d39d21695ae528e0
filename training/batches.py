"""Batches for the training forward: conversations as arrays, all pictures of a batch of one size."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from training import chat
from training.samples import SKILLS, Sample
from training.scenes import EVALUATION, HELD_OUT, TRAIN, TRAINING, Plan, Shape, draw_shape, sample, typed
from training.tokenizer import token_id

Array = npt.NDArray[np.generic]
Arrays = dict[str, Array]

IGNORED = -100  # target of a token that is not part of an answer
_SYSTEM = ("You are a helpful assistant.", "Answer the question about the picture.", "You are Saccade.", "Be brief.")


@dataclass(frozen=True, slots=True)
class BatchSizes:
    patches: int = 160_000  # of 8x8 pixels, in one batch
    text: int = 128  # tokens of text per sample; several questions about a picture fill them


@dataclass(frozen=True, slots=True)
class Mix:
    """What to draw next: steered by the trainer as it goes."""

    weights: tuple[float, ...]  # per skill
    plan: Plan = field(default=TRAINING)


class Encoder:
    """Conversations to token ids, with picture tokens expanded and answers marked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.pad, self.start, self.end, self.image = (
            token_id(tokenizer, name) for name in (chat.END_OF_TEXT, chat.START, chat.END, chat.IMAGE)
        )
        self._answering = [self.start, *tokenizer.encode("assistant\n").ids]

    def turn(self, text: str, skill: int) -> tuple[list[int], list[int]]:
        """Ids of some turns and, for each, the skill it is an answer for, or -1."""
        ids = self.tokenizer.encode(text).ids
        skills, reach = [-1] * len(ids), len(self._answering)
        for place in range(len(ids) - reach):
            if ids[place : place + reach] == self._answering:
                last = ids.index(self.end, place)
                skills[place + reach : last + 1] = [skill] * (last + 1 - place - reach)
        return ids, skills

    def conversation(self, rng: Random, made: Sample, room: int, *, plain: bool) -> tuple[list[int], list[int]]:
        """As many of the sample's questions as fit `room` tokens; picture tokens are not expanded yet."""
        ids: list[int] = []
        skills: list[int] = []
        pictures = len(made.pictures)
        if not plain and rng.random() < 0.1:
            ids, skills = self.turn(chat.turn("system", rng.choice(_SYSTEM)), -1)
        for index, question in enumerate(made.questions):
            text = question.text if plain else typed(rng, question)
            shown = pictures if index == 0 else 0
            asked = chat.user(text, shown, is_text_first=not plain and rng.random() < 0.2)
            more_ids, more_skills = self.turn(asked + chat.assistant(question.answer), SKILLS.index(question.skill))
            if index and len(ids) + len(more_ids) > room:
                break
            ids, skills = ids + more_ids, skills + more_skills
        return ids, skills


def positions(ids: list[int], image: int, columns: int, rows: int) -> tuple[npt.NDArray[np.int32], list[int]]:
    """M-RoPE positions [3, expanded tokens] and where pictures begin; in `ids` one `image` stands for a picture."""
    parts, starts = [], []
    at, place = 0, 0
    grid = np.stack([np.zeros(rows * columns), *np.divmod(np.arange(rows * columns), columns)]).astype(np.int32)
    run = 0
    for token in [*ids, image]:  # the last one only closes the text before it
        if token != image:
            run += 1
            continue
        parts.append(np.broadcast_to(np.arange(at, at + run, dtype=np.int32), (3, run)))
        at, place, run = at + run, place + run, 0
        starts.append(place)
        parts.append(grid + at)
        at, place = at + max(rows, columns), place + rows * columns
    return np.concatenate(parts[:-1], axis=1), starts[:-1]


def collate(encoder: Encoder, rng: Random, samples: list[Sample], shape: Shape, text: int, *, plain: bool) -> Arrays:
    """One batch. Samples with fewer pictures than `shape` has leave blank ones, which go nowhere (slot B * T)."""
    per_picture = shape.columns * shape.rows
    length = shape.pictures * (per_picture + 2) + text
    count, total = len(samples), len(samples) * shape.pictures
    height, width = shape.rows * 16, shape.columns * 16
    out: Arrays = {
        "pixels": np.zeros((total, height, width, 3), np.uint8),
        "glyphs": np.zeros((total, height // 8, width // 8), np.uint8),
        "colors": np.zeros((total, height // 8, width // 8), np.uint8),
        "ids": np.full((count, length), encoder.pad, np.int32),
        "positions": np.zeros((3, count, length), np.int32),
        "targets": np.full((count, length), IGNORED, np.int32),
        "skills": np.full((count, length), -1, np.int8),
        "slots": np.full((total, per_picture), count * length, np.int32),
    }
    for row, made in enumerate(samples):
        room = length - len(made.pictures) * (per_picture - 1)
        ids, skills = encoder.conversation(rng, made, room, plain=plain)
        _put_text(out, encoder, row, ids[:room], skills[:room], shape)
        for index, picture in enumerate(made.pictures):
            slot = row * shape.pictures + index
            out["pixels"][slot] = np.asarray(picture.resized())
            out["glyphs"][slot], out["colors"][slot] = picture.glyphs, picture.colors
    # Found here, because to look for them on a GPU is to wait for it.
    out["answers"] = np.flatnonzero(out["targets"] != IGNORED)
    return out


def _put_text(out: Arrays, encoder: Encoder, row: int, ids: list[int], skills: list[int], shape: Shape) -> None:
    per_picture, length = shape.columns * shape.rows, out["ids"].shape[1]
    where, starts = positions(ids, encoder.image, shape.columns, shape.rows)
    repeats = [per_picture if token == encoder.image else 1 for token in ids]
    expanded, marks = np.repeat(ids, repeats), np.repeat(skills, repeats)
    count = len(expanded)
    out["ids"][row, :count] = expanded
    out["positions"][:, row, :count] = where
    out["skills"][row, : count - 1] = marks[1:]  # a token's target is the next token
    out["targets"][row, : count - 1] = np.where(marks[1:] >= 0, expanded[1:], IGNORED)
    for index, start in enumerate(starts):
        out["slots"][row * shape.pictures + index] = row * length + start + np.arange(per_picture)


def train_batch(encoder: Encoder, seed: int, sizes: BatchSizes, mix: Mix) -> Arrays:
    """The batch of a seed: one size of picture, skills by weight, several questions about each picture."""
    rng = Random(f"{TRAIN} batch/{seed}")
    is_several = rng.random() < mix.weights[SKILLS.index("several")] / sum(mix.weights)
    fits_data = is_several or rng.random() < 0.6
    shape = draw_shape(rng, "several" if is_several else "chart" if fits_data else None)
    weights = dict(zip(SKILLS, mix.weights, strict=True))
    if not fits_data and min(shape.columns, shape.rows) < 9:
        weights |= {"chart": 0.0, "table": 0.0}
    elif not is_several:  # the share that small pictures could not take
        weights |= {name: weights[name] / 0.7 for name in ("chart", "table")}
    weights["several"] = 0.0
    count = max(1, sizes.patches // (4 * shape.columns * shape.rows * shape.pictures))
    chosen = ["several"] * count if is_several else rng.choices(SKILLS, list(weights.values()), k=count)
    samples = [
        sample(seed * 4096 + i, TRAIN, skill=skill, shape=shape, turns=5, plan=mix.plan)
        for i, skill in enumerate(chosen)
    ]
    return collate(encoder, rng, samples, shape, sizes.text, plain=False)


def held_out_batch(encoder: Encoder, seed: int, sizes: BatchSizes) -> Arrays:
    """Evaluation samples of one picture size, one question each, all skills in turn."""
    rng = Random(f"{HELD_OUT} batch/{seed}")
    is_several = seed % 6 == 5
    shape = draw_shape(rng, "several" if is_several else "chart")
    skills = ("several",) if is_several else tuple(s for s in SKILLS if s != "several")
    count = max(len(skills), sizes.patches // (8 * shape.columns * shape.rows * shape.pictures))
    samples = [
        sample(10**9 + seed * 4096 + i, HELD_OUT, skill=skills[i % len(skills)], shape=shape, plan=EVALUATION)
        for i in range(count)
    ]
    return collate(encoder, rng, samples, shape, sizes.text, plain=True)
