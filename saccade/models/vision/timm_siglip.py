"""SigLIP's vision tower with timm's weight names."""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor

from saccade.checkpoint.config import VisionConfig
from saccade.models.layers.layernorm import LayerNorm
from saccade.models.layers.linear import PatchLinear
from saccade.models.state_dict import Parameters
from saccade.models.vision.backend import VisionOps, run_blocks
from saccade.models.vision.blocks import VisionBlock
from saccade.models.vision.clip import image_size
from saccade.models.weights import Rule

_EPS = 1e-6


class TimmSiglip:
    """All layers and the last norm; the pooling head is not loaded."""

    def __init__(self, params: Parameters, vision: VisionConfig) -> None:
        self.side = image_size(vision) // vision.patch_size  # patches along each side of a square
        self.width = vision.hidden_size
        kernel = (vision.in_channels, vision.patch_size, vision.patch_size)
        self.patch = PatchLinear(params.within("patch"), kernel, self.width, bias=True)
        self.positions = params.new("positions", 1, self.side**2, self.width)
        blocks = params.each("blocks", vision.num_layers)
        self.blocks = [VisionBlock(block, vision, eps=_EPS, is_qkv_fused=True) for block in blocks]
        self.norm = LayerNorm(params.within("norm"), self.width, _EPS)

    def encode(self, patches: Tensor, squares: int, ops: VisionOps) -> Generator[int, None, Tensor]:
        """Patches of so many squares -> [squares, patches of one, width]; yields after each layer."""
        run = ops.begin([self.side**2] * squares, None, patches.device)
        x = self.patch(patches).view(squares, self.side**2, -1).add_(self.positions).flatten(0, 1)
        del patches
        x = yield from run_blocks(run, self.blocks, x)
        return self.norm(x).view(squares, self.side**2, -1)


TIMM_SIGLIP_RULES = (
    Rule("patch_embed.proj.*", "patch.*"),
    Rule("pos_embed", "positions"),
    Rule("blocks.{}.norm1.*", "blocks.{}.attention_norm.*"),
    Rule("blocks.{}.attn.qkv.*", "blocks.{}.qkv.*"),
    Rule("blocks.{}.attn.proj.*", "blocks.{}.out.*"),
    Rule("blocks.{}.norm2.*", "blocks.{}.mlp_norm.*"),
    Rule("blocks.{}.mlp.fc1.*", "blocks.{}.up.*"),
    Rule("blocks.{}.mlp.fc2.*", "blocks.{}.down.*"),
    Rule("norm.*", "norm.*"),
    Rule("attn_pool.latent", None),
    *(Rule(f"attn_pool.{name}.*", None) for name in ("q", "kv", "proj", "norm", "mlp.fc1", "mlp.fc2")),
)
