"""Cost formulas: bytes of weights, KV cache, embeddings and activations; KV blocks; FLOPs. Pure functions.

How an image's size becomes tokens is in `processor/families/`; everything that follows from tokens is here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from saccade.checkpoint.config import LinearConfig, MLAConfig, ModelConfig, TextConfig, VisionConfig
from saccade.checkpoint.quantization import Quantization, stays_fp8
from saccade.types.media import Size

GIB = 1 << 30
HOST_PASSES = 4  # a CPU may take longer to prepare an image than its tower to encode it
FP8 = "float8_e4m3fn"
MIN_GPU_JPEG_PIXELS = 2_000_000  # smaller ones take one core about as long as nvJPEG takes for a photo
MAX_GPU_JPEG_PIXELS = 50_000_000  # of one JPEG, and of all that nvJPEG has decoded and are not resized yet
_INT4_COLUMNS = 128  # that kernels read at once
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def dtype_bytes(dtype: str) -> int:
    if dtype not in _DTYPE_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPE_BYTES)}, not {dtype!r}")
    return _DTYPE_BYTES[dtype]


def kv_dtype(option: str, dtype: str) -> str:
    """The dtype of stored keys and values: `Options.kv_cache_dtype` of a model of this dtype."""
    return FP8 if option.startswith("fp8") else dtype


def kept_tokens(tokens: int, pruning: float) -> int:
    """Tokens of a frame group after pruning this share, rounded up. In decimal: 0.29 of 100 is 29."""
    return tokens - math.floor(Fraction(repr(float(pruning))) * tokens)


def blocks_for(tokens: int, block_size: int = 16) -> int:
    """KV blocks that hold this many tokens."""
    return -(-tokens // block_size)


def max_chars(tokens: int) -> int:
    """An upper bound on the characters of so many tokens, to refuse early what cannot fit."""
    return 32 * tokens


def kv_bytes_per_token_layer(num_kv_heads: int, head_dim: int, dtype: str) -> int:
    """Keys and values of one token in one layer, in a `kv_dtype`."""
    return 2 * num_kv_heads * head_dim * (1 if dtype == FP8 else dtype_bytes(dtype))


def kv_bytes_per_token(text: TextConfig, dtype: str) -> int:
    both = kv_bytes_per_token_layer(text.num_kv_heads, text.head_dim, dtype)
    return text.num_kv_layers * (both // 2 if text.mla else both)  # MLA's latent vector is key and value


def kv_bytes_per_block(text: TextConfig, dtype: str, block_size: int = 16) -> int:
    return block_size * kv_bytes_per_token(text, dtype)


def kv_blocks_in(budget_bytes: float, text: TextConfig, dtype: str, block_size: int = 16) -> int:
    return int(budget_bytes // kv_bytes_per_block(text, dtype, block_size))


def concurrent_requests(budget_bytes: float, request_bytes: float) -> int:
    """How many requests of this KV size fit, rounded."""
    return round(budget_bytes / request_bytes)


def embedding_bytes_per_slot(text: TextConfig, dtype: str) -> int:
    """One cached image embedding, with its deepstack vectors."""
    return text.embedding_size * dtype_bytes(dtype)


def embedding_slots_in(budget_bytes: float, text: TextConfig, dtype: str) -> int:
    return int(budget_bytes // embedding_bytes_per_slot(text, dtype))


def patches_of(slots: int, vision: VisionConfig, text: TextConfig) -> int:
    """About how many patches become so many slots."""
    return slots * vision.spatial_merge_size**2 // max(1, cross_slots_per_state(text))


def cross_slots_per_state(text: TextConfig) -> int:
    """Encoder cache slots of one cross-attended state: its keys and values in all cross-attention layers."""
    values = 2 * text.num_cross_layers * text.num_kv_heads * text.head_dim
    return -(-values // text.embedding_size)


def passes_ahead(*, prepares_on_host: bool) -> int:
    """Of a tower: whose images may wait, decoded or prepared, while another pass runs."""
    return HOST_PASSES if prepares_on_host else 2


def prepared_bytes_per_patch(vision: VisionConfig, dtype: str) -> int:
    """A preprocessed patch that waits for the tower."""
    return vision.patch_dim * dtype_bytes(dtype)


def prepare_bytes(source: Size, resized: Size) -> int:
    """Preprocessing of an image on a device: the original, with one axis resized, with both."""
    between = max(resized.width * source.height, source.width * resized.height)
    return 3 * (source.width * source.height + between + resized.width * resized.height)


def gpu_jpeg_bytes() -> int:
    """Pixels that nvJPEG has decoded, as stored and turned upright."""
    return 2 * 3 * MAX_GPU_JPEG_PIXELS


def encode_bytes_per_patch(vision: VisionConfig, text: TextConfig, dtype: str) -> int:
    """Peak memory of a patch while fused kernels encode it, including the packed input.

    packing       the images' patches, and all of them in one tensor
    attention     x, its norm or the attention output, q, k, v
    MLP           x, its norm, the intermediate tensor (gated: gate and up); out of place: twice
    merger        x, its norm or the activation, the hidden tensor; then embeddings in place of one of them
    deepstack     outputs kept until the last layer, including that layer's own
    """
    hidden = vision.hidden_size
    wide = vision.intermediate_size
    is_in_place = vision.hidden_act in ("quick_gelu", "gelu_pytorch_tanh")
    mlp = 2 * hidden + wide if is_in_place else hidden + 2 * wide
    if vision.is_gated:
        mlp = 2 * hidden + 2 * wide
    merger = 2 * hidden + max(hidden, text.hidden_size // vision.spatial_merge_size**2)
    features = text.embedding_size // vision.spatial_merge_size**2 if vision.deepstack_layers else 0
    values = max(2 * vision.patch_dim, vision.patch_dim + hidden, max(5 * hidden, mlp, merger) + features)
    angles = 4 * hidden // vision.num_heads  # cosine and sine of a head's pairs, in float32
    return values * dtype_bytes(dtype) + angles


def state_bytes_per_request(text: TextConfig, dtype: str) -> int:
    """Recurrent state of a request in linear attention layers: float32 state and convolution inputs."""
    if text.linear is None:
        return 0
    linear = text.linear
    memory = linear.value_heads * linear.key_dim * linear.value_dim * dtype_bytes("float32")
    return len(linear.layers) * (memory + linear.channels * (linear.kernel - 1) * dtype_bytes(dtype))


def prompt_bytes_per_token(text: TextConfig, dtype: str) -> int:
    """Peak activations of a prefill token, in a layer's MLP while the attention tensors are still alive.

    the input row; q, k, v and the attention output; the residual before and after; its norm; gate and up, and
    their elementwise result; RoPE cos and sin. With MoE: its row for each of its experts, ordered by expert
    and by token, and one expert that all tokens may go to
    """
    attention = 2 * (text.num_heads + text.num_kv_heads) * text.head_dim
    mlp = 3 * text.hidden_size + 3 * text.intermediate_size
    if text.experts:
        rows = text.experts.per_token * text.hidden_size
        routed = max(2 * rows, rows + 2 * text.experts.width, text.hidden_size + 2 * text.experts.shared)
        mlp = max(mlp, 3 * text.hidden_size + routed)
    return (text.embedding_size + attention + mlp + 2 * text.head_dim) * dtype_bytes(dtype)


def fused_prompt_bytes_per_token(text: TextConfig, dtype: str) -> int:
    """The same for fused kernels, where one workspace serves the widest GEMMs.

    the input row; q, k, v or gate and up; the residual before a layer and after its attention, each with a
    split-K partial, and a norm or the attention output; RoPE cos and sin
    """
    output = text.num_heads * text.head_dim
    attention = output + 2 * text.num_kv_heads * text.head_dim
    if text.mla:
        output = text.num_heads * text.mla.v_head_dim
        attention = _latent_values(text.num_heads, text.mla)
    hidden = text.hidden_size
    workspace = max(attention, 2 * text.intermediate_size)
    if text.experts:  # of each of its experts a row between the two GEMMs, and one of outputs
        slots = text.experts.per_token + max(1, text.experts.stacked_shared)
        workspace += slots * (text.experts.width + hidden) + 2 * text.experts.shared
    if text.linear:
        workspace = max(workspace, text.linear.channels + 2 * text.linear.value_heads * text.linear.value_dim)
    residual = 4 * hidden + max(hidden, output)
    per_token = (text.embedding_size + workspace + residual + 2 * text.head_dim) * dtype_bytes(dtype)
    return per_token + (_chunk_bytes(text.linear, dtype) // _CHUNK if text.linear else 0)


def expanded_bytes_per_token(text: TextConfig, dtype: str) -> int:
    """A token of a context whose keys and values MLA expands for every head. Zero without MLA."""
    return _expanded_values(text.num_heads, text.mla) * dtype_bytes(dtype) if text.mla else 0


def _latent_values(heads: int, mla: MLAConfig) -> int:
    """Queries and the cached vector; queries and outputs as wide as the latent, or an expanded context."""
    cached = mla.kv_lora_rank + mla.qk_rope_head_dim
    projected = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim) + cached
    return projected + max(heads * (cached + mla.kv_lora_rank), _expanded_values(heads, mla))


def _expanded_values(heads: int, mla: MLAConfig) -> int:
    return heads * (mla.qk_nope_head_dim + mla.v_head_dim) + mla.kv_lora_rank + mla.qk_rope_head_dim


_CHUNK = 64  # tokens that a gated delta net computes together


def _chunk_bytes(linear: LinearConfig, dtype: str) -> int:
    """What the launches of a gated delta net leave each other: q, k; beta v, d; inverse and state."""
    keys = 2 * linear.key_heads * _CHUNK * linear.key_dim
    values = linear.value_heads * (
        2 * linear.value_dim * _CHUNK + _CHUNK**2 + linear.value_dim * linear.key_dim
    )
    return (keys + values) * dtype_bytes(dtype) + 12 * linear.value_heads * _CHUNK


def sampling_bytes_per_row(text: TextConfig) -> int:
    """Sampling one row with all options: float64 logits, sorted indices, sums, penalty counts. Measured."""
    return 75 * text.vocab_size


def decoder_layer_params(text: TextConfig) -> int:
    """Matrix parameters of one dense decoder layer; norms and biases are negligible."""
    return _attention_params(text) + 3 * text.hidden_size * text.intermediate_size


def _attention_params(text: TextConfig) -> int:
    q = text.hidden_size * text.num_heads * text.head_dim
    kv = 2 * text.hidden_size * text.num_kv_heads * text.head_dim
    return _latent_params(text, text.mla) if text.mla else 2 * q + kv


def _latent_params(text: TextConfig, mla: MLAConfig) -> int:
    """MLA projections: queries, down to the latent vector, up to keys and values, output."""
    hidden = text.hidden_size
    rank = mla.q_lora_rank
    queries = text.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    q_proj = rank * (hidden + queries) if rank else hidden * queries
    kv_down = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    kv_up = mla.kv_lora_rank * text.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return q_proj + kv_down + kv_up + text.num_heads * mla.v_head_dim * hidden


def decoder_params(text: TextConfig) -> int:
    """All decoder layers plus the embedding table and, unless it is tied, the output projection."""
    tables = 1 if text.tie_word_embeddings else 2
    return layer_params(text) + tables * text.vocab_size * text.hidden_size


def layer_params(text: TextConfig) -> int:
    """All decoder layers, with all experts."""
    return _all_mixer_params(text) + _all_mlp_params(text, text.experts.total_width if text.experts else 0)


def active_layer_params(text: TextConfig) -> int:
    """Parameters of all layers that one token uses: without the experts it is not routed to."""
    return _all_mixer_params(text) + _all_mlp_params(text, text.experts.active_width if text.experts else 0)


def dense_params(text: TextConfig) -> int:
    """Matrix parameters of all layers without experts."""
    return _all_mixer_params(text) + _all_mlp_params(text, 0)


def read_expert_params(text: TextConfig, tokens: int) -> int:
    """Parameters of the experts that a pass over so many tokens reads, if all are equally likely."""
    moe = text.experts
    if moe is None:
        return 0
    missed = (1 - moe.per_token / moe.count) ** tokens
    width = round(moe.count * (1 - missed)) * moe.width + moe.shared
    return len(moe.layers) * 3 * text.hidden_size * width


def _all_mixer_params(text: TextConfig) -> int:
    """Attention and linear attention of all layers."""
    if text.linear is None:
        return text.num_layers * _attention_params(text)
    linear = text.linear
    values = linear.value_heads * linear.value_dim
    gate = text.hidden_size * text.num_heads * text.head_dim  # such models have gated attention, too
    mixer = text.hidden_size * (linear.channels + 2 * values + 2 * linear.value_heads)
    return text.num_kv_layers * (_attention_params(text) + gate) + len(linear.layers) * mixer


def _all_mlp_params(text: TextConfig, width: int) -> int:
    """`width`: intermediate size of the experts that count, together."""
    dense = 3 * text.hidden_size * text.intermediate_size
    moe = text.experts
    if moe is None:
        return text.num_layers * dense
    routed = text.hidden_size * (3 * width + moe.count + moe.shared_gate)
    return (text.num_layers - len(moe.layers)) * dense + len(moe.layers) * routed


def encoder_layer_params(vision: VisionConfig) -> int:
    mlp_matrices = 3 if vision.is_gated else 2
    return 4 * vision.hidden_size**2 + mlp_matrices * vision.hidden_size * vision.intermediate_size


def encoder_params(vision: VisionConfig, text: TextConfig) -> int:
    """Vision layers, patch embedding and the projections to the decoder's width."""
    layers = vision.num_layers * encoder_layer_params(vision)
    return layers + vision.patch_dim * vision.hidden_size + projector_params(vision, text)


