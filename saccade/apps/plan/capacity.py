"""Where the memory goes and how many requests it holds, by the arithmetic with which an engine starts."""

from __future__ import annotations

from dataclasses import dataclass

from saccade import costs
from saccade.apps.plan.hardware import Hardware
from saccade.apps.plan.timing import Precision
from saccade.apps.plan.workload import RequestCost, largest_image
from saccade.errors import ConfigError
from saccade.options.engine import Options, SchedulerConfig
from saccade.processor.checkpoint_files import Checkpoint
from saccade.processor.families import is_known
from saccade.runner.memory import Machine, MemoryParts, size_memory

_HOST_TIER_GIB = 4.0  # of embeddings beside a GPU, where no option says how many
_MAX_GPUS = 64  # of one copy of a model


@dataclass(frozen=True, slots=True)
class MemoryCapacity:
    gpus: int  # that one copy of the model needs
    parts: MemoryParts  # of all of them
    scheduler: SchedulerConfig
    kv_bytes: int  # for KV blocks
    kv_bytes_per_token: float
    kv_blocks_per_request: int
    concurrent: int  # requests that the memory holds
    bound_by: str  # what runs out first
    encoder_cache_images: float  # embeddings of so many images fit, host memory included

    @property
    def running(self) -> int:
        """Requests that run at the same time."""
        return min(self.concurrent, self.scheduler.max_num_seqs)


def plan_capacity(
    checkpoint: Checkpoint,
    options: Options,
    hardware: Hardware,
    cost: RequestCost,
    dtype: str,
    precision: Precision,
    kv_gb: float | None = None,
) -> MemoryCapacity:
    """`kv_gb`: 10^9 bytes for KV, counted on paper by the byte; None: what an engine leaves, by the block."""
    gpus, parts, scheduler = _fitting(checkpoint, options, hardware, cost, dtype, precision)
    text = checkpoint.config.text
    per_token = costs.kv_bytes_per_token(text, dtype) / costs.dtype_bytes(dtype) * precision.kv_bytes
    blocks = costs.blocks_for(cost.tokens, options.block_size)
    block_bytes = blocks * options.block_size * per_token
    kv_bytes = parts.kv if kv_gb is None else kv_gb * 1e9
    concurrent = int(kv_bytes // block_bytes)
    if kv_gb is not None:
        each = cost.tokens * per_token
        concurrent = costs.concurrent_requests(kv_bytes, each) if kv_bytes >= each else 0
    pinned = cost.num_images * cost.slots if cost.is_cross_attended else 0
    bound_by = "KV cache"
    if pinned and scheduler.encoder_cache_slots // pinned < concurrent:
        concurrent = int(scheduler.encoder_cache_slots // pinned)
        bound_by = "encoder cache"
    return MemoryCapacity(
        gpus=gpus,
        parts=parts,
        scheduler=scheduler,
        kv_bytes=int(kv_bytes),
        kv_bytes_per_token=per_token,
        kv_blocks_per_request=blocks,
        concurrent=concurrent,
        bound_by="max_num_seqs" if scheduler.max_num_seqs < concurrent else bound_by,
        encoder_cache_images=_cached_images(options, hardware, scheduler, cost),
    )


def _fitting(
    checkpoint: Checkpoint,
    options: Options,
    hardware: Hardware,
    cost: RequestCost,
    dtype: str,
    precision: Precision,
) -> tuple[int, MemoryParts, SchedulerConfig]:
    """The fewest GPUs that hold a copy of the model and at least one request."""
    largest = largest_image(checkpoint, options)
    problem = None
    for gpus in range(1, 2 if hardware.is_cpu else _MAX_GPUS + 1):
        free = hardware.free_bytes(options.gpu_memory_utilization) * gpus
        machine = Machine(
            hardware.device,
            dtype,
            free,
            host_free_bytes=free,
            is_native=is_known(checkpoint.config),
            fp8_params=precision.fp8_params,
            int4=precision.int4,
        )
        try:
            sizes = size_memory(options, checkpoint.config, largest, machine)
        except ConfigError as error:
            if problem is None:
                problem = error
            continue
        if cost.max_tokens <= sizes.scheduler.max_model_len:
            return gpus, sizes.parts, sizes.scheduler
        longest = min(options.max_model_len or cost.max_tokens, checkpoint.config.text.max_context)
        if cost.max_tokens > longest:
            raise ConfigError(
                f"a request of {cost.max_tokens} tokens does not fit the context of {longest}; lower "
                "--images, --max-pixels, --input-tokens or --output-tokens"
            )
    raise problem or ConfigError(f"a request of {cost.max_tokens} tokens fits no {hardware.name}")


def _cached_images(
    options: Options, hardware: Hardware, scheduler: SchedulerConfig, cost: RequestCost
) -> float:
    if not cost.num_images or not scheduler.keep_idle_embeddings:
        return 0.0
    host = options.embedding_host_gb
    if host is None:
        host = 0.0 if hardware.is_cpu else _HOST_TIER_GIB
    slots = scheduler.encoder_cache_slots + host * costs.GIB // scheduler.slot_bytes
    return slots / cost.slots
