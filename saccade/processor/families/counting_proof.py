"""A counting rule beside a checkpoint's own processor: used where both agree, in the processor's tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from fractions import Fraction
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from saccade.errors import RequestError
from saccade.processor.families.counting_rules import Rule, RuledImage
from saccade.types.media import Size

logger = logging.getLogger("saccade.processor")

_SIDES = ((64, 64), (37, 90), (300, 211), (512, 384), (480, 641), (800, 600), (1000, 1000), (1280, 720))
PROBES = (*_SIDES, (720, 1280), (1280, 960), (1600, 200), (90, 900), (1920, 1080), (2000, 3000))
GRID = "image_grid_thw"


class Counted(NamedTuple):
    token_ids: npt.NDArray[np.int32]  # of the expanded image
    kinds: npt.NDArray[np.int8]  # of each token, as its processor tells text from images; empty: it does not
    values: int  # that the tower reads
    arguments: Mapping[str, Any]  # of its model's positions: grids and sizes


Count = Callable[[Size], Counted]


class Facts(NamedTuple):
    """What all images of a model share."""

    token: int  # that stands for an image
    kind: int
    has_kinds: bool
    share: Fraction  # values of a pixel


class Written:
    """The tokens that stand for the texts and runs of a rule."""

    def __init__(self, rule: Rule, image_ids: tuple[int, ...], names: frozenset[str]) -> None:
        self._patch: int | None = None
        if names == {GRID}:
            self._patch = rule.patch_size
        self._image_ids = image_ids
        self._facts: Facts | None = None
        self._texts: dict[str, tuple[list[int], list[int]]] = {}  # tokens and their kinds

    def learn(self, image: RuledImage, counted: Counted) -> bool:
        """False: the two differ."""
        ids = counted.token_ids
        token = next((token for token in self._image_ids if token in ids), -1)
        edges = np.flatnonzero(np.diff(ids == token, prepend=False, append=False))
        if (edges[1::2] - edges[::2]).tolist() != [run.tokens for run in image.runs]:
            return False
        kinds = counted.kinds
        if not len(kinds):
            kinds = np.zeros(len(ids), np.int8)
        kind, *others = set(kinds[ids == token].tolist())
        facts = Facts(token, kind, len(counted.kinds) > 0, Fraction(counted.values, image.area))
        if self._facts is None:
            self._facts = facts
        parts = zip(np.split(ids, edges)[::2], np.split(kinds, edges)[::2], strict=True)
        texts = [self._is_known(text, *part) for text, part in zip(image.texts, parts, strict=True)]
        return all([not others, self._facts == facts, self._has_grid(image, counted), *texts])

    def _is_known(self, text: str, ids: npt.NDArray[Any], kinds: npt.NDArray[Any]) -> bool:
        part = ids.tolist(), kinds.tolist()
        return self._texts.setdefault(text, part) == part

    def _has_grid(self, image: RuledImage, counted: Counted) -> bool:
        if self._patch is None:
            return True
        grids: list[list[int]] = counted.arguments[GRID].tolist()
        return grids == [self.grid(image, self._patch)]

    def grid(self, image: RuledImage, patch: int) -> list[int]:
        return [1, image.resized.height // patch, image.resized.width // patch]

    def counted(self, image: RuledImage) -> Counted:
        """KeyError for a text that was not learned."""
        assert self._facts is not None
        ids: list[int] = []
        kinds: list[int] = []
        for text, tokens in (*image.runs, (image.end, 0)):
            ids += self._texts[text][0] + [self._facts.token] * tokens
            kinds += self._texts[text][1] + [self._facts.kind] * tokens
        grid = {}
        if self._patch is not None:
            grid = {GRID: import_module("torch").tensor([self.grid(image, self._patch)])}
        if not self._facts.has_kinds:
            kinds = []
        values = int(self._facts.share * image.area)
        return Counted(np.array(ids, np.int32), np.array(kinds, np.int8), values, grid)


class RuledCounts:
    """By the rule; by the processor where a picture has a text that no other had."""

    def __init__(self, rule: Rule, written: Written, count: Count) -> None:
        self._rule = rule
        self._written = written
        self._count = count

    def __call__(self, size: Size) -> Counted:
        image = self._rule(size)
        try:
            return self._written.counted(image)
        except KeyError:
            counted = self._count(size)
            self._written.learn(image, counted)
            return counted


def proven(rule: Rule, count: Count, image_ids: tuple[int, ...], names: frozenset[str]) -> RuledCounts | None:
    """None, with a line in the log, where rule and processor differ. `names`: arguments of positions."""
    if names - {GRID if rule.patch_size else ""}:
        return None
    written = Written(rule, image_ids, names)
    for sides in PROBES:
        size = Size(*sides)
        if not _agree(written, rule, count, size):
            what = "the counting rule of this model type differs from the checkpoint's processor"
            logger.warning("%s at %dx%d; the processor counts", what, size.width, size.height)
            return None
    return RuledCounts(rule, written, count)


def _agree(written: Written, rule: Rule, count: Count, size: Size) -> bool:
    try:
        counted = count(size)
    except Exception:  # a processor may raise anything about a size that it does not take
        return _refuses(rule, size)
    try:
        return written.learn(rule(size), counted)
    except RequestError:
        return False


def _refuses(rule: Rule, size: Size) -> bool:
    try:
        rule(size)
    except RequestError:
        return True
    return False
