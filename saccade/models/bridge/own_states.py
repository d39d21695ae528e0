"""Layers of Transformers that keep states, as ours: delta nets like Qwen3.5's, convolutions like LFM2's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from saccade.checkpoint.config import LinearConfig
from saccade.models.bridge.errors import Unfit
from saccade.models.bridge.own_modules import Modules, eps_of
from saccade.models.bridge.states import RECURRENT, StateLayers, StateTensor
from saccade.models.layers.gated_delta_net import GatedDeltaNet
from saccade.models.layers.short_convolution import ShortConvolution


def linear_config(states: StateLayers, layers: Sequence[Modules]) -> LinearConfig:
    """Their shape, by their weights and by what they keep."""
    shapes = {_shape(layers[index], states.parts[index]) for index in states.layers}
    if len(shapes) > 1:
        raise Unfit("its layers keep states of different shapes")
    return replace(shapes.pop(), layers=states.layers)


def _shape(layer: Modules, parts: Sequence[StateTensor]) -> LinearConfig:
    """Without its layers."""
    channels, _, kernel = layer["conv"][0].shape
    recurrent = [part.shape for part in parts if part.kind == RECURRENT]
    if not recurrent:
        return LinearConfig((), 0, 1, 0, channels, kernel)
    heads, key, value = recurrent[0]
    return LinearConfig((), (channels - heads * value) // (2 * key), heads, key, value, kernel)


def share_states(ours: GatedDeltaNet | ShortConvolution, theirs: Modules) -> None:
    """What they have beside GEMMs."""
    ours.conv = theirs["conv"][0].data
    if isinstance(ours, GatedDeltaNet):
        ours.decay = theirs["decay"][0].data
        ours.decay_bias = theirs["decay_bias"][0].data
        ours.norm.weight = theirs["gated_norm"][0].weight.data
        ours.norm.eps = eps_of(theirs["gated_norm"][0])
