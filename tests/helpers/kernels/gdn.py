"""A gated delta net layer with random weights and states, computed by kernels or by the layer itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.checkpoint.config import LinearConfig, TextConfig
from saccade.kernels.gdn.decode import allocate_counters, gdn_decode
from saccade.kernels.gdn.layout import GDNShape, GDNStates, GDNWeights
from saccade.kernels.gdn.prefill import GDNPrefill, PrefillConfig, PrefillWorkspace
from saccade.kernels.gdn.prefill_plan import plan_chunks
from saccade.models.layers.forward_types import States, WindowGroup
from saccade.models.layers.gated_delta_net import GatedDeltaNet
from saccade.models.state_dict import Parameters
from tests.helpers.kernels.paged import DEVICE, ints, random

TOLERANCE = {torch.float32: 1e-4, torch.float16: 6e-3, torch.bfloat16: 4e-2}


class Piece(NamedTuple):
    """Tokens of a window, up to a checkpoint or its end."""

    length: int
    row: int
    keep: int = -1


class Net:
    """`rows` states, the last of which is spare. What runs changes `states`."""

    def __init__(self, shape: GDNShape, dtype: torch.dtype = torch.float32, rows: int = 8, seed: int = 0) -> None:
        self.shape = shape
        self.dtype = dtype
        self.weights = GDNWeights(
            random(shape.channels, 1, shape.kernel, dtype=dtype, seed=seed + 1),
            random(shape.value_heads, dtype=dtype, seed=seed + 2),
            random(shape.value_heads, dtype=dtype, seed=seed + 3),
            1 + 0.1 * random(shape.value_dim, dtype=dtype, seed=seed + 4),
            1e-6,
        )
        self.states = GDNStates(
            random(rows, shape.kernel - 1, shape.channels, dtype=dtype, seed=seed + 5).transpose(1, 2),
            random(rows, shape.value_heads, shape.key_dim, shape.value_dim, seed=seed + 6),
        )

    def projected(self, tokens: int, seed: int = 100) -> Tensor:
        return random(tokens, self.shape.width, dtype=self.dtype, seed=seed)

    def copy(self) -> Net:
        twin = Net.__new__(Net)
        twin.__dict__ = {**self.__dict__, "states": GDNStates(*(state.clone() for state in self.states))}
        return twin

    def decode(self, projected: Tensor, rows: list[int], **options: Any) -> Tensor:
        counters = allocate_counters(len(rows), self.shape, DEVICE)
        found = gdn_decode(projected, ints(rows), self.shape, self.weights, self.states, counters, **options)
        assert not counters.any()
        return found

    def prefill(
        self, projected: Tensor, pieces: list[Piece], unused: int = 0, config: PrefillConfig | None = None
    ) -> Tensor:
        """`unused`: pieces of padding."""
        starts = [0]
        for piece in pieces:
            starts.append(starts[-1] + piece.length)
        rows = ints([piece.row for piece in pieces] + [-1] * unused)
        keep = ints([piece.keep for piece in pieces] + [-1] * unused)
        plan = plan_chunks(ints(starts + starts[-1:] * unused), rows, keep, len(projected))
        workspace = PrefillWorkspace.allocate(len(plan.chunks), self.shape, self.dtype, DEVICE)
        for tensor in workspace:
            tensor.fill_(float("nan"))
        given = GDNPrefill(projected, plan, self.shape, self.weights, self.states, workspace)
        return (given if config is None else given._replace(config=config))()

    def expected(self, projected: Tensor, pieces: list[Piece]) -> Tensor:
        """By the layer, in float32."""
        layer = self._layer()
        states = States(self.states.conv.float()[None], self.states.recurrent.clone()[None], [])
        first = 0
        groups = []
        for piece in pieces:
            keep = None if piece.keep < 0 else torch.tensor([piece.keep], device=DEVICE)
            tokens = torch.arange(first, first + piece.length, device=DEVICE)[None]
            groups.append(WindowGroup(tokens, torch.tensor([piece.row], device=DEVICE), keep))
            first += piece.length
        found: Tensor = layer(projected[:first].float(), states._replace(groups=groups), 0)
        self.states.conv.copy_(states.conv[0])
        self.states.recurrent.copy_(states.recurrent[0])
        return found.to(self.dtype)

    def _layer(self) -> Any:
        """Its projections pass on what they are given."""
        shape = self.shape
        text = TextConfig(8, 8, 1, 1, 1, 8, 8, 8, self.weights.eps, 1e4, None, {}, False, "qwen3_5")
        linear = LinearConfig((0,), *shape)
        layer: Any = GatedDeltaNet(Parameters(torch.float32, DEVICE), text, linear)
        layer.conv, layer.decay, layer.decay_bias, layer.norm.weight = (w.float() for w in self.weights[:4])
        layer.inputs = layer.out = lambda x: x
        return layer


def assert_same(found: Net, expected: Net) -> None:
    """In their states."""
    torch.testing.assert_close(found.states.conv, expected.states.conv, atol=0, rtol=0)
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.states.recurrent, expected.states.recurrent, atol=tolerance, rtol=tolerance)


def assert_near(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
