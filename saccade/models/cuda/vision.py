"""Vision towers with fused kernels, for CUDA devices: the same weights and results as `TorchVision`.

Nothing here reads a value back from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from saccade.kernels.attention.vit_schedule import TileSchedule
from saccade.kernels.attention.vit_triton import TILE_ROWS, packed_vit
from saccade.kernels.gemm.linear_act import linear_act
from saccade.kernels.gemm.vit_qkv_rope import qkv_rope
from saccade.kernels.launch.device import is_hopper, num_sms
from saccade.kernels.launch.kernel_choice import KernelChoice, assert_agree
from saccade.kernels.launch.varlen_tiles import Tiles
from saccade.kernels.ops import image_preprocess, vit_elementwise
from saccade.kernels.ops.reference import parted_columns
from saccade.models.cuda import vision_attention
from saccade.models.cuda.vision_attention import Attend, AttentionPath, PartedAttend
from saccade.models.cuda.vision_graphs import VisionGraphs, packed_cells
from saccade.models.layers.activation import Activation, quick_gelu, silu_and_mul, tanh_gelu
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear
from saccade.models.vision.backend import Blocks, Lengths, RunBlocks
from saccade.models.vision.blocks import Norm, PatchPositions, VisionBlock
from saccade.models.vision.pillow_resize import BITS, Taps, resample
from saccade.models.vision.preprocess import ImagePixels, PatchLayout, PixelPolicy, as_tensor, resize
from saccade.types.media import Grid, Size
from saccade.util.torch_utils import to_device

_ACTIVATIONS: Mapping[Activation, tuple[str, Activation]] = {
    quick_gelu: ("quick_gelu", vit_elementwise.quick_gelu),
    silu_and_mul: ("silu_and_mul", vit_elementwise.silu_and_mul),
    tanh_gelu: ("tanh_gelu", vit_elementwise.tanh_gelu),
}
"""The name that `linear_act` has for each, and a kernel for it alone."""
_MIN_SCHEDULED = 768  # patches of a captured pass: smaller ones have too few tiles for all SMs
_KEPT = 8  # packings: images of one camera have one size
_TESTED_PROGRAMS = (2, 15)  # of the self-test: one item after the other, and some of them cut


class FusedVision:
    def __init__(self, attention: str | None = None) -> None:
        """Without a name: the attention that is fastest on this device."""
        self._given = attention
        self._last: PatchPositions | None = None  # of the last eager pass

    @cached_property
    def _name(self) -> str:
        """Decided when it is used first, so that its kernels may be compiled before."""
        has_hopper = torch.cuda.is_available() and _can_use_hopper(torch.device("cuda"))
        return self._given or ("hopper" if has_hopper else "triton")

    @cached_property
    def _attention(self) -> Callable[[tuple[int, ...], torch.device], Attend]:
        return lru_cache(maxsize=_KEPT)(ATTENTION[self._name])

    @cached_property
    def _graphs(self) -> VisionGraphs:
        return VisionGraphs(_FusedPass, _graph_paths(self._name), self._eager)

    def resize(self, image: ImagePixels, size: Size, resampling: int) -> Tensor:
        if isinstance(image, Tensor):
            return resample(image, size, resampling, _weigh_axis)
        return as_tensor(resize(image, size, resampling))

    def cut(
        self, image: Tensor, grid: Grid, layout: PatchLayout, policy: PixelPolicy, dtype: torch.dtype
    ) -> Tensor:
        cut = image_preprocess.Cut(grid.h, grid.w, layout.patch, layout.merge, layout.frames)
        gain = [policy.scale / std for std in policy.std]
        shift = [mean / std for mean, std in zip(policy.mean, policy.std, strict=True)]
        return image_preprocess.cut_patches(image, cut, gain, shift, dtype)

    def begin(self, lengths: Lengths, positions: PatchPositions | None, device: torch.device) -> RunBlocks:
        if self._graphs.fit(lengths):
            return self._graphs.begin(lengths, positions, device)
        return self._eager(lengths, positions, device)

    def _eager(self, lengths: Lengths, positions: PatchPositions | None, device: torch.device) -> RunBlocks:
        return _FusedPass(self._rotary(positions), self._attention(tuple(lengths), device)).first

    def _rotary(self, positions: PatchPositions | None) -> Tensor | None:
        if positions is None:
            return None
        if positions.rotary is None and self._last is not None and positions.are(self._last):
            positions.rotary = self._last.rotary
        self._last = positions  # frees the last ones first: memory is planned for those of one pass
        if positions.rotary is None:
            device = positions.per_axis.device
            cells = to_device(packed_cells(positions), device)
            shape = (len(cells), 4 * positions.per_axis.shape[-1])
            positions.rotary = torch.empty(shape, dtype=torch.float32, device=device)
            vit_elementwise.write_cos_sin(cells, positions.per_axis, positions.rotary)
        return positions.rotary

    def capturing(self) -> AbstractContextManager[None]:
        """Small passes that run in it are captured as CUDA graphs; later ones of their sizes replay them."""
        return self._graphs.capturing()


class _FusedPass:
    """Runs blocks over one packing of images. The GEMMs add to the residual x in place."""

    def __init__(self, rotary: Tensor | None, attend: Attend) -> None:
        self._rotary = rotary  # float32 [T, d]: cosine and sine of each pair
        self._attend = attend
        self._parted = attend if isinstance(attend, PartedAttend) else None

    def first(self, blocks: Blocks, x: Tensor) -> tuple[Tensor, int]:
        return self(blocks[0], x), 1

    def __call__(self, block: VisionBlock, x: Tensor) -> Tensor:
        x.addmm_(self._mix(x, block).flatten(1), block.out.weight.T)
        return x.addmm_(self._widen(x, block), block.down.weight.T)

    def _mix(self, x: Tensor, block: VisionBlock) -> Tensor:
        """Attention [T, heads, d]. RoPE is fused into the projection where device and attention can."""
        normed = _norm(x, block.attention_norm, block.out)
        dim = len(block.qkv.weight) // (3 * block.heads)
        if self._rotary is not None and self._parted is not None and self._parted.takes_parted(dim, x.dtype):
            parted = qkv_rope(normed, block.qkv.weight, block.qkv.bias, self._rotary, block.heads)
            if parted is not None:
                del normed  # before attention needs as much memory
                return self._parted.parted(parted, block.scale)
        qkv = block.qkv(normed).view(len(x), 3, block.heads, dim)
        del normed
        if self._rotary is not None:
            vit_elementwise.rotate_half(qkv, self._rotary)
        return self._attend(qkv, block.scale)

    def _widen(self, x: Tensor, block: VisionBlock) -> Tensor:
        """GEMM and activation: one launch where the device has a kernel for both, else two."""
        normed = _norm(x, block.mlp_norm, block.down)
        name, act = _ACTIVATIONS.get(block.act, (None, block.act))
        wide = linear_act(normed, block.up.weight, block.up.bias, name) if name else None
        if wide is None:
            wide = block.up(normed)
            del normed  # before an activation that needs as much memory again
            wide = act(wide)
        return wide


def _norm(x: Tensor, norm: Norm, following: Linear) -> Tensor:
    """The norm of x. The bias of the GEMM that will be added to x is added to it here."""
    if following.bias is None:  # then PyTorch's own kernel does the same
        return norm(x)
    if isinstance(norm, RMSNorm):
        return vit_elementwise.rms_norm_and_add(x, norm.weight, norm.eps, following.bias)
    return vit_elementwise.norm_then_add(x, norm.weight, norm.bias, norm.eps, following.bias)


def _weigh_axis(image: Tensor, taps: Taps) -> Tensor:
    return image_preprocess.weigh_axis(image, taps.starts, taps.weights, BITS)


def _by_triton(lengths: Sequence[int], device: torch.device) -> Attend:
    return _over(Tiles.of(lengths, TILE_ROWS, device))


def _over(tiles: Tiles) -> Attend:
    def attend(qkv: Tensor, scale: float) -> Tensor:
        q, k, v = qkv.unbind(1)  # [T, heads, d] each
        return packed_vit(q, k, v, tiles, scale)

    return attend


class _ByHopper:
    """Chosen once heads are known: others, and images that are too small, take the Triton kernel."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self._lengths = lengths
        self._device = device
        self._chosen: Attend | None = None

    def __call__(self, qkv: Tensor, scale: float) -> Tensor:
        return self._choose(qkv)(qkv, scale)

    def takes_parted(self, dim: int, dtype: torch.dtype) -> bool:
        from saccade.kernels.attention import vit_hopper

        return vit_hopper.takes_parted(dim) and vit_hopper.suits(self._lengths, dim, dtype)

    def parted(self, qkv: Tensor, scale: float) -> Tensor:
        chosen = self._choose(qkv)
        assert isinstance(chosen, PartedAttend), "`takes_parted` was asked before"
        return chosen.parted(qkv, scale)

    def _choose(self, like: Tensor) -> Attend:
        from saccade.kernels.attention import vit_hopper

        if self._chosen is None and vit_hopper.suits(self._lengths, like.shape[3], like.dtype):
            schedule = TileSchedule.of(self._lengths, like.shape[2], num_sms(like.device), like.device)
            self._chosen = vit_hopper.HopperVit(schedule)
        self._chosen = self._chosen or _by_triton(self._lengths, self._device)
        return self._chosen