def projector_params(vision: VisionConfig, text: TextConfig) -> int:
    """The projector, and one more for each deepstack layer."""
    merged = vision.hidden_size * vision.spatial_merge_size**2
    widths = (merged, *(vision.projector or (merged,)), text.hidden_size)
    return (1 + len(vision.deepstack_layers)) * sum(inputs * outputs for inputs, outputs in pairwise(widths))


class Int4Bytes(NamedTuple):
    """What weights of the decoder's layers take that stay in INT4; 0: none does."""

    weight: float = 0.0
    experts: bool = True  # those of experts stay so, too

    def __bool__(self) -> bool:
        return self.weight > 0


NO_INT4 = Int4Bytes()


def weight_bytes(model: ModelConfig, dtype: str, *, fp8: int = 0, int4: Int4Bytes = NO_INT4) -> int:
    """`fp8`: parameters that are in FP8."""
    vision = encoder_params(model.vision, model.text) if model.vision else 0
    saved = saved_bytes(model.text, dtype, fp8=fp8, int4=int4)
    return (decoder_params(model.text) + vision) * dtype_bytes(dtype) - saved


def saved_bytes(text: TextConfig, dtype: str, *, fp8: int, int4: Int4Bytes) -> int:
    """By weights that stay quantised."""
    if int4:
        return int(sum(_int4_matrices(text, int4.experts)) * (dtype_bytes(dtype) - int4.weight))
    return fp8 * (dtype_bytes(dtype) - 1)


