"""Which weights are packed for the GEMMs of a CPU, and what that costs in memory."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch

from saccade import costs
from saccade.checkpoint.config import ModelConfig
from saccade.models import is_native
from saccade.models.interface import DecoderModel, VisionLanguageModel
from saccade.models.layers.packed_linear import plain_reason

_MIN_WEIGHT = 1 << 16  # elements of a layer's largest


class WeightPacking(NamedTuple):
    is_on: bool
    copied_bytes: int  # of a tied head, which is packed beside the embeddings
    reason: str  # for the start-up log


def plan_packing(model: ModelConfig, dtype: str, device: torch.device) -> WeightPacking:
    problem = plain_reason(getattr(torch, dtype), device.type)
    if problem is None and not is_native(model):
        problem = "the model runs through Transformers' code"
    if problem is None and model.text.hidden_size * model.text.intermediate_size < _MIN_WEIGHT:
        problem = "they are so small that building code for them takes longer than it saves"
    if problem is not None:
        return WeightPacking(False, 0, f"weights are not packed for oneDNN: {problem}")
    text = model.text
    if not text.tie_word_embeddings:
        return WeightPacking(True, 0, "weights are packed for oneDNN")
    copied = text.vocab_size * text.hidden_size * costs.dtype_bytes(dtype)
    copy = f"the head is also the embedding table, so its packed copy takes {copied / costs.GIB:.2f} GiB more"
    return WeightPacking(True, copied, f"weights are packed for oneDNN; {copy}")


def pack_where_faster(model: VisionLanguageModel, dtype: torch.dtype, device: torch.device) -> None:
    if plan_packing(model.config, str(dtype).removeprefix("torch."), device).is_on:
        pack_weights(model)


def pack_weights(model: VisionLanguageModel) -> None:
    """Replace the weights of linear layers and of the head. Experts stay as they are."""
    params = cast(DecoderModel, model).params
    params.give_up_names()  # their tensors are views of the originals
    for linear in params.linears:
        if not linear.weight.is_meta:
            linear.pack()
    if not model.decoder.head.is_meta:
        model.decoder.pack_head()
