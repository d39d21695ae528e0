"""Which weights are packed for the GEMMs of a CPU, and what that costs in memory."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch

from saccade import costs
from saccade.checkpoint.config import ModelConfig
from saccade.models import is_native
from saccade.models.interface import DecoderModel, VisionLanguageModel
from saccade.models.layers.decoder import Decoder
from saccade.models.layers.packed_linear import is_aarch64, plain_reason, shares_rows

_MIN_WEIGHT = 1 << 16  # elements of a layer's largest


class WeightPacking(NamedTuple):
    is_on: bool
    has_plain_layers: bool  # only a copy of the head is packed
    copied_bytes: int  # of a tied head, which is packed beside the embeddings
    reason: str  # for the start-up log


def plan_packing(model: ModelConfig, dtype: str, device: torch.device) -> WeightPacking:
    text = model.text
    problem = _problem(model, dtype, device)
    if problem is not None:
        return WeightPacking(False, True, 0, f"weights are not packed for oneDNN: {problem}")
    if not text.tie_word_embeddings:
        return WeightPacking(True, False, 0, "weights are packed for oneDNN")
    if not is_aarch64() and shares_rows(getattr(torch, dtype), text.hidden_size):
        reason = "weights are packed for oneDNN; embeddings are looked up in the packed head"
        return WeightPacking(True, False, 0, reason)
    copied = text.vocab_size * text.hidden_size * costs.dtype_bytes(dtype)
    copy = f"the head is also the embedding table, so its packed copy takes {copied / costs.GIB:.2f} GiB more"
    packed = "the head (for two rows and more) is" if is_aarch64() else "weights are"
    return WeightPacking(True, is_aarch64(), copied, f"{packed} packed for oneDNN; {copy}")


def _problem(model: ModelConfig, dtype: str, device: torch.device) -> str | None:
    """Why nothing is packed, as far as the config tells."""
    if problem := plain_reason(getattr(torch, dtype), device.type):
        return problem
    if not is_native(model):
        return "the model runs through Transformers' code (a decoder that becomes one of ours is packed)"
    return _shape_problem(model)


def _shape_problem(model: ModelConfig) -> str | None:
    text = model.text
    if text.hidden_size * text.intermediate_size < _MIN_WEIGHT:
        return "they are so small that building code for them takes longer than it saves"
    if is_aarch64() and not text.tie_word_embeddings:
        return "on AArch64 only a head that is also the embedding table is"
    return None


def pack_where_faster(model: VisionLanguageModel, dtype: torch.dtype, device: torch.device) -> None:
    if not is_native(model.config):
        if plain_reason(dtype, device.type) is None:
            _pack_own_decoder(model)
        return
    plan = plan_packing(model.config, str(dtype).removeprefix("torch."), device)
    if not plan.is_on:
        return
    if not plan.has_plain_layers:
        pack_weights(model)
    elif not model.decoder.head.is_meta:
        model.decoder.copy_head()


def _pack_own_decoder(model: VisionLanguageModel) -> None:
    """Of a model that runs through Transformers' code, which reads a tied head as it is for pictures."""
    decoder = model.decoder
    is_ours = isinstance(decoder, Decoder) and _shape_problem(model.config) is None
    if is_ours and not is_aarch64():
        pack_weights(model, with_head=decoder.head is not decoder.table)


def pack_weights(model: VisionLanguageModel, *, with_head: bool = True) -> None:
    """Replace the weights of linear layers and of the head. Experts stay as they are."""
    params = cast(DecoderModel, model).params
    params.give_up_names()  # their tensors are views of the originals
    for linear in params.linears:
        if not linear.weight.is_meta:
            linear.pack()
    if with_head and not model.decoder.head.is_meta:
        model.decoder.pack_head()
