"""The proof before a model serves: its logits with our attention are those of its own.

Once alone, and once as a server computes, with two requests of different length in the same steps, each in
chunks, over the paged cache. With LongRoPE the second request is beyond the switch.

    request      step 1            step 2              step 3
    image        [0, n / 3)        [n / 3, n - 1)      [n - 1, n)
    text         [0, m / 3)        [m / 3, m - 1)      [m - 1, m)

A block of tokens that see each other is never cut.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from saccade.checkpoint.hf_processor import processed, starts_of
from saccade.checkpoint.token_blocks import block_row
from saccade.models.bridge.errors import Unfit
from saccade.models.bridge.images import on_device
from saccade.models.bridge.model import ModelBridge
from saccade.models.bridge.tail import NEVER, tail_of
from saccade.models.layers.attention_rules import AttentionRule
from saccade.models.layers.forward_types import States, WindowGroup
from saccade.models.layers.torch_attention import AttentionBatch, PagedAttention, PagedKV
from saccade.types.media import Geometry, Grid, Size

TOLERANCE = {torch.float32: 3e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the largest logit
_BLOCK_SIZE = 16
_SIZE = Size(300, 211)  # rarely a multiple of a patch, and wide enough for rows of tiles
_MAX_ROUNDING = 0.5  # of the largest logit
_OTHER_ATTENTION = "eager"
_TEXT = "f g h i j k l m n o p q r s t u v w x y z"
_KINDS = ("mm_token_type_ids", "token_type_ids")


class Probe(NamedTuple):
    """A request, and the logits of the model's own forward."""

    embeds: Tensor  # [n, width]
    positions: Tensor  # [rows, n], see `ModelBridge.forward`
    expected: Tensor  # [n, vocabulary]
    rounding: float  # how much they differ from those of attention that rounds in another way
    cuts: tuple[int, ...]  # ends of its chunks


class Chunk(NamedTuple):
    probe: int
    start: int
    end: int


@torch.inference_mode()
def check_against_own_forward(model: ModelBridge) -> list[Probe]:
    """Raises Unfit if logits differ; exceptions of the model's own code pass. What was asked."""
    budget = model.indexers.budget
    if budget is not None and model.window > budget:
        reason = f"its layers select {budget} tokens of a longer context, and ours read all"
        raise Unfit(f"{reason}; it is served up to there with --max-model-len {budget}")
    probes = [_image_probe(model), _text_probe(model)]
    alone = _difference(model, probes, [[Chunk(0, 0, len(probes[0].embeds))]])
    limit = limit_of(model, probes)
    if not alone <= limit:
        raise Unfit(
            f"with our attention its logits differ by {alone:.1e} from its own. Its pictures may be read in "
            "both directions, its layers may see only part of the context, or tokens around a picture may be "
            "changed"
        )
    together = _difference(model, probes, list(_steps(probes)))
    if not together <= limit:
        raise Unfit(
            f"beside another request, and in pieces, its logits differ by {together:.1e} from those it has "
            "alone. Its layers may remember more than keys and values, or mix what stands side by side"
        )
    return probes


@torch.inference_mode()
def difference_in_steps(model: ModelBridge, probes: Sequence[Probe]) -> float:
    """The largest difference of logits: of each request alone and whole, and of all in pieces."""
    alone = [[Chunk(number, 0, len(probe.embeds))] for number, probe in enumerate(probes)]
    steps = [*alone, *_steps(probes)]
    return _difference(model, probes, steps)


def limit_of(model: ModelBridge, probes: Sequence[Probe]) -> float:
    """The largest difference that may be rounding. Random weights may turn that into anything."""
    if model.is_random:
        return math.inf
    rounding = 2 * max(probe.rounding for probe in probes)
    return max(TOLERANCE[model.dtype], min(_MAX_ROUNDING, rounding))


def _steps(probes: Sequence[Probe]) -> list[list[Chunk]]:
    pieces = [
        [Chunk(i, *ends) for ends in zip((0, *probe.cuts), probe.cuts, strict=False)]
        for i, probe in enumerate(probes)
    ]
    return [[chunk for chunk in step if chunk is not None] for step in zip_longest(*pieces)]


