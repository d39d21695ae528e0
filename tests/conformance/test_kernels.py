"""Kernels and passes of a GPU around Transformers' layers, in the interpreter: tokens are those of the PyTorch pass."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from saccade import LLM, SamplingParams
from saccade.models.bridge.text_model import TextModel
from saccade.models.layers.hybrid_decoder import HybridDecoder
from tests.helpers.engine.async_engine import OPTIONS, overlapped
from tests.helpers.families.bridged import transformers_layers
from tests.helpers.families.zoo import ZOO, second_half
from tests.helpers.media.images import make_photo

pytestmark = pytest.mark.transformers

OURS = {"lfm2_vl", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7"}  # layers with states, in a decoder of ours
A_FEW = {
    "gemma3": "windows, pictures seen in both directions, embeddings that are scaled",
    "glm4v": "RoPE positions on three axes",
    "lfm2_vl": "short convolutions",
}
EAGER = {  # beside those that keep states
    "molmo2": "its pictures see each other, and not the text between them",
    "unlimited_ocr": "its attention sees a prompt and, apart from it, a window",
}
SERVED = [name for name, entry in ZOO.items() if entry.refusal is None]
SAMPLING = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def _case(name: str) -> object:
    return name if name in A_FEW else pytest.param(name, marks=pytest.mark.conformance)


@pytest.mark.parametrize("name", [_case(name) for name in SERVED])
def test_a_family_answers_from_kernels_as_from_pytorch(name: str, tmp_path: Path) -> None:
    entry = ZOO[name]
    imaged = {"prompt": f"{entry.image}What is it?", "multi_modal_data": {"image": make_photo(60, 50)}}
    prompts = [imaged, {"prompt": "The quick brown fox jumps."}]
    sizes = {"max_model_len": 1024, "max_num_batched_tokens": 1024, **entry.options}
    with second_half.libraries(name), nullcontext() if name in OURS else transformers_layers():
        folder = str(entry.build(tmp_path))
        with LLM(folder, **{**OPTIONS, **sizes}) as llm:
            decoder = llm.engine.core.runner.model.decoder
            assert isinstance(decoder, HybridDecoder if name in OURS else TextModel)
            reason = decoder.eager_reason() if isinstance(decoder, TextModel) else None
            expected = [out.outputs[0].token_ids for out in llm.generate(prompts, SAMPLING, use_tqdm=False)]
        if reason is not None:
            assert reason == EAGER.get(name, "its layers keep states")
            return
        with overlapped(tmp_path, **sizes) as llm:
            found = [out.outputs[0].token_ids for out in llm.generate(prompts, SAMPLING, use_tqdm=False)]
    assert found == expected
