"""Which kernels the registry has for a GPU and a model."""

from __future__ import annotations

import pytest
import torch

from saccade.kernels.attention import registry
from saccade.kernels.attention.registry import DECODE, MLA, PREFILL, VIT
from saccade.kernels.launch.device import Gpu, Heads

CPU = torch.device("cpu")
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("capability", "dim", "dtype", "block_size", "decodes", "prefills"),
    [
        ((9, 0), 128, BF16, 16, True, True),
        ((9, 0), 128, FP16, 16, True, False),
        ((9, 0), 256, BF16, 16, True, False),
        ((9, 0), 64, BF16, 16, False, False),
        ((9, 0), 128, FP8, 16, False, False),
        ((9, 0), 128, BF16, 128, False, True),
        ((9, 0), 128, BF16, 8, False, False),
        ((8, 9), 128, BF16, 16, False, False),
        ((10, 0), 128, BF16, 16, False, False),
    ],
)
def test_hopper_kernels_are_for_hopper_gpus_and_shapes_that_fit(
    capability: tuple[int, int], dim: int, dtype: torch.dtype, block_size: int, decodes: bool, prefills: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(registry, "gpu_of", lambda device: Gpu(132, capability, 227 << 10))
    case = (CPU, Heads(12, 2, dim), dtype, block_size)
    assert DECODE[0].choice and DECODE[0].choice.supports(*case, None) is decodes
    assert PREFILL[0].choice and PREFILL[0].choice.supports(*case) is prefills
    assert VIT[0].choice and VIT[0].choice.supports(CPU) is (capability == (9, 0))


@pytest.mark.parametrize("table", [DECODE, PREFILL, VIT, MLA])
def test_the_last_kernel_of_each_table_runs_everywhere(table: object) -> None:
    assert [row.choice is None for row in table][-1] and table[-1].smallest == 0  # type: ignore[index, attr-defined]
