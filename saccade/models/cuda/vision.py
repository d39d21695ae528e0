"""Vision towers with fused kernels, for CUDA devices: the same weights and results as `TorchVision`.

Nothing here reads a value back from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor

from saccade.kernels.attention.registry import VIT, usable
from saccade.kernels.attention.vit import Attend, PackedAttention, PartedAttend, VisionHeads, VitKernel
from saccade.kernels.gemm.linear_act import linear_act
from saccade.kernels.gemm.vit_qkv_rope import qkv_rope
from saccade.kernels.ops import image_preprocess, vit_elementwise
from saccade.models.cuda.vision_graphs import VisionGraphs, packed_cells
from saccade.models.layers.activation import Activation, quick_gelu, silu_and_mul, tanh_gelu
from saccade.models.layers.layernorm import RMSNorm
from saccade.models.layers.linear import Linear
from saccade.models.vision.backend import Blocks, Lengths, RunBlocks
from saccade.models.vision.blocks import Norm, PatchPositions, RotaryCosSin, VisionBlock
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
_PACKINGS = 8  # that are remembered: images of one camera have one size


class FusedVision:
    def __init__(self, attention: Sequence[VitKernel] | None = None) -> None:
        """`attention`: kernels, of which a pass takes the first that suits it; None: those of this device."""
        self._asked = attention
        self._last: PatchPositions | None = None  # of the last eager pass

    @cached_property
    def _kernels(self) -> Sequence[VitKernel]:
        """Decided when they are used first, so that they may be compiled before."""
        if self._asked is not None:
            return self._asked
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return [kernel for _, kernel in usable(VIT, device)]

    @cached_property
    def _attention(self) -> Callable[[tuple[int, ...], torch.device], Attend]:
        return lru_cache(maxsize=_PACKINGS)(partial(PackedAttention, self._kernels))

    @cached_property
    def _graphs(self) -> VisionGraphs:
        return VisionGraphs(_FusedPass, self._kernels, self._eager)

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

    def begin_rotated(self, lengths: Lengths, angles: RotaryCosSin | None, device: torch.device) -> RunBlocks:
        rotary = None
        if angles is not None:
            half = angles.cos.shape[-1] // 2  # sin has the sign of `rotate`
            rotary = torch.stack((angles.cos[:, :half], angles.sin[:, half:]), -1).flatten(1)
        return _FusedPass(rotary, self._attention(tuple(lengths), device)).first

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
        heads = VisionHeads(block.heads, dim, x.dtype)
        if self._rotary is not None and self._parted is not None and self._parted.takes_parted(heads):
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
