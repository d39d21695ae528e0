"""GPUs by name: memory, bandwidth, speed. Published numbers of their makers; knows no model.

Memory is what CUDA reports, somewhat less than the name says. FLOP/s are dense, of bfloat16 with sums in
float32.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from saccade import costs
from saccade.errors import ConfigError

_CONTEXT_BYTES = 527 << 20  # of the driver, before anything is allocated (docs/experiments/023)


@dataclass(frozen=True, slots=True)
class Hardware:
    name: str
    memory_gib: float
    bandwidth_gb_s: float  # of its memory
    tflops: float
    has_fp8: bool = False  # multiplies FP8 at twice the speed
    float32_tflops: float | None = None  # outside tensor cores; None: as bfloat16
    is_cpu: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.is_cpu else "cuda"

    def flops(self, dtype: str) -> float:
        """A second, of GEMMs in this dtype."""
        if dtype != "float32" or self.float32_tflops is None:
            return 1e12 * self.tflops
        return 1e12 * self.float32_tflops

    def free_bytes(self, share: float) -> int:
        """What an engine may take on an idle machine, as `runner/device_memory.py` finds it."""
        total = self.memory_gib * costs.GIB
        return int(total if self.is_cpu else total * share - _CONTEXT_BYTES)

    def having(
        self, memory_gib: float | None, bandwidth_gb_s: float | None, tflops: float | None
    ) -> Hardware:
        """The same with other numbers, as far as they are given."""
        changes: dict[str, Any] = {
            "memory_gib": memory_gib,
            "bandwidth_gb_s": bandwidth_gb_s,
            "tflops": tflops,
        }
        return replace(self, **{name: value for name, value in changes.items() if value})

    def times(self, number: int) -> Hardware:
        """So many of them as one, without a cost for their exchange."""
        if number == 1:
            return self
        return replace(
            self,
            memory_gib=self.memory_gib * number,
            bandwidth_gb_s=self.bandwidth_gb_s * number,
            tflops=self.tflops * number,
            float32_tflops=self.float32_tflops and self.float32_tflops * number,
        )


PRESETS = {
    "l4": Hardware("L4", 22.0, 300, 121, has_fp8=True, float32_tflops=30.3),
    "a10": Hardware("A10", 22.0, 600, 125, float32_tflops=31.2),
    "l40s": Hardware("L40S", 44.4, 864, 362, has_fp8=True, float32_tflops=91.6),
    "a100-40": Hardware("A100 40GB", 39.4, 1555, 312, float32_tflops=19.5),
    "a100-80": Hardware("A100 80GB", 79.1, 2039, 312, float32_tflops=19.5),
    "h100": Hardware("H100 SXM", 79.1, 3350, 989, has_fp8=True, float32_tflops=67),
    "h200": Hardware("H200", 139.8, 4800, 989, has_fp8=True, float32_tflops=67),
    "b200": Hardware("B200", 178.3, 8000, 2250, has_fp8=True, float32_tflops=80),
    "rtx4090": Hardware("RTX 4090", 23.6, 1008, 165, has_fp8=True, float32_tflops=82.6),
    "rtx5090": Hardware("RTX 5090", 31.3, 1792, 209, has_fp8=True, float32_tflops=104.8),
    "cpu": Hardware("CPU of 16 cores (an example)", 64.0, 80, 1.5, is_cpu=True),
}
DEFAULT = "h200"  # where none is named
_OTHER_NAMES = {"a100": "a100-80", "4090": "rtx4090", "5090": "rtx5090"}


def read_hardware(values: Any, file: str) -> Hardware:
    try:
        read = Hardware(**values)
        if min(read.memory_gib, read.bandwidth_gb_s, read.tflops) > 0:
            return read
    except TypeError:
        pass
    names = ", ".join(field.name for field in fields(Hardware))
    raise ConfigError(f"{file}: hardware has {names}, all numbers above 0; not {values!r}")


def find_hardware(name: str) -> Hardware:
    key = name.lower().replace(" ", "").replace("_", "-").removesuffix("gb")
    key = _OTHER_NAMES.get(key, key)
    if key not in PRESETS:
        remedy = "take the nearest and change --gpu-memory-gib, --gpu-bandwidth and --gpu-tflops"
        raise ConfigError(f"--gpu {name} is not known; known are {', '.join(PRESETS)}; {remedy}")
    return PRESETS[key]
