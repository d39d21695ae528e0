"""The bill of a plan is the engine's: by the same code, in all families."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from benchmarks.gpu_shapes import SHAPES
from benchmarks.gpu_shapes import write_folder as write_shape
from saccade.apps.plan.model_cards import card_names, find_model, read_card
from saccade.apps.plan.workload import Workload, request_cost
from saccade.cli.count import count_files
from saccade.errors import ConfigError
from saccade.options.engine import MediaPolicy, Options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.input_processor import Processor
from tests.helpers.engine.plans import planned, sizes, write_folder

SIZES = [(1280, 960), (1280, 720), (37, 1011), (640, 480), (3000, 2000)]
WITH_IMAGES = [name for name in card_names() if read_card(name).config.vision]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("images")
    paths = [folder / f"{width}x{height}.png" for width, height in SIZES]
    for path, size in zip(paths, SIZES, strict=True):
        Image.new("L", size).save(path)
    return [str(path) for path in paths]


@pytest.mark.parametrize("name", WITH_IMAGES)
@pytest.mark.parametrize("max_pixels", [None, 500_000])
def test_tokens_of_every_family_are_those_that_count_tells(
    name: str, max_pixels: int | None, files: list[str], tmp_path: Path
) -> None:
    folder = write_folder(read_card(name), tmp_path / "model")
    options = Options(model=str(folder), max_pixels=max_pixels)
    counts, errors = count_files(files, options)
    cost = request_cost(find_model(name), options, Workload(sizes=sizes(*SIZES)))
    assert not errors
    assert [image.geometry.tokens for image in cost.images] == [count.tokens for count in counts]


@pytest.mark.parametrize("name", ["deepseek-ai/deepseek-vl2-small", "Qwen/Qwen3-VL-8B"])
def test_many_images_of_a_request_cost_what_count_tells_of_them_together(
    name: str, files: list[str], tmp_path: Path
) -> None:
    folder = write_folder(read_card(name), tmp_path / "model")
    counts, _ = count_files(files[:1] * 4, Options(model=str(folder)), together=True)
    cost = request_cost(find_model(name), Options(), Workload(sizes=sizes(SIZES[0]), images=4))
    assert cost.num_images * cost.image_tokens == sum(count.tokens for count in counts)


def test_a_request_has_as_many_tokens_as_the_prompt_that_the_engine_builds(files: list[str], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_shape(SHAPES["tiny"], tmp_path / "tiny")), weights=False)
    processor = Processor(checkpoint, MediaPolicy.of(Options()))
    pad = SHAPES["tiny"].image
    given = {"prompt": f"{pad}{pad}Compare.", "multi_modal_data": {"image": [Path(file) for file in files[:2]]}}
    prompt = processor.from_prompt(given)
    bill = processor.bill(prompt, 16)
    workload = Workload(sizes=sizes(*SIZES[:2]), images=2, input_tokens=bill.text_tokens, output_tokens=0)
    cost = request_cost(checkpoint, Options(), workload)
    assert cost.prompt_tokens == len(prompt.token_ids)
    assert cost.num_images * cost.image_tokens == bill.image_tokens


def test_a_mix_is_weighed_by_its_shares() -> None:
    size = sizes((1280, 960), (644, 476))
    mix = (size[0]._replace(share=3.0), size[1])
    cost = request_cost(find_model("qwen2-vl-2b"), Options(), Workload(sizes=mix, images=2, input_tokens=10))
    assert cost.image_tokens == 0.75 * 1564 + 0.25 * 391
    assert cost.prompt_tokens == 10 + round(2 * cost.image_tokens)
    assert cost.max_tokens == 10 + 2 * 1564 + cost.output_tokens


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        ("Qwen/Qwen3-8B", {}, "takes no pictures.*--images 0"),
        ("Qwen/Qwen3-VL-8B", {"images": 17}, "--images 17 is above limit_mm_per_prompt image=16.*image=17"),
        ("Qwen/Qwen3-VL-8B", {"sizes": sizes((100_000, 2000))}, "--image 100000x2000 has 200000000 pixels"),
        ("Qwen/Qwen3-VL-8B", {"sizes": sizes((3000, 3))}, "--image 3000x3: .*aspect ratio"),
        ("llava-1.5-7b", {"input_tokens": 4000}, "a request of 4704 tokens does not fit the context of 4096"),
    ],
)
def test_what_a_server_would_refuse_is_refused_with_values(model: str, given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(model, **given)
