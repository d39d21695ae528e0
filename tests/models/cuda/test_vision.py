"""The CUDA way through a vision tower against the plain one, in Triton's interpreter where there is no device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from saccade import costs
from saccade.kernels.attention.registry import VIT
from saccade.kernels.ops import vit_elementwise
from saccade.models.cuda.vision import FusedVision
from saccade.models.cuda.vision_graphs import packed_cells
from saccade.models.families.llava import Llava
from saccade.models.families.qwen2_vl import Qwen2VL
from saccade.models.layers.activation import quick_gelu
from saccade.models.layers.rotary_embedding import cos_sin, rotate
from saccade.models.vision.backend import Lengths, RunBlocks, TorchVision
from saccade.models.vision.blocks import PatchPositions, angles_of, grid_positions
from saccade.models.vision.preprocess import PatchLayout, PixelPolicy
from saccade.types.media import Grid, Size
from tests.helpers.families.vision_towers import DEVICE, GRIDS, LLAVA, QWEN, encode, model, random
from tests.helpers.kernels.allocations import PeakMemory


def rotary_of(cos: Tensor, sin: Tensor) -> Tensor:
    """What `rotate` takes, as fused kernels take it."""
    half = cos.shape[-1] // 2
    return torch.stack((cos[:, half:], sin[:, half:]), dim=-1).flatten(1)


def picture(width: int, height: int) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator).to(DEVICE)


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_of_cells_are_those_of_plain_arithmetic(interleaved: bool) -> None:
    places = grid_positions([Grid(1, 4, 6), Grid(1, 300, 2)], 80, 1e4, 2, DEVICE, interleaved=interleaved)
    expected = angles_of(places)
    rotary = torch.empty_like(expected.cos)
    vit_elementwise.write_cos_sin(packed_cells(places).to(DEVICE), places.per_axis, rotary)
    torch.testing.assert_close(rotary, rotary_of(*expected), atol=1e-5, rtol=1e-5)


class RotatedElsewhere(FusedVision):
    def begin(self, lengths: Lengths, positions: PatchPositions | None, device: torch.device) -> RunBlocks:
        return self.begin_rotated(lengths, angles_of(positions) if positions else None, device)


@pytest.mark.parametrize("ops", [FusedVision, RotatedElsewhere])
def test_images_of_several_sizes_get_the_embeddings_of_the_plain_tower(ops: type[FusedVision]) -> None:
    patches = random(sum(grid.patches for grid in GRIDS), 24)
    expected = encode(model(QWEN, TorchVision(), Qwen2VL), patches, GRIDS)
    found = encode(model(QWEN, ops(), Qwen2VL), patches, GRIDS)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_tower_that_keeps_several_layers_gets_each_as_it_was() -> None:
    patches, grids = random(32, 12), [Grid(1, 4, 4)] * 2
    expected = encode(model(LLAVA, TorchVision(), Llava), patches, grids)
    found = encode(model(LLAVA, FusedVision(), Llava), patches, grids)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [Size(16, 12), Size(40, 6), Size(9, 60)], ids=str)
def test_resizing_gives_the_reference_s_pixels(size: Size) -> None:
    image = picture(33, 21)
    assert torch.equal(FusedVision().resize(image, size, 3), TorchVision().resize(image, size, 3))


@pytest.mark.parametrize("layout", [PatchLayout(2), PatchLayout(2, 2, 2), PatchLayout(3, 2, 1)], ids=str)
def test_cutting_gives_the_reference_s_patches(layout: PatchLayout) -> None:
    grid = Grid(1, 4, 6)
    image = picture(6 * layout.patch, 4 * layout.patch)
    expected = TorchVision().cut(image, grid, layout, PixelPolicy(), torch.float32)
    found = FusedVision().cut(image, grid, layout, PixelPolicy(), torch.float32)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_a_cropped_image_need_not_be_copied_before_it_is_cut() -> None:
    cropped = picture(20, 20)[3:11, 5:13]
    expected = TorchVision().cut(cropped, Grid(1, 4, 4), PatchLayout(2), PixelPolicy(), torch.float32)
    found = FusedVision().cut(cropped, Grid(1, 4, 4), PatchLayout(2), PixelPolicy(), torch.float32)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_the_norm_leaves_its_input_with_the_bias_added() -> None:
    x, weight, bias, added = random(5, 96), random(96), random(96) + 1, random(96) - 1
    normed = torch.nn.functional.layer_norm(x, (96,), weight, bias, 1e-6)
    expected = x + added
    found = vit_elementwise.norm_then_add(x, weight, bias, 1e-6, added)
    torch.testing.assert_close(found, normed, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x, expected)


def test_rotation_turns_queries_and_keys_and_leaves_values() -> None:
    qkv = random(7, 3, 3, 20)
    cos, sin = cos_sin(random(7, 10), torch.float32)
    expected = torch.cat((rotate(qkv[:, :2], cos[:, None, None], sin[:, None, None]), qkv[:, 2:]), dim=1)
    vit_elementwise.rotate_half(qkv, rotary_of(cos, sin))
    torch.testing.assert_close(qkv, expected, atol=1e-6, rtol=1e-6)


def test_the_fused_activation_is_the_plain_one() -> None:
    x = random(33, 129) * 4
    expected = quick_gelu(x.clone())
    torch.testing.assert_close(vit_elementwise.quick_gelu(x), expected, atol=1e-6, rtol=1e-5)


def test_every_attention_of_the_table_can_be_chosen() -> None:
    assert all(FusedVision([row.build(DEVICE)]).begin([4], None, DEVICE) for row in VIT)


@pytest.mark.parametrize("act", ["quick_gelu", "gelu"])
def test_encoding_takes_the_memory_that_the_formula_says(act: str) -> None:
    raw = {**QWEN, "vision_config": {**QWEN["vision_config"], "hidden_act": act}}
    made, grids = model(raw, FusedVision(), Qwen2VL), [Grid(1, 8, 16)]
    patches = random(128, 24)
    with PeakMemory() as memory:
        memory.hold(patches)
        layers = made.encode(patches, grids)
        del patches
        for _ in layers:
            pass
    vision = made.config.vision
    assert vision is not None
    planned = 128 * costs.encode_bytes_per_patch(vision, made.config.text, "float32")
    assert memory.peak == pytest.approx(planned, rel=0.02)
