"""Launches follow the shared memory of the GPU; what compiles and fits is tested in `test_compiles.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from saccade.kernels.attention import decode_triton, prefill_triton, vit_triton
from saccade.kernels.gemm import skinny
from saccade.kernels.launch import device
from saccade.kernels.launch.device import Gpu
from saccade.kernels.moe.fused_moe import choose
from saccade.kernels.moe.router_gemm import choose_router

META = torch.device("meta")
H200 = Gpu(132, (9, 0), 227 << 10)
A100 = Gpu(108, (8, 0), 163 << 10)
L4 = Gpu(58, (8, 9), 99 << 10)


@pytest.fixture(autouse=True)
def on_gpu(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_of", lambda _: gpu)


def rows(count: int, heads: int, dim: int) -> Tensor:
    return torch.empty(count, heads, dim, dtype=torch.bfloat16, device=META)


@pytest.mark.parametrize(("gpu", "stages"), [(H200, 4), (A100, 4), (L4, 3)])
def test_decode_attention_has_as_many_stages_as_fit(gpu: Gpu, stages: int) -> None:
    assert decode_triton.launch_for(rows(4096, 2, 128), 16, 4).stages == stages


@pytest.mark.parametrize(("gpu", "keys"), [(H200, 128), (A100, 128), (L4, 64)])
def test_prefill_attention_of_one_wave_takes_as_many_keys_at_a_time_as_fit(gpu: Gpu, keys: int) -> None:
    launch = prefill_triton.launch_for(rows(gpu.sms * 4, 12, 128), 64)
    assert (launch.keys, launch.stages) == (keys, 5)


@pytest.mark.parametrize(("gpu", "warps"), [(H200, 4), (A100, 8), (L4, 8)])
def test_prefill_attention_with_heads_of_256_has_more_warps_without_wgmma(gpu: Gpu, warps: int) -> None:
    assert prefill_triton.launch_for(rows(8192, 16, 256), 64).warps == warps


@pytest.mark.parametrize(("gpu", "stages"), [(H200, 7), (A100, 7), (L4, 5)])
def test_a_skinny_gemm_has_as_many_stages_as_fit(gpu: Gpu, stages: int) -> None:
    x = torch.empty(32, 8960, dtype=torch.bfloat16, device=META)
    config = skinny.choose(32, 1536, 8960, x.dtype)
    assert config is not None
    assert skinny._fitting_stages(config, skinny._Gemm(x, x)) == stages


@pytest.mark.parametrize(("gpu", "registers"), [(H200, (128, 128)), (A100, (128, 128)), (L4, (128, None))])
def test_vision_attention_limits_registers_where_two_programs_share_an_sm(
    gpu: Gpu, registers: tuple[int | None, ...]
) -> None:
    assert tuple(vit_triton.launch_for(rows(512, 16, dim), 128).registers for dim in (64, 80)) == registers


@pytest.mark.parametrize(("gpu", "experts"), [(H200, 128), (A100, 64), (L4, 64)])
def test_the_router_has_smaller_tiles_without_wgmma(gpu: Gpu, experts: int) -> None:
    assert choose_router(8192, 256, 2048, gpu.sms, device.is_hopper(META)).experts == experts


@pytest.mark.parametrize(("gpu", "stages"), [(H200, (4, 4)), (A100, (3, 3)), (L4, (2, 2))])
def test_expert_gemms_have_as_many_stages_as_fit(gpu: Gpu, stages: tuple[int, int]) -> None:
    launch = choose(8192, 8, 128, torch.bfloat16, device.shared_memory(META), tma=False)
    assert (launch.gate_up.stages, launch.down.stages) == stages
