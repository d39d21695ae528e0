"""A vision tower's work with fused kernels, for CUDA devices: the same weights and results as `TorchVision`.

Nothing here reads a value back from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade.kernels import pictures, vit_steps
from saccade.kernels.act_linear import act_linear
from saccade.kernels.packed_vit import TILE_ROWS, packed_vit
from saccade.kernels.paged_decode import num_multiprocessors
from saccade.kernels.tiles import Tiles
from saccade.kernels.trial import is_hopper, passes
from saccade.kernels.vit_shares import Shares
from saccade.models.attention import packed_attention
from saccade.models.layers import Activation, Linear, RMSNorm, quick_gelu, silu_and_mul, tanh_gelu
from saccade.models.pixels import PatchLayout, Picture, PixelPolicy, as_tensor, resize
from saccade.models.recorded_attention import Attend, SharedWay, TiledWay, Way
from saccade.models.recorded_vision import Recordings, packed_cells
from saccade.models.resample import BITS, Taps, resample
from saccade.models.vision import Angles, Norm, Places, VisionBlock
from saccade.models.vision_ops import Blocks, RunBlocks
from saccade.types import Grid, Size

_ACTIVATIONS: Mapping[Activation, tuple[str, Activation]] = {
    quick_gelu: ("quick_gelu", vit_steps.quick_gelu),
    silu_and_mul: ("silu_and_mul", vit_steps.silu_and_mul),
    tanh_gelu: ("tanh_gelu", vit_steps.tanh_gelu),
}
"""Kernels: the name that `act_linear` has for them, and by themselves."""
_LEAST_SHARED = 768  # patches of a recorded pass: smaller ones have too few tiles for all programs
_TRIED = (2, 15)  # programs of a trial: one item after the other, and some of them cut


class FusedVision:
    def __init__(self, attention: str | None = None) -> None:
        """Without a name: the attention that is fastest on this device."""
        attention = attention or _best_attention()
        self._attention = ATTENTION[attention]
        self._recordings = Recordings(_FusedPass, _ways(attention), self._launched)

    def resize(self, image: Picture, size: Size, resampling: int) -> Tensor:
        if isinstance(image, Tensor):
            return resample(image, size, resampling, _weigh_axis)
        return as_tensor(resize(image, size, resampling))

    def cut(self, image: Tensor, grid: Grid, layout: PatchLayout, policy: PixelPolicy, dtype: torch.dtype) -> Tensor:
        cut = pictures.Cut(grid.h, grid.w, layout.patch, layout.merge, layout.frames)
        gain = [policy.scale / std for std in policy.std]
        shift = [mean / std for mean, std in zip(policy.mean, policy.std, strict=True)]
        return pictures.cut_patches(image, cut, (gain[0], gain[1], gain[2]), (shift[0], shift[1], shift[2]), dtype)

    def begin(self, lengths: Sequence[int], places: Places | None, device: torch.device) -> RunBlocks:
        if self._recordings.fit(lengths):
            return self._recordings.begin(lengths, places, device)
        return self._launched(lengths, places, device)

    def _launched(self, lengths: Sequence[int], places: Places | None, device: torch.device) -> RunBlocks:
        return _FusedPass(_angles(places), self._attention(lengths, device)).first

    def recording(self) -> AbstractContextManager[None]:
        """Small passes that run in it are recorded, and later ones of their sizes replayed."""
        return self._recordings.recording()


class _FusedPass:
    """Runs blocks over one packing of pictures. Residuals are added inside the products, so x changes in place."""

    def __init__(self, angles: Angles | None, attend: Attend) -> None:
        self._angles = angles
        self._attend = attend

    def first(self, blocks: Blocks, x: Tensor) -> tuple[Tensor, int]:
        return self(blocks[0], x), 1

    def __call__(self, block: VisionBlock, x: Tensor) -> Tensor:
        qkv = block.qkv(_norm(x, block.attention_norm, block.out)).view(len(x), 3, block.heads, -1)
        if self._angles is not None:
            vit_steps.rotate_pairs(qkv, *self._angles)
        x.addmm_(self._attend(qkv, block.scale).flatten(1), block.out.weight.T)
        del qkv  # the MLP is wider than all that came before: it takes this memory over
        return x.addmm_(self._widen(x, block), block.down.weight.T)

    def _widen(self, x: Tensor, block: VisionBlock) -> Tensor:
        """Product and activation: one launch where the device has a kernel for both, else two."""
        normed = _norm(x, block.mlp_norm, block.down)
        name, act = _ACTIVATIONS.get(block.act, (None, block.act))
        wide = act_linear(normed, block.up.weight, block.up.bias, name) if name else None
        if wide is None:
            wide = block.up(normed)
            del normed  # before an activation that needs as much room again
            wide = act(wide)
        return wide


def _angles(places: Places | None) -> Angles | None:
    if places is not None and places.angles is None:
        places.angles = _new_angles(places)
    return places.angles if places else None


def _new_angles(places: Places) -> Angles:
    device, cells = places.per_axis.device, packed_cells(places)
    if device.type == "cuda":
        cells = cells.pin_memory().to(device, non_blocking=True)  # sent while the host goes on
    shape = (len(cells), 4 * places.per_axis.shape[-1])
    angles = Angles(*(torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2)))
    vit_steps.turn(cells, places.per_axis, *angles)
    return angles


def _norm(x: Tensor, norm: Norm, following: Linear) -> Tensor:
    """What the norm makes of x. The bias of the product that is going to be added to x is added already."""
    if following.bias is None:  # then PyTorch's own kernel has all there is to do
        return norm(x)
    if isinstance(norm, RMSNorm):
        return vit_steps.rms_norm_and_add(x, norm.weight, norm.eps, following.bias)
    return vit_steps.norm_and_add(x, norm.weight, norm.bias, norm.eps, following.bias)


def _weigh_axis(image: Tensor, taps: Taps) -> Tensor:
    return pictures.weigh_axis(image, taps.starts, taps.weights, BITS)


# --- attention ----------------------------------------------------------------------------------------------------


def _by_triton(lengths: Sequence[int], device: torch.device) -> Attend:
    return _over(Tiles.of(lengths, TILE_ROWS, device))


def _over(tiles: Tiles) -> Attend:
    def attend(qkv: Tensor, scale: float) -> Tensor:
        q, k, v = qkv.unbind(1)  # [T, heads, d] each
        return packed_vit(q, k, v, tiles, scale)

    return attend


def _by_hopper(lengths: Sequence[int], device: torch.device) -> Attend:
    chosen: list[Attend] = []  # once heads are seen

    def attend(qkv: Tensor, scale: float) -> Tensor:
        if not chosen:
            chosen.append(_hopper_over(lengths, qkv) or _by_triton(lengths, device))
        return chosen[0](qkv, scale)

    return attend


def _hopper_over(lengths: Sequence[int], like: Tensor) -> Attend | None:
    """None where the kernel is not made for such heads or pictures."""
    from saccade.kernels import hopper_vit  # its language is experimental: only devices that use it import it

    if not hopper_vit.suits(lengths, like.shape[3], like.dtype):
        return None
    programs = num_multiprocessors(like.device)
    return hopper_vit.HopperVit(Shares.of(lengths, like.shape[2], programs, like.device))


def _ways(attention: str) -> tuple[Way, ...]:
    """Of recorded passes."""
    tiled = TiledWay(_over, TILE_ROWS)
    if attention != "hopper":
        return (tiled,)
    from saccade.kernels import hopper_vit

    programs = num_multiprocessors(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return SharedWay(hopper_vit.suits, hopper_vit.HopperVit, programs, _LEAST_SHARED), tiled


def _best_attention() -> str:
    device = torch.device("cuda")
    if not torch.cuda.is_available() or not is_hopper(device):
        return "triton"
    is_right = passes(lambda: _try_hopper(device), "vision attention runs without the Hopper kernel")
    return "hopper" if is_right else "triton"


def _try_hopper(device: torch.device) -> None:
    """It must compile and agree with the plain kernel, also where weights outgrow its level."""
    from saccade.kernels import hopper_vit

    lengths = [1500, 257]
    qkv = torch.randn(sum(lengths), 3, 2, 80, device=device, dtype=torch.bfloat16)
    qkv[5, 1] *= 60  # a key of the second tile that queries prefer by hundreds of powers of two
    expected = _by_triton(lengths, device)(qkv, 1.0)
    for programs in _TRIED:
        attend = hopper_vit.HopperVit(Shares.of(lengths, 2, programs, device))
        for _ in range(2):  # the second layer goes another way
            torch.testing.assert_close(attend(qkv, 1.0), expected, atol=0.05, rtol=0.05)


def _by_sdpa(backend: SDPBackend) -> Callable[[Sequence[int], torch.device], Attend]:
    def begin(lengths: Sequence[int], device: torch.device) -> Attend:
        def attend(qkv: Tensor, scale: float) -> Tensor:
            q, k, v = qkv.unbind(1)
            with sdpa_kernel(backend):
                return packed_attention(q, k, v, lengths, scale)

        return attend

    return begin


ATTENTION: Mapping[str, Callable[[Sequence[int], torch.device], Attend]] = {
    "triton": _by_triton,  # one launch for pictures of any sizes, and nothing to set up for a new size
    "hopper": _by_hopper,  # the same, faster where the device is one; small pictures go the way above
    "cudnn": _by_sdpa(SDPBackend.CUDNN_ATTENTION),
    "flash": _by_sdpa(SDPBackend.FLASH_ATTENTION),
}
