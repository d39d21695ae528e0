"""What the tests of prompts and chats share: processors, pictures, and Transformers' own processors to compare with."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import LlavaProcessor, PreTrainedTokenizerFast, Qwen2VLProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks import checkpoints
from saccade.errors import RequestError
from saccade.options.engine import MediaPolicy, Options
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.input_processor import Processor
from tests.helpers.media.images import make_photo, png

POLICY = MediaPolicy.of(
    Options(limit_mm_per_prompt={"image": 4, "video": 1}, max_image_bytes=1 << 20, max_image_pixels=10_000_000)
)
PHOTOS = [make_photo(112, 84, 1), make_photo(60, 130, 2)]


def make(folder: Path, **policy: Any) -> Processor:
    return Processor(open_checkpoint(str(folder)), replace(POLICY, **policy))


def changed(folder: Path, **changes: Any) -> Processor:
    """A processor whose checkpoint differs from its files."""
    return Processor(replace(open_checkpoint(str(folder)), **changes), POLICY)


def data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def refusal(processor: Processor, prompt: Any, **how: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        processor.from_prompt(prompt, **how)
    return caught.value


def chat_refusal(processor: Processor, messages: Any, **how: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        processor.from_chat(messages, **how)
    return caught.value


class ImagesOnly(Qwen2VLProcessor):
    """Transformers' processor without its video part, which would need torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
        return None


def reference(folder: Path) -> Any:
    """Transformers' processor for the same files."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if open_checkpoint(str(folder)).config.model_type == "qwen2_vl":
        return ImagesOnly(Qwen2VLImageProcessorPil(), tokenizer, None, chat_template=checkpoints.QWEN_TEMPLATE)
    crop = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    return LlavaProcessor(
        CLIPImageProcessorPil(**crop),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=checkpoints.LLAVA_TEMPLATE,
    )