def _graph_paths(attention: str) -> tuple[AttentionPath, ...]:
    """Of captured passes."""
    tiled = vision_attention.TiledAttention(_over, TILE_ROWS)
    if attention != "hopper":
        return (tiled,)
    from saccade.kernels.attention import vit_hopper

    programs = num_sms(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    kernel = (vit_hopper.suits, vit_hopper.HopperVit)
    return vision_attention.ScheduledAttention(*kernel, programs, _MIN_SCHEDULED), tiled


def _self_test(device: torch.device) -> None:
    """It must compile and agree with the Triton kernel, also where weights overflow."""
    from saccade.kernels.attention import vit_hopper

    lengths = [1500, 257]
    qkv = torch.randn(sum(lengths), 3, 2, 80, device=device, dtype=torch.bfloat16)
    qkv[5, 1] *= 60  # a key of the second tile with scores larger by hundreds of powers of two
    expected = _by_triton(lengths, device)(qkv, 1.0)
    parted = qkv.flatten(1)[:, parted_columns(2, 80)].view_as(qkv)
    for programs in _TESTED_PROGRAMS:
        attend = vit_hopper.HopperVit(TileSchedule.of(lengths, 2, programs, device))
        for _ in range(2):  # the second layer is launched differently
            assert_agree(attend(qkv, 1.0), expected, 0.05)
            assert_agree(attend.parted(parted, 1.0), expected, 0.05)


_can_use_hopper = KernelChoice(
    "the Hopper kernel of vision attention", is_hopper, _self_test, "the Triton kernel runs instead"
)


ATTENTION: dict[str, Callable[[Sequence[int], torch.device], Attend]] = {
    "triton": _by_triton,  # one launch for images of any sizes, and nothing to set up for a new size
    "hopper": _ByHopper,  # the same, faster on Hopper GPUs
}
