"""A decoder of Transformers as one of ours, where its modules are like ours and the proof's numbers agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from saccade.checkpoint.config import TextConfig
from saccade.checkpoint.hf_processor import raised
from saccade.models.bridge.errors import Unfit
from saccade.models.bridge.model import ModelBridge
from saccade.models.bridge.own_experts import experts_of, share_experts, share_experts_beside
from saccade.models.bridge.own_gates import check_gates
from saccade.models.bridge.own_modules import (
    Modules,
    check_shapes,
    has_bias,
    has_gelu,
    keeps_states,
    modules_of,
    scale_of,
    set_norm,
    share,
)
from saccade.models.bridge.own_rotation import rotations_of
from saccade.models.bridge.own_ruled import joined, ruled_layers, set_beside_experts
from saccade.models.bridge.own_scales import ScaledDecoder, Scales, scales_of
from saccade.models.bridge.own_states import linear_config, share_states
from saccade.models.bridge.proof import Probe, difference_in_steps, limit_of
from saccade.models.bridge.states import StateLayers
from saccade.models.bridge.stored import is_in_blocks
from saccade.models.fp8_weights import BLOCK
from saccade.models.layers.decoder import Biases, Decoder
from saccade.models.layers.gated_delta_net import GatedDeltaNet
from saccade.models.layers.hybrid_decoder import KEEPS_STATES, HybridDecoder
from saccade.models.layers.linear import Linear
from saccade.models.layers.moe import MoE
from saccade.models.layers.ruled_decoder import MLPBesideExperts, RuledDecoder
from saccade.models.layers.sandwich import SandwichDecoder
from saccade.models.state_dict import Parameters

_TRIED = 64  # tokens, over the whole vocabulary


def use_own_decoder(model: ModelBridge, probes: Sequence[Probe]) -> str | None:
    """From here on the model's decoder is ours; or the reason why Transformers' layers stay."""
    theirs = model.decoder, model.config
    try:
        own = OwnDecoder(model)
        own.share()
    except Unfit as error:
        return str(error)
    except Exception as error:  # modules may be of any kind
        return raised(error)
    own.reorder()
    model.decoder, model.config = own.decoder, own.config
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
    model.decoder, model.config = theirs
    own.reorder(back=True)
    return reason


class OwnDecoder:
    """Raises Unfit before anything of the model is changed."""

    @torch.no_grad()
    def __init__(self, model: ModelBridge) -> None:
        _check(model)
        self.model = model
        self.layers = [modules_of(layer) for layer in model.text.layers]
        self.config = model.config
        if model.states is not None:
            shape = linear_config(model.states, self.layers)
            self.config = replace(model.config, text=replace(model.config.text, linear=shape))
        rules = dict(model.attention.rules)  # before other passes of these layers
        gates = {has_gelu(layer) for layer in model.text.layers}
        if len(gates) > 1:
            raise Unfit("its layers differ in what gates their MLPs")
        self.gelu = gates.pop()
        self.rotations = rotations_of(model)
        self.scales = scales_of(model)
        self.ruled = None
        if model.states is None:
            self.ruled = ruled_layers(self.layers, self.rotations, rules, model.config.text)
        self.params = Parameters(model.dtype, torch.device("meta"))
        self.decoder = self._empty_decoder()
        for ours, theirs in zip(self.decoder.layers, self.layers, strict=True):
            for name, linear in _linears(ours).items():
                check_shapes(name, linear, theirs[name], _parts(name, linear, ours))
        self.orders = {
            index: self._order_of(self.decoder.layers[index].attention, rotation.order)
            for index, rotation in self.rotations.items()
        }
        self._check_blocks()
        self._set_norms()
        if isinstance(self.decoder, ScaledDecoder):
            self.scales.put_into(self.decoder)

    def _check_blocks(self) -> None:
        """Rows that change places stay in their block."""
        for index, order in self.orders.items():
            stays = torch.equal(order // BLOCK, order.sort().values // BLOCK)
            if not stays and any(map(is_in_blocks, self.layers[index]["qkv"])):
                raise Unfit("rows of its queries that change places have scales of blocks")

    def _empty_decoder(self) -> Decoder:
        """Without memory."""
        model = self.model
        decoder = self._decoder_of(self._shape())
        decoder.embedding_gain = _embedding_gain(model)
        tail = model.tail._replace(gain=1.0)
        if not tail.is_plain:
            decoder.tail = tail
        if isinstance(decoder, ScaledDecoder):
            decoder.scales = self.scales
        decoder.table = model.model.get_input_embeddings().weight.data
        decoder.head = model.head.weight.data
        if decoder.head.data_ptr() == decoder.table.data_ptr():
            decoder.head = decoder.table
        rotary = decoder.rotary
        rotary.frequencies, rotary.axes, rotary.gain = joined(self.rotations)
        decoder.scale = _scaling(model) * rotary.gain**2
        return decoder

    def _decoder_of(self, text: TextConfig) -> Decoder:
        """One of our classes."""
        first = next(layer for layer in self.layers if "qkv" in layer)
        has_qk_norms = bool(first["q_norm"])
        if text.linear is None:
            biases = (has_bias(self.layers, *names) for names in (("qkv",), ("out",), ("gate_up", "down")))
            kind = self._kind(norms_sums=bool(first["attention_sum"]))
            return kind(self.params, text, Biases(*biases), has_qk_norms=has_qk_norms)
        if first["attention_sum"] or self.scales != Scales() or self.model.entrance.extras:
            raise Unfit("its layers keep states, and its decoder scales, norms sums, or takes more")
        rows = sum(part.out_features for part in first["qkv"])
        has_gates = rows == 2 * (text.num_heads + text.num_kv_heads) * text.head_dim
        return HybridDecoder(self.params, text, text.linear, has_gates=has_gates, has_qk_norms=has_qk_norms)

    def _kind(self, *, norms_sums: bool) -> Callable[..., Decoder]:
        """Of a decoder whose layers keep no states."""
        is_scaled = self.scales != Scales()
        if is_scaled and (norms_sums or self.ruled is not None):
            raise Unfit("its layers scale what they add, and norm it or differ in their attention")
        if self.ruled is not None:
            return partial(RuledDecoder, of_layers=self.ruled)
        if norms_sums:
            return SandwichDecoder
        return ScaledDecoder if is_scaled else Decoder

    def _shape(self) -> TextConfig:
        """As its modules have it, with RoPE that says nothing."""
        widths = {layer["down"][0].in_features for layer in self.layers if "down" in layer}
        if len(widths) > 1:
            raise Unfit("its MLPs differ in width")
        routed = [i for i, layer in enumerate(self.layers) if "experts" in layer and "mlp_out" not in layer]
        rules = {index: experts_of(self.layers[index]) for index in routed}
        if len(set(rules.values())) > 1:
            raise Unfit("its layers differ in their experts")
        text = self.config.text
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
        text = self.model.text
        set_norm(self.decoder.norm, getattr(text, "norm", None) or text.embedding_norm)
        modules = (self.decoder.layers, self.layers, text.layers)
        for index, (ours, theirs, layer) in enumerate(zip(*modules, strict=True)):
            set_norm(ours.attention_norm, theirs["attention_norm"][0])
            set_norm(ours.mlp_norm, theirs["mlp_norm"][0])
            self._set_sums(ours, theirs, scale_of(layer))
            self._set_mlp(ours, theirs)
            check_gates(layer, theirs, gelu=self.gelu)
            norms = getattr(ours.attention, "qk_norms", None)
            if bool(theirs.get("q_norm")) != (norms is not None):
                raise Unfit("some of its layers norm queries and keys")
            if norms is not None:
                for norm, name in ((norms.q, "q_norm"), (norms.k, "k_norm")):
                    set_norm(norm, theirs[name][0])
                    norm.weight = norm.weight[self.rotations[index].order]
                norms.eps = norms.q.eps
                if norms.k.eps != norms.eps:
                    raise Unfit("its norms of queries and of keys differ")

    def _set_mlp(self, ours: Any, theirs: Modules) -> None:
        for mlp in (ours.mlp, getattr(ours.mlp, "experts", ours.mlp)):
            mlp.gelu = self.gelu
        if isinstance(ours.mlp, MLPBesideExperts):
            set_beside_experts(ours.mlp, theirs, ours.mlp_norm.weight)

    def _set_sums(self, ours: Any, theirs: Modules, scale: float) -> None:
        if scale != 1 and getattr(ours, "mlp_sum", None) is None:
            raise Unfit("its layers scale what they return")
        for name in ("attention_sum", "mlp_sum"):
            layer_sum = getattr(ours, name, None)
            if bool(theirs[name]) != (layer_sum is not None):
                raise Unfit("some of its layers norm what they add")
            if layer_sum is not None:
                set_norm(layer_sum.norm, theirs[name][0])
                layer_sum.scale = {"mlp_sum": scale}.get(name, 1.0)

    @torch.no_grad()
    def share(self) -> None:
        """Transformers' layers compute what they did."""
        for ours, theirs in zip(self.decoder.layers, self.layers, strict=True):
            for name, linear in _linears(ours).items():
                share(linear, theirs[name])
            if isinstance(ours.attention, KEEPS_STATES):
                share_states(ours.attention, theirs)
            if isinstance(ours.mlp, MoE):
                share_experts(ours.mlp, theirs)
            if isinstance(ours.mlp, MLPBesideExperts):
                share_experts_beside(ours.mlp.experts, theirs)

    def _order_of(self, attention: Any, order: Tensor) -> Tensor:
        """The rows of their projection, a head's gate after its query, as ours stand: [rows]."""
        heads, dim = attention.heads, attention.head_dim
        rows = torch.arange(len(attention.qkv.weight), device=order.device).view(-1, dim)
        q, k, v = rows.tensor_split([len(rows) - 2 * attention.kv_heads, len(rows) - attention.kv_heads])
        q, gates = q.view(heads, -1)[:, :dim], q.view(heads, -1)[:, dim:]
        return torch.cat([part.flatten() for part in (q[:, order], k[:, order], v, gates)])

    @torch.no_grad()
    def reorder(self, *, back: bool = False) -> None:
        """Rows of queries and keys, in place: scores stay the same, but Transformers' layers are wrong."""
        for index, order in self.orders.items():
            if bool((order.diff() == 1).all()):
                continue
            places = order.argsort() if back else order
            for tensor in self.decoder.layers[index].attention.qkv.by_row():
                tensor.copy_(tensor[places])


