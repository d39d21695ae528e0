"""What the host code launches on a GPU that is not here: models of published shapes run on `meta` tensors.

Nothing is computed. `gpu_of` describes the GPU, launches are written down instead of compiled, and kernels that need a
self-test (those for Hopper) are not chosen: the Triton kernels are what every other GPU runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from saccade.checkpoint.config import model_config
from saccade.kernels.launch import device, pdl
from saccade.kernels.launch.device import Gpu
from saccade.kernels.launch.kernel_choice import KernelChoice
from saccade.kernels.ops.argmax import TokenSink
from saccade.kernels.ops.copy_kv_blocks import copy_blocks
from saccade.kernels.ops.sample import sample_rows
from saccade.models.cuda.vision import FusedVision
from saccade.models.families import family_class
from saccade.models.fp8_weights import FP8, Fp8Weights
from saccade.models.interface import ModelParts
from saccade.models.layers.torch_attention import PagedKV
from saccade.models.state_dict import Parameters
from saccade.runner.build import new_slab
from saccade.runner.cuda.forward import CudaForward
from saccade.runner.cuda.graph_sizes import MAX_MIXED_ROWS, mixed_sizes
from saccade.runner.cuda.kv_host_blocks import _by_block
from saccade.runner.cuda.prefill_metadata import Parts
from saccade.runner.recurrent_state import RecurrentStates
from saccade.types.media import Geometry, Grid, Size
from tests.helpers.families.variant import NONE, ONE, Variant

META = torch.device("meta")
BLOCK_SIZE = 16
MAX_REQUESTS = 256
MAX_BLOCKS = 2048  # of a request
DECODED = (1, 2, 8, 16, 24, 32, 64, 256)  # requests of a step
PREFILLED = (32, 128, 256, 512, 2048, 8192)  # tokens of a step
MAX_SLOTS = 8192  # embeddings of images
OWN_TOWERS = {"mllama"}  # that take no `Grid` of one image; heads of 80, as Qwen2-VL's
SIDE = 24  # patches along each side of an image
NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


def text(hidden: int, wide: int, heads: int, kv_heads: int, vocabulary: int, **others: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": wide, "num_attention_heads": heads, "num_hidden_layers": 1,
        "num_key_value_heads": kv_heads, "vocab_size": vocabulary, "max_position_embeddings": 32768, **others,
    }  # fmt: skip


def qwen(model_type: str, decoder: dict[str, Any], section: list[int], **vision: Any) -> dict[str, Any]:
    tower = {"depth": 1, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": section}
    return {
        "model_type": model_type, "image_token_id": 3, "vision_config": {**tower, **vision},
        "text_config": {"model_type": f"{model_type}_text", "rope_parameters": rope, **decoder},
    }  # fmt: skip


def llava(decoder: dict[str, Any], **vision: Any) -> dict[str, Any]:
    tower = {"num_hidden_layers": 2, "num_attention_heads": 16, "image_size": 336, "patch_size": 14, **vision}
    return {"model_type": "llava", "image_token_index": 3, "vision_config": tower, "text_config": decoder}


QWEN3_VISION = {
    "hidden_size": 1152, "patch_size": 16, "intermediate_size": 4304, "hidden_act": "gelu_pytorch_tanh",
    "num_position_embeddings": 2304, "deepstack_visual_indexes": [],
}  # fmt: skip


def qwen3(decoder: dict[str, Any], model_type: str = "qwen3_vl", **vision: Any) -> dict[str, Any]:
    tower = {**QWEN3_VISION, "out_hidden_size": decoder["hidden_size"], **vision}
    return qwen(model_type, decoder, [24, 20, 20], **tower)


def qwen3_5(decoder: dict[str, Any], value_heads: int, model_type: str = "qwen3_5") -> dict[str, Any]:
    """A layer of each kind. Heads of 256, of which a quarter rotates."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    nets = {
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
    }  # fmt: skip
    both = {"head_dim": 256, "num_hidden_layers": 2, "rope_parameters": rope, **nets}
    return qwen3({**decoder, **both}, model_type)


def deepseek(decoder: dict[str, Any], experts: int, width: int, **routing: Any) -> dict[str, Any]:
    """DeepSeek-VL2's decoder; its tower has heads of 72, as Qwen3-VL's."""
    moe = {"n_routed_experts": experts, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": width}
    mla = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": None}
    return {"model_type": "deepseek_v2", **decoder, **moe, **mla, "use_mla": True, **routing}


LLAMA_VISION = {
    "model_type": "mllama", "image_token_index": 3,
    "text_config": text(
        4096, 14336, 32, 8, 128256, num_hidden_layers=2, cross_attention_layers=[1], model_type="mllama_text_model"
    ),
    "vision_config": {
        "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 1, "num_global_layers": 1,
        "attention_heads": 16, "image_size": 560, "patch_size": 14, "intermediate_layers_indices": [0],
        "vision_output_dim": 2560, "max_num_tiles": 4, "supported_aspect_ratios": [[1, 1]],
    },
}  # fmt: skip
MINISTRAL = {
    "model_type": "ministral3",
    **text(5120, 16384, 32, 8, 131072, head_dim=128),
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
        "llama_4_scaling_beta": 0.1,
    },
}  # fmt: skip
QWEN3_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
QWEN3_5_EXPERTS = {
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512
}  # fmt: skip

