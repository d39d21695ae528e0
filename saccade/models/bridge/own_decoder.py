"""A decoder of Transformers as one of ours, where its modules are like ours and the proof's numbers agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from saccade.checkpoint.config import TextConfig
from saccade.checkpoint.hf_processor import raised
from saccade.models.bridge.errors import Unfit
from saccade.models.bridge.model import ModelBridge
from saccade.models.bridge.own_experts import experts_of, share_experts
from saccade.models.bridge.own_modules import check_shapes, has_bias, modules_of, set_norm, share
from saccade.models.bridge.own_rotation import rotation_of
from saccade.models.bridge.own_scales import ScaledDecoder, Scales, scales_of
from saccade.models.bridge.proof import Probe, difference_in_steps, limit_of
from saccade.models.layers.decoder import Biases, Decoder
from saccade.models.layers.linear import Linear
from saccade.models.layers.moe import MoE
from saccade.models.state_dict import Parameters

_TRIED = 64  # tokens, over the whole vocabulary


def use_own_decoder(model: ModelBridge, probes: Sequence[Probe]) -> str | None:
    """From here on the model's decoder is ours; or the reason why Transformers' layers stay."""
    theirs = model.decoder
    try:
        own = OwnDecoder(model)
        own.share()
    except Unfit as error:
        return str(error)
    except Exception as error:  # modules may be of any kind
        return raised(error)
    own.reorder(own.rotation.order)
    model.decoder = own.decoder
    try:
        difference = difference_in_steps(model, probes)
    except Exception as error:
        reason = raised(error)
    else:
        if difference <= limit_of(model, probes):
            model.params = own.params
            _give_up_layers(model)
            return None
        reason = f"with our layers its logits differ by {difference:.1e} from its own"
    model.decoder = theirs
    own.reorder(own.rotation.order.argsort())
    return reason


class OwnDecoder:
    """Raises Unfit before anything of the model is changed."""

    @torch.no_grad()
    def __init__(self, model: ModelBridge) -> None:
        _check(model)
        self.model = model
        self.layers = [modules_of(layer) for layer in model.text.layers]
        self.rotation = rotation_of(model)
        self.scales = scales_of(model)
        self.params = Parameters(model.dtype, torch.device("meta"))
        self.decoder = self._empty_decoder()
        for ours, theirs in zip(self.decoder.layers, self.layers, strict=True):
            for name, linear in _linears(ours).items():
                check_shapes(name, linear, theirs[name], _parts(name, linear, ours))
        self._set_norms()
        if isinstance(self.decoder, ScaledDecoder):
            self.scales.put_into(self.decoder)

    def _empty_decoder(self) -> Decoder:
        """Without memory."""
        model, rotation = self.model, self.rotation
        biases = Biases(
            *(has_bias(self.layers, *names) for names in (("qkv",), ("out",), ("gate_up", "down")))
        )
        kind = Decoder if self.scales == Scales() else ScaledDecoder
        decoder = kind(self.params, self._shape(), biases, has_qk_norms=bool(self.layers[0]["q_norm"]))
        if isinstance(decoder, ScaledDecoder):
            decoder.scales = self.scales
        decoder.table = model.model.get_input_embeddings().weight.data
        decoder.head = model.head.weight.data
        if decoder.head.data_ptr() == decoder.table.data_ptr():
            decoder.head = decoder.table
        rotary = decoder.rotary
        rotary.frequencies, rotary.axes, rotary.gain = rotation.frequencies, rotation.axes, rotation.gain
        decoder.scale = _scaling(model) * rotation.gain**2
        return decoder

    def _shape(self) -> TextConfig:
        """As its modules have it, with RoPE that says nothing."""
        widths = {layer["down"][0].weight.shape[1] for layer in self.layers if "down" in layer}
        if len(widths) > 1:
            raise Unfit("its MLPs differ in width")
        rules = {index: experts_of(layer) for index, layer in enumerate(self.layers) if "experts" in layer}
        if len(set(rules.values())) > 1:
            raise Unfit("its layers differ in their experts")
        text = self.model.config.text
        return replace(
            text,
            intermediate_size=next(iter(widths), text.intermediate_size),
            rope_scaling={},
            rope_theta=1e4,
            mrope_section=None,
            tie_word_embeddings=True,
            experts=replace(next(iter(rules.values())), layers=tuple(rules)) if rules else None,
        )

    def _set_norms(self) -> None:
        set_norm(self.decoder.norm, self.model.text.norm)
        for ours, theirs in zip(self.decoder.layers, self.layers, strict=True):
            set_norm(ours.attention_norm, theirs["attention_norm"][0])
            set_norm(ours.mlp_norm, theirs["mlp_norm"][0])
            norms = ours.attention.qk_norms
            if bool(theirs["q_norm"]) != (norms is not None):
                raise Unfit("some of its layers norm queries and keys")
            if norms is not None:
                for norm, name in ((norms.q, "q_norm"), (norms.k, "k_norm")):
                    set_norm(norm, theirs[name][0])
                    norm.weight = norm.weight[self.rotation.order]
                norms.eps = norms.q.eps
                if norms.k.eps != norms.eps:
                    raise Unfit("its norms of queries and of keys differ")

    @torch.no_grad()
    def share(self) -> None:
        """Transformers' layers compute what they did."""
        for ours, theirs in zip(self.decoder.layers, self.layers, strict=True):
            for name, linear in _linears(ours).items():
                share(linear, theirs[name])
            if isinstance(ours.mlp, MoE):
                share_experts(ours.mlp, theirs)

    @torch.no_grad()
    def reorder(self, order: Tensor) -> None:
        """Rows of queries and keys, in place: scores stay the same, but Transformers' layers are wrong."""
        if self.rotation.is_ordered:
            return
        for layer in self.decoder.layers:
            attention = layer.attention
            rows = (attention.heads + attention.kv_heads) * attention.head_dim
            for tensor in (attention.qkv.weight, attention.qkv.bias):
                if tensor is not None:
                    part = tensor[:rows].unflatten(0, (-1, len(order)))
                    part.copy_(part[:, order])


