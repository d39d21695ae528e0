"""Engines with the step loop and forward pass of CUDA devices, run in Triton's interpreter without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from PIL import Image

from saccade import LLM, SamplingParams
from saccade.engine.async_core import AsyncEngineCore
from saccade.runner.build import new_slab
from saccade.runner.cuda.forward import CudaForward
from saccade.runner.forward_selector import position_rows
from tests.helpers.families.families import FAMILIES

TWO_LAYERS = {"num_hidden_layers": 2}  # of a decoder: enough to mix up, and the interpreter takes a while for each
# How to make a decoder short that is not made of equal layers.
ONE_OF_EACH = {"text": {**TWO_LAYERS, "layer_types": ["linear_attention", "full_attention"]}}
CROSSING = {"text": {**TWO_LAYERS, "cross_attention_layers": [1]}}
SHORT: dict[str, dict[str, Any]] = {
    "deepseek_vl_v2": {**TWO_LAYERS, "first_k_dense_replace": 1},  # MLA; the second layer has experts
    "internvl": {},
    "ministral3": {},
    "mllama": CROSSING,
    "qwen3_5": ONE_OF_EACH,
    "qwen3_5_moe": ONE_OF_EACH,
}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "kv_cache_gb": 0.02,
    "use_tqdm": False,
}


def short(name: str, folder: Path) -> Path:
    """A checkpoint of this family whose decoder has few layers."""
    return FAMILIES[name].build(folder, **SHORT.get(name, {"text": TWO_LAYERS}))


def overlapped(folder: Path, **options: Any) -> LLM:
    """An engine whose decoder runs in kernels and whose core launches ahead."""
    with mock.patch("saccade.runner.build.pack_where_faster"):  # kernels read weights as they are
        llm = LLM(str(folder), **{**OPTIONS, **options})
    core = llm.engine.core
    runner, limits = core.runner, core.limits
    text = runner.model.config.text
    if text.num_cross_layers:
        runner.embeddings = new_slab(text, limits.encoder_cache_slots, runner.kv.k.dtype, runner.kv.k.device)
    runner.forward = new_forward(runner, limits, runner.forward.recurrent)
    llm.engine._core = AsyncEngineCore(limits, runner)
    return llm


def new_forward(runner: Any, limits: Any, states: Any) -> CudaForward:
    text = runner.model.config.text
    return CudaForward(
        runner.model.decoder,
        runner.kv,
        block_size=limits.block_size,
        max_requests=limits.max_num_seqs,
        max_blocks=limits.max_model_len // limits.block_size,
        axes=position_rows(runner.model),
        states=states,
        slab=runner.embeddings if text.num_cross_layers else None,
        max_cross_states=4 * limits.encoder_budget,
    )


def prompts(photo: Callable[..., Image.Image], tag: str) -> list[dict[str, Any]]:
    imaged = f"{tag} What is it?"
    return [
        {"prompt": "Count to three."},
        {"prompt": imaged, "multi_modal_data": {"image": photo(seed=1)}},
        {"prompt": "A longer text that has several blocks of tokens."},
        {"prompt": imaged, "multi_modal_data": {"image": photo(84, 56, seed=2)}},
        {"prompt": "Five."},
    ]


QWEN2_VL = FAMILIES["qwen2_vl"].image
FEW = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def answers(llm: LLM, given: list[dict[str, Any]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(given, params, use_tqdm=False)]


def decoding(llm: LLM) -> int:
    """Pictures that are being decoded, or were and wait for the tower."""
    return len(llm.engine.core.runner.encoder._stage._begun)
