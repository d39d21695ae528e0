"""What is proven alike of every Qwen family: sizes and positions against Transformers, fused towers against plain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from saccade import costs, vision_graph_sizes
from saccade.checkpoint.config import model_config
from saccade.models.cuda import vision_graphs
from saccade.models.cuda.vision import FusedVision
from saccade.models.interface import ModelParts
from saccade.models.state_dict import Parameters
from saccade.models.vision.backend import TorchVision, VisionOps
from saccade.models.weights import fill_random
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.families import family_for
from saccade.types.media import Geometry, Grid, Size
from saccade.types.prompt import Span
from tests.helpers.families.family_checks import finish
from tests.helpers.kernels.allocations import PeakMemory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Make = Callable[[VisionOps], Any]  # a small model with random weights, on these operations


def assert_sizes_equal(folder: Path, size: Size, limits: tuple[int, int], patch: int) -> None:
    """A picture's grid, tokens and size are those of the image processor; `limits` are of its pixels."""
    assume(max(size) / min(size) <= 200)
    files = open_checkpoint(str(folder), weights=False)
    geometry = family_for(files.config).from_checkpoint(files).geometry(size, *limits)
    edges = {"shortest_edge": limits[0], "longest_edge": limits[1]}
    output = Qwen2VLImageProcessorPil(size=edges, patch_size=patch)(Image.new("RGB", size), return_tensors="np")
    assert output["image_grid_thw"].tolist() == [list(geometry.grid)]
    assert geometry.tokens == geometry.grid.patches // 4
    assert geometry.resized == Size(geometry.grid.w * patch, geometry.grid.h * patch)


def assert_positions_equal(theirs: Any, folder: Path) -> None:
    """Of text with two pictures, as `theirs`, the model in Transformers, counts them."""
    files = open_checkpoint(str(folder), weights=False)
    grids, image = [Grid(1, 6, 10), Grid(1, 4, 4)], files.config.image_token_id
    geometries = [Geometry(Size(1, 1), grid, grid.patches // 4, grid.patches // 4) for grid in grids]
    ids = [5, 6, *[image] * 15, 7, *[image] * 4, 8, 9]
    spans = [Span(2, 15, b"a", 15), Span(18, 4, b"b", 4)]
    found, following = family_for(files.config).from_checkpoint(files).positions(ids, spans, geometries)
    kinds = torch.tensor([[int(i == image) for i in ids]])
    expected, delta = theirs.model.get_rope_index(torch.tensor([ids]), kinds, image_grid_thw=torch.tensor(grids))
    assert found.tolist() == expected[:, 0].tolist()
    assert following == len(ids) + int(delta)


def small_model(family: Any, raw: dict[str, Any], ops: VisionOps) -> Any:
    """Of the family's class, with random weights and biases."""
    params = Parameters(torch.float32, DEVICE)
    made = family(ModelParts(model_config(raw), params, {}, ops))
    fill_random(params.targets, 0)
    generator = torch.Generator(DEVICE).manual_seed(1)
    for name, tensor in params.targets.items():
        if name.endswith("bias"):  # zeros would hide one that is added twice or not at all
            tensor.normal_(std=0.5, generator=generator)
    return made


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(DEVICE)


def assert_fused_tower_equal(make: Make, grids: list[Grid]) -> None:
    patches = random(sum(grid.patches for grid in grids), 24)
    expected = finish(make(TorchVision()).encode(patches, grids))
    found = finish(make(FusedVision()).encode(patches, grids))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def assert_recorded_passes_equal(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was recorded with one grid serves others of that size."""
    monkeypatch.setattr(vision_graph_sizes, "SIZES", (16,))
    for module in (vision_graph_sizes, vision_graphs):
        monkeypatch.setattr(module, "IMAGES", 4)
    ops, grids = FusedVision(), [Grid(1, 2, 6), Grid(1, 2, 2)]
    recorded, patches = make(ops), random(sum(grid.patches for grid in grids), 24)
    with ops.capturing():
        finish(recorded.encode(random(12, 24), [Grid(1, 6, 2)]))
    expected = finish(make(TorchVision()).encode(patches, grids))
    for one, other in zip(finish(recorded.encode(patches, grids)), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def assert_encoding_memory(make: Make) -> None:
    """As much as the formula says."""
    made, patches = make(FusedVision()), random(48, 24)
    with PeakMemory() as memory:
        memory.hold(patches)
        layers = made.encode(patches, [Grid(1, 8, 6)])
        del patches
        for _ in layers:
            pass
    vision = made.config.vision
    assert vision is not None
    planned = 48 * costs.encode_bytes_per_patch(vision, made.config.text, "float32")
    assert memory.peak == pytest.approx(planned, rel=0.06)  # small: what is held once shows