def _image_probe(model: ModelBridge) -> Probe:
    noise = np.random.default_rng(0).integers(0, 256, (_SIZE.height, _SIZE.width, 3), np.uint8)
    image = Image.fromarray(noise)
    inputs = on_device(
        dict(processed(model.processor, f"a {model.place.written} b c d e", image)), model.device
    )
    inputs = {name: cast(value, model.dtype) for name, value in inputs.items()}
    ids = inputs["input_ids"][0]
    model.entrance.learn(inputs)
    embeds = model.embed(ids)
    start, rows = _image_rows(model, image, ids.tolist())
    embeds[start : start + len(rows)] = rows
    positions = positions_of(model, inputs, ids)
    own = _own_logits(model, inputs)
    return Probe(embeds, positions, own, rounding_of(model, inputs, own), _cuts(model, len(ids), start))


def cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _image_rows(model: ModelBridge, image: Image.Image, ids: list[int]) -> tuple[int, Tensor]:
    """Where the image stands in the prompt, and its embeddings as the engine makes them."""
    alone = model.images.frame.inside(
        processed(model.processor, model.place.written, image)["input_ids"][0].tolist()
    )
    starts = starts_of(ids, alone)
    if not starts:
        raise Unfit("its processor writes a picture in other tokens where text is around it")
    patches = model.images.rows(np.asarray(image)).to(model.device)
    encoding = model.encode_images(patches, [_geometry(len(patches), len(alone))])
    while True:
        try:
            next(encoding)
        except StopIteration as done:
            features: list[Tensor] = done.value
            return starts[0], features[0]


def _geometry(patches: int, tokens: int) -> Geometry:
    return Geometry(_SIZE, Grid(1, patches, 1), tokens, tokens)


def _cuts(model: ModelBridge, length: int, image: int) -> tuple[int, ...]:
    match model.config.text.blocks:
        case None:
            return length // 3, length - 1, length
        case "prompt":
            return (length,)
    return image, length - 1, length


