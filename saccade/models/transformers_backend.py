"""The Transformers backend (vLLM: model_impl="transformers"): any other model, with our attention and cache.

Before a model is served, `check_against_own_forward` compares its logits with those of its own attention:
once alone, and once as a server computes, with two requests of different length in the same steps, each in
chunks, over the paged cache. With LongRoPE the second request is beyond the switch.

    request      step 1            step 2              step 3
    image        [0, n / 3)        [n / 3, n - 1)      [n - 1, n)
    text         [0, m / 3)        [m / 3, m - 1)      [m - 1, m)
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from saccade.checkpoint import hf_processor
from saccade.checkpoint.config import ModelConfig
from saccade.checkpoint.hf_processor import LOCAL, placeholder, processed, refusal
from saccade.errors import ConfigError, RequestError
from saccade.models.layers.forward_types import Attention, Encoding
from saccade.models.layers.torch_attention import AttentionBatch, PagedAttention, PagedKV
from saccade.models.layers.transformers_text import TextModel
from saccade.models.quantized.tensors import DequantizedTensors
from saccade.models.tensor_files import StoredTensors, some
from saccade.models.vision.preprocess import ImagePixels
from saccade.models.weights import OF_QUANTISED
from saccade.types.media import Geometry, Grid, Size

logger = logging.getLogger("saccade.models")

_NAME = "saccade"  # of our attention in Transformers' registry
_UNKNOWN = ("softcap", "s_aux", "sinks")  # attention features that ours lacks
_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}  # equal within a window that fits
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the largest logit
_BLOCK_SIZE = 16
_PROBE_SIZE = (300, 211)  # rarely a multiple of a patch, and wide enough for rows of tiles
_PROBE_TEXT = "f g h i j k l m n o p q r s t u v w x y z"
_ANY_GEOMETRY = Geometry(Size(1, 1), Grid(1, 1, 1), 1, 1)  # which `prepare` ignores


class Unfit(Exception):
    """Why a model cannot be served, as the end of a sentence that starts with its name."""


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
        self._text = self.model.get_decoder()
        self._scale = self.config.text.head_dim**-0.5
        assert self.config.image_token_id is not None
        self.token = placeholder(self.processor, self.config.model_type, self.config.image_token_id)
        self._outer = 0  # dimensions of the processor's output before the tiles of an image
        owner = self.model if hasattr(self.model, "get_image_features") else self.model.model
        self._encode = owner.get_image_features
        self._rope = follow_lengths(self._text, self.config.text.rope_switch, self.window)
        ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        self.decoder = TextModel(
            self.config.text, *ends, self.forward, layers=self._text, is_rope_fixed=self._rope is None
        )

    def prepare(self, image: ImagePixels, geometry: Geometry) -> Tensor:
        """The processor's tiles, reshaped to [patches, patch_dim] without reordering."""
        pixels = image.cpu().numpy() if isinstance(image, Tensor) else image
        assert isinstance(pixels, np.ndarray), "what is not resized is decoded"
        inputs = self.on_device(processed(self.processor, self.token, Image.fromarray(pixels)))
        assert self.config.vision is not None
        side = self.config.vision.patch_size
        masks = [
            name for name, values in inputs.items() if name.startswith("pixel_") and name.endswith("mask")
        ]
        if any(not bool(inputs[name].all()) for name in masks):
            raise RequestError(
                f"the picture of {pixels.shape[1]}x{pixels.shape[0]} pixels is padded by this model's "
                "processor, which is not supported for models served through Transformers",
                code="invalid_image",
            )
        tiles: Tensor = inputs["pixel_values"]  # [..., tiles, channels, height, width]
        self._outer = tiles.dim() - 4
        height, width = (int(n) // side * side for n in tiles.shape[-2:])  # whole patches
        return tiles[..., :height, :width].reshape(-1, tiles.shape[-3] * side**2)

    def encode(self, patches: Tensor, grids: Sequence[Grid]) -> Encoding:
        """Pauses after each image, as Transformers' layers cannot be interrupted."""
        assert self.config.vision is not None
        side = self.config.vision.patch_size
        embeddings = []
        for grid, rows in zip(grids, torch.split(patches, [grid.patches for grid in grids]), strict=True):
            tiles = rows.reshape(grid.t, -1, grid.h * side, grid.w * side)
            embeddings.append(self._features(tiles))
            yield 1
        return embeddings

    def _features(self, tiles: Tensor) -> Tensor:
        output = self._encode(pixel_values=tiles.view(*[1] * self._outer, *tiles.shape))
        features = getattr(output, "pooler_output", output)
        if features is None:
            raise Unfit("what its tower makes of a picture is not yet what its decoder reads")
        whole = features if isinstance(features, Tensor) else torch.cat([f.flatten(0, -2) for f in features])
        return whole.reshape(-1, whole.shape[-1])

    def encoder_weights(self) -> Mapping[str, Tensor]:
        """All but the decoder's and the head's: which of them a tower reads is not known."""
        ends = (self._text, self.model.get_output_embeddings())
        decoder = {id(tensor) for end in ends for tensor in (*end.parameters(), *end.buffers())}
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: tensor for name, tensor in tensors if id(tensor) not in decoder}

    def embed(self, token_ids: Tensor) -> Tensor:
        embeds: Tensor = self.model.get_input_embeddings()(token_ids)
        return embeds

    def forward(self, embeds: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Positions [1, T], or [2, T] with lengths for LongRoPE (see `LengthRope`)."""
        inputs = {"inputs_embeds": embeds[None], "position_ids": positions[:1], "use_cache": False}
        ours = {"saccade_attention": self._rescaled(attention), "saccade_window": self.window}
        with self._lengths(positions[-1]):
            hidden: Tensor = self._text(**inputs, **ours).last_hidden_state[0]
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
        """Our attention scales by head_dim ** -0.5; a model may have another factor."""

        def attend(layer: int, scaling: float | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if scaling and scaling != self._scale:
                q = q * (scaling / self._scale)
            return attention(layer, q, k, v)

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

    def on_device(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        return {
            name: v.to(self.device, self.dtype if v.is_floating_point() else None)
            for name, v in inputs.items()
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
    tensors: StoredTensors | None,
) -> Fallback:
    """Load and check a model. Anything that Transformers raises becomes a ConfigError.

    `tensors`: weights of the checkpoint. Quantised ones are dequantised here, as for other models.
    """
    kind = config.model_type
    processor = hf_processor.load_processor(path, kind)
    window = max_model_len or config.text.max_context
    try:
        model = _model(hf_processor.import_transformers(kind), path, dtype, tensors, seed)
        fallback = Fallback(config, model.to(device).eval(), processor, device, dtype, window)
        check_against_own_forward(fallback)
    except ConfigError:
        raise
    except (Unfit, RequestError) as error:
        raise refusal(kind, str(error)) from None
    except Exception as error:
        raise refusal(kind, hf_processor.raised(error)) from error
    logger.warning(
        "model_type %s is not one that Saccade knows: it runs through Transformers' code. Its answers are "
        "right, but steps are slower than a known model's, and a picture is encoded in one piece, in which "
        "others wait",
        kind,
    )
    return fallback


def _model(
    transformers: Any, path: Path, dtype: torch.dtype, tensors: StoredTensors | None, seed: int
) -> Any:
    # Without a mask function of this name Transformers makes no mask, and reads nothing back to make one.
    transformers.AttentionInterface.register(_NAME, _attend)
    shape = transformers.AutoConfig.from_pretrained(path, **LOCAL)
    unknown = sorted(set(getattr(shape.get_text_config(), "layer_types", None) or ()) - _LAYERS)
    if unknown:
        raise Unfit(f"its layers are of a kind we cannot follow ({', '.join(unknown)})")
    for part in (shape, shape.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config  # or Transformers would load the weights by its own quantisers
    kind = transformers.AutoModelForImageTextToText
    if tensors is None:
        torch.manual_seed(seed)
        model = kind.from_config(shape, dtype=dtype)
    else:
        model = _loaded(kind, path, shape, dtype, tensors)
    use_our_attention(model)
    return model


def _loaded(kind: Any, path: Path, shape: Any, dtype: torch.dtype, tensors: StoredTensors) -> Any:
    how = {"dtype": dtype, "use_safetensors": True, "output_loading_info": True, **LOCAL}
    if isinstance(tensors, DequantizedTensors):
        with torch.device("meta"):
            model_class = type(kind.from_config(shape))  # `kind` itself takes no state_dict
        weights = {name: tensors.read(name).to("cpu", dtype) for name in tensors.file_of}
        model, info = model_class.from_pretrained(None, config=shape, state_dict=weights, **how)
        logger.info("%s", tensors.summary())
    else:
        model, info = kind.from_pretrained(path, **how)
    _check_loaded(info["missing_keys"], info["unexpected_keys"])
    return model


def _check_loaded(absent: Collection[str], unexpected: Collection[str]) -> None:
    """Transformers fills the missing at random and leaves the unexpected out."""
    if absent:
        raise Unfit(f"its checkpoint lacks {len(absent)} tensors ({some(absent)})")
    scales = [name for name in unexpected if name.endswith(OF_QUANTISED)]
    if scales:
        raise Unfit(f"its quantization_config says nothing of quantised weights ({some(scales)})")


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
        remedy = f"--max-model-len {window} makes up for it"
        raise Unfit(f"its attention has a window of {window} tokens, ours none; {remedy}")
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [T, heads, d]
    return how["saccade_attention"](module.layer_idx, how.get("scaling"), q, k, v)[None], None


class LengthRope(nn.Module):
    """LongRoPE for packed steps. Transformers' module selects the factors by the largest position in the
    batch, which is wrong for several requests or for a chunk of one. Here each token has the length of its
    own request:

        switch 8       prompt of 6, positions 0 .. 5          prompt of 10, positions 0 .. 9
        lengths        5 5 5 5 5 5 | 6 7 8 9 (its output)     9 9 9 9 9 9 9 9 9 9 | 10 11 ...
        factors        short ............ long                long ...

    This equals `generate`: one choice for a whole prompt, then one for each output token.
    """

    def __init__(self, rope: Any, switch: int) -> None:
        super().__init__()
        self.rope = rope
        self.switch = switch
        self.lengths: Tensor | None = None  # [T]; None: one whole sequence, as Transformers expects

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        if self.lengths is None:
            whole: tuple[Tensor, ...] = self.rope(x, position_ids)
            return whole
        is_long = self.lengths >= self.switch
        short: tuple[Tensor, ...] = self.rope(x, position_ids.masked_fill(is_long, 0))
        if not is_long.any():
            return short
        beyond = torch.full_like(position_ids[:, :1], self.switch)  # a position that selects the long factors
        long = self.rope(x, torch.cat([position_ids, beyond], 1))
        return tuple(torch.where(is_long[:, None], b[:, :-1], a) for a, b in zip(short, long, strict=True))


def follow_lengths(text: Any, switch: int | None, window: int) -> LengthRope | None:
    """Replace LongRoPE in the text model, if it has one with this `switch`.

    Unfit if RoPE depends on the length in another way within a context of `window` tokens.
    """
    followed = None
    for name, module in list(text.named_modules()):
        minimum = _min_switch(module)
        if minimum is None:
            continue
        if module.rope_type == "longrope" and minimum == switch and followed is None:
            parent, _, attribute = name.rpartition(".")
            followed = LengthRope(module, minimum)
            setattr(text.get_submodule(parent), attribute, followed)
        elif window > minimum:
            raise Unfit(
                f"beyond {minimum} tokens its rope ({module.rope_type}) changes with a prompt's length in a "
                f"way we do not follow; --max-model-len {minimum} avoids that"
            )
    return followed


def _min_switch(module: Any) -> int | None:
    """The number of tokens beyond which a RoPE module depends on the length; None: it never does."""
    kind = getattr(module, "rope_type", None)
    if kind is None:
        return None
    rules = module.config.rope_parameters
    kinds: dict[str | None, str] = kind if isinstance(kind, dict) else {None: str(kind)}
    lengths = []
    for layer, name in kinds.items():
        if "dynamic" in name:
            lengths.append(module.original_max_seq_len)
        elif name == "longrope":
            lengths.append((rules if layer is None else rules[layer])["original_max_position_embeddings"])
    return min(lengths, default=None)


class Probe(NamedTuple):
    """A request, and the logits of the model's own forward."""

    embeds: Tensor  # [n, hidden]
    positions: Tensor  # [2, n]: of each token, and of the last one
    expected: Tensor  # [n, vocabulary]


class Chunk(NamedTuple):
    probe: int
    start: int
    end: int


@torch.inference_mode()
def check_against_own_forward(model: Fallback) -> None:
    """Raises Unfit if logits differ; exceptions of the model's own code pass."""
    probes = [_image_probe(model), _text_probe(model)]
    alone = _difference(model, probes, [[Chunk(0, 0, len(probes[0].embeds))]])
    if not alone <= _TOLERANCE[model.dtype]:
        raise Unfit(
            f"with our attention its logits differ by {alone:.1e} from its own. Its pictures may be read in "
            "both directions, its layers may see only part of the context, or tokens around a picture may be "
            "changed"
        )
    cuts = [(0, length // 3, length - 1, length) for length in (len(probe.embeds) for probe in probes)]
    steps = [[Chunk(probe, cut[i], cut[i + 1]) for probe, cut in enumerate(cuts)] for i in range(3)]
    together = _difference(model, probes, steps)
    if not together <= _TOLERANCE[model.dtype]:
        raise Unfit(
            f"beside another request, and in pieces, its logits differ by {together:.1e} from those it has "
            "alone. Its layers may remember more than keys and values, or mix what stands side by side"
        )


def _image_probe(model: Fallback) -> Probe:
    image = Image.effect_noise(_PROBE_SIZE, 80).convert("RGB")
    inputs = model.on_device(processed(model.processor, f"a {model.token} b c d e", image))
    ids = inputs["input_ids"][0]
    embeds = model.embed(ids)
    features = _features(model, inputs, image)
    assert model.config.image_token_id is not None
    rows = torch.eq(ids, model.config.image_token_id).nonzero()[:, 0]
    if len(features) != len(rows):
        raise Unfit(f"its tower makes {len(features)} embeddings of a picture of {len(rows)} tokens")
    embeds[rows] = features
    return Probe(embeds, _positions(ids, 0), _own_logits(model, inputs))


def _features(model: Fallback, inputs: Mapping[str, Any], image: Image.Image) -> Tensor:
    patches = model.prepare(np.asarray(image), _ANY_GEOMETRY)
    assert model.config.vision is not None
    side = model.config.vision.patch_size
    height, width = (int(n) // side for n in inputs["pixel_values"].shape[-2:])
    return _last(model.encode(patches, [Grid(len(patches) // (height * width), height, width)]))[0]


def _text_probe(model: Fallback) -> Probe:
    """Text around the LongRoPE switch, if a request can get there: positions need no preceding tokens."""
    text = model.processor.tokenizer.encode(_PROBE_TEXT, add_special_tokens=False)
    ids = torch.tensor(text, device=model.device)
    switch = model.config.text.rope_switch
    start = 0
    if switch is not None and switch + len(ids) <= model.window:
        start = max(0, switch - len(ids) // 2)
    positions = _positions(ids, start)
    inputs = {"input_ids": ids[None], "position_ids": positions[:1]}
    return Probe(model.embed(ids), positions, _own_logits(model, inputs))


def _positions(ids: Tensor, start: int) -> Tensor:
    positions = torch.arange(start, start + len(ids), device=ids.device)
    return torch.stack([positions, positions[-1:].expand(len(ids))])


def _own_logits(model: Fallback, inputs: Mapping[str, Any]) -> Tensor:
    parameters = inspect.signature(model.model.forward).parameters
    arguments = {name: value for name, value in inputs.items() if name in parameters}
    with model.own_attention():
        logits: Tensor = model.model(**arguments).logits
    return logits[0].float()


def _difference(model: Fallback, probes: Sequence[Probe], steps: Sequence[Sequence[Chunk]]) -> float:
    """The largest difference, relative to the largest logit."""
    blocks = -(-max(len(probe.embeds) for probe in probes) // _BLOCK_SIZE)
    kv = PagedKV.allocate(model.config.text, blocks * len(probes), _BLOCK_SIZE, model.dtype, model.device)
    differences = [0.0]
    for chunks in steps:
        embeds = [probes[chunk.probe].embeds[chunk.start : chunk.end] for chunk in chunks]
        positions = [probes[chunk.probe].positions[:, chunk.start : chunk.end] for chunk in chunks]
        attention = PagedAttention(kv, _batch(chunks, blocks, model.device), model.decoder.scale)
        ours = model.logits(model.forward(torch.cat(embeds), torch.cat(positions, 1), attention))
        for chunk, logits in zip(chunks, torch.split(ours, [len(part) for part in embeds]), strict=True):
            expected = probes[chunk.probe].expected
            differences.append(
                float((logits - expected[chunk.start : chunk.end]).abs().max() / expected.abs().max())
            )
    return float(np.max(differences))  # a NaN counts as the largest


def _batch(chunks: Sequence[Chunk], blocks: int, device: torch.device) -> AttentionBatch:
    """Each request has `blocks` consecutive blocks of its own."""
    tables = [range(chunk.probe * blocks, (chunk.probe + 1) * blocks) for chunk in chunks]
    slots: list[int] = []
    for chunk in chunks:
        first = chunk.probe * blocks * _BLOCK_SIZE
        slots += range(first + chunk.start, first + chunk.end)
    return AttentionBatch(
        query_lens=[chunk.end - chunk.start for chunk in chunks],
        seq_lens=[chunk.end for chunk in chunks],
        block_tables=torch.tensor(tables, device=device),
        slots=torch.tensor(slots, device=device),
        block_size=_BLOCK_SIZE,
    )


def _last(encoding: Encoding) -> list[Tensor]:
    while True:
        try:
            next(encoding)
        except StopIteration as done:
            embeddings: list[Tensor] = done.value
            return embeddings
