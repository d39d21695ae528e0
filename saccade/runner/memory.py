"""Sizes everything once, before weights are loaded: context, KV blocks, encoder budget and cache.

Each automatic value comes with the reason it was chosen; a setting that cannot work is refused with values.
Imports no torch: an engine (`device_memory`) and `saccade plan` use the same arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from saccade import costs
from saccade.checkpoint.config import ModelConfig
from saccade.errors import ConfigError
from saccade.options.engine import Options, SchedulerConfig
from saccade.runner.cuda.graph_sizes import (
    GRAPH_STRETCHES,
    GRAPH_TOKENS,
    GRAPH_WINDOWS,
    MAX_EXPANDED,
    MAX_MIXED_ROWS,
    mixed_sizes,
)
from saccade.runner.cuda.staging_sizes import IN_BUFFERS, OUT_BUFFERS, staging_blocks
from saccade.types.media import Geometry, Size
from saccade.vision_graph_sizes import largest_pass

_CPU_KV_GIB = 4.0  # automatic maximum on a CPU
_CPU_KV_SHARE = 0.3  # of the memory that is free once the weights are loaded
_EMBEDDING_CACHE_GIB = 0.5
_CPU_CACHE_SHARE = 0.15  # of the free memory, if that is less
_MIN_CHECKPOINTS = 8  # of recurrent states in the prefix cache
_MAX_CHECKPOINTS = 32
_CROSS_ATTENDED = 8  # images that the cache holds at least, where requests pin them until they finish
_LIBRARY_BYTES = 32 << 20  # cuBLAS workspace, for each stream it is called on
_SEGMENT_BYTES = 20 << 20  # that the allocator takes for graphs at a time, so about as much stays unused
_AS_ASKED = (  # options that the scheduler takes as they are
    "max_num_batched_tokens",
    "max_num_seqs",
    "block_size",
    "enable_prefix_caching",
    "disable_chunked_mm_input",
    "encode_layers_per_step",
    "max_waiting",
)
_BRIDGED_WORK = 2  # Transformers' layers write what kernels keep in registers
_BRIDGED_GRAPHS = 5  # and in sizes that the memory of graphs holds with gaps
SPARE_BYTES = 1 << 30  # of a GPU: the driver's memory for graphs and kernels, library workspaces, rounding


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes by use. Nothing else is allocated once the engine runs; a CPU plans only the first three."""

    weights: int
    kv: int
    embeddings: int  # resident ones
    work: int = 0  # activations: a full encoder pass, plus prefill without a graph or sampling
    images: int = 0  # before the tower: pixels, and patches that wait
    graphs: int = 0  # inputs, outputs and activations of CUDA graphs
    spare: int = 0
    states: int = 0  # of recurrent layers, for requests and checkpoints
    staging: int = 0  # of KV blocks on their way to host memory and back
    jpegs: int = 0  # pixels that nvJPEG has decoded

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class MemorySizes:
    scheduler: SchedulerConfig
    reasons: tuple[str, ...]  # one line per choice, for the start-up log
    parts: MemoryParts


class Machine(NamedTuple):
    """What memory is planned for."""

    device: str  # "cuda" or "cpu"
    dtype: str
    free_bytes: int  # that the engine may take
    host_free_bytes: int | None = None  # for KV blocks in host memory; None: what a CPU has left
    is_native: bool = True  # the model runs through code of our own
    packed_bytes: int = 0  # of weights that are packed beside their originals
    fp8_params: int = 0  # weights that are in FP8
    int4: costs.Int4Bytes = costs.NO_INT4


class Encoders(NamedTuple):
    """Encoder workers of the server that an engine belongs to."""

    number: int = 0
    bytes_beside: int = 0  # device memory of those on the engine's own GPU


