"""Packed GEMMs against `F.linear` over the same weights."""

from __future__ import annotations

import platform

import pytest
import torch
import torch.nn.functional as F

from saccade.models.layers import packed_linear as packing
from saccade.models.layers.linear import Linear, PatchLinear
from saccade.models.layers.packed_linear import (
    linear_with_copy,
    pack,
    packed_linear,
    packed_lookup,
    packed_rows,
    padded_rows,
    plain_reason,
    shares_rows,
)
from saccade.models.state_dict import Parameters
from saccade.models.weights import fill_random
from tests.helpers.families.packing import PACKED_DTYPES, needs_onednn

CPU = torch.device("cpu")


def params(dtype: torch.dtype = torch.float32) -> Parameters:
    return Parameters(dtype, CPU)


@needs_onednn
def test_float32_is_packed_wherever_it_can_be() -> None:
    assert plain_reason(torch.float32, "cpu") is None


@needs_onednn
@pytest.mark.parametrize("dtype", PACKED_DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 9, 17, 70, 200])
def test_a_packed_gemm_is_the_plain_one(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, bias, x = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((96, 40), (96,), (rows, 40)))
    tolerance = 1e-4 if dtype == torch.float32 else 0.25  # outputs are sums of 40 values near 1
    for own in (None, bias):
        torch.testing.assert_close(
            packed_linear(x, pack(weight), own), F.linear(x, weight, own), atol=tolerance, rtol=0.01
        )


@needs_onednn
def test_padding_rows_do_not_change_the_others() -> None:
    weight, x = torch.randn(64, 32), torch.randn(12, 32)
    packed = pack(weight)
    expected = packed_linear(x, packed)
    assert padded_rows(11, torch.float32) == 12
    torch.testing.assert_close(packed_linear(x[:11], packed), expected[:11], atol=0, rtol=0)


@needs_onednn
def test_inputs_of_three_dimensions_and_strided_ones_are_taken() -> None:
    weight, x = torch.randn(64, 32), torch.randn(3, 5, 64)
    half = x[..., ::2]
    found = packed_linear(half, pack(weight))
    assert found.shape == (3, 5, 64)
    torch.testing.assert_close(found, F.linear(half, weight), atol=1e-4, rtol=1e-3)


@needs_onednn
@pytest.mark.parametrize(("rows", "reads"), [(0, -1), (1, 1), (2, -1), (9, -1)])
def test_one_row_reads_the_weight_and_several_its_packed_copy(rows: int, reads: int) -> None:
    weight, x = torch.randn(64, 32), torch.randn(rows, 32)
    found = linear_with_copy(x, weight, packed=pack(-weight))  # another one, so that one can tell
    torch.testing.assert_close(found, reads * F.linear(x, weight), atol=1e-4, rtol=1e-3)


@needs_onednn
@pytest.mark.parametrize("outputs", [64, 130, 1000])
def test_rows_are_looked_up_in_a_packed_weight_or_it_is_said_that_they_cannot(outputs: int) -> None:
    weight = torch.randn(outputs, 48)
    rows = packed_rows(pack(weight), weight)  # keeps the packed weight alive
    token_ids = torch.randint(outputs, (70,))
    found = F.embedding(token_ids, weight) if rows is None else packed_lookup(token_ids, rows)
    assert (rows is not None) == shares_rows(torch.float32, 48)
    assert torch.equal(found, weight[token_ids])


@needs_onednn
def test_rows_of_a_layout_that_is_not_known_are_not_looked_up() -> None:
    weight = torch.randn(128, 48)
    assert packed_rows(pack(weight), weight.flip(0)) is None
    assert not shares_rows(torch.bfloat16, 48)


def test_no_memory_is_taken_for_a_width_that_only_a_config_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "pack", lambda weight: pytest.fail(f"{weight.shape} was packed"))
    assert not shares_rows(torch.float32, 1 << 24)


@needs_onednn
def test_a_layer_gives_up_its_original_weight_when_it_is_packed() -> None:
    own = params()
    merged = Linear(own.within("qkv"), 24, {"q": 16, "k": 8}, bias=True)
    patch = PatchLinear(own.within("patch"), (3, 2, 4), 16)
    fill_random(own.targets, 0)
    x = torch.randn(7, 24)
    for layer in (merged, patch):
        expected = layer(x)
        shape = layer.weight.shape
        layer.pack()
        assert layer.weight.is_mkldnn and layer.weight.shape == shape
        torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-4)
    assert own.linears == [merged, patch]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_padded_to_few_counts_and_by_little(dtype: torch.dtype) -> None:
    counts = {rows: padded_rows(rows, dtype) for rows in range(1, 4097)}
    assert all(rows <= padded < 2 * rows + 1 for rows, padded in counts.items())
    assert all(padded <= rows * 1.25 for rows, padded in counts.items() if rows > 8)
    assert all(padded <= rows * 1.125 for rows, padded in counts.items() if rows > 64)
    assert all(padded_rows(padded, dtype) == padded for padded in counts.values())
    assert len(set(counts.values())) < 120
    assert padded_rows(1564, dtype) == 1600


def test_one_row_of_bfloat16_is_computed_as_two_where_amx_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        packing._min_rows.cache_clear()
        assert padded_rows(1, torch.bfloat16) == 1 + has_amx
        assert padded_rows(1, torch.float32) == 1
    packing._min_rows.cache_clear()


def test_weights_stay_plain_where_packed_gemms_were_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = plain_reason.__wrapped__
    assert "for a CPU" in str(reason(torch.float32, "cuda"))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(packing, "multiplies_bfloat16", lambda: False)
    assert "only emulates bfloat16" in str(reason(torch.bfloat16, "cpu"))
    assert "float16" in str(reason(torch.float16, "cpu"))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert "without oneDNN" in str(reason(torch.float32, "cpu"))
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "riscv64" in str(reason(torch.float32, "cpu"))


def test_bfloat16_stays_plain_on_aarch64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "not measured on aarch64" in str(plain_reason.__wrapped__(torch.bfloat16, "cpu"))


def test_weights_stay_plain_where_the_operators_fail_or_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such operator\nat some line")

    monkeypatch.setattr(packing, "pack", missing)
    assert packing._failure(torch.float32) == "packing failed (no such operator)"
    monkeypatch.setattr(packing, "pack", lambda weight: weight)
    monkeypatch.setattr(packing, "packed_linear", lambda x, weight: F.linear(x, weight) + 1)
    assert packing._failure(torch.float32) == "packed GEMMs differ by 1"