def fp8_params_of(model: ModelConfig, quantization: Quantization | None, option: str | None) -> int:
    """Where FP8 is multiplied: a checkpoint stores it, or the option `quantization` makes it."""
    in_blocks = False
    is_fp8 = option == "fp8"
    if quantization is not None:
        in_blocks = quantization.has_blocks
        is_fp8 |= quantization.becomes_fp8
    if not is_fp8:
        return 0
    return fp8_params(_bridged_text(model, in_blocks=in_blocks), in_blocks=in_blocks)


def _bridged_text(model: ModelConfig, *, in_blocks: bool) -> TextConfig:
    """Of a bridged model experts stay quantised where both of their weights can, and shared ones never."""
    text = model.text
    if not model.is_bridged or text.experts is None:
        return text
    hidden, width = text.hidden_size, text.experts.width
    sizes = (((width, width), hidden), ((hidden,), width))
    stay = all(stays_fp8(parts, inputs, in_blocks=in_blocks) for parts, inputs in sizes)
    count = text.experts.count if stay else 0
    return replace(text, experts=replace(text.experts, shared=0, count=count))


def fp8_params(text: TextConfig, *, in_blocks: bool) -> int:
    """Those of the decoder's layers that are in FP8. In blocks a delta net's gates, for one, are not."""
    gemms = [gemm for gemm in _gemms(text) if stays_fp8(gemm.parts, gemm.inputs, in_blocks=in_blocks)]
    return sum(gemm.times * gemm.inputs * (gemm.outputs or sum(gemm.parts)) for gemm in gemms)


