"""A model's own code up to its decoder: what it makes of text and of an image, as rows for the engine.

    input ids, pixels, grids ──the model's own forward──► inputs_embeds, and more that its decoder takes
                                                          │
    row of a token   [ embedding | deep features, embeddings for each layer, kind of token | zeros ]

What stands beside an embedding is in its row: the encoder's cache and splicing know nothing of it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from saccade.models.bridge.errors import Unfit

_OURS = frozenset(
    (
        "attention_mask",
        "cache_position",
        "input_ids",
        "inputs_embeds",
        "past_key_values",
        "position_ids",
        "use_cache",
    )
)  # arguments of a decoder that a step gives it
_KINDS = frozenset(
    ("mm_token_type_ids", "token_type_ids")
)  # some models hand them on to a decoder that ignores them
_BYTE = 256  # whole numbers stand as digits, which every floating-point type holds


class _ArrivedError(Exception):
    """Ends a forward where the decoder begins."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class Arrival(NamedTuple):
    """What a decoder is called with."""

    embeds: Tensor  # [T, hidden]
    positions: Tensor | None
    rows: dict[str, Tensor]  # [T, ...] by path: of the other arguments that have a value for each token
    arguments: dict[str, Any]


class Extra(NamedTuple):
    """An argument beside the embeddings."""

    path: str
    shape: tuple[int, ...]  # of a token's values
    dtype: torch.dtype
    is_of_images: bool  # without the dimension of the batch; zero for text

    @property
    def width(self) -> int:
        return math.prod(self.shape)

    @property
    def columns(self) -> int:
        return self.width if self.dtype.is_floating_point else 3 * self.width


