"""Steps of bridged models in published shapes, random weights: `python -m tests.helpers.gpu.gpu_bridge SHAPE [HOW]`.

One shape a process; a row of JSON. HOW: `online` for `--quantization fp8`, or a format of
`tests.helpers.families.quantize` (`fp8-blocks`, `fbgemm`, `awq`, `compressed-w4-128`), which config.json then names.
`floor`: bytes that a step must move (weights, experts that its tokens take, keys and values, states) at 4.2 TB/s, in
ms. Towers stay as small as those of the zoo.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from saccade import LLM, SamplingParams, costs
from saccade.models.bridge.stored import named_weights
from saccade.models.layers.decoder import Decoder
from saccade.models.layers.moe import MoE
from tests.helpers.families.quantize import FORMATS
from tests.helpers.families.zoo import ZOO, second_half

BYTES_PER_MS = 4.2e9
CONTEXT = 1000
STEPS = 33


def _windows(layers: int) -> list[str]:
    """Every sixth layer sees all."""
    return ["full_attention" if number % 6 == 0 else "sliding_attention" for number in range(1, layers + 1)]


_ROPE = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_GEMMA = {"head_dim": 256, "sliding_window": 1024, "vocab_size": 262144}
_WIDE = {**_GEMMA, "global_head_dim": 512}
_OCR_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}
_PER_LAYER = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 18}
_EXPERTS = {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
_CONVOLUTIONS = ["full_attention" if number in (2, 5, 8, 10, 12, 14) else "conv" for number in range(16)]
_DELTA_NETS = (["linear_attention"] * 3 + ["full_attention"]) * 6
_DELTA_HEADS = {"linear_num_key_heads": 16, "linear_num_value_heads": 16} | dict.fromkeys(
    ("linear_key_head_dim", "linear_value_head_dim"), 128
)
_QUARTER = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
SHAPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {  # family of the zoo, and fields of its text_config
    "internvl3_5_8b": (
        "internvl",
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936, **_HEADS},
    ),
    "glm_4_6v_flash": (
        "glm46v",
        {"hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40, "vocab_size": 151552, **_HEADS}
        | {"num_key_value_heads": 2, "rope_parameters": _ROPE},
    ),
    "gemma3_12b": (
        "gemma3",
        {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "layer_types": _windows(48)}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "query_pre_attn_scalar": 256, **_GEMMA},
    ),
    "gemma4_31b": (
        "gemma4",
        {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "layer_types": _windows(60)}
        | {"num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4, **_WIDE},
    ),
    "glm_ocr": (
        "glm_ocr",
        {"hidden_size": 1536, "intermediate_size": 4608, "num_hidden_layers": 16, "vocab_size": 59392, "head_dim": 128}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "rope_parameters": _OCR_ROPE},
    ),
    "gemma4_e4b": (
        "gemma4@e2b",
        {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42, "layer_types": _windows(42)}
        | {"num_attention_heads": 8, "num_key_value_heads": 2, **_WIDE, "sliding_window": 512, **_PER_LAYER}
        | {"use_double_wide_mlp": False},
    ),
    "gemma4_26b_a4b": (
        "gemma4@moe",
        {"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "layer_types": _windows(30)}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2, **_WIDE, **_EXPERTS},
    ),
    "minicpmv4_6": (  # Qwen3.5-0.8B's decoder, by its card; 248,094 tokens
        "minicpmv4_6",
        {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "layer_types": _DELTA_NETS}
        | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248094, **_DELTA_HEADS}
        | {"rope_parameters": {**_QUARTER, "mrope_interleaved": True}},
    ),
    "lfm2_5_vl_1_6b": (  # LFM2-1.2B's decoder, by its report: 10 convolutions, 6 layers of attention
        "lfm2_vl",
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "layer_types": _CONVOLUTIONS}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536},
    ),
}


def main() -> int:
    name, how = sys.argv[1], "".join(sys.argv[2:3])
    kind, text = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder, second_half.libraries(kind):
        write(kind, text, Path(folder), how)
        start = time.perf_counter()
        options = {"dtype": "bfloat16", "max_model_len": 16384, "max_num_batched_tokens": 8192, "max_num_seqs": 32}
        options["quantization"] = "fp8" if how == "online" else None
        with LLM(folder, load_format="dummy", gpu_memory_utilization=0.85, use_tqdm=False, **options) as llm:
            row = {
                "shape": name,
                "stored": how,
                "start_s": round(time.perf_counter() - start, 1),
                **measure(llm, ZOO[kind].image),
            }
    print(json.dumps(row))
    return 0


def write(kind: str, text: Mapping[str, Any], folder: Path, how: str) -> None:
    """The family's small checkpoint without its weights, and with the decoder of this shape."""
    ZOO[kind].build(folder)
    for weights in folder.glob("*.safetensors*"):
        weights.unlink()
    config = json.loads((folder / "config.json").read_text())
    old = {key: value for key, value in config["text_config"].items() if not key.startswith("per_layer")}
    old.pop("layer_types", None)
    config["text_config"] = {**old, **text, "max_position_embeddings": 65536}
    vision = config["vision_config"]
    vision |= {key: text["hidden_size"] for key in ("out_hidden_size", "projection_dim") if key in vision}
    if how in FORMATS:
        config["quantization_config"] = dict(FORMATS[how].config)
    (folder / "config.json").write_text(json.dumps(config))


