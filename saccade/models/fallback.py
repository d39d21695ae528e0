"""Models that the table does not know, through Transformers' modelling code with our attention and caches.

Nothing is taken on trust: before a model is used its logits for a picture and some text are compared with those that
its own code gives, computed in one piece and with its own attention. What differs is refused.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from saccade.config import ConfigError, ModelConfig
from saccade.hf_processor import LOCAL, library, load_processor, placeholder, refusal
from saccade.models.interface import Attention, Encoding
from saccade.models.pixels import Picture
from saccade.types import Geometry, Grid, RequestError, Size

logger = logging.getLogger("saccade.models")

_NAME = "saccade"  # of our attention in Transformers' table
_UNKNOWN = ("softcap", "s_aux", "sinks")  # what some attentions also do and ours does not
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the largest logit


@dataclass(eq=False)
class Fallback:
    """The engine's view of a Transformers model."""

    config: ModelConfig
    model: Any
    processor: Any
    device: torch.device
    dtype: torch.dtype
    why_plain: str = "the model runs through Transformers' code"

    def __post_init__(self) -> None:
        table = self.model.get_input_embeddings().weight
        self._text = self.model.get_decoder()
        self._scale = self.config.text.head_dim**-0.5
        self.decoder: Any = SimpleNamespace(table=table, scale=self._scale)  # there are no layers that others could run
        assert self.config.image_token_id is not None
        self._token = placeholder(self.processor, self.config.model_type, self.config.image_token_id)
        self._outer = 0  # dimensions that the processor puts before the tiles of a picture
        owner = self.model if hasattr(self.model, "get_image_features") else self.model.model
        self._encode = owner.get_image_features
        taken = inspect.signature(self._encode).parameters.values()
        self._needed = {p.name for p in taken if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}

    # --- pictures -------------------------------------------------------------------------------------------------

    def prepare(self, image: Picture, geometry: Geometry) -> Tensor:
        """[patches, values of a patch]: the processor's tiles as they lie in memory, in rows as long as a patch."""
        pixels = image.cpu().numpy() if isinstance(image, Tensor) else image
        made = self._inputs(self._token, Image.fromarray(pixels))
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
        return tiles.reshape(-1, tiles.shape[-3] * side**2)

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
        whole = features if isinstance(features, Tensor) else torch.cat([f.flatten(0, -2) for f in features])
        return whole.reshape(-1, whole.shape[-1])

    # --- text -----------------------------------------------------------------------------------------------------

    def embed(self, token_ids: Tensor) -> Tensor:
        embeds: Tensor = self.model.get_input_embeddings()(token_ids)
        return embeds

    def forward(self, embeds: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        given = {"inputs_embeds": embeds[None], "position_ids": positions, "use_cache": False}
        hidden: Tensor = self._text(**given, saccade_attention=self._rescaled(attention)).last_hidden_state[0]
        return hidden

    def _rescaled(self, attention: Attention) -> Callable[..., Tensor]:
        """Our attention scales by the size of a head; a model may want another factor."""

        def attend(layer: int, scaling: float | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            factor = (scaling or self._scale) / self._scale
            return attention(layer, q if factor == 1 else q * factor, k, v)

        return attend

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits.float()

    # --- the proof ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prove(self) -> None:
        """ConfigError unless our way gives the logits of the model's own."""
        kind = self.config.model_type
        missing = sorted(self._needed - {"pixel_values"})
        if missing:
            raise refusal(kind, f"its tower needs {', '.join(missing)} beside the pixels")
        picture = Image.effect_noise((300, 97), 80).convert("RGB")
        try:
            inputs = self._inputs(f"a {self._token} b c d e", picture)
            theirs = self._their_logits(inputs)
            ours = self._our_logits(inputs, picture)
        except ConfigError:
            raise
        except Exception as error:  # code that nobody has tried with this engine may raise anything
            raise refusal(kind, f"{type(error).__name__}: {error}") from error
        difference = float((ours - theirs).abs().max() / theirs.abs().max())
        if not difference <= _TOLERANCE[self.dtype]:
            raise refusal(
                kind,
                f"with our attention its logits differ by {difference:.1e} from its own. Its pictures may be read in "
                "both directions, or its layers may see only part of the context",
            )

    def _their_logits(self, inputs: Mapping[str, Any]) -> Tensor:
        taken = inspect.signature(self.model.forward).parameters
        given = {k: v for k, v in inputs.items() if k in taken}
        self.model.set_attn_implementation("sdpa")
        try:
            logits: Tensor = self.model(**given).logits[0].float()
        finally:
            use_our_attention(self.model)
        return logits

    def _our_logits(self, inputs: Mapping[str, Any], picture: Image.Image) -> Tensor:
        ids = inputs["input_ids"][0]
        patches = self.prepare(np.asarray(picture), _ANY)
        tiles = inputs["pixel_values"]
        assert self.config.vision is not None
        side = self.config.vision.patch_size
        height, width = (int(n) // side for n in tiles.shape[-2:])
        features = _last(self.encode(patches, [Grid(len(patches) // (height * width), height, width)]))[0]
        embeds = self.embed(ids)
        embeds[ids == self.config.image_token_id] = features
        positions = torch.arange(len(ids), device=ids.device)[None]
        return self.logits(self.forward(embeds, positions, _causal(self._scale)))

    def _inputs(self, text: str, picture: Image.Image) -> Mapping[str, Any]:
        made = self.processor(text=[text], images=[picture], return_tensors="pt", add_special_tokens=False)
        return {
            name: v.to(self.device, self.dtype if v.is_floating_point() else None)
            for name, v in made.items()
            if isinstance(v, Tensor)
        }


def load(
    path: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, load_format: str, seed: int
) -> Fallback:
    transformers, processor = library(config.model_type), load_processor(path, config.model_type)
    transformers.AttentionInterface.register(_NAME, _attend)
    transformers.AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
    kind = transformers.AutoModelForImageTextToText
    try:
        if load_format == "dummy":
            torch.manual_seed(seed)
            shape = transformers.AutoConfig.from_pretrained(path, **LOCAL)
            model = kind.from_config(shape, dtype=dtype)
        else:
            model = kind.from_pretrained(path, dtype=dtype, use_safetensors=True, **LOCAL)
        use_our_attention(model)
    except Exception as error:  # a library of hundreds of models may raise anything
        raise refusal(config.model_type, f"it cannot be loaded there ({type(error).__name__}: {error})") from None
    made = Fallback(config, model.to(device).eval(), processor, device, dtype)
    made.prove()
    logger.warning(
        "model_type %s is not one that Saccade knows: it runs through Transformers' code. Its answers are right, but "
        "steps are slower than a known model's, and a picture is encoded in one piece, in which others wait",
        config.model_type,
    )
    return made


def use_our_attention(model: Any) -> None:
    model.set_attn_implementation({"": "sdpa", "text_config": _NAME, "vision_config": "sdpa"})


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **how: Any
) -> tuple[Tensor, None]:
    """What Transformers calls in every decoder layer: [1, heads, T, d] each -> [1, T, heads, d]."""
    window = how.get("sliding_window")
    unknown = [name for name in _UNKNOWN if how.get(name) is not None]
    if unknown or window is not None:
        kind = module.config.model_type
        raise refusal(kind, f"its attention uses {', '.join(unknown) or f'a window of {window} tokens'}, ours does not")
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [T, heads, d]
    return how["saccade_attention"](module.layer_idx, how.get("scaling"), q, k, v)[None], None


def _causal(scale: float) -> Attention:
    """Plain attention over one sequence: what the caches must amount to."""

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))  # [heads, T, d]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return mixed.transpose(0, 1)

    return attend


def _last(encoding: Encoding) -> list[Tensor]:
    while True:
        try:
            next(encoding)
        except StopIteration as done:
            found: list[Tensor] = done.value
            return found


_ANY = Geometry(Size(1, 1), Grid(1, 1, 1), 1, 1)  # `prepare` asks the processor, not this
