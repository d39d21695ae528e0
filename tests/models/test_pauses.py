"""Towers of Transformers pause between layers; what else the model computes meanwhile is not disturbed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from saccade import LLM, SamplingParams
from saccade.models import load_model
from saccade.models.bridge.model import ModelBridge
from saccade.models.bridge.pauses import Pauses
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.types.media import Geometry, Grid, Size
from tests.helpers.families.bridged import transformers_layers
from tests.helpers.families.zoo import ZOO

T = TypeVar("T")
CPU = torch.device("cpu")
SIZES = (Size(180, 90), Size(64, 64))


def finish(steps: Generator[int, None, T], counts: list[int]) -> T:
    while True:
        try:
            counts.append(next(steps))
        except StopIteration as done:
            value: T = done.value
            return value


def tower_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "saccade-tower"}


def tower(pauses: Pauses, layers: int) -> nn.Sequential:
    made = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    pauses.listen(made)
    return made


@pytest.mark.parametrize("images", [1, 2, 3])
def test_a_tower_pauses_after_each_layer_over_all_images(images: int) -> None:
    pauses = Pauses(CPU)
    layers = tower(pauses, 5)
    x = torch.randn(images, 4)
    counts: list[int] = []
    found = finish(pauses.running(lambda: [layers(row) for row in x], images), counts)
    assert counts == [1] * 5
    torch.testing.assert_close(torch.stack(found), layers(x))


def test_other_threads_run_its_layers_without_pauses() -> None:
    pauses = Pauses(CPU)
    layers = tower(pauses, 3)
    steps = pauses.running(lambda: layers(torch.ones(4)), 1)
    assert next(steps) == 1
    assert layers(torch.ones(4)).shape == (4,), "it would wait for itself"
    counts: list[int] = []
    finish(steps, counts)
    assert counts == [1, 1]


def test_a_run_that_nobody_finishes_ends() -> None:
    pauses = Pauses(CPU)
    layers = tower(pauses, 3)
    ends: list[str] = []

    def work() -> Tensor:
        try:
            result: Tensor = layers(torch.ones(4))
            return result
        except Exception:
            ends.append("caught")
            raise
        finally:
            ends.append("freed")

    steps = pauses.running(work, 1)
    next(steps)
    del steps
    assert ends == ["freed"]
    unstarted = pauses.running(work, 1)
    del unstarted
    assert ends == ["freed"]
    held = pauses.running(work, 1)
    next(held)
    counts: list[int] = []
    finish(pauses.running(work, 1), counts)  # although another run was held
    assert ends == ["freed"] * 3 and counts == [1] * 3


def test_the_thread_ends_with_its_model() -> None:
    before = tower_threads()
    pauses = Pauses(CPU)
    assert finish(pauses.running(lambda: 5, 1), []) == finish(pauses.running(lambda: 5, 1), []) == 5
    (thread,) = tower_threads() - before
    del pauses
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_an_error_of_a_layer_reaches_who_waits() -> None:
    pauses = Pauses(CPU)
    layers = tower(pauses, 2)
    steps = pauses.running(lambda: layers(torch.ones(5)), 1)
    with pytest.raises(RuntimeError, match="shape"):
        next(steps)
    counts: list[int] = []
    finish(pauses.running(lambda: layers(torch.ones(4)), 1), counts)
    assert counts == [1, 1]


def loaded(folder: Path) -> ModelBridge:
    model = load_model(folder, open_checkpoint(str(folder)).config, dtype=torch.float32, device=CPU, max_model_len=512)
    assert isinstance(model, ModelBridge)
    return model


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("gemma4@e2b", False),  # each step's tokens go through the model's own code, up to its decoder
        ("paddleocr_vl", True),  # the tower's layers are ours
    ],
)
@torch.inference_mode()
def test_steps_between_layers_change_no_embedding_and_are_not_changed(family: str, own: bool, tmp_path: Path) -> None:
    if own:
        model = loaded(ZOO[family].build(tmp_path))
    else:
        with transformers_layers():
            model = loaded(ZOO[family].build(tmp_path))
    noise = np.random.default_rng(3)
    patches, geometries, expected = [], [], []
    for size in SIZES:
        pixels = noise.integers(0, 256, (size.height, size.width, 3), np.uint8)
        patches.append(model.prepare_on_host(pixels, size))
        inputs = model.images.inputs(patches[-1], size)
        expected.append(model.images.frame.inside(model.entrance.rows(inputs)))
        slots = len(expected[-1])
        geometries.append(Geometry(size, Grid(1, len(patches[-1]), 1), slots, slots))
    ids = torch.arange(5)
    rope = torch.arange(5).expand(model.axes, -1)
    text: list[Any] = [step(model, ids, rope)]
    steps = model.encode_images(torch.cat(patches), geometries)
    count = 0
    while True:
        try:
            count += next(steps)
        except StopIteration as done:
            found = done.value
            break
        text.append(step(model, ids, rope))
    assert model.config.vision is not None and count >= model.config.vision.num_layers > 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(one, text[0]) for one in text)


def step(model: ModelBridge, ids: Tensor, rope: Tensor) -> Tensor:
    """What a step computes of a few tokens of text, without a cache."""
    embeds = model.embed(ids)
    with model.attention.own(None):
        return model.decode(embeds[None], rope[:, None])[0] if model.params is None else embeds


@pytest.mark.transformers
def test_a_stream_gets_tokens_between_the_layers_of_a_picture(tmp_path: Path) -> None:
    folder = ZOO["paddleocr_vl"].build(tmp_path)
    how = {"dtype": "float32", "device": "cpu", "max_model_len": 512, "kv_cache_gb": 0.01, "encode_layers_per_step": 1}
    llm = LLM(str(folder), use_tqdm=False, **how)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompt = {"prompt": f"{ZOO['paddleocr_vl'].image} b c", "multi_modal_data": {"image": Image.new("RGB", (90, 60))}}
    llm.engine.add_request("text", {"prompt": "a b c d e"}, greedy)
    llm.engine.step()
    llm.engine.add_request("picture", prompt, greedy)
    events: list[str] = []
    while llm.engine.has_unfinished_requests() and "picture" not in events:
        events += [output.request_id for output in llm.engine.step()]
    assert events.count("text") > llm.engine.core.runner.model.config.vision.num_layers
    llm.close()