def _check(model: ModelBridge) -> None:
    """What our decoder has not, whatever its layers are."""
    head, layers, text = model.head, model.text.layers, model.config.text
    if model.states is not None:
        _check_states(model, model.states)
    if model.indexers.modules:
        raise Unfit("its layers have indexers")
    if text.rope_switch is not None:
        raise Unfit("its RoPE changes with a prompt's length")
    if text.blocks in ("images", "before answer"):
        raise Unfit("its attention sees more than what lies side by side")
    if not all(extra.is_of_images and extra.shape == (text.hidden_size,) for extra in model.entrance.extras):
        raise Unfit("its decoder takes more than embeddings and deep features")
    if type(head) is not nn.Linear or getattr(head, "bias", None) is not None:
        raise Unfit("its head is more than a matrix")
    if len(layers) != text.num_layers:
        raise Unfit(f"it has {len(layers)} layers, and its config tells of {text.num_layers}")


def _check_states(model: ModelBridge, states: StateLayers) -> None:
    if not all(keeps_states(model.text.layers[number]) for number in states.layers):
        raise Unfit("its layers keep states in another way than ours")
    if not all(rule.is_plain for rule in model.attention.rules.values()):
        raise Unfit("its layers keep states, and its attention is more than causal")


def _embedding_gain(model: ModelBridge) -> float:
    """In the model's dtype, as its own code multiplies."""
    embeddings = model.model.get_input_embeddings()
    ids = torch.linspace(0, len(embeddings.weight) - 1, _TRIED).long().to(model.device)
    found, rows = embeddings(ids).float(), embeddings.weight[ids]
    if torch.equal(found, rows.float()):
        return 1.0
    gain = float(((found * rows).sum() / rows.float().square().sum()).to(rows.dtype))
    if not torch.allclose(found, gain * rows.float(), rtol=1e-2):
        raise Unfit("its embeddings are more than a table")
    return gain