class Entrance:
    """`width`: of a row. `learn` fixes what is beside the embeddings, from what an image made."""

    def __init__(self, model: Any, text: Any, hidden: int, width: int) -> None:
        self.model = model
        self.text = text
        self.hidden = hidden
        self.width = width
        self.extras: list[Extra] = []
        self._arguments: dict[str, Any] = {}
        self._masks: dict[str, tuple[int, ...]] = {}  # paths of masks of image tokens, and their shapes
        self._parameters = inspect.signature(model.forward).parameters
        self._is_placed = False  # pictures come with positions, of any kind
        self._ignored = _OURS | (_KINDS - inspect.signature(text.forward).parameters.keys())

    def arrive(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the decoder for one prompt [1, T]."""
        takes_all = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
        known = {name: value for name, value in inputs.items() if takes_all or name in self._parameters}
        here = get_ident()  # where this forward pauses, other threads run the decoder

        def decoder(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            if get_ident() == here and isinstance(named.get("inputs_embeds"), Tensor):
                raise _ArrivedError(named)

        def first_layer(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            """Of a decoder that makes the embeddings itself."""
            if get_ident() != here:
                return
            hidden = positional[0] if positional else named["hidden_states"]
            raise _ArrivedError({"inputs_embeds": hidden, "position_ids": named.get("position_ids")})

        hooks = [self.text.register_forward_pre_hook(decoder, with_kwargs=True)]
        hooks += [
            layer.register_forward_pre_hook(first_layer, with_kwargs=True) for layer in self.text.layers[:1]
        ]
        try:
            self.model(**known, use_cache=False)
        except _ArrivedError as arrived:
            return arrived.arguments
        finally:
            for hook in hooks:
                hook.remove()
        raise Unfit("its own forward does not call its decoder")

    def learn(self, inputs: Mapping[str, Any]) -> None:
        """From a prompt with an image."""
        arguments = self.arrive(inputs)
        embeds = _embeds(arguments)
        tokens = embeds.shape[1]
        leaves = list(self._leaves(arguments))
        masks = {path: leaf for path, leaf in leaves if _is_mask(leaf, tokens)}
        counts = {int(mask.reshape(tokens, -1)[:, 0].sum()) for mask in masks.values()}
        for path, leaf in leaves:
            if path in masks or not isinstance(leaf, Tensor):
                continue
            if leaf.shape[:2] == (1, tokens):
                self.extras.append(Extra(path, tuple(leaf.shape[2:]), leaf.dtype, is_of_images=False))
            elif leaf.dim() > 1 and leaf.shape[0] in counts:
                self.extras.append(Extra(path, tuple(leaf.shape[1:]), leaf.dtype, is_of_images=True))
            else:
                raise Unfit(
                    f"its decoder takes {path.strip('.')} {tuple(leaf.shape)}, which we cannot cut by token"
                )
        self._masks = {path: tuple(mask.shape[2:]) for path, mask in masks.items()}
        self._arguments = {name: value for name, value in arguments.items() if name not in self._ignored}
        needed = self.hidden + sum(extra.columns for extra in self.extras)
        if needed > self.width:
            raise Unfit(f"its decoder takes {needed} values of a token, and its config tells of {self.width}")
        self._is_placed = "position_ids" in self._parameters and self._needs_no_positions(inputs)

    def _needs_no_positions(self, inputs: Mapping[str, Any]) -> bool:
        """To find those of a picture its code would ask the device, which waits for the tower."""
        expected = self.rows(inputs)
        self._is_placed = True
        try:
            return torch.equal(self.rows(inputs), expected)
        except Exception:  # it takes others, or wants none
            return False

    def rows(self, inputs: Mapping[str, Any]) -> Tensor:
        """[T, width] of a prompt with an image, or of text."""
        if self._is_placed and len(inputs) > 1:
            ids = inputs["input_ids"]
            inputs = {**inputs, "position_ids": torch.arange(ids.shape[1], device=ids.device)[None]}
        arguments = self.arrive(inputs)
        embeds = _embeds(arguments)[0]
        parts = [embeds]
        leaves = dict(self._leaves(arguments))
        tokens = len(embeds)
        mask = next((leaf for leaf in leaves.values() if _is_mask(leaf, tokens)), None)
        for extra in self.extras:
            leaf = leaves.get(extra.path)
            parts.append(_spread(extra, leaf, mask, embeds))
        used = sum(part.shape[1] for part in parts)
        parts.append(embeds.new_zeros(tokens, self.width - used))
        return torch.cat(parts, 1) if len(parts) > 1 else embeds

    def arguments(self, rows: Tensor) -> dict[str, Any]:
        """Those of the decoder beside embeddings and positions, for rows [B, T, width]."""
        if not self._arguments:
            return {}
        shape = rows.shape[:2]
        rows = rows.flatten(0, 1)
        values: dict[str, Any] = {}
        start = self.hidden
        for extra in self.extras:
            part = rows[:, start : start + extra.columns]
            start += extra.columns
            if not extra.dtype.is_floating_point:
                part = _from_digits(part)
            whole = part.reshape(len(rows), *extra.shape).to(extra.dtype)
            values[extra.path] = whole if extra.is_of_images else whole.reshape(*shape, *extra.shape)
        for path, more in self._masks.items():
            values[path] = rows.new_ones((*shape, *more), dtype=torch.bool)

        def of(path: Any, leaf: Any) -> Any:
            return values.get(pytree.keystr(path), leaf)

        filled: dict[str, Any] = pytree.tree_map_with_path(of, self._arguments)
        return filled

    def _leaves(self, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """By path: of the arguments beside embeddings and positions."""
        other = {name: value for name, value in arguments.items() if name not in self._ignored}
        for path, leaf in pytree.tree_flatten_with_path(other)[0]:
            yield pytree.keystr(path), leaf


def _embeds(arguments: Mapping[str, Any]) -> Tensor:
    embeds = arguments.get("inputs_embeds")
    if not isinstance(embeds, Tensor):
        raise Unfit("its decoder makes the embeddings of a picture itself")
    return embeds


def _is_mask(leaf: Any, tokens: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.bool and leaf.shape[:2] == (1, tokens)


def _spread(extra: Extra, leaf: Any, mask: Tensor | None, embeds: Tensor) -> Tensor:
    """[T, columns]"""
    tokens = len(embeds)
    if not isinstance(leaf, Tensor):
        return embeds.new_zeros(tokens, extra.columns)
    if extra.is_of_images:
        assert mask is not None, "deep features come with a mask of their tokens"
        flat = embeds.new_zeros(tokens, extra.columns)
        flat[mask.reshape(tokens, -1)[:, 0]] = leaf.reshape(len(leaf), -1).to(embeds.dtype)
        return flat
    values = leaf.reshape(tokens, -1)
    return (values if extra.dtype.is_floating_point else _digits(values)).to(embeds.dtype)


def _digits(values: Tensor) -> Tensor:
    whole = values.long()
    return torch.cat([whole % _BYTE, whole // _BYTE % _BYTE, whole // _BYTE**2], 1)


def _from_digits(digits: Tensor) -> Tensor:
    low, middle, high = digits.long().chunk(3, 1)
    return low + _BYTE * middle + _BYTE**2 * high
