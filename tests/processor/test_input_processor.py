"""Raw prompts: the same ids as Transformers' processors, and every refusal in one sentence."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from saccade.errors import ConfigError
from saccade.media.hashing import salt_of
from saccade.processor.detokenize import Detokenizer
from saccade.processor.input_processor import Processor
from saccade.types.prompt import RECORD_BYTES
from tests.helpers.media.images import make_photo, png
from tests.helpers.media.prompts import PHOTOS, changed, make, reference, refusal

pytestmark = pytest.mark.transformers

IMAGE = {"qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>", "llava": "<image>"}
LAYOUTS = ["no pictures here", "{}\nWhat is this?", "Look: {} and {} differ how?", "the end{}", " {}{}", "a {} b  {}\n"]


@pytest.fixture(scope="session")
def qwen(qwen2_vl_folder: Path) -> Processor:
    return make(qwen2_vl_folder)


@pytest.fixture(scope="session")
def llava(llava_folder: Path) -> Processor:
    return make(llava_folder)


@pytest.fixture(scope="session")
def both(qwen: Processor, llava: Processor) -> dict[str, Processor]:
    return {"qwen2_vl": qwen, "llava": llava}


@pytest.fixture(scope="session")
def theirs(qwen2_vl_folder: Path, llava_folder: Path) -> dict[str, Any]:
    return {"qwen2_vl": reference(qwen2_vl_folder), "llava": reference(llava_folder)}


def with_image(image: Any = None, count: int = 1) -> dict[str, Any]:
    return {"prompt": "<|image_pad|>x" * count, "multi_modal_data": {"image": PHOTOS[0] if image is None else image}}


# --- the same ids as Transformers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
def test_raw_prompts_expand_as_in_transformers(
    both: dict[str, Processor], theirs: dict[str, Any], family: str, layout: str
) -> None:
    count = layout.count("{}")
    text = layout.format(*[IMAGE[family]] * count)
    prompt = both[family].from_prompt({"prompt": text, "multi_modal_data": {"image": PHOTOS[:count]}})
    expected = theirs[family](text=text, images=PHOTOS[:count] or None)
    assert prompt.token_ids == expected["input_ids"][0]
    assert prompt.text == text


@pytest.mark.parametrize("layout", ["{}\nWhat is this?", "Look: {} and {} differ how?"])
@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
def test_token_ids_expand_like_their_text(both: dict[str, Processor], family: str, layout: str) -> None:
    processor, count = both[family], layout.count("{}")
    text = layout.format(*[IMAGE[family]] * count)
    data = {"image": PHOTOS[:count]}
    ids = processor.tokenizer.encode(text)
    from_ids = processor.from_prompt({"prompt_token_ids": ids, "multi_modal_data": data})
    assert from_ids.token_ids == processor.from_prompt({"prompt": text, "multi_modal_data": data}).token_ids


# --- spans, positions, identity -----------------------------------------------------------------------------------


def test_spans_cover_exactly_the_placeholders(qwen: Processor) -> None:
    prompt = qwen.from_prompt({"prompt": "a<|image_pad|>b<|image_pad|>", "multi_modal_data": {"image": PHOTOS}})
    covered = {i for span in prompt.spans for i in range(span.start, span.end)}
    image_token = qwen.family.image_token_id
    assert covered == {i for i, token in enumerate(prompt.token_ids) if token == image_token}
    assert [span.key for span in prompt.spans] == [item.key for item in prompt.items]
    assert [span.length for span in prompt.spans] == [item.geometry.tokens for item in prompt.items]


def test_there_is_a_position_and_a_record_per_token(both: dict[str, Processor]) -> None:
    for family, processor in both.items():
        prompt = processor.from_prompt({"prompt": IMAGE[family] + "x", "multi_modal_data": {"image": PHOTOS[0]}})
        assert prompt.positions.shape == (3 if family == "qwen2_vl" else 1, len(prompt))
        assert len(prompt.identity) == RECORD_BYTES * len(prompt)


def test_the_same_image_twice_is_one_item(qwen: Processor) -> None:
    data = png(PHOTOS[0])
    for images in ([PHOTOS[0]] * 2, [data, bytes(bytearray(data))]):
        prompt = qwen.from_prompt(with_image(images, count=2))
        assert prompt.items[0] is prompt.items[1] and len(prompt.spans) == 2


def test_a_text_prompt_has_no_spans(qwen: Processor) -> None:
    prompt = qwen.from_prompt("hello")
    assert (prompt.spans, prompt.items) == ((), ())
    assert prompt.positions.tolist() == [list(range(len(prompt)))] * 3
    assert prompt.next_position == len(prompt)


def test_a_path_bytes_and_an_unread_image_have_one_key(qwen: Processor, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png(PHOTOS[0]))
    sources = [file, str(file), file.read_bytes(), Image.open(file)]
    assert len({qwen.from_prompt(with_image(source)).items[0].key for source in sources}) == 1


def test_a_salt_separates_tenants(qwen: Processor) -> None:
    plain, salted = qwen.from_prompt(with_image()), qwen.from_prompt(with_image(), salt=salt_of("a", ""))
    asked = qwen.from_prompt({**with_image(), "cache_salt": "a"})
    assert len({p.items[0].key for p in (plain, salted, asked)}) == 3
    assert len({p.salt for p in (plain, salted, asked)}) == 3
    assert plain.salt == b""


def test_a_prompts_own_salt_does_not_take_the_place_of_the_callers(qwen: Processor) -> None:
    prompt = {"prompt": "x", "cache_salt": "b"}
    tenants = [qwen.from_prompt(prompt, salt=salt_of(tenant, "")) for tenant in ("", "a", "c")]
    assert len({made.salt for made in tenants}) == 3


# --- the bill -----------------------------------------------------------------------------------------------------


def test_the_bill_adds_up(qwen: Processor) -> None:
    prompt = qwen.from_prompt({"prompt": "a<|image_pad|>b<|image_pad|>", "multi_modal_data": {"image": PHOTOS}})
    bill = qwen.bill(prompt, 16)
    assert bill.prompt_tokens == len(prompt)
    assert bill.image_tokens == sum(item.tokens for item in bill.items) == 4 * 3 + 2 * 5
    assert bill.kv_blocks == -(-len(prompt) // 16)
    assert (bill.items[0].width, bill.items[0].height) == (112, 84)
    assert (bill.items[0].resized_width, bill.items[0].resized_height) == (112, 84)
    assert bill.items[0].kv_blocks == 1


def test_the_largest_item_bounds_every_image(both: dict[str, Processor]) -> None:
    for family, processor in both.items():
        prompt = processor.from_prompt({"prompt": IMAGE[family], "multi_modal_data": {"image": make_photo(900, 700)}})
        largest = processor.largest_item()
        assert largest is not None and prompt.items[0].geometry.tokens <= largest.tokens


def test_without_images_and_videos_allowed_there_is_no_largest_item(qwen2_vl_folder: Path) -> None:
    assert make(qwen2_vl_folder, limits={"image": 0, "video": 0}).largest_item() is None


def test_end_tokens_fall_back_to_the_tokenizers(llava: Processor, llava_folder: Path) -> None:
    end = llava.tokenizer.token_id("</s>")
    assert llava.eos_token_ids == {end}
    silent = replace(llava.checkpoint.config, eos_token_ids=frozenset())
    assert changed(llava_folder, config=silent).eos_token_ids == {end}


# --- resolution ---------------------------------------------------------------------------------------------------


def tokens_of(processor: Processor, **how: Any) -> int:
    return processor.from_prompt({**with_image(make_photo(1120, 896)), **how}).items[0].geometry.tokens


def test_a_deployments_limit_holds(qwen2_vl_folder: Path) -> None:
    assert tokens_of(make(qwen2_vl_folder, max_pixels=100_352)) <= 128


def test_images_of_two_jpeg_policies_share_no_key_unless_their_pixels_are_equal(qwen2_vl_folder: Path) -> None:
    whole = make(qwen2_vl_folder)
    scaled = make(qwen2_vl_folder, scaled_jpeg=True)
    stream = io.BytesIO()
    make_photo(1120, 896).save(stream, "JPEG")
    for source, max_pixels, reduction in (
        (stream.getvalue(), 1_003_520, 1),
        (stream.getvalue(), 280 * 224, 4),
        (stream.getvalue(), 280 * 224 - 1, 4),
        (stream.getvalue(), 560 * 448, 2),
        (stream.getvalue(), 616 * 504, 1),
        (png(make_photo(1120, 896)), 280 * 224, 1),
    ):
        how = {**with_image(source), "mm_processor_kwargs": {"max_pixels": max_pixels}}
        kept, given = (processor.from_prompt(how) for processor in (whole, scaled))
        assert (kept.items[0].reduction, given.items[0].reduction) == (1, reduction)
        assert (kept.items[0].key == given.items[0].key) == (reduction == 1)
        assert (kept.identity == given.identity) == (reduction == 1)
        assert kept.items[0].geometry == given.items[0].geometry


def test_jpegs_that_nvjpeg_may_decode_have_keys_of_their_own(qwen2_vl_folder: Path) -> None:
    def jpeg(size: tuple[int, int], **how: Any) -> bytes:
        stream = io.BytesIO()
        make_photo(*size).save(stream, "JPEG", **how)
        return stream.getvalue()

    whole = make(qwen2_vl_folder)
    scaled = make(qwen2_vl_folder, scaled_jpeg=True)
    on_gpu = make(qwen2_vl_folder, scaled_jpeg=True, gpu_jpeg=True)
    photo = jpeg((1680, 1200))
    for source, is_for_gpu in (
        (photo, True),
        (photo[: len(photo) // 2], False),
        (jpeg((1680, 1200), progressive=True), False),
        (jpeg((1660, 1200)), False),  # below two megapixels
        (png(make_photo(1680, 1200)), False),
    ):
        how = {**with_image(source), "mm_processor_kwargs": {"max_pixels": 280 * 224}}
        kept, plain, given = (processor.from_prompt(how).items[0] for processor in (whole, scaled, on_gpu))
        assert (plain.gpu_jpeg, given.gpu_jpeg) == (False, is_for_gpu)
        assert (plain.key == given.key) != is_for_gpu and (given.key != kept.key or plain.reduction == 1)
        assert given.reduction == (1 if is_for_gpu else plain.reduction)
        assert kept.geometry == given.geometry


def test_a_request_may_lower_the_limit(qwen: Processor) -> None:
    assert tokens_of(qwen) == 1280
    assert tokens_of(qwen, mm_processor_kwargs={"max_pixels": 200_704}) <= 256


def test_a_request_may_ask_for_less_than_the_minimum(qwen: Processor) -> None:
    assert tokens_of(qwen, mm_processor_kwargs={"max_pixels": 784}) == 1


@pytest.mark.parametrize("value", [2_000_000, 0, -1, 10**18, "100", True, 1.5])
def test_a_request_may_not_raise_the_limit_or_give_nonsense(qwen: Processor, value: Any) -> None:
    error = refusal(qwen, {**with_image(), "mm_processor_kwargs": {"max_pixels": value}})
    assert "1003520" in error.message and error.param == "mm_processor_kwargs.max_pixels"


def test_unknown_processor_settings_are_refused(qwen: Processor) -> None:
    assert "fps" in refusal(qwen, {**with_image(), "mm_processor_kwargs": {"fps": 1}}).message
    assert refusal(qwen, {**with_image(), "mm_processor_kwargs": "large"}).param == "mm_processor_kwargs"


def test_a_model_of_one_size_cannot_be_asked_for_another(llava: Processor) -> None:
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": PHOTOS[0]}}
    error = refusal(llava, {**prompt, "mm_processor_kwargs": {"max_pixels": 100}})
    assert "size of this model's pictures cannot be chosen" in error.message


# --- refusals of raw prompts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("placeholders", "images"), [(2, 1), (0, 1), (1, 0), (1, 2)])
def test_a_mismatch_names_both_numbers(qwen: Processor, placeholders: int, images: int) -> None:
    prompt = {"prompt": "x" + "<|image_pad|>" * placeholders, "multi_modal_data": {"image": PHOTOS[:images]}}
    error = refusal(qwen, prompt)
    assert f"{placeholders} image placeholders (<|image_pad|>)" in error.message
    assert f"{images} images were given" in error.message


def test_too_many_images_are_refused_with_the_option(qwen: Processor) -> None:
    error = refusal(qwen, with_image([PHOTOS[0]] * 5, count=5))
    assert "at most 4 images per prompt" in error.message and "limit_mm_per_prompt image=4" in error.message
    assert "5 were given" in error.message


def test_images_that_are_too_large_together_are_refused_with_their_sizes(qwen2_vl_folder: Path) -> None:
    processor = make(qwen2_vl_folder, max_request_pixels=20_000)
    two = [make_photo(100, 90, seed=seed) for seed in (1, 2)]
    assert len(processor.from_prompt(with_image(two, count=2)).items) == 2
    error = refusal(processor, with_image([*two, make_photo(60, 50)], count=3))
    assert "100x90, 100x90, 60x50" in error.message and "21000 pixels together" in error.message
    assert "at most 20000" in error.message and error.code == "context_length_exceeded"


def test_the_same_image_again_adds_no_pixels(qwen2_vl_folder: Path) -> None:
    processor, same = make(qwen2_vl_folder, max_request_pixels=10_000), make_photo(100, 90)
    assert len(processor.from_prompt(with_image([same] * 3, count=3)).items) == 3


@pytest.mark.parametrize("prompt", ["", {"prompt": ""}, {"prompt_token_ids": []}, {}, {"prompt": None}])
def test_an_empty_prompt_is_refused(qwen: Processor, prompt: Any) -> None:
    assert refusal(qwen, prompt).param in ("prompt", "prompt_token_ids")


def test_text_that_is_no_unicode_is_refused(qwen: Processor) -> None:
    assert "surrogate" in refusal(qwen, "a\ud800").message


def test_text_and_ids_together_are_refused(qwen: Processor) -> None:
    assert "either" in refusal(qwen, {"prompt": "x", "prompt_token_ids": [1]}).message


@pytest.mark.parametrize("ids", [[-1], [10**9], [2**70], [1.5], ["a"], [True], [[1]], 5])
def test_ids_outside_the_vocabulary_are_refused(qwen: Processor, ids: Any) -> None:
    assert refusal(qwen, {"prompt_token_ids": ids}).param == "prompt_token_ids"


def test_ids_in_an_array_are_accepted(qwen: Processor) -> None:
    assert qwen.from_prompt({"prompt_token_ids": np.array([1, 2, 3])}).token_ids == [1, 2, 3]


def test_unknown_keys_are_refused_by_name(qwen: Processor) -> None:
    assert "promt" in refusal(qwen, {"promt": "x"}).message
    assert "audio" in refusal(qwen, {"prompt": "x", "multi_modal_data": {"audio": b""}}).message
    assert refusal(qwen, {"prompt": "x", "multi_modal_data": [1]}).param == "multi_modal_data"
    assert refusal(qwen, 5).param == "prompt"
    assert refusal(qwen, {"prompt": "x", "cache_salt": 5}).param == "cache_salt"


def test_placeholders_and_videos_must_be_as_many(qwen: Processor) -> None:
    without = refusal(qwen, {"prompt": "x", "multi_modal_data": {"video": b""}}).message
    assert "0 video placeholders (<|video_pad|>), but 1 videos" in without
    assert "1 video placeholders (<|video_pad|>), but 0 videos" in refusal(qwen, "x<|video_pad|>").message


def test_a_model_without_video_says_so(llava: Processor) -> None:
    asked = {"prompt": "x", "multi_modal_data": {"video": [make_photo()]}}
    assert "takes no videos" in refusal(llava, asked).message


def test_a_bad_image_is_named_by_its_place(qwen: Processor) -> None:
    error = refusal(qwen, with_image([PHOTOS[0], b"", PHOTOS[1]], count=3))
    assert (error.code, error.param) == ("empty_image_file", "multi_modal_data.image[1]")


def test_a_strip_is_refused_by_its_place(qwen: Processor) -> None:
    error = refusal(qwen, with_image(Image.new("L", (3000, 1))))
    assert (error.code, error.param) == ("image_too_large", "multi_modal_data.image")


def test_a_tokenizer_without_the_image_token_is_refused(llava: Processor, llava_folder: Path) -> None:
    config = replace(llava.checkpoint.config, image_token_id=99_999)
    with pytest.raises(ConfigError, match="image_token_id=99999"):
        changed(llava_folder, config=config)


def test_the_detokenizer_speaks_the_models_tokens(qwen: Processor) -> None:
    detokenizer = Detokenizer(qwen.tokenizer, ["picture"])
    for token in qwen.tokenizer.encode("What is in the picture?"):
        detokenizer.push(token)
    assert detokenizer.text == "What is in the "


def test_an_untouched_image_file_is_not_decoded(qwen: Processor) -> None:
    image = Image.open(io.BytesIO(png(PHOTOS[0])))
    qwen.from_prompt(with_image(image))
    assert image.tile