def size_memory(
    options: Options,
    model: ModelConfig,
    largest: Geometry | None,
    machine: Machine,
    memory_parts: int = 1,
    encoders: Encoders = Encoders(),  # noqa: B008 (immutable)
) -> MemorySizes:
    """`largest` is the most expensive image the limits allow."""
    dtype = machine.dtype
    free = machine.free_bytes // memory_parts  # engines on one CPU share it, and the automatic cache sizes
    slots, why_cache, keep_idle = _encoder_slots(options, model, machine, largest, memory_parts)
    _check_kv_dtype(options, model, dtype)
    kv_dtype = costs.kv_dtype(options.kv_cache_dtype, dtype)
    parts = _beside_kv(options, model, largest, slots, machine, encoders)
    blocks, why_kv = _kv_blocks(options, model, kv_dtype, free - parts.total, machine.device, memory_parts)
    parts = replace(parts, kv=blocks * costs.kv_bytes_per_block(model.text, kv_dtype, options.block_size))
    host_free = free - parts.total if machine.host_free_bytes is None else machine.host_free_bytes
    host_blocks, why_offload = _host_blocks(options, model, kv_dtype, host_free)
    length, why_length = _model_len(options, model, blocks)
    biggest = _biggest(largest, length)
    budget, why_budget = _encoder_budget(options, biggest)
    min_slots = biggest if keep_idle else max(budget, biggest * _pinned_images(options, model))
    slots, why_cache = _hold_largest(options, slots, why_cache, min_slots)
    scheduler = SchedulerConfig(
        **{name: getattr(options, name) for name in _AS_ASKED},
        max_model_len=length,
        num_blocks=blocks,
        encoder_budget=budget,
        steps_ahead=costs.HOST_PASSES if model.is_bridged else 1,
        encoder_cache_slots=slots,
        keep_idle_embeddings=keep_idle,
        state_rows=_num_checkpoints(options) if model.text.linear else None,
        host_blocks=host_blocks,
        slot_bytes=costs.embedding_bytes_per_slot(model.text, dtype),
        num_encoders=encoders.number,
    )
    parts = replace(parts, embeddings=slots * scheduler.slot_bytes)
    reasons = (
        why_length,
        why_kv,
        *why_offload,
        *([why_budget] if model.vision else []),
        why_cache,
        *_why_states(options, model, parts),
        *(_why_parts(parts) if parts.graphs else []),
    )
    return MemorySizes(scheduler, reasons, parts)


def _beside_kv(
    options: Options,
    model: ModelConfig,
    largest: Geometry | None,
    slots: int,
    machine: Machine,
    encoders: Encoders,
) -> MemoryParts:
    """All that has to fit beside the KV cache. The largest image counts whole, for any context."""
    dtype = machine.dtype
    weights = costs.weight_bytes(model, dtype, fp8=machine.fp8_params, int4=machine.int4)
    weights += machine.packed_bytes
    num_states = options.max_num_seqs + _num_checkpoints(options)
    states = num_states * costs.state_bytes_per_request(model.text, dtype)
    if machine.device != "cuda":
        return MemoryParts(weights, 0, 0, states=states)
    biggest = largest.slots if largest else 0
    restores = options.has_embedding_tiers or encoders.number > 0
    per_slot = costs.embedding_bytes_per_slot(model.text, dtype)
    per_token = costs.fused_prompt_bytes_per_token if machine.is_native else costs.prompt_bytes_per_token
    token_bytes = per_token(model.text, dtype)
    if machine.fp8_params:
        token_bytes += costs.fp8_input_bytes_per_token(model.text)
    scratch = costs.int4_scratch_bytes(model.text, dtype) if machine.int4 else 0
    if machine.fp8_params or (machine.int4 and machine.int4.experts):
        scratch += costs.expert_scratch_bytes(model, dtype)
    graphs = _graph_bytes(options, model, dtype, token_bytes)
    return MemoryParts(
        weights=weights,
        kv=0,
        embeddings=max(slots or budget_of(options, biggest), biggest) * per_slot,
        work=_work_bytes(options, model, dtype, largest, token_bytes) + scratch,
        images=image_bytes(options, model, dtype, largest, restores=restores),
        graphs=graphs + _cross_table_bytes(options, model, slots, biggest),
        spare=SPARE_BYTES,
        states=states,
        staging=_staging_bytes(options, model, costs.kv_dtype(options.kv_cache_dtype, dtype)),
        jpegs=jpeg_bytes(options, model),
    )


def pass_patches(options: Options, model: ModelConfig, largest: Geometry | None) -> int:
    """Patches of a full encoder pass. An image in tiles may have far more patches than embeddings."""
    assert model.vision is not None
    slots, patches = (largest.slots, largest.grid.patches) if largest else (0, 0)
    return max(costs.patches_of(budget_of(options, slots), model.vision, model.text), patches)


def budget_of(options: Options, biggest: int) -> int:
    """Embeddings encoded per step: a full step, and the largest image."""
    return options.encoder_budget or max(options.max_num_batched_tokens, biggest)