# One layer of each kind, since all of a kind are alike.
SHAPES: Mapping[str, dict[str, Any]] = {
    "Qwen2.5-VL-7B": qwen(
        "qwen2_5_vl", text(3584, 18944, 28, 4, 152064), [16, 24, 24], hidden_size=1280, intermediate_size=3420,
        hidden_act="silu", window_size=112, fullatt_block_indexes=[0], out_hidden_size=3584,
    ),
    "Qwen3-VL-8B": qwen3(text(4096, 12288, 32, 8, 151936, head_dim=128)),
    "Qwen3-VL-30B-A3B": qwen3(text(2048, 6144, 32, 4, 151936, head_dim=128, **QWEN3_EXPERTS), "qwen3_vl_moe"),
    "Qwen3.5-27B": qwen3_5(text(5120, 17408, 24, 4, 151936), 48),
    "Qwen3.5-35B-A3B": qwen3_5(text(2048, 6144, 16, 2, 151936, **QWEN3_5_EXPERTS), 32, "qwen3_5_moe"),
    "DeepSeek-VL2-Small": deepseek(text(2048, 10944, 16, 16, 102400), 64, 1408),
    "Llama-3.2-11B-Vision": LLAMA_VISION,
    "Ministral-3-14B": MINISTRAL,
    "LLaVA-1.5-7B": llava(
        text(4096, 11008, 32, 32, 32064, model_type="llama"), hidden_size=1024, intermediate_size=4096,
        hidden_act="quick_gelu", model_type="clip_vision_model",
    ),
    "Qwen2-VL-2B": qwen(
        "qwen2_vl", text(1536, 8960, 12, 2, 151936), [16, 24, 24], embed_dim=1280, hidden_act="quick_gelu"
    ),
    "Qwen3-VL-2B": qwen3(
        text(2048, 6144, 16, 8, 151936, head_dim=128), hidden_size=1024, intermediate_size=4096
    ),
    "Qwen3.5-9B": qwen3_5(text(4096, 12288, 16, 4, 151936), 32),
    "DeepSeek-VL2": deepseek(
        text(2560, 12288, 32, 32, 102400), 72, 1536, scoring_func="sigmoid", topk_method="noaux_tc"
    ),
    "heads of 64": {"model_type": "qwen2", **text(896, 4864, 14, 2, 151936)},
    "heads of 72": {"model_type": "llama", **text(1152, 4304, 16, 16, 32000, head_dim=72)},
    "heads of 80": {"model_type": "llama", **text(2560, 10240, 32, 32, 51200, head_dim=80)},
}  # fmt: skip
SIMILAR = {"Qwen3-VL-2B", "Qwen3.5-9B", "DeepSeek-VL2", "heads of 64", "heads of 72", "heads of 80"}
"""Shapes whose tiles are no larger than others'."""


def launches(gpu: Gpu, shapes: Iterable[str], dtypes: Iterable[torch.dtype], *, fp8: bool = False) -> list[Variant]:
    """All that differ, in the order in which they are launched first. `fp8`: weights and the KV cache are in FP8."""
    found: dict[object, Variant] = {}
    for name, dtype in product(shapes, dtypes):
        for kernel, args, given in launched_by(partial(run, SHAPES[name], dtype, fp8), gpu):
            one = variant(name, kernel, args, given)
            found.setdefault((one.kernel, *one.types, *one.constants, *sorted(one.options.items())), one)
    return list(found.values())


def launched_by(host: Callable[[], None], gpu: Gpu) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The kernels that the host code launches on this GPU, with their arguments by position and by name."""
    found = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        found.append((kernel, args, given))

    with (
        patch.object(device, "gpu_of", lambda _: gpu),
        patch.object(pdl, "gpu_of", lambda _: gpu),
        patch.object(KernelChoice, "__call__", lambda *_: False),
        patch.object(JITFunction, "run", note),
        patch.object(F, "rms_norm", _shape_of_norm),
        torch.inference_mode(),
    ):
        host()
    return found


def _shape_of_norm(x: Tensor, *_: Any) -> Tensor:
    """What PyTorch finds for a `meta` tensor, without the dozens of operations in which it does."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def variant(name: str, kernel: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Variant:
    names = [param.name for param in kernel.params]
    values = {param.name: param.default for param in kernel.params if param.has_default}
    values |= dict(zip(names, args, strict=False))
    values |= {name: given[name] for name in names if name in given}
    constants = [values[param.name] for param in kernel.params if param.is_constexpr]
    types = [type_of(param, values[param.name]) for param in kernel.params if not param.is_constexpr]
    options = {name: value for name, value in given.items() if name not in names and value is not None}
    module = kernel.fn.__module__.removeprefix("saccade.kernels.")
    return Variant(name, f"{module}:{kernel.fn.__name__}", types, constants, options)


