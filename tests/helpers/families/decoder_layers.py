"""Decoder layers with random weights, and their MLP in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from saccade.checkpoint.config import TextConfig
from saccade.models.cuda.gemms import DecoderGemms
from saccade.models.cuda.residual import Residual
from saccade.models.layers.decoder import Biases, Decoder, DecoderLayer
from saccade.models.state_dict import Parameters

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BIASES = pytest.mark.parametrize("biases", [Biases(), Biases(qkv=True), Biases(True, True, True)], ids=str)
PLAIN = Biases()
TEXT = TextConfig(64, 96, 2, 4, 2, 16, 200, 512, 1e-6, 1e4, None, {}, False, "llama")


def decoder(biases: Biases = PLAIN, dtype: torch.dtype = torch.float16, text: TextConfig = TEXT) -> Decoder:
    params = Parameters(dtype, DEVICE)
    made = Decoder(params, text, biases)
    generator = torch.Generator().manual_seed(0)
    for tensor in params.targets.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) / 8)
    return made


def rows_of(rows: int, size: int, seed: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def total(x: Residual) -> Tensor:
    if x.added is None:
        return x.rows
    return x.rows + (x.added if x.added.dim() == 2 else x.added.sum(0).to(x.rows.dtype))


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=8e-3, rtol=8e-3)


def plain_mlp(x: Tensor, layer: DecoderLayer) -> Tensor:
    return layer.mlp(layer.mlp_norm(x)) + x


def assert_layer_agrees(made: Decoder, rows: int, width: int) -> None:
    """The GEMMs chosen for `rows` rows give what the first layer gives in plain PyTorch."""
    layer, gemms = made.layers[0], DecoderGemms(made).for_rows(rows)
    x, mixed = rows_of(rows, width, 1), rows_of(rows, width, 2)
    qkv, stream = gemms.project(Residual(x), layer.attention_norm, layer.attention.qkv)
    assert_close(qkv, layer.attention.qkv(layer.attention_norm(x)))
    stream = gemms.add(mixed, layer.attention.out, stream)
    added = layer.attention.out(mixed) + x
    assert_close(total(stream), added)
    assert_close(total(gemms.mlp(stream, layer.mlp_norm, layer.mlp)), plain_mlp(added, layer))