def measure(llm: LLM, image: str) -> dict[str, Any]:
    runner = llm.engine.core.runner
    decoder = runner.model.decoder
    row: dict[str, Any] = {"decoder": "ours" if isinstance(decoder, Decoder) else "Transformers'"}
    row["forward"] = type(runner.forward).__name__
    row["weights"] = sorted({str(tensor.dtype) for tensor in weights_of(runner.model).values()})
    row["weights_gb"] = round(sum(tensor.nbytes for tensor in weights_of(runner.model).values()) / 1e9, 2)
    rng = np.random.default_rng(0)

    def words(count: int) -> dict[str, Any]:
        return {"prompt_token_ids": rng.integers(100, 400, count).tolist()}

    seconds(llm, [words(64)] * 4, 8)
    for requests in (1, 32):
        prompts = [words(CONTEXT) for _ in range(requests)]
        seconds(llm, prompts, 1)  # known prompts from here on
        first, whole = (float(np.median([seconds(llm, prompts, n) for _ in range(3)])) for n in (1, STEPS))
        row[f"decode_{requests}_ms"] = round((whole - first) / (STEPS - 1) * 1e3, 2)
        row[f"floor_{requests}_ms"] = round(floor_bytes(runner, requests) / BYTES_PER_MS, 2)
    for tokens in (64, 1600, 8000):
        row[f"text_{tokens}_ms"] = round(min(seconds(llm, [words(tokens)], 1) for _ in range(4)) * 1e3, 1)
    pictures = [Image.fromarray(rng.integers(0, 255, (480, 640, 3), np.uint8)) for _ in range(4)]
    imaged = [{"prompt": f"{image} What?", "multi_modal_data": {"image": picture}} for picture in pictures]
    row["picture_ms"] = round(min(seconds(llm, [prompt], 1) for prompt in imaged) * 1e3, 1)
    return row


def seconds(llm: LLM, prompts: Sequence[Any], tokens: int) -> float:
    start = time.perf_counter()
    llm.generate(list(prompts), SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - start


def floor_bytes(runner: Any, requests: int) -> float:
    model, decoder = runner.model, runner.model.decoder
    weights = weights_of(model)
    experts = sum(tensor.nbytes for name, tensor in weights.items() if "experts" in name)
    dense = sum(tensor.nbytes for tensor in weights.values()) - experts + decoder.head.nbytes
    chosen = 1 - (1 - _share(model.config.raw)) ** requests  # of experts, by requests that choose at random
    states = 2 * costs.state_bytes_per_request(model.config.text, "bfloat16")  # read and written
    of_requests = CONTEXT * runner.kv.bytes_per_token + states
    return float(dense + experts * chosen + requests * of_requests)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Of its layers, as they lie in memory."""
    if not isinstance(model.decoder, Decoder):
        lookups = {id(module.weight) for module in model.text.modules() if isinstance(module, nn.Embedding)}
        named = enumerate(named_weights(model.text))
        return {f"{name} {number}": tensor for number, (name, tensor) in named if id(tensor) not in lookups}
    held: dict[str, Any] = {}
    for number, linear in enumerate(model.params.linears):
        groups = linear.groups or ()
        held |= {f"{number}.{part}": tensor for part, tensor in enumerate((linear.weight, linear.scales, *groups))}
    for number, layer in enumerate(model.decoder.layers):
        moe = getattr(layer.mlp, "experts", layer.mlp)  # or beside an MLP
        if isinstance(moe, MoE):
            held |= {f"{number}.experts.{name}": getattr(moe, name) for name in ("gate_up", "down")}
    return {name: tensor for name, tensor in held.items() if tensor is not None}


def _share(raw: Mapping[str, Any]) -> float:
    text = raw.get("text_config", raw)
    return text.get("top_k_experts", 1) / (text.get("num_experts") or 1)


if __name__ == "__main__":
    sys.exit(main())