def type_of(param: Any, value: Any) -> str:
    """As Triton specializes an argument."""
    if value is None:
        return NONE
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{NAMES[value.base.dtype]}{value.block_shape}>"
    if isinstance(value, Tensor):
        return f"*{NAMES[value.dtype]}" + (":1" if value.data_ptr() % 16 else "")
    if value == 1 and not param.do_not_specialize:
        return ONE
    return ("i32" if -(2**31) <= value < 2**31 else "i64") + ("" if value % 16 else ":16")


def run(shape: dict[str, Any], dtype: torch.dtype, fp8: bool = False) -> None:
    """Steps of many sizes, and an image."""
    config = model_config(shape)
    params = Parameters(dtype, META, quantized=Fp8Weights(in_blocks=True) if fp8 else None)
    model = family_class(config)(ModelParts(config, params, {}, FusedVision()))
    kv = PagedKV.allocate(config.text, MAX_BLOCKS, BLOCK_SIZE, FP8 if fp8 else dtype, META)
    sizes = {"block_size": BLOCK_SIZE, "max_requests": MAX_REQUESTS, "max_blocks": MAX_BLOCKS}
    linear = config.text.linear
    forward = CudaForward(
        model.decoder, kv, axes=3 if config.text.mrope_section else 1, **sizes,
        states=RecurrentStates(linear, MAX_REQUESTS, 0, dtype, META) if linear else None,
        slab=new_slab(config.text, MAX_SLOTS, dtype, META),
    )  # fmt: skip
    decode(forward)
    prefill(forward)
    mix(forward)
    offload(kv)
    if config.vision is not None and config.model_type not in OWN_TOWERS:
        encode(model, config.vision.patch_size)


def decode(forward: CudaForward) -> None:
    """Greedy and sampled, with and without images to attend to."""
    graphs = forward._decode_graphs
    for requests in DECODED:
        rows = forward._trial_rows(requests)
        found = graphs.run(rows)
        if graphs.kinds.is_optional:
            graphs.run(rows._replace(states=rows.states + 1))
    which = torch.empty(MAX_REQUESTS, dtype=torch.int64, device=META)
    params = torch.empty(5, MAX_REQUESTS, dtype=torch.float64, device=META)
    sample_rows(found.logits, which, params, found.tokens, TokenSink(forward._tables.last_tokens, which))


def prefill(forward: CudaForward) -> None:
    """As CUDA graphs are captured, with short contexts and others, and as longer steps are launched."""
    graphs = forward._prefill_graphs
    for tokens in PREFILLED:
        graphs.run([forward._trial_window(tokens, samples=True)])
        for is_short in {False, graphs.attention.is_short(tokens, [tokens])}:
            for optional in (False, True) if graphs.kinds.is_optional else (False,):
                sizes = graphs.graph_sizes(tokens, is_short=is_short, optional=optional)
                embeds = torch.empty(tokens, graphs.width, dtype=forward._decoder.decoder.table.dtype, device=META)
                metadata = graphs.new_metadata((), sizes)
                x, gemms = graphs._layers(embeds, metadata, sizes)
                gemms.normed(x, forward._decoder.decoder, Parts.of(metadata, sizes).last)


def mix(forward: CudaForward) -> None:
    graphs = forward._mixed_graphs
    for size in mixed_sizes(MAX_MIXED_ROWS, MAX_REQUESTS):
        graphs._forward(size, graphs.prepare(size))


def offload(kv: PagedKV) -> None:
    """KV blocks to host memory and back."""
    blocks = torch.empty(8, dtype=torch.int64, device=META)
    cache = _by_block(kv.k, BLOCK_SIZE)
    rows = torch.empty(8, len(cache) * cache.shape[2], dtype=torch.int64, device=META)
    for to_cache in (False, True):
        copy_blocks(cache, rows, blocks, to_cache=to_cache)


def encode(model: Any, patch_size: int) -> None:
    side = SIDE * patch_size
    grid = Grid(1, SIDE, SIDE)
    image = torch.empty(640, 480, 3, dtype=torch.uint8, device=META)
    patches = model.prepare(image, Geometry(Size(side, side), grid, grid.patches, grid.patches))
    for _ in model.encode(patches, [grid]):
        pass
