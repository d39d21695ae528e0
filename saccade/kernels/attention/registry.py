"""Which attention kernel runs where: a table for each job, the fastest kernel first, the Triton one last.

    job       kernel   GPUs   models                                              steps, images
    decode    Hopper   9.0    heads of 128 or 256, 16 bits, blocks of 16 to 64    from 16 requests on
    prefill   Hopper   9.0    heads of 128, bfloat16, blocks of 16 to 128         from 129 tokens on
    vit       Hopper   9.0    heads of 72 or 80, bfloat16                         each image of 256 patches or more
    all       Triton   all    all                                                 all

A kernel is used where its GPU is there, its shapes fit and a self-test passed on that very device; the log says why or
why not. A kernel for another GPU is a file beside these and a row here. Gluon is experimental, so its kernels are
imported only where they are used. Knows shapes and devices, no models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from saccade.kernels.attention.decode_hopper_schedule import plan_schedule
from saccade.kernels.attention.decode_triton import paged_decode
from saccade.kernels.attention.fp8_kv import UNSCALED
from saccade.kernels.attention.kernel_types import DecodeKernel, MlaKernels, PrefillKernel
from saccade.kernels.attention.mla_absorbed import mla_decode, mla_prefill
from saccade.kernels.attention.mla_expanded import mla_expanded_prefill
from saccade.kernels.attention.prefill_triton import choose_rows, paged_prefill
from saccade.kernels.attention.self_tests import check_decode, check_prefill, check_vit
from saccade.kernels.attention.vit import ScheduledVit, TiledVit, VitKernel
from saccade.kernels.launch.device import HOPPER, Heads, gpu_of, num_sms
from saccade.kernels.launch.kernel_choice import KernelChoice
from saccade.util.torch_utils import Capability

K = TypeVar("K")
_MIN_SCHEDULED = 768  # patches of a captured pass: smaller ones have too few tiles for all SMs


@dataclass(frozen=True, eq=False)
class AttentionKernel(Generic[K]):
    """A row of a table. Functions take what decides, with the device first; `choice` does, too."""

    build: Callable[..., K]
    smallest: int = 0  # step that it is for: requests that decode, or tokens of prompts
    choice: KernelChoice | None = None  # None: it runs everywhere


class Usable(NamedTuple, Generic[K]):
    smallest: int
    kernel: K


def usable(table: Sequence[AttentionKernel[K]], *case: Any, largest: int | None = None) -> list[Usable[K]]:
    """The kernels that run in this case. `largest`: step of an engine; kernels for larger ones are left alone."""
    rows = [row for row in table if largest is None or row.smallest <= largest]
    return [Usable(row.smallest, row.build(*case)) for row in rows if row.choice is None or row.choice(*case)]


def _kernel_for(
    capability: Capability, name: str, why: str, build: Callable[..., K], check: Callable[..., None],
    supports: Callable[..., bool] = lambda *case: True, smallest: int = 0,
) -> AttentionKernel[K]:  # fmt: skip
    """A kernel for one kind of GPU. `check` raises if what was built is not what the Triton kernel computes."""

    def is_supported(device: torch.device, *case: Any) -> bool:
        return gpu_of(device).capability == capability and supports(*case)

    def self_test(*case: Any) -> None:
        check(build(*case), *case)

    choice = KernelChoice(name, is_supported, self_test, "the Triton kernel runs instead", why)
    return AttentionKernel(build, smallest, choice)


def _without_scales(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of a kernel that reads no FP8."""

    def attend(*inputs: Any, scales: tuple[float, float] = UNSCALED, **options: Any) -> Tensor:
        assert scales == UNSCALED
        return kernel(*inputs, **options)

    return attend


def _suits_hopper_decode(heads: Heads, dtype: torch.dtype, block_size: int, norm_eps: float | None) -> bool:
    from saccade.kernels.attention.decode_hopper import suits

    return suits(heads.head_dim, heads.num_heads // heads.num_kv_heads, dtype, block_size)


def _hopper_decode(device: torch.device, heads: Heads, *_: Any) -> DecodeKernel:
    from saccade.kernels.attention.decode_hopper import hopper_decode

    attend = _without_scales(hopper_decode)
    return DecodeKernel(lambda lens, sms: partial(attend, schedule=plan_schedule(lens, heads.num_kv_heads, sms)))


def _suits_hopper_prefill(heads: Heads, dtype: torch.dtype, block_size: int) -> bool:
    from saccade.kernels.attention.prefill_hopper import suits

    return suits(heads.head_dim, dtype, block_size)


def _hopper_prefill(*_: Any) -> PrefillKernel:
    from saccade.kernels.attention.prefill_hopper import ROWS, hopper_prefill

    return PrefillKernel(_without_scales(hopper_prefill), lambda tokens: ROWS)


def _triton_prefill(device: torch.device, heads: Heads, *_: Any) -> PrefillKernel:
    sms = num_sms(device)
    return PrefillKernel(paged_prefill, lambda tokens: choose_rows(tokens, heads.num_heads, sms, heads.head_dim))


def _hopper_vit(device: torch.device) -> VitKernel:
    from saccade.kernels.attention.vit_hopper import HopperVit, suits

    return ScheduledVit(suits, HopperVit, num_sms(device), _MIN_SCHEDULED)


# Of a device, heads, the dtype of the KV cache, tokens of a block, and the epsilon of norms of query and key heads.
DECODE: Sequence[AttentionKernel[DecodeKernel]] = (
    _kernel_for(
        HOPPER,
        "the Hopper kernel of decode attention",
        "its time depends on the sum of all contexts, not on the longest",
        _hopper_decode,
        check_decode,
        _suits_hopper_decode,
        smallest=16,  # requests: fewer are faster without a schedule
    ),
    AttentionKernel(lambda *_: DecodeKernel(lambda *_: paged_decode)),
)
# Of a device, heads, the dtype of the KV cache and tokens of a block.
PREFILL: Sequence[AttentionKernel[PrefillKernel]] = (
    _kernel_for(
        HOPPER,
        "the Hopper kernel of prefill attention",
        "it takes about two thirds of the Triton kernel's time",
        _hopper_prefill,
        check_prefill,
        _suits_hopper_prefill,
        smallest=129,  # tokens: fewer leave half of its rows empty
    ),
    AttentionKernel(_triton_prefill),
)
# Of a device.
VIT: Sequence[AttentionKernel[VitKernel]] = (
    _kernel_for(
        HOPPER,
        "the Hopper kernel of vision attention",
        "it keeps all SMs busy with images of different sizes",
        _hopper_vit,
        check_vit,
    ),
    AttentionKernel(lambda _: TiledVit()),
)
MLA: Sequence[AttentionKernel[MlaKernels]] = (
    AttentionKernel(lambda _: MlaKernels(mla_decode, mla_prefill, mla_expanded_prefill)),
)