def _scaling(model: ModelBridge) -> float:
    """Of scores."""
    usual = model.config.text.head_dim**-0.5
    layers = [layer for layer in model.text.layers if hasattr(layer, "self_attn")]
    scalings = {float(getattr(layer.self_attn, "scaling", None) or usual) for layer in layers}
    if len(scalings) != 1:
        raise Unfit("its layers scale their scores differently")
    return scalings.pop()


def _linears(layer: Any) -> dict[str, Linear]:
    attention, mlp = layer.attention, layer.mlp
    first = "inputs" if isinstance(attention, KEEPS_STATES) else "qkv"
    linears = {first: getattr(attention, first), "out": attention.out}
    if not isinstance(mlp, MoE):
        return linears | {"gate_up": mlp.gate_up, "down": mlp.down}
    if mlp.shared is not None:
        linears |= {"shared.gate_up": mlp.shared.gate_up, "shared.down": mlp.shared.down}
    return linears


def _parts(name: str, linear: Linear, layer: Any) -> list[int]:
    """Rows of each projection in it."""
    rows = len(linear.weight)
    attention = layer.attention
    if name == "qkv":
        shared = attention.kv_heads * attention.head_dim
        return [rows - 2 * shared, shared, shared]
    if isinstance(attention, GatedDeltaNet) and name == "inputs":
        return list(attention.sizes.values())
    if name.endswith("gate_up"):
        return [rows // 2, rows // 2]
    return [rows]


def _give_up_layers(model: ModelBridge) -> None:
    """The model's own forward ends where they would begin. Nothing else holds weights that may be packed."""
    model.text.layers = nn.ModuleList(nn.Identity() for _ in model.text.layers)
    if model.decoder.head is not model.decoder.table:
        model.head.weight = nn.Parameter(model.head.weight.new_empty(0), requires_grad=False)
