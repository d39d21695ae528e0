"""The layers of a model's tower as ours, where their modules are like ours and a picture's embeddings agree.

The model's own code makes patches before them, and merges what they return.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from saccade.checkpoint.hf_processor import raised
from saccade.models.bridge.errors import Unfit
from saccade.models.bridge.model import ModelBridge
from saccade.models.bridge.own_modules import check_shapes, set_norm, share
from saccade.models.bridge.pauses import Pauses
from saccade.models.bridge.proof import TOLERANCE
from saccade.models.bridge.together import KINDS, Together
from saccade.models.layers.activation import activation
from saccade.models.layers.layernorm import LayerNorm, RMSNorm
from saccade.models.state_dict import Parameters
from saccade.models.vision.backend import VisionOps, run_blocks
from saccade.models.vision.blocks import RotaryCosSin, VisionBlock
from saccade.types.media import Size

_NAMES: Mapping[str, tuple[tuple[str, ...], ...]] = {  # ours: theirs, as parts or fused
    "attention_norm": (("layer_norm1",), ("norm1",), ("layernorm_before",), ("attention_norm",)),
    "qkv": (
        *(tuple(f"{name}.{part}_proj" for part in "qkv") for name in ("self_attn", "attn", "attention")),
        ("attn.qkv",),
    ),
    "out": (
        ("self_attn.out_proj",),
        ("self_attn.o_proj",),
        ("attn.proj",),
        ("attention.projection_layer",),
        ("attention.o_proj",),
    ),
    "mlp_norm": (("layer_norm2",), ("norm2",), ("layernorm_after",), ("ffn_norm",)),
    "up": (
        ("mlp.fc1",),
        *((f"{name}.gate_proj", f"{name}.up_proj") for name in ("mlp", "feed_forward")),
    ),
    "down": (("mlp.fc2",), ("mlp.down_proj",), ("feed_forward.down_proj",)),
}
_GAINS = {"out": "lambda_1", "down": "lambda_2"}  # of what a layer adds, in layers that have them
_ACTIVATIONS = ("quick_gelu", "gelu_pytorch_tanh", "gelu", "silu", "relu")
_HEADS = ("num_heads", "num_attention_heads")
_LINEARS = ("qkv", "out", "up", "down")
_OF_A_TOKEN = 2  # what rounding may change of one, compared with the largest value of all
_MAX_KNOWN = 256  # kinds of calls with several images, of which lengths are kept
_SIZES = (Size(300, 211), Size(640, 480))  # of pictures that are compared
_OTHER = Size(37, 90)  # which some cut into another number of tiles


class LayerCall(NamedTuple):
    """What a layer got beside x, and what it returned."""

    arguments: tuple[Any, ...]  # those by position, then those by name
    has_tuple: bool  # whether it returns one


class OwnTower(nn.Module):
    """All layers as one module, which the model's own code calls as it called the first."""

    def __init__(
        self, theirs: Sequence[Any], blocks: Sequence[VisionBlock], ops: VisionOps, pauses: Pauses
    ) -> None:
        super().__init__()
        self.theirs = nn.ModuleList(theirs)  # whose weights are ours
        self.blocks = list(blocks)
        self.ops = ops
        self.pauses = pauses
        self.has_tuple = False
        self.num_by_theirs = 0  # calls
        self._images: tuple[Size, ...] = ()  # of a call of the model's own code with several
        self._calls = 0  # in it
        self._lengths_of: dict[tuple[Any, ...], list[int]] = {}  # of sizes that came before

    def forward(self, hidden_states: Tensor, *more: Any, **named: Any) -> Any:
        """[T, hidden] with lengths among the arguments, or [images, T, hidden]."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        arguments = (*more, *named.values())
        if not all(_is_known(value, len(rows)) for value in arguments):
            return self._by_theirs(hidden_states, *more, **named)
        lengths = self._lengths(arguments, hidden_states)
        if min(lengths) < 1 or sum(lengths) != len(rows):
            return self._by_theirs(hidden_states, *more, **named)
        run = self.ops.begin_rotated(lengths, _angles(arguments), rows.device)
        steps = run_blocks(run, self.blocks, rows.clone())
        while True:
            try:
                self.pauses.after_layers(next(steps))
            except StopIteration as done:
                x: Tensor = done.value
                mixed = x.view(hidden_states.shape)
                return (mixed,) if self.has_tuple else mixed

    @contextmanager
    def encoding(self, images: tuple[Size, ...]) -> Iterator[None]:
        """Several images together, of these sizes."""
        self._images, self._calls = images, 0
        try:
            yield
        finally:
            self._images = ()

    def _lengths(self, arguments: Sequence[Any], hidden: Tensor) -> list[int]:
        """Those of many images are asked of the device, once for the same sizes."""
        if not self._images:
            return _lengths(arguments, hidden)
        self._calls += 1
        key = (self._images, self._calls)
        if key not in self._lengths_of:
            if len(self._lengths_of) >= _MAX_KNOWN:
                self._lengths_of.clear()
            self._lengths_of[key] = _lengths(arguments, hidden)
        return self._lengths_of[key]

    def _by_theirs(self, x: Any, *more: Any, **named: Any) -> Any:
        """Of a picture that has a mask, say."""
        self.num_by_theirs += 1
        output = x
        for layer in self.theirs:
            output = layer(x, *more, **named)
            x = output[0] if self.has_tuple else output
            self.pauses.after_layers(1)
        return output


@torch.no_grad()
def use_own_tower(model: ModelBridge, ops: VisionOps) -> str | None:
    """From here on the layers of the model's tower are ours; or the reason why Transformers' stay."""
    try:
        layers = _tower_layers(model)
        tower = _tower(model, layers, ops)
        images = [_inputs(model, size) for size in _SIZES]
        with _listening(layers) as calls:
            expected = [model.entrance.rows(image) for image in images]
        tower.has_tuple = _alike(calls).has_tuple
    except Unfit as error:
        return str(error)
    except Exception as error:  # modules may be of any kind
        return raised(error)
    theirs = list(layers)
    _put(layers, [tower])
    try:
        rows = [model.entrance.rows(image) for image in images]
        pairs = zip(rows, expected, strict=True)
        difference = max(_difference(*map(model.images.frame.inside, pair)) for pair in pairs)
    except Exception as error:
        reason = raised(error)
    else:
        reason = f"with our layers its embeddings differ by {difference:.1e} from its own"
        if tower.num_by_theirs:
            reason = "its tower's layers get a mask, or RoPE in another form"
        elif difference <= _OF_A_TOKEN * TOLERANCE[model.dtype]:
            model.pauses.has_layers = True
            model.own_tower = tower
            model.together = _together(model, images)
            return None
    _put(layers, theirs)
    return reason


def _together(model: ModelBridge, images: Sequence[Mapping[str, Any]]) -> Together | None:
    """The first way in which a call with several images gives each what it has alone; None: there is none."""
    trials = dict(zip(_SIZES, images, strict=True))
    with suppress(Exception):  # not every processor takes it
        trials[_OTHER] = _inputs(model, _OTHER)
    alone = {size: model.rows_of([image], ())[0] for size, image in trials.items()}
    for way in KINDS:
        model.together = way
        sizes = tuple(trials) if way.takes_sizes else _SIZES[:1] * 2
        try:
            rows = model.rows_of([trials[size] for size in sizes], sizes)
        except Exception:  # of any kind, where shapes do not fit
            continue
        pairs = zip(rows, (alone[size] for size in sizes), strict=True)
        if max(_difference(*pair) for pair in pairs) <= _OF_A_TOKEN * TOLERANCE[model.dtype]:
            return way
    return None


def pause_between_layers(model: ModelBridge) -> None:
    """Between those of the largest tower. Others run in one piece."""
    decoder = set(model.text.modules())
    lists = [part for part in model.model.modules() if isinstance(part, nn.ModuleList)]
    layers = [part for part in lists if len(part) > 1 and decoder.isdisjoint(part.modules())]
    if layers:
        largest = max(layers, key=_num_values)
        model.pauses.listen(largest)


def _num_values(part: nn.Module) -> int:
    return sum(param.numel() for param in part.parameters())


def _inputs(model: ModelBridge, size: Size) -> dict[str, Any]:
    noise = np.random.default_rng(1).integers(0, 256, (size.height, size.width, 3), np.uint8)
    return model.images.inputs(model.images.rows(noise).to(model.device), size)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest of a token's, as a share of its length; a NaN is infinite."""
    largest = float(((ours - theirs).float().norm(dim=1) / theirs.float().norm(dim=1)).max())
    return largest if largest == largest else float("inf")


