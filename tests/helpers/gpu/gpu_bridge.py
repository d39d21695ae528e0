"""Steps of bridged models in published shapes, random weights: `python -m tests.helpers.gpu.gpu_bridge SHAPE`.

One shape a process; a row of JSON. `floor`: bytes that a step must read (weights, experts that its tokens take, keys
and values) at 4.2 TB/s, in ms. Towers stay as small as those of the zoo.
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
from PIL import Image
from torch import nn

from saccade import LLM, SamplingParams
from saccade.models.layers.decoder import Decoder
from tests.helpers.families.zoo import ZOO, second_half

BYTES_PER_MS = 4.2e9
CONTEXT = 1000
STEPS = 33


def _windows(layers: int) -> list[str]:
    """Every sixth layer sees all."""
    return ["full_attention" if number % 6 == 0 else "sliding_attention" for number in range(1, layers + 1)]


_ROPE = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_WIDE = {"head_dim": 256, "global_head_dim": 512, "sliding_window": 1024, "vocab_size": 262144}
_EXPERTS = {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
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
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "query_pre_attn_scalar": 256, **_WIDE},
    ),
    "gemma4_31b": (
        "gemma4",
        {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "layer_types": _windows(60)}
        | {"num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4, **_WIDE},
    ),
    "gemma4_26b_a4b": (
        "gemma4@moe",
        {"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "layer_types": _windows(30)}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2, **_WIDE, **_EXPERTS},
    ),
}


def main() -> int:
    name = sys.argv[1]
    kind, text = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder, second_half.libraries(kind):
        write(kind, text, Path(folder))
        start = time.perf_counter()
        options = {"dtype": "bfloat16", "max_model_len": 16384, "max_num_batched_tokens": 8192, "max_num_seqs": 32}
        with LLM(folder, load_format="dummy", gpu_memory_utilization=0.85, use_tqdm=False, **options) as llm:
            row = {"shape": name, "start_s": round(time.perf_counter() - start, 1), **measure(llm, ZOO[kind].image)}
    print(json.dumps(row))
    return 0


def write(kind: str, text: Mapping[str, Any], folder: Path) -> None:
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
    (folder / "config.json").write_text(json.dumps(config))


def measure(llm: LLM, image: str) -> dict[str, Any]:
    runner = llm.engine.core.runner
    decoder = runner.model.decoder
    row: dict[str, Any] = {"decoder": "ours" if isinstance(decoder, Decoder) else "Transformers'"}
    row["forward"] = type(runner.forward).__name__
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
    if isinstance(decoder, Decoder):
        weights = {name: tensor for name, tensor in model.params.targets.items() if name.startswith("layers")}
    else:
        lookups = {id(module.weight) for module in model.text.modules() if isinstance(module, nn.Embedding)}
        weights = {name: tensor for name, tensor in model.text.named_parameters() if id(tensor) not in lookups}
    experts = sum(tensor.nbytes for name, tensor in weights.items() if "experts" in name)
    dense = sum(tensor.nbytes for tensor in weights.values()) - experts + decoder.head.nbytes
    chosen = 1 - (1 - _share(model.config.raw)) ** requests  # of experts, by requests that choose at random
    return float(dense + experts * chosen + requests * CONTEXT * runner.kv.bytes_per_token)


def _share(raw: Mapping[str, Any]) -> float:
    text = raw.get("text_config", raw)
    return text.get("top_k_experts", 1) / (text.get("num_experts") or 1)


if __name__ == "__main__":
    sys.exit(main())
