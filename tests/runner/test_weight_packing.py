"""Whole models with packed weights against the same with plain ones; and what the plan says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade import costs
from saccade.models import load_model
from saccade.models.layers.packed_linear import shares_rows
from saccade.models.layers.torch_attention import AttentionBatch, PagedAttention, PagedKV
from saccade.options.engine import Options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.runner import weight_packing
from saccade.runner.device_memory import plan_memory
from saccade.runner.weight_packing import pack_weights, plan_packing
from saccade.types.media import Grid
from tests.helpers.families.packing import needs_onednn

pytestmark = needs_onednn
CPU = torch.device("cpu")
TOKENS = 21


def loaded(folder: Path) -> Any:
    config = open_checkpoint(str(folder)).config
    return load_model(folder, config, dtype=torch.float32, device=CPU, progress=False)


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    text = model.config.text
    kv = PagedKV.allocate(text, 2, 16, torch.float32, CPU)
    batch = AttentionBatch([TOKENS], [TOKENS], torch.tensor([[0, 1]]), torch.arange(TOKENS), 16)
    axes = 3 if text.mrope_section else 1
    positions = torch.arange(TOKENS).expand(axes, -1)
    attention = PagedAttention(kv, batch, model.decoder.scale)
    embeds = model.embed(torch.arange(TOKENS))
    found: torch.Tensor = model.logits(model.forward(embeds, positions, attention))
    return found


@pytest.mark.transformers
@pytest.mark.parametrize("name", ["qwen2_vl_folder", "llava_folder"])
def test_a_packed_model_computes_the_same_logits(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    plain, packed = loaded(folder), loaded(folder)
    pack_weights(packed)
    linears = packed.params.linears
    assert linears and all(linear.weight.is_mkldnn for linear in linears)
    text = packed.config.text
    shares = text.tie_word_embeddings and shares_rows(torch.float32, text.hidden_size)
    assert packed.decoder.head.is_mkldnn and packed.decoder.table.dim() == (3 if shares else 2)
    torch.testing.assert_close(logits(packed), logits(plain), atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def embeddings(model: Any, grids: list[Grid]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    patches = torch.randn(sum(grid.patches for grid in grids), model.config.vision.patch_dim, generator=generator)
    encoding = model.encode(patches, grids)
    while True:
        try:
            next(encoding)
        except StopIteration as done:
            found: list[torch.Tensor] = done.value
            return found


@pytest.mark.transformers
def test_a_packed_tower_whose_rows_are_padded_makes_the_same_embeddings(qwen2_vl_folder: Path) -> None:
    plain, packed = loaded(qwen2_vl_folder), loaded(qwen2_vl_folder)
    pack_weights(packed)
    grids = [Grid(1, 6, 10), Grid(1, 4, 2)]
    assert packed.tower.blocks[0].qkv.padding(68) == 4 and plain.tower.blocks[0].qkv.padding(68) == 0
    found = embeddings(packed, grids)
    assert [len(own) for own in found] == [15, 2]
    torch.testing.assert_close(found, embeddings(plain, grids), atol=1e-4, rtol=1e-4)


@pytest.mark.transformers
def test_a_packed_model_holds_no_plain_weight_beside_a_tied_table(qwen2_vl_folder: Path) -> None:
    model = loaded(qwen2_vl_folder)
    pack_weights(model)
    assert not model.params.targets and not model.params.wholes
    with pytest.raises(AssertionError, match="packed"):
        model.encoder_weights()


@pytest.mark.transformers
def test_on_aarch64_the_head_alone_is_packed_and_the_table_kept(
    qwen2_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_packing, "is_aarch64", lambda: True)
    monkeypatch.setattr(weight_packing, "_MIN_WEIGHT", 0)
    plain, packed = loaded(qwen2_vl_folder), loaded(qwen2_vl_folder)
    weight_packing.pack_where_faster(packed, torch.float32, CPU)
    assert packed.decoder.head is packed.decoder.table and packed.decoder.head_gemm is not plain.decoder.head_gemm
    assert not any(linear.weight.is_mkldnn for linear in packed.params.linears)
    torch.testing.assert_close(logits(packed), logits(plain), atol=1e-4, rtol=1e-4)
    text = packed.config.text
    packing = plan_packing(packed.config, "float32", CPU)
    assert packing.copied_bytes == text.vocab_size * text.hidden_size * 4 and "two rows" in packing.reason
    untied = replace(packed.config, text=replace(text, tie_word_embeddings=False))
    assert not plan_packing(untied, "float32", CPU).is_on


@pytest.mark.transformers
def test_the_copy_of_a_tied_head_is_planned_and_said(qwen2_vl_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_packing, "shares_rows", lambda *_: False)
    small = open_checkpoint(str(qwen2_vl_folder)).config
    config = replace(small, text=replace(small.text, intermediate_size=1 << 14))
    text = config.text
    copied = text.vocab_size * text.hidden_size * 4
    plan = plan_memory(Options(device="cpu", dtype="float32"), config, None, 16 << 30)
    assert (
        plan_packing(config, "float32", CPU).is_on
        and plan.parts.weights == costs.weight_bytes(config, "float32") + copied
    )
    assert any("its packed copy takes" in reason for reason in plan.reasons)
    untied = replace(config, text=replace(text, tie_word_embeddings=False))
    assert plan_packing(untied, "float32", CPU).copied_bytes == 0


@pytest.mark.transformers
def test_a_head_in_which_embeddings_are_looked_up_is_no_copy(
    qwen2_vl_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_packing, "is_aarch64", lambda: False)
    monkeypatch.setattr(weight_packing, "shares_rows", lambda *_: True)
    small = open_checkpoint(str(qwen2_vl_folder)).config
    packing = plan_packing(replace(small, text=replace(small.text, intermediate_size=1 << 14)), "float32", CPU)
    assert packing.is_on and packing.copied_bytes == 0 and "looked up in the packed head" in packing.reason


@pytest.mark.transformers
def test_a_tiny_model_keeps_its_weights(qwen2_vl_folder: Path) -> None:
    packing = plan_packing(open_checkpoint(str(qwen2_vl_folder)).config, "float32", CPU)
    assert not packing.is_on and packing.copied_bytes == 0 and "so small" in packing.reason


@pytest.mark.transformers
def test_a_model_of_transformers_code_keeps_its_weights(qwen2_vl_folder: Path) -> None:
    config = replace(open_checkpoint(str(qwen2_vl_folder)).config, model_type="unheard_of")
    packing = plan_packing(config, "float32", CPU)
    assert not packing.is_on and "Transformers' code" in packing.reason