class _LinearShape(NamedTuple):
    times: int  # in all layers
    inputs: int
    parts: tuple[int, ...]  # rows of the tensors that it is stored as
    outputs: int = 0  # where they are not the sum of the parts


def _gemms(text: TextConfig) -> Iterator[_LinearShape]:
    """Of the decoder's layers. Routers and MLA's expansion are none."""
    hidden, wide, moe = text.hidden_size, text.intermediate_size, text.experts
    dense = text.num_layers - (len(moe.layers) if moe else 0)
    mlps = [(dense, wide)]
    if moe:
        mlps += [(len(moe.layers) * (moe.count + moe.stacked_shared), moe.width)]
        mlps += [(len(moe.layers), 0 if moe.stacked_shared else moe.shared)]
    for count, width in mlps:
        yield _LinearShape(count, hidden, (width, width))
        yield _LinearShape(count, width, (hidden,))
    yield from _latent_gemms(text, text.mla) if text.mla else _attention_gemms(text)


def _attention_gemms(text: TextConfig) -> Iterator[_LinearShape]:
    hidden, layers, crossing = text.hidden_size, text.num_kv_layers, text.num_cross_layers
    q, kv = text.num_heads * text.head_dim, text.num_kv_heads * text.head_dim
    yield _LinearShape(layers + crossing, q, (hidden,))
    yield _LinearShape(crossing, hidden, (q,))
    yield _LinearShape(crossing, hidden, (kv, kv))
    if text.linear is None:
        yield _LinearShape(layers, hidden, (q, kv, kv))
        return
    linear = text.linear
    values = linear.value_heads * linear.value_dim
    yield _LinearShape(layers, hidden, (text.head_dim, kv, kv), 2 * (q + kv))  # query and gate, head by head
    yield _LinearShape(len(linear.layers), hidden, (linear.channels, values))
    yield _LinearShape(len(linear.layers), hidden, (linear.value_heads, linear.value_heads))
    yield _LinearShape(len(linear.layers), values, (hidden,))


