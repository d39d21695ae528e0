"""Norms of query and key heads: the kernel against plain PyTorch, and the fused decoder against the plain one."""

from __future__ import annotations

import pytest
import torch

from saccade.checkpoint.config import TextConfig
from saccade.kernels.attention.decode_triton import DecodeWorkspace, NewTokens, paged_decode
from saccade.kernels.ops import reference
from saccade.kernels.ops.qk_norm import qk_rms_norm
from saccade.models.cuda.decoder import FusedDecoder, Mixer, Mixers
from saccade.models.layers.decoder import Biases, Decoder, SelfAttention
from saccade.models.layers.torch_attention import PagedKV
from saccade.models.state_dict import Parameters
from tests.helpers.kernels.paged import BLOCK, Paged

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (12, 4, 80), (7, 7, 128), (1, 1, 32)])
def test_query_and_key_heads_are_normed_and_values_left_alone(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    found = random(5, heads + 2 * kv_heads, dim, seed=1, dtype=dtype)
    expected = found.clone()
    q, k = 1 + 0.1 * random(dim, seed=2, dtype=dtype), 1 + 0.1 * random(dim, seed=3, dtype=dtype)
    qk_rms_norm(found, q, k, heads, 1e-6)
    reference.qk_rms_norm(expected, q, k, heads, 1e-6)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    for norm in (qk_rms_norm, reference.qk_rms_norm):
        norm(expected if norm is qk_rms_norm else found, q, k, heads, 1e-6, has_v=True)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("has_qk_norms", [True, False])
def test_the_fused_decoder_hands_attention_the_heads_of_the_plain_one(has_qk_norms: bool) -> None:
    text = TextConfig(64, 96, 1, 4, 2, 16, 200, 512, 1e-6, 1e4, None, {}, False, "qwen3")
    params = Parameters(torch.float32, DEVICE)
    decoder = Decoder(params, text, Biases(), has_qk_norms=has_qk_norms)
    for seed, tensor in enumerate(params.targets.values()):
        tensor.copy_(random(*tensor.shape, seed=seed) / 8)
    x, layer, seen = random(3, 64, seed=99), decoder.layers[0], []

    def keep(projected: torch.Tensor, own: object, index: int, out: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(projected.clone())
        return projected[:, :4].flatten(1)

    fused = FusedDecoder(decoder, PagedKV.allocate(text, 1, 16, torch.float32, DEVICE))
    fused.forward(x, Mixers({SelfAttention: Mixer(keep)}), fused.gemms(3))
    own = layer.attention
    qkv = own.qkv(layer.attention_norm(x)).view(3, 8, 16)
    torch.testing.assert_close(seen[0], qkv, atol=2e-4, rtol=2e-4)  # attention applies the norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rotary", [32, 8])
@pytest.mark.parametrize("parts", [1, 3])
def test_decode_attention_norms_heads_as_the_kernel_before_it(parts: int, rotary: int, dtype: torch.dtype) -> None:
    """The same from heads that are normed before, and the same keys in the cache."""
    paged = Paged.of([40, 1, 17], kv_heads=2, dim=32, dtype=dtype)
    new = paged.new_tokens(random(3, 6, 32, seed=4, dtype=dtype))
    new = new._replace(cos=random(3, rotary, seed=6, dtype=dtype), sin=random(3, rotary, seed=7, dtype=dtype))
    q, k = 1 + random(32, seed=2), 1 + random(32, seed=3, dtype=dtype)
    before = new.qkv.clone()
    qk_rms_norm(before, q, k, 6, 1e-6)
    expected = decoded(paged, new._replace(qkv=before))
    rest = random(parts - 1, *new.qkv.shape, seed=5)
    in_parts = torch.cat((new.qkv.float()[None] - rest.sum(0), rest)) if parts > 1 else new.qkv
    found = decoded(paged, new._replace(qkv=in_parts, q_norm=q, k_norm=k))
    tolerance = 2e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert not found[: 3 * 6 * 32].isnan().any()


def decoded(paged: Paged, new: NewTokens) -> torch.Tensor:
    """The attention's result beside the cache it leaves."""
    k, v = paged.k.clone(), paged.v.clone()
    seq_lens = torch.tensor(paged.seq_lens, dtype=torch.int32, device=DEVICE)
    workspace = DecodeWorkspace.allocate(3, 6, 2, 32, DEVICE)
    found = paged_decode(new, k, v, paged.tables, seq_lens, BLOCK, 0.2, workspace, norm_eps=1e-6)
    return torch.cat((found.flatten(), k.flatten()))
