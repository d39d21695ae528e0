"""Any other family, through Transformers' own processor: what it makes of a size, mostly without pixels."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from saccade.checkpoint import hf_processor
from saccade.checkpoint.hf_shapes import SizeRuns
from saccade.checkpoint.hf_video import form_of, why_none
from saccade.errors import RequestError
from saccade.processor.families import base
from saccade.processor.families.base import Expansion, Files, Positions, TokenIds
from saccade.processor.families.counting_proof import Count, Counted, proven
from saccade.processor.families.counting_rules import MAX_PIXELS, Rule, rule_of
from saccade.processor.families.fallback_positions import PositionRules
from saccade.processor.families.fallback_videos import FallbackVideos
from saccade.types.media import Geometry, Grid, Size
from saccade.types.prompt import Prompt, Span

logger = logging.getLogger("saccade.processor")
_KEPT = 4096  # sizes, of which all have at most so many tokens and other numbers
_KEPT_VALUES = 16_000_000
_ORDINARY = Size(512, 384)
_KINDS = ("mm_token_type_ids", "token_type_ids")
_OF_TOKENS = ("input_ids", "attention_mask")
_NONE = np.zeros(0, np.int8)
_MAX_VALUES = 4096
_RATIOS = (1, 5 / 4, 4 / 3, 3 / 2, 16 / 9, 2, 5 / 2, 3, 4, 5, 6, 8)
_WIDE = [Size(1280, round(1280 / ratio)) for ratio in _RATIOS]
_TALL = [Size(height, width) for width, height in _WIDE]
_TRIED = [*_WIDE, *_TALL, Size(64, 64), Size(512, 512), Size(2048, 2048)]


class Counts:
    """What each size becomes, once. A size that the processor does not take is kept, too."""

    def __init__(self, count: Count) -> None:
        self._count = count
        self._kept: OrderedDict[Size, Counted | None] = OrderedDict()
        self._weight = 0
        self._lock = Lock()

    def __call__(self, size: Size) -> Counted:
        with self._lock:
            if is_known := size in self._kept:
                self._kept.move_to_end(size)
            counted = self._kept.get(size)
        if not is_known:
            try:
                counted = self._count(size)
            except Exception as error:  # a processor may raise anything about an image
                if isinstance(error, MemoryError) or "memory" in str(error):  # which says nothing of the size
                    raise
                counted = None
            self._keep(size, counted)
        if counted is None:
            message = f"the model's own processor takes no pictures of {size.width}x{size.height} pixels"
            raise RequestError(message, code="invalid_image")
        return counted

    def _keep(self, size: Size, counted: Counted | None) -> None:
        with self._lock:
            if size in self._kept:  # another thread's, meanwhile
                return
            self._kept[size] = counted
            self._weight += _weight(counted)
            while len(self._kept) > 1 and (len(self._kept) > _KEPT or self._weight > _KEPT_VALUES):
                _, oldest = self._kept.popitem(last=False)
                self._weight -= _weight(oldest)


@dataclass(frozen=True, slots=True)
class Fallback:
    image_token_id: int  # placeholder in the prompt before expansion
    embedded_id: int | None  # tokens that embeddings replace, after expansion
    patch_dim: int
    count: Counts
    settings: str  # of the image processor
    rules: PositionRules
    frame: hf_processor.Frame
    gaps: Callable[[int], list[tuple[int, ...]]]  # tokens before each of so many images, and after the last
    closing: re.Pattern[str]  # an image that a word follows at once
    tokens_each: int = 1  # that a prompt has for an image
    videos: FallbackVideos | str = ""  # or why it takes none
    rule: Rule | None = None  # that counts in place of the processor

    @classmethod
    def from_checkpoint(cls, files: Files) -> Self:
        config = files.config
        kind = config.model_type
        assert config.vision is not None, "its config was read by hf_config"
        embedded = config.image_token_id
        processor = hf_processor.load_processor(files.path, kind)
        place = hf_processor.placeholder(processor, config)
        token_id = processor.tokenizer.convert_tokens_to_ids(place.token)
        settings = repr(processor.image_processor)
        try:
            frame = hf_processor.frame_of(processor, place)
            runs = SizeRuns(processor, place.written)
            ordinary = counted_from(runs(_ORDINARY), frame)
        except Exception as error:
            size = f"{_ORDINARY.width}x{_ORDINARY.height}"
            reason = f"its processor fails on a picture of {size} pixels: {hf_processor.raised(error)}"
            raise hf_processor.refusal(kind, reason) from error
        rules = PositionRules.of(files.path, config, ordinary)
        gaps = lru_cache(64)(lambda images: hf_processor.gaps(processor, place, frame, images))
        closing = re.compile(re.escape(place.token) + r"(?=[^\s<])")

        def count(size: Size) -> Counted:
            return counted_from(runs(size), frame)

        rule, names = rule_of(files), rules.names & ordinary.arguments.keys()
        ids = tuple(token for token in (embedded, token_id) if token is not None)
        quick = proven(rule, count, ids, names) if rule else None
        return cls(
            token_id,
            embedded,
            config.vision.patch_dim,
            Counts(quick or count),
            settings,
            rules,
            frame,
            gaps,
            closing,
            place.tokens,
            videos=_videos(processor, files.path, place, config.vision.patch_dim),
            rule=rule if quick else None,
        )

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        video = () if isinstance(self.videos, str) else (self.videos.token_id,)
        return tuple({self.image_token_id, self.embedded_id or self.image_token_id, *video})

    @property
    def is_fixed_size(self) -> bool:
        """The processor applies pixel limits of its own, or none."""
        return self.rule is None or self.rule.limits is None

    def policy(self, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
        return (1, MAX_PIXELS) if self.rule is None else self.rule.policy(min_pixels, max_pixels)

    def policy_tag(self, min_pixels: int, max_pixels: int) -> bytes:
        limits = () if self.is_fixed_size else (min_pixels, max_pixels)
        return base.tag({"processor": self.settings, "limits": limits})

    def geometry(self, size: Size, min_pixels: int, max_pixels: int) -> Geometry:
        base.check_aspect_ratio(size)
        if size.width * size.height > MAX_PIXELS:
            pixels = f"the picture is {size.width}x{size.height} pixels, and at most {MAX_PIXELS} are allowed"
            message = f"{pixels} for a model that is served through Transformers"
            raise RequestError(message, code="image_too_large")
        if self.rule is not None:
            size = self.rule.limited(size, min_pixels, max_pixels)
        counted = self.count(size)
        tokens = len(counted.token_ids)
        return Geometry(size, Grid(1, -(-counted.values // self.patch_dim), 1), tokens, tokens)

    def largest(self, min_pixels: int, max_pixels: int) -> Geometry:
        """The largest of many sizes tried. An image that costs still more is refused when it comes."""
        geometries = []
        for size in (_ORDINARY, *_TRIED):
            with suppress(RequestError):  # a size that the processor does not take
                geometries.append(self.geometry(size, min_pixels, max_pixels))
        return max(geometries, key=lambda geometry: geometry.slots)

    def expand(self, geometry: Geometry) -> Expansion:
        """Every token takes an embedding: what a model puts between rows is not known."""
        return Expansion(self._counted(geometry).token_ids.astype(np.int64), None)

    def _counted(self, geometry: Geometry) -> Counted:
        if geometry.clip is None:
            return self.count(geometry.resized)
        assert not isinstance(self.videos, str), "a clip comes from its rules"
        video: Counted = self.videos.count(form_of(geometry.resized, geometry.clip))
        return video

    @property
    def grows(self) -> bool:
        return not self.frame.after and not self.frame.trail and self.rules.grows

    def framed(self, token_ids: npt.NDArray[np.int64], images: int) -> npt.NDArray[np.int64]:
        """With what the processor writes around images."""
        token_ids = self._with_one_each(token_ids)
        if not isinstance(self.videos, str):
            token_ids = self.videos.framed(token_ids, images)
        places = np.flatnonzero(token_ids == self.image_token_id)
        if not images or len(places) != images:  # which has an error of its own
            return token_ids
        if len(places) > 1 and not self.frame.takes_many:
            reason = "its processor writes several in other tokens than each alone"
            raise RequestError(f"this model takes one picture per prompt here: {reason}; send one at a time")
        if self.frame.lead or self.frame.trail:
            token_ids = self._with_gaps(token_ids, places.tolist())
        return np.array(self.frame.around(token_ids.tolist()), np.int64)

    def _with_one_each(self, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """One token for each image, where a prompt has all of its tokens."""
        if self.tokens_each == 1:
            return token_ids
        places = np.flatnonzero(token_ids == self.image_token_id)
        more = [place for number, place in enumerate(places.tolist()) if number % self.tokens_each]
        return np.delete(token_ids, more)

    def _with_gaps(self, token_ids: npt.NDArray[np.int64], places: list[int]) -> npt.NDArray[np.int64]:
        gaps = list(zip([*places, places[-1] + 1], self.gaps(len(places)), strict=True))
        if self.frame.is_joined:
            gaps = [(place, gap) for place, gap in gaps if place - 1 not in places]
        where = [place for place, gap in gaps for _ in gap]
        return np.insert(token_ids, where, [token for _, gap in gaps for token in gap])

    def spelled(self, text: str) -> str:
        return self.closing.sub(r"\g<0> ", text) if self.frame.puts_space else text

    def positions(
        self, token_ids: TokenIds, spans: Sequence[Span], geometries: Sequence[Geometry]
    ) -> Positions:
        images = [self._counted(geometry) for geometry in geometries]
        return self.rules.positions(np.asarray(token_ids, np.int64), spans, images)

    def bound(self, prompt: Prompt) -> Prompt:
        return self.rules.bound(prompt)


def _videos(
    processor: Any, path: Path, place: hf_processor.Placeholder, patch_dim: int
) -> FallbackVideos | str:
    """What cannot be known of videos must not keep pictures from being served."""
    reason = why_none(processor)
    if reason is None:
        try:
            config = hf_processor.auto_config(path)
            return FallbackVideos.of(processor, config, place, patch_dim, counted_from)
        except ValueError as error:
            reason = str(error)
        except Exception as error:  # of the processor
            reason = f"its processor fails on a video: {hf_processor.raised(error)}"
    logger.info("no videos are read: %s", reason)
    return reason


def _weight(counted: Counted | None) -> int:
    """Numbers that it keeps, about."""
    return len(counted.token_ids) + sum(map(_numbers, counted.arguments.values())) if counted else 1


def counted_from(inputs: Mapping[str, Any], frame: hf_processor.Frame) -> Counted:
    ids = frame.inside(inputs["input_ids"][0].numpy().astype(np.int32))
    kinds = next(
        (frame.inside(inputs[name][0].numpy().astype(np.int8)) for name in _KINDS if name in inputs), _NONE
    )
    arguments = {name: value for name, value in inputs.items() if name not in (*_KINDS, *_OF_TOKENS)}
    content = hf_processor.Leaves.of(inputs).content
    sizes = {name: value for name, value in arguments.items() if _is_small(value) and not _is_content(value)}
    return Counted(ids, kinds, sum(tensor.numel() for tensor in content), sizes)


def _is_small(value: Any) -> bool:
    """Unlike a mask of pixels, of which one for each size would fill the memory."""
    return _numbers(value) <= _MAX_VALUES


def _numbers(value: Any) -> int:
    return int(value.numel()) if hasattr(value, "numel") else 1


def _is_content(value: Any) -> bool:
    return bool(hf_processor.Leaves.of({"": value}).content)