def _latent_gemms(text: TextConfig, mla: MLAConfig) -> Iterator[_LinearShape]:
    queries = text.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    rank = mla.q_lora_rank or 0
    yield _LinearShape(text.num_layers, text.hidden_size, (rank or queries, text.head_dim))
    yield _LinearShape(text.num_layers, rank, (queries,))
    yield _LinearShape(text.num_layers, text.num_heads * mla.v_head_dim, (text.hidden_size,))


def fp8_input_bytes_per_token(text: TextConfig) -> int:
    """The widest input of a GEMM in FP8, which is quantised as well."""
    experts = text.experts.active_width if text.experts else 0
    return max(text.hidden_size, text.intermediate_size, text.num_heads * text.head_dim, experts)


def expert_scratch_bytes(model: ModelConfig, dtype: str) -> int:
    """Transformers' layers read a layer's experts dequantised."""
    moe = model.text.experts
    if moe is None or not model.is_bridged:
        return 0
    return 3 * moe.count * moe.width * model.text.hidden_size * dtype_bytes(dtype)


def int4_scratch_bytes(text: TextConfig, dtype: str) -> int:
    """The largest projection, unpacked for many rows."""
    queries = text.num_heads * text.head_dim
    both = queries + 2 * text.num_kv_heads * text.head_dim
    return text.hidden_size * max(both, 2 * text.intermediate_size) * dtype_bytes(dtype)


def _int4_matrices(text: TextConfig, has_experts: bool) -> Iterator[int]:
    """Parameters of those that stay in INT4: attention, MLPs and routed experts, of widths that kernels read.

    Shared experts and recurrent layers are often stored as they were, so they do not count.
    """
    hidden, wide, queries = text.hidden_size, text.intermediate_size, text.num_heads * text.head_dim
    moe = text.experts
    mlps = text.num_layers - (len(moe.layers) if moe else 0)
    mixers = 0 if text.mla or text.linear else text.num_kv_layers
    keys = text.num_kv_heads * text.head_dim
    shapes = [
        (mixers, hidden, queries + 2 * keys),
        (mixers, queries, hidden),
        (mlps, hidden, 2 * wide),
        (mlps, wide, hidden),
    ]
    if moe and has_experts:
        routed = len(moe.layers) * moe.count
        shapes += [(routed, hidden, 2 * moe.width), (routed, moe.width, hidden)]
    for layers, inputs, outputs in shapes:
        if inputs % _INT4_COLUMNS == 0:
            yield layers * inputs * outputs


def prefill_flops(text: TextConfig, new_tokens: int, context: int = 0) -> int:
    """Multiply-adds (x 2) to compute `new_tokens` after `context` tokens, logits of the last one included."""
    matrices = 2 * new_tokens * active_layer_params(text)
    pairs = new_tokens * context + new_tokens * (new_tokens + 1) // 2
    attention = 4 * pairs * text.num_kv_layers * text.num_heads * text.head_dim
    return matrices + attention + 2 * text.vocab_size * text.hidden_size


def encode_flops(vision: VisionConfig, text: TextConfig, patches: int) -> int:
    """One image through the tower and the projector."""
    params = vision.num_layers * encoder_layer_params(vision) + vision.patch_dim * vision.hidden_size
    attention = 4 * patches * attended_patches(vision, patches) * vision.hidden_size
    tokens = patches // vision.spatial_merge_size**2
    return 2 * patches * params + attention + 2 * tokens * projector_params(vision, text)


def attended_patches(vision: VisionConfig, patches: int) -> int:
    """Patches that one patch attends to, summed over the layers; windows count as full."""
    if vision.window_tokens is None:
        return patches * vision.num_layers
    window = (vision.window_tokens * vision.spatial_merge_size) ** 2
    full = len(vision.full_layers)
    return patches * full + min(window, patches) * (vision.num_layers - full)
