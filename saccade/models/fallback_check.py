"""What a model from Transformers must show before it is served: that our way gives the logits of its own.

Once alone, and once as a server computes: two requests of different length in the same steps, each in pieces, over the
paged cache. Where a rope depends on a sequence's length the second request lies beyond that length.

    request      step 1            step 2              step 3
    picture      [0, n / 3)        [n / 3, n - 1)      [n - 1, n)
    text         [0, m / 3)        [m / 3, m - 1)      [m - 1, m)
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from saccade.checkpoint.hf_processor import processed
from saccade.models.layers.attention import AttentionBatch, PagedAttention, PagedKV
from saccade.models.layers.length_rope import Unfit
from saccade.models.layers.types import Encoding
from saccade.types import Geometry, Grid, Size

if TYPE_CHECKING:
    from saccade.models.fallback import Fallback

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the largest logit
_BLOCK = 16
_SIZE = (300, 211)  # seldom a multiple of a patch, and tiles of it lie in rows
_TEXT = "f g h i j k l m n o p q r s t u v w x y z"
_ANY = Geometry(Size(1, 1), Grid(1, 1, 1), 1, 1)  # `prepare` asks the processor, not this


class Trial(NamedTuple):
    """A request, and what the model's own code makes of it alone and in one piece."""

    embeds: Tensor  # [n, hidden]
    positions: Tensor  # [2, n]: where each token is, and where the last one is
    theirs: Tensor  # [n, vocabulary]


class Piece(NamedTuple):
    trial: int
    start: int
    end: int


@torch.inference_mode()
def check_against_own_forward(model: Fallback) -> None:
    """Unfit unless it holds; what the model's own code raises comes through."""
    trials = [_with_image(model), _of_text(model)]
    alone = _difference(model, trials, [[Piece(0, 0, len(trials[0].embeds))]])
    if not alone <= _TOLERANCE[model.dtype]:
        raise Unfit(
            f"with our attention its logits differ by {alone:.1e} from its own. Its pictures may be read in both "
            "directions, its layers may see only part of the context, or tokens around a picture may be changed"
        )
    together = _difference(model, trials, _in_pieces([len(trial.embeds) for trial in trials]))
    if not together <= _TOLERANCE[model.dtype]:
        raise Unfit(
            f"beside another request, and in pieces, its logits differ by {together:.1e} from those it has alone. Its "
            "layers may remember more than keys and values, or mix what stands side by side"
        )


def _with_image(model: Fallback) -> Trial:
    image = Image.effect_noise(_SIZE, 80).convert("RGB")
    inputs = model.on_device(processed(model.processor, f"a {model.token} b c d e", image))
    ids = inputs["input_ids"][0]
    embeds, features = model.embed(ids), _features(model, inputs, image)
    assert model.config.image_token_id is not None
    rows = torch.eq(ids, model.config.image_token_id).nonzero()[:, 0]
    if len(features) != len(rows):
        raise Unfit(f"its tower makes {len(features)} embeddings of a picture of {len(rows)} tokens")
    embeds[rows] = features
    return Trial(embeds, _positions(ids, 0), _own_logits(model, inputs))


def _features(model: Fallback, inputs: Mapping[str, Any], image: Image.Image) -> Tensor:
    patches = model.prepare(np.asarray(image), _ANY)
    assert model.config.vision is not None
    side = model.config.vision.patch_size
    height, width = (int(n) // side for n in inputs["pixel_values"].shape[-2:])
    return _last(model.encode(patches, [Grid(len(patches) // (height * width), height, width)]))[0]


def _of_text(model: Fallback) -> Trial:
    """Around the place where the rope changes, if a request can get there: positions need no tokens before them."""
    ids = torch.tensor(model.processor.tokenizer.encode(_TEXT, add_special_tokens=False), device=model.device)
    switch = model.config.text.rope_switch
    fits = switch is not None and switch + len(ids) <= model.window
    positions = _positions(ids, max(0, switch - len(ids) // 2) if switch is not None and fits else 0)
    inputs = {"input_ids": ids[None], "position_ids": positions[:1]}
    return Trial(model.embed(ids), positions, _own_logits(model, inputs))


def _positions(ids: Tensor, start: int) -> Tensor:
    places = torch.arange(start, start + len(ids), device=ids.device)
    return torch.stack([places, places[-1:].expand(len(ids))])


def _own_logits(model: Fallback, inputs: Mapping[str, Any]) -> Tensor:
    taken = inspect.signature(model.model.forward).parameters
    with model.own_attention():
        logits: Tensor = model.model(**{name: value for name, value in inputs.items() if name in taken}).logits
    return logits[0].float()


def _in_pieces(lengths: Sequence[int]) -> list[list[Piece]]:
    cuts = [(0, length // 3, length - 1, length) for length in lengths]
    return [[Piece(trial, cut[step], cut[step + 1]) for trial, cut in enumerate(cuts)] for step in range(3)]


def _difference(model: Fallback, trials: Sequence[Trial], steps: Sequence[Sequence[Piece]]) -> float:
    """The largest one, as a share of the largest logit."""
    blocks = -(-max(len(trial.embeds) for trial in trials) // _BLOCK)
    kv = PagedKV.allocate(model.config.text, blocks * len(trials), _BLOCK, model.dtype, model.device)
    found = [0.0]
    for pieces in steps:
        embeds = torch.cat([trials[piece.trial].embeds[piece.start : piece.end] for piece in pieces])
        positions = torch.cat([trials[piece.trial].positions[:, piece.start : piece.end] for piece in pieces], 1)
        attention = PagedAttention(kv, _batch(pieces, blocks, model.device), model.decoder.scale)
        ours = model.logits(model.forward(embeds, positions, attention))
        for piece, own in zip(pieces, torch.split(ours, [piece.end - piece.start for piece in pieces]), strict=True):
            theirs = trials[piece.trial].theirs
            found.append(float((own - theirs[piece.start : piece.end]).abs().max() / theirs.abs().max()))
    return float(np.max(found))  # a NaN counts as the largest


def _batch(pieces: Sequence[Piece], blocks: int, device: torch.device) -> AttentionBatch:
    """Each request has `blocks` blocks of its own, one behind the other."""
    tables = torch.tensor([range(piece.trial * blocks, (piece.trial + 1) * blocks) for piece in pieces], device=device)
    first = [piece.trial * blocks * _BLOCK for piece in pieces]
    slots = [place + i for place, piece in zip(first, pieces, strict=True) for i in range(piece.start, piece.end)]
    return AttentionBatch(
        query_lens=[piece.end - piece.start for piece in pieces],
        context_lens=[piece.end for piece in pieces],
        block_tables=tables,
        slots=torch.tensor(slots, device=device),
        block_size=_BLOCK,
    )


def _last(encoding: Encoding) -> list[Tensor]:
    while True:
        try:
            next(encoding)
        except StopIteration as done:
            found: list[Tensor] = done.value
            return found
