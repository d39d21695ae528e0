"""Positions of a prompt for a model that runs through Transformers' code, and which prompts share a prefix.

Rows of `Prompt.positions`, of which most models have the first alone:

    RoPE       one row, or one per axis from the model's own `get_rope_index`
    block      first token of the block in which a token sees all others, those after it too; or the token
    length     last token of the prompt: LongRoPE selects its factors by it
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from saccade.checkpoint import hf_processor
from saccade.checkpoint.config import ModelConfig
from saccade.checkpoint.token_blocks import Blocks, block_row
from saccade.errors import RequestError
from saccade.processor.families.base import Positions
from saccade.types.prompt import Prompt, Span

Ints = npt.NDArray[np.int64]
_OTHER_NAMES = {"second_per_grids": "video_second_per_grid"}  # a parameter, and as processors call it


class CountedImage(Protocol):
    @property
    def token_ids(self) -> npt.NDArray[np.int32]: ...
    @property
    def kinds(self) -> npt.NDArray[np.int8]: ...
    @property
    def arguments(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class PositionRules:
    rope_index: Any = None  # the model's `get_rope_index`, without weights; None: positions count tokens
    axes: int = 1
    blocks: Blocks | None = None
    rope_switch: int | None = None  # see TextConfig

    @classmethod
    def of(cls, path: Path, config: ModelConfig, image: CountedImage) -> PositionRules:
        blocks = config.text.blocks
        rope_index = _rope_index(path, config.model_type)
        if rope_index is not None and blocks is not None:  # an answer's rows would name tokens before it
            reason = "its pictures are read in both directions at positions of several axes"
            raise hf_processor.refusal(config.model_type, reason)
        if rope_index is None:
            return cls(blocks=blocks, rope_switch=config.text.rope_switch)
        ids = image.token_ids.astype(np.int64)
        positions, _ = _own_positions(rope_index, ids, _kinds(ids, [(0, image)]), [image])
        return cls(rope_index, len(positions), blocks, config.text.rope_switch)

    @property
    def names(self) -> frozenset[str]:
        """Arguments of the model's own code."""
        if self.rope_index is None:
            return frozenset()
        return frozenset(inspect.signature(self.rope_index).parameters)

    def positions(self, ids: Ints, spans: Sequence[Span], images: Sequence[CountedImage]) -> Positions:
        kinds = _kinds(ids, list(zip((span.start for span in spans), images, strict=True)))
        if self.rope_index is None or not spans:
            count = np.arange(len(ids), dtype=np.int32)
            rows, following = np.broadcast_to(count, (self.axes, len(ids))), len(ids)
        else:
            rows, following = self._model_positions(ids, kinds, images)
        more = []
        if self.blocks is not None:
            more.append(block_row(kinds, self.blocks))
        if self.rope_switch is not None:
            more.append(np.full(len(ids), following - 1, np.int32))
        return np.concatenate([rows, *(row[None] for row in more)]), following

    def _model_positions(self, ids: Ints, kinds: Ints, images: Sequence[CountedImage]) -> Positions:
        try:
            return _own_positions(self.rope_index, ids, kinds, images)
        except Exception:  # tokens of a prompt can confuse it
            what = f"no positions for the {len(images)} pictures among the {len(ids)} tokens of this prompt"
            advice = "write it as the model's chat template does"
            raise RequestError(f"the model's own code finds {what}; {advice}") from None

    @property
    def grows(self) -> bool:
        """Whether keys and values of a prompt are those of a longer one's begin."""
        return self.rope_switch is None and self.blocks in (None, "image", "images")

    def bound(self, prompt: Prompt) -> Prompt:
        """With ranges that no window cuts, and a salt of its own where later tokens change its keys."""
        wholes = self._wholes(prompt.positions)
        return replace(
            prompt,
            spans=tuple(self._with_reader(span, wholes) for span in prompt.spans),
            salt=self._root(prompt),
            wholes=wholes,
            constant_rows=int(self.blocks == "before answer"),
        )

    def _with_reader(self, span: Span, wholes: Sequence[tuple[int, int]]) -> Span:
        """Images of one range are there together until it is computed."""
        if self.blocks not in ("images", "prompt"):
            return span
        ends = [end for start, end in wholes if start < span.end and span.start < end]
        return replace(span, last_reader=max(ends)) if ends else span

    def _wholes(self, positions: npt.NDArray[np.int32]) -> tuple[tuple[int, int], ...]:
        """Ranges of tokens that see each other, from the row of blocks."""
        if self.blocks in (None, "before answer"):
            return ()
        row = positions[self.axes]
        inside = np.flatnonzero(row != np.arange(len(row)))
        ends = {int(row[index]): int(index) + 1 for index in inside}
        return tuple(sorted(ends.items()))

    def _root(self, prompt: Prompt) -> bytes:
        """Prompts below and above the LongRoPE switch share no prefix. Nor do those of which a token sees
        what comes after it, beyond its own image, nor a prompt with an answer that saw a part of itself."""
        sees_later_images = self.blocks == "images" and len(prompt.spans) > 1
        if sees_later_images or self.blocks == "prompt":
            return hashlib.sha256(b"whole" + prompt.salt + prompt.identity).digest()
        if self.blocks == "before answer":
            return hashlib.sha256(b"ends" + len(prompt).to_bytes(8, "little") + prompt.salt).digest()
        if self.rope_switch is None or len(prompt) <= self.rope_switch:
            return prompt.salt
        return hashlib.sha256(b"long" + prompt.salt).digest()


def _rope_index(path: Path, model_type: str) -> Any:
    """The model is built without memory for weights."""
    kind, config = hf_processor.model_class(path, model_type)
    with import_module("torch").device("meta"):
        model = kind(config)
    inner = getattr(model, "model", None)
    return getattr(model, "get_rope_index", None) or getattr(inner, "get_rope_index", None)


def _own_positions(rope_index: Any, ids: Ints, kinds: Ints, images: Sequence[CountedImage]) -> Positions:
    torch = import_module("torch")
    of_tokens = {
        "input_ids": torch.from_numpy(ids)[None],
        "mm_token_type_ids": torch.from_numpy(kinds)[None],
        "attention_mask": torch.ones(1, len(ids), dtype=torch.int64),
    }
    parameters = inspect.signature(rope_index).parameters
    arguments = {name: value for name, value in of_tokens.items() if name in parameters}
    positions, delta = rope_index(**arguments, **_joined(torch, images, parameters))
    rows = positions.reshape(-1, len(ids)).numpy().astype(np.int32)
    return rows, len(ids) + int(delta.reshape(-1)[0])


def _joined(torch: Any, images: Sequence[CountedImage], names: Iterable[str]) -> dict[str, Any]:
    """Grids and sizes of all images, one after the other."""
    sources = {name: _OTHER_NAMES.get(name, name) for name in names}
    parts = {
        name: [image.arguments[other] for image in images if other in image.arguments]
        for name, other in sources.items()
    }
    return {name: torch.cat(part) for name, part in parts.items() if part}


def _kinds(ids: Ints, images: Sequence[tuple[int, CountedImage]]) -> Ints:
    kinds = np.zeros(len(ids), np.int64)
    for start, image in images:
        kinds[start : start + len(image.kinds)] = image.kinds
    return kinds