def _tower_layers(model: ModelBridge) -> nn.ModuleList:
    """The longest list of layers that have the parts of ours, outside of the decoder."""
    decoder = set(model.text.modules())
    lists = [part for part in model.model.modules() if isinstance(part, nn.ModuleList)]
    candidates = [part for part in lists if part not in decoder and len(part) and _parts(part[0]) is not None]
    if not candidates:
        raise Unfit("its tower has no layers like ours")
    return max(candidates, key=len)


def _parts(layer: Any) -> dict[str, list[Any]] | None:
    modules = dict(layer.named_modules())
    parts = {}
    for name, choices in _NAMES.items():
        names = next((names for names in choices if all(part in modules for part in names)), None)
        if names is None:
            return None
        parts[name] = [modules[part] for part in names]
    return parts


@contextmanager
def _listening(layers: nn.ModuleList) -> Iterator[list[LayerCall]]:
    calls: list[LayerCall] = []

    def note(_: Any, positional: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        keywords = {name: value for name, value in keywords.items() if name != "hidden_states"}
        calls.append(LayerCall((*positional[1:], *keywords.values()), isinstance(output, tuple)))

    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _alike(calls: Sequence[LayerCall]) -> LayerCall:
    """That of all layers: of a picture they get the same tensors."""
    if not calls:
        raise Unfit("its tower's layers are not called")
    kinds = {tuple(map(id, _tensors(call.arguments))) for call in calls}
    if len(kinds) > len(_SIZES) or len({call.has_tuple for call in calls}) > 1:
        raise Unfit("its tower's layers are called in different ways")
    return calls[0]


def _tensors(arguments: Sequence[Any]) -> list[Tensor]:
    return [value for value in arguments if isinstance(value, Tensor)]


def _is_known(value: Any, rows: int) -> bool:
    """Whether it is cosines and sines [T, d], ends of pictures, or no tensor."""
    if isinstance(value, tuple):
        shapes = {tuple(part.shape) for part in value if isinstance(part, Tensor) and part.dim() == 2}
        return len(value) == 2 and len(shapes) == 1 and shapes.pop()[0] == rows
    if isinstance(value, Tensor):
        return value.dim() == 0 or _is_ends(value)
    return isinstance(value, bool | int | float | str | None)


def _is_ends(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64) and value.dim() == 1


def _angles(arguments: Sequence[Any]) -> RotaryCosSin | None:
    """Both halves of a head have the same ones."""
    pair = next((value for value in arguments if isinstance(value, tuple)), None)
    if pair is None:
        return None
    cos, sin = (part.float() for part in pair)
    half = sin.shape[-1] // 2
    return RotaryCosSin(cos, torch.cat((-sin[:, :half], sin[:, half:]), 1))


def _lengths(arguments: Sequence[Any], hidden: Tensor) -> list[int]:
    """Patches of each picture. Those of one are known without asking the device."""
    if hidden.dim() == 3 and len(hidden) > 1:
        return [hidden.shape[1]] * len(hidden)
    ends = [value for value in arguments if _is_ends(value)]
    if ends and len(ends[0]) > 2:
        return [int(length) for length in ends[0].diff().tolist()]
    return [hidden.shape[-2]]


def _tower(model: ModelBridge, layers: nn.ModuleList, ops: VisionOps) -> OwnTower:
    parts = [_parts(layer) for layer in layers]
    blocks = []
    for layer, modules in zip(layers, parts, strict=True):
        if modules is None:
            raise Unfit("its tower's layers differ")
        blocks.append(_block(model, layer, modules))
    for block, layer, modules in zip(blocks, layers, parts, strict=True):
        assert modules is not None
        for name in _LINEARS:
            share(getattr(block, name), modules[name])
            gain = getattr(layer, _GAINS.get(name, ""), None)
            if gain is not None:
                _scale(getattr(block, name), gain)
    return OwnTower(list(layers), blocks, ops, model.pauses)


def _block(model: ModelBridge, layer: Any, modules: Mapping[str, list[Any]]) -> VisionBlock:
    """Without weights, but those of its norms."""
    _check_weights(layer, modules)
    hidden = modules["down"][0].weight.shape[0]
    is_gated = len(modules["up"]) == 2
    attention = layer.get_submodule(_attention_of(layer, modules["out"][0]))
    heads = next(getattr(attention, name) for name in _HEADS if hasattr(attention, name))
    assert model.config.vision is not None
    shape = replace(
        model.config.vision,
        hidden_size=hidden,
        intermediate_size=modules["down"][0].weight.shape[1],
        num_heads=int(heads),
        hidden_act=_activation(layer),
        is_gated=is_gated,
    )
    norm, eps = _norm_of(modules["attention_norm"][0])
    biases = {part.bias is not None for name in _LINEARS for part in modules[name]}
    params = Parameters(model.dtype, torch.device("meta"))
    is_fused = len(modules["qkv"]) == 1
    block = VisionBlock(params, shape, eps=eps, is_qkv_fused=is_fused, norm=norm, has_bias=True in biases)
    for name in _LINEARS:
        linear = getattr(block, name)
        check_shapes(name, linear, modules[name], [len(part.weight) for part in modules[name]])
    scaling = getattr(attention, "scaling", getattr(attention, "scale", block.scale))
    block.scale = float(scaling)
    for name in ("attention_norm", "mlp_norm"):
        _share_norm(getattr(block, name), modules[name][0])
    return block


def _check_weights(layer: Any, modules: Mapping[str, list[Any]]) -> None:
    parts = [part for members in modules.values() for part in members]
    ids = {id(tensor) for part in parts for tensor in part.parameters()}
    ids |= {id(getattr(layer, name, None)) for name in _GAINS.values()}
    other = [name for name, tensor in layer.named_parameters() if id(tensor) not in ids]
    if other:
        raise Unfit(f"its tower's layers have {other[0]}, which ours have not")


def _attention_of(layer: Any, out: Any) -> str:
    name = next(name for name, module in layer.named_modules() if module is out)
    return str(name.rpartition(".")[0])


def _activation(layer: Any) -> str:
    """By what it computes."""
    x = torch.linspace(-6, 6, 49)
    for module in layer.modules():
        for name in ("act_fn", "activation_fn", "act"):
            act = getattr(module, name, None)
            if act is not None:
                return _named(act, x)
    raise Unfit("its tower's layers have no activation that has a name")


def _named(act: Any, x: Tensor) -> str:
    for name in _ACTIVATIONS:
        if torch.allclose(act(x), activation(name)(x.clone()), atol=1e-6):
            return name
    raise Unfit(f"its tower's layers activate by {type(act).__name__}, which ours do not")


def _norm_of(norm: Any) -> tuple[type[LayerNorm] | type[RMSNorm], float]:
    if type(norm) is nn.LayerNorm:
        return LayerNorm, norm.eps
    return RMSNorm, 0.0  # `set_norm` finds it


def _share_norm(ours: LayerNorm | RMSNorm, theirs: Any) -> None:
    if isinstance(ours, RMSNorm):
        set_norm(ours, theirs)
    else:
        ours.weight, ours.bias, ours.eps = theirs.weight.data, theirs.bias.data, theirs.eps


def _scale(ours: Any, gain: Tensor) -> None:
    ours.weight = ours.weight * gain[:, None]
    if ours.bias is not None:
        ours.bias = ours.bias * gain


def _put(layers: nn.ModuleList, members: Sequence[Any]) -> None:
    layers._modules.clear()
    layers.extend(members)
