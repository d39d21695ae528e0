"""Puts a plan together: the bill, memory, times and requests/s of one deployment."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from saccade import costs
from saccade.apps.plan.calibration import Calibration
from saccade.apps.plan.capacity import MemoryCapacity, plan_capacity
from saccade.apps.plan.hardware import Hardware
from saccade.apps.plan.throughput import MAX_LOAD, GpuLoad, Level, RequestDemand, load_at, sustained
from saccade.apps.plan.timing import Precision, TimeModel
from saccade.apps.plan.workload import RequestCost, Workload, request_cost
from saccade.checkpoint.quantization import Quantization, quantization_of
from saccade.errors import ConfigError
from saccade.options.engine import Options
from saccade.processor.checkpoint_files import Checkpoint

_DECODE_THREADS = 8  # of the host, where no option says how many


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is planned. `encoders_apart` and `store_gb_s` are what alternatives change."""

    checkpoint: Checkpoint = field(repr=False)
    hardware: Hardware
    calibration: Calibration
    workload: Workload
    options: Options
    kv_gb: float | None = None  # 10^9 bytes for KV on paper; None: what an engine leaves
    encoders_apart: bool = False
    store_gb_s: float = 0.0  # of a store for embeddings that memory does not hold; 0: there is none

    @property
    def dtype(self) -> str:
        """The dtype asked; a CPU's is float32 otherwise, as few multiply bfloat16."""
        dtype = self.options.dtype
        if dtype == "auto":
            dtype = "float32" if self.hardware.is_cpu else self.checkpoint.config.dtype
        try:
            costs.dtype_bytes(dtype)
        except ValueError as error:
            raise ConfigError(f"{error}; give another --dtype") from None
        return dtype

    @property
    def kv_dtype(self) -> str:
        return costs.kv_dtype(self.options.kv_cache_dtype, self.dtype)

    @property
    def stored(self) -> Quantization | None:
        """How the checkpoint is quantised."""
        return quantization_of(self.checkpoint.config.raw, self.checkpoint.path)

    @property
    def fp8_params(self) -> int:
        """Weights in FP8: none where a GPU multiplies no FP8."""
        if not self.hardware.has_fp8:
            return 0
        return costs.fp8_params_of(self.checkpoint.config, self.stored, self.options.quantization)

    @property
    def int4(self) -> costs.Int4Bytes:
        """All GPUs that are known here read it."""
        if self.stored is None or self.hardware.is_cpu:
            return costs.NO_INT4
        return costs.Int4Bytes(self.stored.int4_bytes, experts=not self.stored.has_order)

    @property
    def precision(self) -> Precision:
        size = costs.dtype_bytes(self.dtype)
        kv_size = 1 if self.kv_dtype == costs.FP8 else size
        text = self.checkpoint.config.text
        saved = costs.saved_bytes(text, self.dtype, fp8=self.fp8_params, int4=self.int4)
        layer_bytes = size - saved / costs.layer_params(text)
        return Precision(layer_bytes, kv_size, self.fp8_params, self.int4)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Milliseconds to the first token of a request whose images are new."""

    preprocess: float  # decode and resize images on the host
    encode: float
    prefill: float  # with the host's own time
    queue: float  # on average, at the planned rate
    queue_p99: float

    @property
    def total(self) -> float:
        return self.preprocess + self.encode + self.prefill + self.queue


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    deployment: Deployment = field(repr=False)
    cost: RequestCost
    capacity: MemoryCapacity
    demand: RequestDemand = field(repr=False)
    first_token: FirstToken
    seen_ms: float  # the same without queue, for a request whose images are cached
    between_ms: float  # tokens, at the planned rate
    rate: float  # requests/s that one copy of the model sustains, within the service level if there is one
    bound_by: str
    saturated: float  # without a service level
    copies: int  # of the model, for the rate asked; 0: no number of them keeps to the service level
    encode_apart: float  # seconds of other GPUs for each request

    @property
    def encoder_gpus(self) -> int:
        """GPUs beside those of the copies."""
        return math.ceil(self.encode_apart * (self.deployment.workload.rate or self.rate) / MAX_LOAD)

    @property
    def gpus(self) -> int:
        return self.copies * self.capacity.gpus + self.encoder_gpus

    @property
    def rate_per_gpu(self) -> float:
        return self.rate / (self.capacity.gpus + self.rate * self.encode_apart)


def make_plan(deployment: Deployment) -> DeploymentPlan:
    _check_fp8(deployment)
    cost = request_cost(deployment.checkpoint, deployment.options, deployment.workload)
    capacity = plan_capacity(
        deployment.checkpoint,
        deployment.options,
        deployment.hardware,
        cost,
        deployment.dtype,
        deployment.precision,
        deployment.kv_gb,
    )
    timing = TimeModel(
        deployment.checkpoint.config,
        deployment.dtype,
        deployment.hardware.times(capacity.gpus),
        deployment.calibration,
        deployment.precision,
        has_images=cost.num_images > 0,
    )
    first = first_token(deployment, timing, cost)
    new = cost.num_images * _new_share(deployment, timing, cost, capacity)
    demand = _demand(deployment, timing, cost, capacity, first, new)
    level = Level(_seconds(deployment.workload.ttft_ms), _seconds(deployment.workload.itl_ms))
    rate = saturated = 0.0
    bound_by = capacity.bound_by
    if capacity.running:
        rate, bound_by = sustained(demand, level)
        saturated, _ = sustained(demand)
    copies = _copies(deployment.workload, rate, has_level=level != Level())
    load = _load(deployment.workload, demand, copies)
    alone = replace(timing, hardware=deployment.hardware)  # a tower is on one GPU, whatever a copy takes
    apart = new * _encode(alone, cost) if deployment.encoders_apart else 0.0
    return DeploymentPlan(
        deployment=deployment,
        cost=cost,
        capacity=capacity,
        demand=demand,
        first_token=replace(first, queue=load.wait * 1e3, queue_p99=load.wait_p99 * 1e3),
        seen_ms=first.prefill,
        between_ms=load.between * 1e3,
        rate=rate,
        bound_by=bound_by,
        saturated=saturated,
        copies=copies,
        encode_apart=apart,
    )


def _check_fp8(deployment: Deployment) -> None:
    """What an engine refuses."""
    hardware = deployment.hardware
    if deployment.kv_dtype == costs.FP8 and not (hardware.has_fp8 or hardware.is_cpu):
        option = f"kv_cache_dtype={deployment.options.kv_cache_dtype}"
        raise ConfigError(f"{option} needs a GPU that converts FP8, which {hardware.name} does not")
    if deployment.options.quantization is None:
        return
    option = f"quantization={deployment.options.quantization}"
    if not hardware.has_fp8:
        raise ConfigError(f"{option} needs a GPU that multiplies FP8, which {hardware.name} does not")
    if deployment.stored is not None and not deployment.stored.becomes_fp8:
        reason = f"this one is {deployment.stored.summary}"
        raise ConfigError(f"{option} is for checkpoints that are not quantised; {reason}")


def first_token(deployment: Deployment, timing: TimeModel, cost: RequestCost) -> FirstToken:
    """The first token on an idle server. Images are decoded in parallel and encoded one after the other."""
    rounds = math.ceil(cost.num_images / _threads(deployment.options))
    preprocess = rounds * timing.preprocess(cost.megapixels)
    encode = cost.num_images * _encode(timing, cost)
    prefill = timing.prefill(cost.prompt_tokens) + timing.request
    return FirstToken(preprocess * 1e3, encode * 1e3, prefill * 1e3, 0.0, 0.0)


def _demand(
    deployment: Deployment,
    timing: TimeModel,
    cost: RequestCost,
    capacity: MemoryCapacity,
    first: FirstToken,
    new: float,
) -> RequestDemand:
    """`new`: images of a request that have to be encoded."""
    context = cost.prompt_tokens + cost.output_tokens / 2
    return RequestDemand(
        encode=0.0 if deployment.encoders_apart else new * _encode(timing, cost),
        prefill=timing.prefill_among(cost.prompt_tokens, deployment.options.max_num_batched_tokens),
        host=new * timing.preprocess(cost.megapixels) / _threads(deployment.options),
        first=first.total / 1e3,
        steps=max(cost.output_tokens - 1, 0),
        decode=lambda running: timing.decode(running, context),
        max_running=capacity.running,
        memory=capacity.bound_by,
    )


def _new_share(
    deployment: Deployment, timing: TimeModel, cost: RequestCost, capacity: MemoryCapacity
) -> float:
    """The share of images that are encoded: new ones, and repeated ones that nothing gives back."""
    repeated = deployment.workload.repeated
    cached_share = min(1.0, capacity.encoder_cache_images / deployment.workload.catalogue)
    if deployment.store_gb_s and restore_seconds(deployment, cost) < _encode(timing, cost):
        cached_share = 1.0
    return 1 - repeated * cached_share


def restore_seconds(deployment: Deployment, cost: RequestCost) -> float:
    """One image's embeddings from the store."""
    slot = costs.embedding_bytes_per_slot(deployment.checkpoint.config.text, deployment.dtype)
    return cost.slots * slot / (deployment.store_gb_s * 1e9)


def _encode(timing: TimeModel, cost: RequestCost) -> float:
    """One image."""
    return sum(image.share * timing.encode(image.geometry) for image in cost.images)


def _threads(options: Options) -> int:
    return options.image_decode_threads or _DECODE_THREADS


def _copies(workload: Workload, rate: float, *, has_level: bool) -> int:
    if workload.rate is None:
        return 1
    if not rate:
        return 0
    return math.ceil(workload.rate / (rate if has_level else MAX_LOAD * rate))


def _load(workload: Workload, demand: RequestDemand, copies: int) -> GpuLoad:
    """The load at the rate asked; without one a single request."""
    alone = GpuLoad(1.0, demand.decode(1.0) if demand.steps else 0.0, 0.0, 0.0)
    if workload.rate is None or not copies:
        return alone
    return load_at(demand, workload.rate / copies) or alone


def _seconds(ms: float | None) -> float:
    return math.inf if ms is None else ms / 1e3
