"""The memory plan of an engine on the device that it finds: which device, which dtype, how much is free."""

from __future__ import annotations

import gc
import math
import time
from dataclasses import dataclass

import torch

from saccade import costs
from saccade.checkpoint.config import ModelConfig
from saccade.checkpoint.layouts import PUBLISHED
from saccade.checkpoint.quantization import Quantization
from saccade.errors import ConfigError
from saccade.helpers.free_memory import free_ram
from saccade.models import is_native, reads_int4_experts
from saccade.models.fp8_weights import multiplies_fp8
from saccade.models.int4_weights import keeps_int4
from saccade.models.layers.packed_linear import multiplies_bfloat16
from saccade.options.engine import Options, SchedulerConfig
from saccade.runner.encoder.nvjpeg import load_library
from saccade.runner.memory import Encoders, Machine, MemoryParts, size_memory
from saccade.runner.weight_packing import plan_packing
from saccade.types.media import Geometry
from saccade.util.torch_utils import capability_of

_FP8_FROM = (8, 9)  # compute capability


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    scheduler: SchedulerConfig
    reasons: tuple[str, ...]  # one line per choice, for the start-up log
    parts: MemoryParts


def plan_memory(
    options: Options,
    model: ModelConfig,
    largest: Geometry | None,
    free_bytes: int | None = None,
    memory_parts: int = 1,
    encoders: Encoders = Encoders(),  # noqa: B008 (immutable)
    quantization: Quantization | None = None,
) -> MemoryPlan:
    """`largest` is the most expensive image the limits allow; `free_bytes` is measured if not given.

    `quantization`: how the checkpoint is quantised.
    """
    device = device_of(options.device)
    check_gpu_jpeg(options, device)
    dtype, why_dtype = dtype_of(options.dtype, model.dtype, device)
    kv_dtype = costs.kv_dtype(options.kv_cache_dtype, dtype)
    if kv_dtype == costs.FP8 and device.type == "cuda":
        _check_fp8(options.kv_cache_dtype, capability_of(device))
    packing = plan_packing(model, dtype, device)
    machine = Machine(
        device=device.type,
        dtype=dtype,
        free_bytes=_free_bytes(device, options, encoders) if free_bytes is None else free_bytes,
        host_free_bytes=free_ram() if device.type == "cuda" else None,
        is_native=is_native(model),
        packed_bytes=packing.copied_bytes,
        fp8_params=_fp8_params(options, model, quantization, device),
        int4=_int4_bytes(model, quantization, device, getattr(torch, dtype)),
    )
    sizes = size_memory(options, model, largest, machine, memory_parts, encoders)
    packed = () if sizes.parts.graphs else (packing.reason,)
    reasons = (f"device {device}", why_dtype, *sizes.reasons, *packed)
    dtypes = (getattr(torch, dtype), getattr(torch, kv_dtype))
    return MemoryPlan(device, *dtypes, sizes.scheduler, reasons, sizes.parts)


def _check_fp8(dtype: str, capability: tuple[int, int]) -> None:
    if capability < _FP8_FROM:
        major, minor = capability
        raise ConfigError(
            f"kv_cache_dtype={dtype} needs a GPU that converts FP8 (compute capability 8.9: Ada, Hopper or "
            f"newer), and this one has {major}.{minor}; leave out --kv-cache-dtype"
        )


def check_gpu_jpeg(options: Options, device: torch.device) -> None:
    if not options.gpu_jpeg:
        return
    if device.type != "cuda":
        raise ConfigError(
            f"gpu_jpeg needs an NVIDIA GPU, and the engine runs on {device}; leave out --gpu-jpeg"
        )
    load_library()


def _kept(model: ModelConfig, quantization: Quantization | None) -> Quantization | None:
    return None if model.is_bridged and PUBLISHED in model.raw else quantization


def _fp8_params(
    options: Options, model: ModelConfig, quantization: Quantization | None, device: torch.device
) -> int:
    params = costs.fp8_params_of(model, _kept(model, quantization), options.quantization)
    if not params or not multiplies_fp8(device):
        return 0
    return params


def _int4_bytes(
    model: ModelConfig, quantization: Quantization | None, device: torch.device, dtype: torch.dtype
) -> costs.Int4Bytes:
    quantization = _kept(model, quantization)
    if quantization is None or not quantization.is_int4 or not keeps_int4(device):
        return costs.NO_INT4
    has_experts = not quantization.has_order and reads_int4_experts(model, device, dtype)
    return costs.Int4Bytes(quantization.int4_bytes, has_experts)


class GpuMemory:
    """How full a GPU is, with all processes on it. The driver is asked once a second."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked_at = -math.inf
        self._stats: dict[str, int] = {}

    def stats(self) -> dict[str, int]:
        """Nothing on a CPU."""
        now = time.monotonic()
        if self._device.type == "cuda" and now - self._asked_at >= 1.0:
            self._asked_at = now
            free, total = torch.cuda.mem_get_info(self._device)
            self._stats = {"used": total - free, "total": total}
        return self._stats


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        problem = "PyTorch sees no CUDA device here"
        raise ConfigError(f"device={name} was asked for, but {problem}; use --device cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, not {name!r}") from None


def dtype_of(name: str, saved: str, device: torch.device) -> tuple[str, str]:
    if name != "auto":
        _check_dtype(name, "give another --dtype")
        return name, f"dtype {name}: as asked"
    if saved == "float32" or device.type != "cpu":
        _check_dtype(saved, "config.json says so (dtype or torch_dtype); choose with --dtype")
        return saved, f"dtype {saved}: as the checkpoint was saved"
    if multiplies_bfloat16():
        why = "this CPU multiplies bfloat16 natively"
        return "bfloat16", f"dtype bfloat16: the checkpoint is {saved} and {why}"
    return "float32", f"dtype float32: the checkpoint is {saved}, which this CPU would only emulate"


def _check_dtype(name: str, remedy: str) -> None:
    try:
        costs.dtype_bytes(name)
    except ValueError as error:
        raise ConfigError(f"{error}; {remedy}") from None


def _free_bytes(device: torch.device, options: Options, encoders: Encoders) -> int:
    """Encoder workers on the same GPU may have taken their memory already, or take it later."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()  # memory that a closed engine left with the allocator counts as taken
        free, total = torch.cuda.mem_get_info(device)
        share = options.gpu_memory_utilization
        return int(min(free - total * (1 - share), total * share - encoders.bytes_beside))
    return free_ram()
