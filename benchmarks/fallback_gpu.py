"""A model that runs through Transformers' code, here and in Transformers: `python -m benchmarks.fallback_gpu [2b 8b]`

InternVL's shape with random weights in bfloat16. Milliseconds of a decode step at a context of 1,024 tokens, of one
request and of 32. Transformers generates with its static cache, which compiles the decode step (`torch.compile`).
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken

from benchmarks.checkpoints import _write, _write_tokenizer, qwen_tokenizer
from saccade import LLM, SamplingParams

TEXT = {
    "2b": {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2},
    "8b": {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4},
}
VISION = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
MARKS = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
CONTEXT, TOKENS, SIDE = 1024, 48, 448


def write_folder(folder: Path, size: str) -> None:
    """Config, tokenizer and processor; weights are random."""
    from transformers import InternVLConfig

    tokenizer = qwen_tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    text = {"model_type": "qwen2", "num_hidden_layers": 28, "vocab_size": 151936, "max_position_embeddings": 32768}
    config = InternVLConfig(
        text_config={**text, **TEXT[size], "tie_word_embeddings": False},
        vision_config={**VISION, "image_size": [SIDE, SIDE], "patch_size": [14, 14]},
        image_token_id=tokenizer.token_to_id("<IMG_CONTEXT>"),
        image_seq_length=256,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
        architectures=["InternVLForConditionalGeneration"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    images = {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": SIDE, "width": SIDE}}
    tiles = {"crop_to_patches": True, "min_patches": 1, "max_patches": 6}
    processor = {"processor_class": "InternVLProcessor", "image_processor": {**images, **tiles}}
    _write(folder / "processor_config.json", {**processor, "image_seq_length": 256})
    names = ("start_image", "end_image", "context_image", "video")
    template = (
        "{% for m in messages %}{% for part in m.content %}{{ part.text or '<IMG_CONTEXT>' }}{% endfor %}{% endfor %}"
    )
    ends = {"eos": "<|im_end|>", "pad": "<|endoftext|>"}
    _write_tokenizer(folder, tokenizer, template, "saved", **ends, **dict(zip(names, MARKS, strict=True)))


def step_ms(generate: Callable[[int], Any]) -> float:
    """Of one more token: the time of many less that of one."""
    generate(TOKENS)  # compiles
    generate(1)
    best = []
    for tokens in (1, TOKENS):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            generate(tokens)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        best.append(min(times))
    return 1e3 * (best[1] - best[0]) / (TOKENS - 1)


def ours(folder: Path, batches: tuple[int, ...]) -> dict[str, Any]:
    llm = LLM(
        str(folder), load_format="dummy", dtype="bfloat16", max_model_len=4096, max_num_seqs=max(batches),
        enable_prefix_caching=False, gpu_memory_utilization=0.7, use_tqdm=False,
    )  # fmt: skip

    def generate(batch: int, tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        prompts = [{"prompt_token_ids": [7 + i] * CONTEXT} for i in range(batch)]
        llm.generate(prompts, params, use_tqdm=False)

    found: dict[str, Any] = {"eager_reason": llm.engine.core.runner.eager_reason}
    for batch in batches:
        found[f"decode of {batch}"] = round(step_ms(lambda tokens, batch=batch: generate(batch, tokens)), 3)
    llm.close()
    return found


def theirs(folder: Path, batches: tuple[int, ...]) -> dict[str, Any]:
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("cuda"):
        shape = AutoConfig.from_pretrained(folder)
        model = AutoModelForImageTextToText.from_config(shape, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def generate(batch: int, tokens: int) -> None:
        ids = torch.full((batch, CONTEXT), 7, device="cuda")
        ends = {"min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}
        mask = torch.ones_like(ids)
        model.generate(input_ids=ids, attention_mask=mask, do_sample=False, cache_implementation="static", **ends)

    return {f"decode of {b}": round(step_ms(lambda tokens, b=b: generate(b, tokens)), 3) for b in batches}


def main(sizes: list[str]) -> None:
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("saccade.models").setLevel(logging.INFO)  # what is fused in Transformers' layers
    for size in sizes or list(TEXT):
        with tempfile.TemporaryDirectory() as name:
            write_folder(Path(name), size)
            for side, run in (("saccade", ours), ("transformers", theirs)):
                try:
                    found = run(Path(name), (1, 32))
                except Exception as error:  # the other side is still worth its time
                    found = {"failed": str(error)[-300:]}
                print("RESULT " + json.dumps({"shape": size, "side": side, **found}), flush=True)
                gc.collect()
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