def _check(model: ModelBridge) -> None:
    """What our decoder has not, whatever its layers are."""
    head, layers, text = model.head, model.text.layers, model.config.text
    if model.states is not None:
        raise Unfit("its layers keep states")
    if model.indexers.modules:
        raise Unfit("its layers have indexers")
    if text.rope_switch is not None:
        raise Unfit("its RoPE changes with a prompt's length")
    if text.blocks is not None or not all(rule.is_plain for rule in model.attention.rules.values()):
        raise Unfit("its attention is more than causal")
    if not all(extra.is_of_images and extra.shape == (text.hidden_size,) for extra in model.entrance.extras):
        raise Unfit("its decoder takes more than embeddings and deep features")
    if model.tail.cap is not None or model.tail.banned is not None:
        raise Unfit("its logits are capped, or of tokens that it never says")
    if type(head) is not nn.Linear or getattr(head, "bias", None) is not None:
        raise Unfit("its head is more than a matrix")
    if len(layers) != text.num_layers:
        raise Unfit(f"it has {len(layers)} layers, and its config tells of {text.num_layers}")
    embeddings = model.model.get_input_embeddings()
    ids = torch.linspace(0, len(embeddings.weight) - 1, _TRIED).long().to(model.device)
    if not torch.equal(embeddings(ids), embeddings.weight[ids]):
        raise Unfit("its embeddings are more than a table")


def _scaling(model: ModelBridge) -> float:
    """Of scores."""
    usual = model.config.text.head_dim**-0.5
    found = {float(getattr(layer.self_attn, "scaling", None) or usual) for layer in model.text.layers}
    if len(found) != 1:
        raise Unfit("its layers scale their scores differently")
    return found.pop()


def _linears(layer: Any) -> dict[str, Linear]:
    attention, mlp = layer.attention, layer.mlp
    found = {"qkv": attention.qkv, "out": attention.out}
    if not isinstance(mlp, MoE):
        return found | {"gate_up": mlp.gate_up, "down": mlp.down}
    if mlp.shared is not None:
        found |= {"shared.gate_up": mlp.shared.gate_up, "shared.down": mlp.shared.down}
    return found


def _parts(name: str, linear: Linear, layer: Any) -> list[int]:
    """Rows of each projection in it."""
    rows = len(linear.weight)
    if name == "qkv":
        attention = layer.attention
        return [
            size * attention.head_dim for size in (attention.heads, attention.kv_heads, attention.kv_heads)
        ]
    if name.endswith("gate_up"):
        return [rows // 2, rows // 2]
    return [rows]


def _give_up_layers(model: ModelBridge) -> None:
    """The model's own forward ends where they would begin. Nothing else holds weights that may be packed."""
    model.text.layers = nn.ModuleList(nn.Identity() for _ in model.text.layers)
    if model.decoder.head is not model.decoder.table:
        model.head.weight = nn.Parameter(model.head.weight.new_empty(0), requires_grad=False)