def _text_probe(model: ModelBridge) -> Probe:
    """Text around the LongRoPE switch, if a request can get there: positions need no preceding tokens."""
    text = model.processor.tokenizer.encode(_TEXT, add_special_tokens=False)
    ids = torch.tensor(text, device=model.device)
    switch = model.config.text.rope_switch
    start = 0
    if switch is not None and switch + len(ids) <= model.window:
        start = max(0, switch - len(ids) // 2)
    inputs = {"input_ids": ids[None]}
    if start:
        inputs["position_ids"] = torch.arange(start, start + len(ids), device=ids.device)[None]
    positions = positions_of(model, inputs, ids)
    own = _own_logits(model, inputs)
    embeds = model.embed(ids)
    return Probe(embeds, positions, own, rounding_of(model, inputs, own), _cuts(model, len(ids), 1))


def positions_of(model: ModelBridge, inputs: Mapping[str, Any], ids: Tensor) -> Tensor:
    """Of RoPE as its own forward makes them, then the rows of blocks and lengths."""
    own = model.entrance.arrive(inputs).get("position_ids")
    rope = torch.arange(len(ids), device=ids.device)[None] if own is None else own.reshape(-1, len(ids))
    if not _has_rope_index(model):
        _check_counted(rope)
    model.axes = max(model.axes, len(rope))  # of text all axes may be one
    rope = rope.expand(model.axes, -1)
    rows = [rope]
    if model.config.text.blocks is not None:
        kinds = next(
            (inputs[name][0].cpu().numpy() for name in _KINDS if name in inputs), np.zeros(len(ids), np.int64)
        )
        rows.append(torch.from_numpy(block_row(kinds, model.config.text.blocks)).to(rope)[None])
    if model.config.text.rope_switch is not None:
        rows.append(rope[-1:, -1:].expand(1, len(ids)))
    return torch.cat(rows)


def _has_rope_index(model: ModelBridge) -> bool:
    return any(hasattr(part, "get_rope_index") for part in (model.model, getattr(model.model, "model", None)))


def _check_counted(rope: Tensor) -> None:
    """Requests get positions that count on, from any number."""
    steps = rope.diff(dim=-1)
    if not bool((steps == 1).all()):
        raise Unfit("its positions do not count tokens, and it has no get_rope_index that says how they go")


def rounding_of(model: ModelBridge, inputs: Mapping[str, Any], expected: Tensor) -> float:
    """In 16 bits it may change which experts a token takes, and so its logits by far more than itself."""
    if model.dtype == torch.float32:
        return 0.0
    try:
        other, _ = own(model, inputs, _OTHER_ATTENTION)
    except Exception:  # a model that has only one
        return 0.0
    difference = float((other - expected).abs().max() / expected[expected > NEVER].abs().max())
    return difference if math.isfinite(difference) else 0.0


def _own_logits(model: ModelBridge, inputs: Mapping[str, Any]) -> Tensor:
    logits, hidden = own(model, inputs)
    plain = model.head(hidden).float()
    model.tail = tail_of(model.text.config, plain, logits, TOLERANCE[model.dtype])
    return logits


def own(model: ModelBridge, inputs: Mapping[str, Any], attention: str | None = None) -> tuple[Tensor, Tensor]:
    """Logits, and the decoder's hidden states."""
    parameters = inspect.signature(model.model.forward).parameters
    arguments = {name: value for name, value in inputs.items() if name in parameters}
    hidden: list[Tensor] = []
    hook = model.text.register_forward_hook(lambda *call: hidden.append(call[-1].last_hidden_state[0]))
    try:
        with model.attention.own(attention), model.indexers.own():
            logits: Tensor = model.model(**arguments, use_cache=False).logits[0].float()
    finally:
        hook.remove()
    return logits.clamp(min=NEVER), hidden[-1]


def _difference(model: ModelBridge, probes: Sequence[Probe], steps: Sequence[Sequence[Chunk]]) -> float:
    """The largest difference, relative to the largest logit."""
    blocks = -(-max(len(probe.embeds) for probe in probes) // _BLOCK_SIZE)
    kv = PagedKV.allocate(model.config.text, blocks * len(probes), _BLOCK_SIZE, model.dtype, model.device)
    states = _states(model, len(probes))
    differences = [0.0]
    for chunks in steps:
        embeds = [probes[chunk.probe].embeds[chunk.start : chunk.end] for chunk in chunks]
        positions = [probes[chunk.probe].positions[:, chunk.start : chunk.end] for chunk in chunks]
        attention = PagedAttention(kv, _batch(chunks, blocks, model.device), model.decoder.scale)
        given = (torch.cat(embeds), torch.cat(positions, 1), attention)
        if states is None:
            hidden = model.forward(*given)
        else:
            for tensor in (states.conv, states.recurrent):
                tensor[:, [chunk.probe for chunk in chunks if chunk.start == 0]] = 0
            hidden = model.forward(*given, states._replace(groups=_groups(chunks, model.device)))
        ours = model.logits(hidden)
        for chunk, logits in zip(chunks, torch.split(ours, [len(part) for part in embeds]), strict=True):
            expected = probes[chunk.probe].expected
            largest = expected[expected > NEVER].abs().max()
            differences.append(float((logits - expected[chunk.start : chunk.end]).abs().max() / largest))
    return float(np.max(differences))  # a NaN counts as the largest


def _states(model: ModelBridge, requests: int) -> States | None:
    linear = model.config.text.linear
    if model.states is None or linear is None:
        return None
    if not model.states.parts:
        cache = model.states.new_cache()
        rows = torch.zeros(1, 3, model.config.text.embedding_size, dtype=model.dtype, device=model.device)
        rope = torch.arange(3, device=model.device).expand(model.axes, 1, 3)
        with model.attention.of_step(_nothing, None):
            model.decode(rows, rope, cache)
        model.states.learn(cache)
    return States.zeros(linear, requests, model.dtype, model.device)


def _nothing(layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule | None = None) -> Tensor:
    return q.new_zeros(*q.shape[:2], v.shape[2])


def _groups(chunks: Sequence[Chunk], device: torch.device) -> list[WindowGroup]:
    groups, first = [], 0
    for chunk in chunks:
        length = chunk.end - chunk.start
        tokens = torch.arange(first, first + length, device=device)[None]
        groups.append(WindowGroup(tokens, torch.tensor([chunk.probe], device=device)))
        first += length
    return groups


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