def _work_bytes(
    options: Options, model: ModelConfig, dtype: str, largest: Geometry | None, token_bytes: int
) -> int:
    """An encoder pass may pause between two layers while prefill or sampling runs."""
    prefill = options.max_num_batched_tokens * token_bytes * (_BRIDGED_WORK if model.is_bridged else 1)
    if model.text.mla:
        contexts = options.max_num_seqs * (options.max_model_len or model.text.max_position)
        prefill += min(contexts, MAX_EXPANDED) * costs.expanded_bytes_per_token(model.text, dtype)
    sampling = options.max_num_seqs * costs.sampling_bytes_per_row(model.text)
    if model.vision is None:
        return max(prefill, sampling)
    per_patch = costs.encode_bytes_per_patch(model.vision, model.text, dtype)
    return max(prefill, sampling) + pass_patches(options, model, largest) * per_patch


def image_bytes(
    options: Options, model: ModelConfig, dtype: str, largest: Geometry | None, *, restores: bool
) -> int:
    """One image at a time is resized; others wait, as patches or embeddings, while a pass runs.

    `restores`: embeddings also come from tiers or encoder workers.
    """
    if model.vision is None or largest is None:
        return 0
    # Squares: the intermediate of a resize depends only on both areas, since the aspect ratio is kept.
    source, resized = (math.isqrt(area) for area in (options.max_image_pixels, math.prod(largest.resized)))
    patches = pass_patches(options, model, largest)
    prepared = costs.prepared_bytes_per_patch(model.vision, dtype)
    slot_bytes = costs.embedding_bytes_per_slot(model.text, dtype)
    restored = -(-largest.slots * slot_bytes // largest.grid.patches) if restores else 0
    waiting = costs.passes_ahead(prepares_on_host=model.is_bridged) * max(prepared, restored)
    patch_bytes = patches * (prepared + waiting)
    return patch_bytes + costs.prepare_bytes(Size(source, source), Size(resized, resized))


def jpeg_bytes(options: Options, model: ModelConfig) -> int:
    return costs.gpu_jpeg_bytes() if options.gpu_jpeg and model.vision is not None else 0


def _graph_bytes(options: Options, model: ModelConfig, dtype: str, token_bytes: int) -> int:
    """All graphs share the memory of the largest; beside it inputs of mixed batches, logits, block tables.

    A formula, since it must be known before the KV cache is sized, and graphs are captured over the cache.
    What they really took is measured and shown beside this.
    """
    text = model.text
    rows = options.max_num_seqs + GRAPH_WINDOWS
    largest = next((n for n in GRAPH_TOKENS if n >= options.max_num_batched_tokens), GRAPH_TOKENS[-1])
    mixed = [sum(size) for size in mixed_sizes(options.max_num_batched_tokens, options.max_num_seqs)]
    embeds = MAX_MIXED_ROWS * text.embedding_size * costs.dtype_bytes(dtype)
    logits = rows * text.vocab_size * costs.dtype_bytes(dtype)
    length = options.max_model_len or text.max_position
    tables = 2 * rows * costs.blocks_for(length, options.block_size) * 4
    activations = max([largest, *mixed]) * token_bytes * (_BRIDGED_GRAPHS if model.is_bridged else 1)
    fixed = _LIBRARY_BYTES + _SEGMENT_BYTES
    return activations + fixed + embeds + logits + tables + tower_graph_bytes(model, dtype)


def _cross_table_bytes(options: Options, model: ModelConfig, slots: int, biggest: int) -> int:
    """Which states of images each request, and each stretch of a prefill pass, attends to."""
    if not model.text.num_cross_layers:
        return 0
    rows = options.max_num_seqs + 1 + GRAPH_STRETCHES
    attended = max(slots, budget_of(options, biggest) * _pinned_images(options, model))
    return rows * (attended // costs.cross_slots_per_state(model.text)) * 4


def tower_graph_bytes(model: ModelConfig, dtype: str) -> int:
    """CUDA graphs of the tower: all share the memory of the largest."""
    if model.vision is None:
        return 0
    per_patch = costs.encode_bytes_per_patch(model.vision, model.text, dtype)
    return largest_pass(model.vision) * per_patch + _LIBRARY_BYTES + _SEGMENT_BYTES


def _why_states(options: Options, model: ModelConfig, parts: MemoryParts) -> tuple[str, ...]:
    if model.text.linear is None:
        return ()
    return (
        f"states {parts.states / costs.GIB:.2f} GiB: of {len(model.text.linear.layers)} recurrent layers, "
        f"for each request and for {_num_checkpoints(options)} checkpoints of the prefix cache",
    )


def _num_checkpoints(options: Options) -> int:
    """Each is as large as a request's state: about as many as requests run at once."""
    if not options.enable_prefix_caching:
        return 0
    return max(_MIN_CHECKPOINTS, min(options.max_num_seqs, _MAX_CHECKPOINTS))


def _why_parts(parts: MemoryParts) -> tuple[str, ...]:
    sizes = (f"{field.name} {getattr(parts, field.name) / costs.GIB:.2f}" for field in fields(parts))
    return (f"{parts.total / costs.GIB:.2f} GiB of the device in all: {', '.join(sizes)}",)


def _check_kv_dtype(options: Options, model: ModelConfig, dtype: str) -> None:
    name = options.kv_cache_dtype
    if name in {"bfloat16", "float16"} - {dtype}:
        raise ConfigError(
            f"kv_cache_dtype={name} cannot be used: the model computes in {dtype}, and keys and values are "
            f"stored as that or as fp8; give --dtype {name}, or leave out --kv-cache-dtype"
        )
    if costs.kv_dtype(name, dtype) == costs.FP8 and model.text.mla:
        raise ConfigError(
            f"kv_cache_dtype={name} cannot be used with {model.model_type}: it caches the latent vectors of "
            "MLA, which are stored in the model's dtype; leave out --kv-cache-dtype"
        )


def _kv_blocks(
    options: Options, model: ModelConfig, kv_dtype: str, free: int, device: str, memory_parts: int
) -> tuple[int, str]:
    per_block = costs.kv_bytes_per_block(model.text, kv_dtype, options.block_size)
    if options.kv_cache_gb is not None:
        size = options.kv_cache_gb * costs.GIB
        why = "as asked"
        if size > free:
            raise _kv_does_not_fit(options, free, device)
    elif device == "cpu":
        length = options.max_model_len or model.text.max_context
        useful = (options.max_num_seqs * length // options.block_size + 1) * per_block
        max_gib = _CPU_KV_GIB / memory_parts
        size = min(max_gib * costs.GIB, free * _CPU_KV_SHARE, useful)
        share = f"{_CPU_KV_SHARE:.0%} of the memory left beside the weights"
        why = f"{share}, at most {max_gib:.3g} GiB on a CPU"
        if size == useful:
            why = f"what {options.max_num_seqs} requests of full length need"
    else:
        size = free
        why = "what gpu_memory_utilization leaves beside weights, embeddings and work"
    blocks = int(size // per_block)
    if blocks < 1:
        raise ConfigError(
            f"there is no room for KV blocks: {size / costs.GIB:.2f} GiB are left and one block of "
            f"{options.block_size} tokens takes {per_block} bytes; free memory, or set --kv-cache-gb"
        )
    size_text = f"{blocks * per_block / costs.GIB:.2f} GiB"
    if kv_dtype == costs.FP8:
        size_text += " in FP8"
    return blocks, f"KV cache {blocks} blocks = {blocks * options.block_size} tokens, {size_text}: {why}"


def _kv_does_not_fit(options: Options, free: int, device: str) -> ConfigError:
    gib = free / costs.GIB
    problem = f"kv_cache_gb={options.kv_cache_gb} does not fit"
    if device == "cuda":
        share = f"gpu_memory_utilization={options.gpu_memory_utilization}"
        return ConfigError(
            f"{problem}: {share} leaves {max(gib, 0):.2f} GiB beside weights, embeddings and work; lower "
            "--kv-cache-gb or raise --gpu-memory-utilization"
        )
    if free < 0:
        return ConfigError(
            f"the model that config.json describes needs {-gib:.2f} GiB more than are free, "
            "without any KV cache; take a smaller one, or check config.json"
        )
    return ConfigError(f"{problem}: {gib:.2f} GiB of memory are free beside the weights; lower --kv-cache-gb")


def _host_blocks(
    options: Options, model: ModelConfig, kv_dtype: str, free_ram: int
) -> tuple[int, tuple[str, ...]]:
    """KV blocks in host memory, and a line that says so."""
    if not options.kv_offload_gb:
        return 0, ()
    setting = f"kv_offload_gb={options.kv_offload_gb}"
    if model.text.linear:
        raise ConfigError(
            f"{setting} cannot be used: recurrent layers need a state beside KV blocks, and only KV blocks "
            "go to host memory; leave out --kv-offload-gb"
        )
    per_block = costs.kv_bytes_per_block(model.text, kv_dtype, options.block_size)
    size = options.kv_offload_gb * costs.GIB
    if size > free_ram:
        free = f"{max(free_ram, 0) / costs.GIB:.2f} GiB of host memory are free"
        raise ConfigError(f"{setting} does not fit: {free}; lower --kv-offload-gb")
    blocks = int(size // per_block)
    if blocks < 1:
        raise ConfigError(f"{setting} holds no KV block of {per_block} bytes; raise --kv-offload-gb")
    tokens = blocks * options.block_size
    gib = blocks * per_block / costs.GIB
    return blocks, (f"KV offload {blocks} blocks = {tokens} tokens, {gib:.2f} GiB of host memory: as asked",)


def _staging_bytes(options: Options, model: ModelConfig, kv_dtype: str) -> int:
    if not options.kv_offload_gb:
        return 0
    per_block = costs.kv_bytes_per_block(model.text, kv_dtype, options.block_size)
    return (OUT_BUFFERS + IN_BUFFERS) * staging_blocks(per_block) * per_block


def _model_len(options: Options, model: ModelConfig, blocks: int) -> tuple[int, str]:
    """Every admitted request must be able to finish alone, so the context never exceeds the KV cache."""
    capacity = blocks * options.block_size
    trained = model.text.max_context
    if options.max_model_len is None:
        length = min(trained, capacity)
        why = "what the model's attention window covers"
        if length < trained:
            why = f"all the KV cache holds (the model allows {trained})"
        elif trained == model.text.max_position:
            why = "the model's own"
        return length, f"context {length} tokens: {why}"
    if options.max_model_len > trained:
        raise ConfigError(
            f"max_model_len={options.max_model_len} is beyond the {trained} positions the model was trained "
            f"for{' in one attention window' if model.text.window else ''}; lower --max-model-len"
        )
    if options.max_model_len > capacity:
        length = costs.blocks_for(options.max_model_len, options.block_size)
        raise ConfigError(
            f"max_model_len={options.max_model_len} needs {length} KV blocks but only {blocks} fit; lower "
            f"--max-model-len to {capacity} or raise --kv-cache-gb"
        )
    return options.max_model_len, f"context {options.max_model_len} tokens: as asked"


def _encoder_budget(options: Options, biggest: int) -> tuple[int, str]:
    if options.encoder_budget is None:
        budget = budget_of(options, biggest)
        why = f"a full step, and the largest picture ({biggest})"
        return budget, f"encoder budget {budget} embeddings a step: {why}"
    if options.encoder_budget < biggest:
        raise ConfigError(
            f"encoder_budget={options.encoder_budget} is below the largest picture the limits allow "
            f"({biggest} embeddings); raise --encoder-budget or lower --max-pixels"
        )
    return options.encoder_budget, f"encoder budget {options.encoder_budget} embeddings a step: as asked"


def _biggest(largest: Geometry | None, length: int) -> int:
    """Embeddings of the largest image whose tokens the context holds."""
    if largest is None:
        return 0
    if largest.tokens <= length:
        return largest.slots
    return min(largest.slots, length)


def _pinned_images(options: Options, model: ModelConfig) -> int:
    """Images that one token needs at once: with cross-attention all of its prompt."""
    if not model.text.num_cross_layers:
        return 1
    return max(1, options.limit_mm_per_prompt.get("image", 0))


def _encoder_slots(
    options: Options, model: ModelConfig, machine: Machine, largest: Geometry | None, memory_parts: int
) -> tuple[int, str, bool]:
    """Slots, the reason, and whether unused embeddings stay. With 0 GiB only those of the current step do."""
    if model.vision is None:
        return 0, "no encoder cache: the model takes no pictures", True
    size = options.encoder_cache_gb
    why = "as asked"
    if size is None:
        size = _EMBEDDING_CACHE_GIB / memory_parts
        why = "the default"
        share = machine.free_bytes * _CPU_CACHE_SHARE / memory_parts / costs.GIB
        if machine.device == "cpu" and share < size:
            size = max(share, 0.0)
            why = f"{_CPU_CACHE_SHARE:.0%} of the free memory"
        pinned = 0
        if largest and model.text.num_cross_layers:
            pinned = largest.slots * _CROSS_ATTENDED
        min_size = pinned * costs.embedding_bytes_per_slot(model.text, machine.dtype) / costs.GIB
        if min_size > size:
            size = min_size
            why = f"{_CROSS_ATTENDED} of the largest pictures, each pinned until its request ends"
    slots = costs.embedding_slots_in(size * costs.GIB, model.text, machine.dtype)
    return slots, f"encoder cache {slots} embeddings, {size:.2f} GiB: {why}", size > 0


def _hold_largest(options: Options, slots: int, why: str, min_slots: int) -> tuple[int, str]:
    if slots >= min_slots:
        return slots, why
    if options.encoder_cache_gb:
        raise ConfigError(
            f"encoder_cache_gb={options.encoder_cache_gb} holds {slots} embeddings but the largest picture "
            f"the limits allow needs {min_slots}; raise --encoder-cache-gb or lower --max-pixels"
        )
    return min_slots, f"encoder cache {min_slots} embeddings: what one step works on"
