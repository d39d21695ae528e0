"""What Transformers' layers call for attention: ours, over the paged cache, with the rule of each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from torch import Tensor

from saccade.models.bridge.errors import Unfit
from saccade.models.layers.attention_rules import READ_AT_ONCE, AttentionRule
from saccade.models.layers.forward_types import Attention
from saccade.types.attention_reach import AttentionReach

NAME = "saccade"  # in Transformers' registry
_SINKS = ("s_aux", "sinks")
_UNKNOWN = ("position_bias", "relative_bias")
_WINDOW_KINDS = ("sliding_attention", "hybrid_sliding")
_BESIDE_PROMPT = "reference_sliding_attention"
_ONLY_SLIDING_SEES_BLOCKS = ("gemma4_text",)
_BLOCKS_BEYOND_WINDOWS = ("gemma4_unified_text",)
_STEP: ContextVar[Callable[..., Tensor]] = ContextVar("step")
"""Not handed through the layers: some of them drop arguments that they do not know."""


def register(transformers: Any) -> None:
    """Without a mask function of this name Transformers makes no mask, and reads nothing back to make one."""
    transformers.AttentionInterface.register(NAME, _attend)


class LayerAttention:
    """The attention of a model's decoder: its implementation switched to ours, and each layer's rule."""

    def __init__(self, text: Any, scale: float, state_layers: Sequence[int]) -> None:
        self.text = text
        self.scale = scale  # that our attention applies
        self._kv_layers = _numbers(text, state_layers)
        self.rules: dict[int, AttentionRule] = {}  # by layer, as seen so far
        self._configs = _configs(text)
        self._own = [config._attn_implementation for config in self._configs]
        self.switch(to_ours=True)

    def switch(self, *, to_ours: bool, other: str | None = None) -> None:
        for config, own in zip(self._configs, self._own, strict=True):
            name = NAME if to_ours else other or own
            config._attn_implementation_internal = name  # the setter changes towers, too

    @contextmanager
    def own(self, other: str | None = None) -> Iterator[None]:
        """Transformers' attention, with which the model was made, or one of another name."""
        self.switch(to_ours=False, other=other)
        try:
            yield
        finally:
            self.switch(to_ours=True)

    @contextmanager
    def of_step(self, attention: Attention, blocks: Tensor | None) -> Iterator[None]:
        """What Transformers' layers call in this step. `blocks` [T]: of its tokens, if there are any."""
        prompts = cache(lambda: None if blocks is None else blocks.tolist())  # a device is asked once

        def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, how: Mapping[str, Any]) -> Tensor:
            scaling = how.get("scaling") or getattr(module, "scaling", None)
            if scaling and scaling != self.scale:
                q = q * (scaling / self.scale)
            rule = self._rule(module, how, blocks, prompts)
            self.rules[module.layer_idx] = rule
            layer = self._kv_layers[module.layer_idx]
            if rule.is_plain:
                return attention(layer, q, k, v)
            return attention(layer, q, k, v, rule)  # type: ignore[call-arg]

        token = _STEP.set(attend)
        try:
            yield
        finally:
            _STEP.reset(token)

    @property
    def reach(self) -> AttentionReach | None:
        """None where a layer reads all that was computed."""
        reaches = [self.rules.get(layer, AttentionRule()).reach for layer in self._kv_layers]
        if None in reaches or not reaches:
            return None
        kinds = getattr(self.text.config, "layer_types", None) or ()
        return AttentionReach(max(filter(None, reaches)) + READ_AT_ONCE - 1, _BESIDE_PROMPT in kinds)

    def _rule(
        self,
        module: Any,
        how: Mapping[str, Any],
        blocks: Tensor | None,
        prompts_of: Callable[[], list[int] | None],
    ) -> AttentionRule:
        config = module.config
        kinds = getattr(config, "layer_types", None) or (None,) * len(self.text.layers)
        kind = kinds[module.layer_idx]
        window = how.get("sliding_window")
        if window is None and kind in _WINDOW_KINDS:
            window = config.sliding_window
        chunk = config.attention_chunk_size if kind == "chunked_attention" else None
        prompts = None
        if _BESIDE_PROMPT in kinds:
            prompts = prompts_of()
            blocks = None
            window = config.sliding_window if kind == _BESIDE_PROMPT else None
        sees_blocks = window is not None or config.model_type not in _ONLY_SLIDING_SEES_BLOCKS
        return AttentionRule(
            window=window,
            chunk=chunk,
            blocks=blocks if sees_blocks else None,
            is_block_whole=config.model_type in _BLOCKS_BEYOND_WINDOWS,
            prompts=prompts,
            softcap=how.get("softcap"),
            sinks=next((how[name] for name in _SINKS if how.get(name) is not None), None),
        )


def _numbers(text: Any, state_layers: Sequence[int]) -> dict[int, int]:
    """Layer -> its number in the KV cache, which has none of those that keep states instead."""
    layers = [layer for layer in range(len(text.layers)) if layer not in state_layers]
    return {layer: number for number, layer in enumerate(layers)}


def _configs(text: Any) -> list[Any]:
    """Of a decoder and its layers, each once. A tower may be inside the decoder, too."""
    modules = [text, *(module for layer in text.layers for module in layer.modules())]
    found = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    return list(found.values())


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **how: Any
) -> tuple[Tensor, None]:
    """[B, heads, T, d] each -> [B, T, heads, d]."""
    unknown = [name for name in _UNKNOWN if how.get(name) is not None]
    if unknown:
        raise Unfit(f"its attention uses {', '.join(unknown)}, ours does not")
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))  # [B * T, heads, d]
    mixed = _STEP.get()(module, q, k, v, how)
    return mixed.view(len(query), -1, *mixed.shape[1:]), None
