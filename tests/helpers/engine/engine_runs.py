"""A workload run by engines with different settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade import LLM, SamplingParams, costs
from saccade.processor.checkpoint_files import open_checkpoint
from tests.helpers.media.images import make_photo

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def prompts(image: str) -> list[dict[str, Any]]:
    """Text, one picture, two, the same picture again, a large one in the middle of text."""
    a, b, large = make_photo(seed=1), make_photo(140, 84, seed=2), make_photo(300, 250, seed=3)
    return [
        {"prompt": "The quick brown fox jumps over the lazy dog. " * 3},
        {"prompt": f"{image}What is in the picture?", "multi_modal_data": {"image": a}},
        {"prompt": f"{image}{image}Compare these two pictures.", "multi_modal_data": {"image": [a, b]}},
        {"prompt": f"Again: {image} and {image}", "multi_modal_data": {"image": [a, a]}},
        {"prompt": f"The quick brown fox {image} jumps over", "multi_modal_data": {"image": large}},
    ]


@dataclass(frozen=True)
class Subject:
    """A checkpoint and the prompts that are put to it."""

    folder: Path
    prompts: list[dict[str, Any]]


def run(subject: Subject, params: SamplingParams = GREEDY, *, together: bool = True, **given: Any) -> list[list[int]]:
    defaults = {"max_model_len": 512, "kv_cache_gb": 0.02, "max_pixels": 200_000, "max_video_pixels": 200_000}
    if slots := given.pop("encoder_cache_slots", None):
        text = open_checkpoint(str(subject.folder)).config.text
        given["encoder_cache_gb"] = (slots + 0.5) * costs.embedding_bytes_per_slot(text, "float32") / costs.GIB
    llm = LLM(model=str(subject.folder), use_tqdm=False, **{**defaults, **given})
    asked = subject.prompts
    batches = [asked] if together else [[p] for p in asked]
    outs = [out for batch in batches for out in llm.generate(batch, params, use_tqdm=False)]
    llm.engine.core.scheduler.check()
    llm.close()
    return [out.outputs[0].token_ids for out in outs]
