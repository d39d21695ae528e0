"""Decoders whose layers are packed in INT4, with random weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from saccade.models.int4_weights import GroupScales, Int4Format, Int4Weights
from saccade.models.layers.decoder import Biases, Decoder
from saccade.models.state_dict import Parameters
from saccade.models.weights import fill_random
from tests.helpers.families.decoder_layers import DEVICE, TEXT

WIDTH = 128


def packed_decoder(*, is_ordered: bool, biases: Biases) -> Decoder:
    own = Int4Format(64, has_zeros=True, dtype=torch.float16, order=b"any" if is_ordered else None)
    params = Parameters(torch.float16, DEVICE, quantized=Int4Weights({}, default=own))
    text = replace(TEXT, hidden_size=WIDTH, head_dim=32, intermediate_size=256, num_layers=1)
    made = Decoder(params.within("decoder"), text, biases)
    fill_random(params.targets, 0, DEVICE, params.scales)
    generator = torch.Generator().manual_seed(1)
    for scales in params.scales.values():
        assert isinstance(scales, GroupScales) and scales.zeros is not None
        scales.zeros.copy_(torch.randint(7, 10, scales.zeros.shape, generator=generator))
        if scales.order is not None:
            scales.order.copy_(torch.randperm(len(scales.order), generator=generator))
    return made
