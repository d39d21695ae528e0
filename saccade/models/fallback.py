"""Models that the table does not know, through Transformers' modelling code with our attention and caches.

Nothing is taken on trust: before a model is used it has to pass the `proof`, which compares its logits with those that
its own code gives with its own attention. What differs is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from saccade.checkpoint.config import ModelConfig
from saccade.checkpoint.hf_processor import LOCAL, library, load_processor, placeholder, processed, raised, refusal
from saccade.errors import ConfigError, RequestError
from saccade.models.fallback_check import check_against_own_forward
from saccade.models.layers.length_rope import Unfit, follow_lengths
from saccade.models.layers.types import Attention, Encoding
from saccade.models.vision.preprocess import ImagePixels
from saccade.types import Geometry, Grid

logger = logging.getLogger("saccade.models")

_NAME = "saccade"  # of our attention in Transformers' table
_UNKNOWN = ("softcap", "s_aux", "sinks")  # what some attentions also do and ours does not
_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}  # the last two see all of a context that fits


@dataclass(eq=False)
class Fallback:
    """The engine's view of a Transformers model."""

    config: ModelConfig
    model: Any
    processor: Any
    device: torch.device
    dtype: torch.dtype
    window: int  # tokens of the longest request

    def __post_init__(self) -> None:
        table = self.model.get_input_embeddings().weight
        self._text = self.model.get_decoder()
        self._scale = self.config.text.head_dim**-0.5
        self.decoder: Any = SimpleNamespace(table=table, scale=self._scale)  # there are no layers that others could run
        assert self.config.image_token_id is not None
        self.token = placeholder(self.processor, self.config.model_type, self.config.image_token_id)
        self._outer = 0  # dimensions that the processor puts before the tiles of a picture
        owner = self.model if hasattr(self.model, "get_image_features") else self.model.model
        self._encode = owner.get_image_features
        self._rope = follow_lengths(self._text, self.config.text.rope_switch, self.window)

    def prepare(self, image: ImagePixels, geometry: Geometry) -> Tensor:
        """[patches, values of a patch]: the processor's tiles as they lie in memory, in rows as long as a patch."""
        pixels = image.cpu().numpy() if isinstance(image, Tensor) else image
        made = self.on_device(processed(self.processor, self.token, Image.fromarray(pixels)))
        assert self.config.vision is not None
        side = self.config.vision.patch_size
        masks = [name for name, values in made.items() if name.startswith("pixel_") and name.endswith("mask")]
        if any(not bool(made[name].all()) for name in masks):
            raise RequestError(
                f"the picture of {pixels.shape[1]}x{pixels.shape[0]} pixels is padded by this model's processor, which "
                "is not supported for models served through Transformers",
                code="invalid_image",
            )
        tiles: Tensor = made["pixel_values"]  # [..., tiles, channels, height, width]
        self._outer = tiles.dim() - 4
        height, width = (int(n) // side * side for n in tiles.shape[-2:])  # no patch covers what is beyond
        return tiles[..., :height, :width].reshape(-1, tiles.shape[-3] * side**2)

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Encoding:
        """A picture is one piece of work here: there is no pause between layers of code that is not ours."""
        assert self.config.vision is not None
        side, embeddings = self.config.vision.patch_size, []
        for grid, own in zip(grids, torch.split(patches, [grid.patches for grid in grids]), strict=True):
            tiles = own.reshape(grid.t, -1, grid.h * side, grid.w * side)
            embeddings.append(self._features(tiles))
            yield 1
        return embeddings

    def _features(self, tiles: Tensor) -> Tensor:
        found = self._encode(pixel_values=tiles.view(*[1] * self._outer, *tiles.shape))
        features = getattr(found, "pooler_output", found)
        if features is None:
            raise Unfit("what its tower makes of a picture is not yet what its decoder reads")
        whole = features if isinstance(features, Tensor) else torch.cat([f.flatten(0, -2) for f in features])
        return whole.reshape(-1, whole.shape[-1])

    def embed(self, token_ids: Tensor) -> Tensor:
        embeds: Tensor = self.model.get_input_embeddings()(token_ids)
        return embeds

    def forward(self, embeds: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Positions [1, T], or [2, T] with lengths where the rope depends on them (see `LengthRope`)."""
        given = {"inputs_embeds": embeds[None], "position_ids": positions[:1], "use_cache": False}
        ours = {"saccade_attention": self._rescaled(attention), "saccade_window": self.window}
        with self._lengths(positions[-1]):
            hidden: Tensor = self._text(**given, **ours).last_hidden_state[0]
        return hidden

    @contextmanager
    def _lengths(self, lengths: Tensor) -> Iterator[None]:
        if self._rope is None:
            yield
            return
        self._rope.lengths = lengths
        try:
            yield
        finally:
            self._rope.lengths = None

    def _rescaled(self, attention: Attention) -> Callable[..., Tensor]:
        """Our attention scales by the size of a head; a model may want another factor."""

        def attend(layer: int, scaling: float | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            factor = (scaling or self._scale) / self._scale
            return attention(layer, q if factor == 1 else q * factor, k, v)

        return attend

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits.float()

    @contextmanager
    def own_attention(self) -> Iterator[None]:
        self.model.set_attn_implementation("sdpa")
        try:
            yield
        finally:
            use_our_attention(self.model)

    def on_device(self, made: Mapping[str, Any]) -> dict[str, Tensor]:
        return {
            name: v.to(self.device, self.dtype if v.is_floating_point() else None)
            for name, v in made.items()
            if isinstance(v, Tensor)
        }


def load(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    seed: int,
    max_model_len: int | None,
) -> Fallback:
    """ConfigError, whatever the library raises: it has hundreds of models, and nobody has tried them all here."""
    kind = config.model_type
    processor = load_processor(path, kind)
    window = max_model_len or config.text.max_context
    try:
        model = _model(library(kind), path, dtype, load_format, seed)
        made = Fallback(config, model.to(device).eval(), processor, device, dtype, window)
        check_against_own_forward(made)
    except ConfigError:
        raise
    except (Unfit, RequestError) as error:
        raise refusal(kind, str(error)) from None
    except Exception as error:
        raise refusal(kind, raised(error)) from error
    logger.warning(
        "model_type %s is not one that Saccade knows: it runs through Transformers' code. Its answers are right, but "
        "steps are slower than a known model's, and a picture is encoded in one piece, in which others wait",
        kind,
    )
    return made


def _model(transformers: Any, path: Path, dtype: torch.dtype, load_format: str, seed: int) -> Any:
    transformers.AttentionInterface.register(_NAME, _attend)
    transformers.AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
    shape = transformers.AutoConfig.from_pretrained(path, **LOCAL)
    unknown = sorted(set(getattr(shape.get_text_config(), "layer_types", None) or ()) - _LAYERS)
    if unknown:
        raise Unfit(f"its layers are of a kind we cannot follow ({', '.join(unknown)})")
    kind = transformers.AutoModelForImageTextToText
    if load_format == "dummy":
        torch.manual_seed(seed)
        model = kind.from_config(shape, dtype=dtype)
    else:
        model = kind.from_pretrained(path, dtype=dtype, use_safetensors=True, **LOCAL)
    use_our_attention(model)
    return model


def use_our_attention(model: Any) -> None:
    model.set_attn_implementation({"": "sdpa", "text_config": _NAME, "vision_config": "sdpa"})


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **how: Any
) -> tuple[Tensor, None]:
    """What Transformers calls in every decoder layer: [1, heads, T, d] each -> [1, T, heads, d]."""
    window = how.get("sliding_window")
    unknown = [name for name in _UNKNOWN if how.get(name) is not None]
    if unknown:
        raise Unfit(f"its attention uses {', '.join(unknown)}, ours does not")
    if window is not None and window < how["saccade_window"]:
        raise Unfit(
            f"its attention has a window of {window} tokens, ours none; --max-model-len {window} makes up for it"
        )
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [T, heads, d]
    return how["saccade_attention"](module.layer_idx, how.get("scaling"), q, k, v)[None], None
