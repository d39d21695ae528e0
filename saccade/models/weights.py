"""Weight loading: safetensors into a model's parameters, renamed by rules; or random weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from tqdm import tqdm

from saccade.errors import ConfigError
from saccade.models.fp8_weights import FP8, Fp8Weights, has_blocks, quantized, scales_for
from saccade.models.int4_weights import GroupScales, Int4Format, Int4Weights, fill_packed
from saccade.models.state_dict import Scales, Whole
from saccade.models.tensor_files import Int4Tensors, StoredTensors, some

OF_QUANTISED = (".qweight", ".weight_packed", "_scale_inv", ".weight_scale", ".pre_quant_scale")
_IGNORED = ""  # our name of a tensor that is ignored
Place = Callable[[str], str | None]  # our name of a checkpoint's tensor; None: it has none
_SHOWN = 5  # missing names that are looked up for an error


@dataclass(frozen=True, slots=True)
class Rule:
    """A checkpoint's name -> ours. `{}` is an index, a final `*` its last part: weight or bias."""

    source: str
    target: str | None  # None: the tensor is ignored


def under(rules: Iterable[Rule], sources: Sequence[str], target: str) -> tuple[Rule, ...]:
    """The same rules under prefixes. Checkpoints of different versions have different ones: all `sources`."""
    prefixed = []
    for rule in rules:
        inner = None if rule.target is None else target + rule.target
        prefixed += [Rule(source + rule.source, inner) for source in sources]
    return tuple(prefixed)


def projected_rules(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Of a base model in one of late interaction, under `vlm.` or without `model.`; and of its projection."""
    names = ("embedding_proj_layer", "custom_text_proj")
    all_rules = [Rule(f"{name}.*", "decoder.projection.*") for name in names]
    for rule in rules:
        bare = rule.source.removeprefix("model.")
        for source in dict.fromkeys((rule.source, bare)):
            all_rules += [Rule(source, rule.target), Rule(f"vlm.{source}", rule.target)]
    return tuple(all_rules)


def load_weights(
    tensors: StoredTensors,
    targets: Mapping[str, Tensor],
    rules: Sequence[Rule],
    wholes: Mapping[str, Whole] = MappingProxyType({}),
    scales: Mapping[str, Scales] = MappingProxyType({}),
    *,
    progress: bool,
) -> None:
    """Load stored tensors into `targets`, one at a time. Every target is loaded exactly once.

    A fused tensor of `wholes` counts as all targets that it covers. Targets without memory are not read.
    Targets in float8 or INT4 have `scales`.
    """
    targets = _stored_targets(tensors.file_of, targets, rules, wholes)
    plan = _plan(tensors, targets, rules)
    names = [name for name, target in plan.items() if not targets[target].is_meta]
    names.sort(key=lambda name: tensors.file_of[name])
    for name in tqdm(names, desc="Loading weights", unit=" tensors", disable=not progress):
        target = targets[plan[name]]
        beside = scales.get(plan[name])
        if beside is not None:
            copy_quantized(tensors, name, target, beside)
            continue
        assert target.dtype != FP8, f"{name} has no scales"
        tensor = tensors.read(name)
        shaped = _as_shaped(tensor, target) if plan[name] in wholes else tensor
        _copy(shaped, target, name, tensors.file_of[name])


def _stored_targets(
    names: Iterable[str], targets: Mapping[str, Tensor], rules: Sequence[Rule], wholes: Mapping[str, Whole]
) -> Mapping[str, Tensor]:
    """The targets, with those that this checkpoint stores fused replaced by the fused tensor."""
    if not wholes:
        return targets
    hits = {_translate(name, rules) for name in names}
    wholes_here = {name: whole for name, whole in wholes.items() if name in hits}
    covered = {part for whole in wholes_here.values() for part in whole.parts}
    separate = {name: tensor for name, tensor in targets.items() if name not in covered}
    return {**separate, **{name: whole.tensor for name, whole in wholes_here.items()}}


def _plan(tensors: StoredTensors, targets: Mapping[str, Tensor], rules: Sequence[Rule]) -> dict[str, str]:
    """Checkpoint name -> target. Unexpected and missing tensors are errors."""
    hits = {name: _translate(name, rules) for name in tensors.file_of}
    places = {_IGNORED, *targets}
    known = {name: target for name, target in hits.items() if target in places}
    unexpected = [name for name in hits if name not in known]
    unexpected = [name for name in unexpected if not tensors.is_needless(name)]
    if unexpected:
        raise ConfigError(
            f"the checkpoint has {len(unexpected)} tensors that a model of this config.json has no place for "
            f"({some(unexpected)}){_why_unexpected(unexpected)}"
        )
    plan = {name: target for name, target in known.items() if target != _IGNORED}
    by_target = {target: name for name, target in plan.items()}
    twice = [name for name, target in plan.items() if by_target[target] != name]
    if twice:
        pairs = [f"{name} and {by_target[plan[name]]}" for name in twice]
        raise ConfigError(f"the checkpoint holds {len(twice)} tensors under two names ({some(pairs)})")
    missing = sorted(targets.keys() - by_target.keys())
    if missing:
        few = missing[: _SHOWN + 1]  # names are slow for thousands
        sources = [_name_in(hits, target, rules) for target in few]
        lacking = f"{len(missing)} tensors that config.json asks for"
        raise ConfigError(f"the checkpoint lacks {lacking} ({some(sources)})")
    return plan


def _why_unexpected(names: Iterable[str]) -> str:
    is_quantised = any(name.endswith(OF_QUANTISED) for name in names)
    return (
        "; they are of quantised weights that its quantization_config says nothing of" if is_quantised else ""
    )


def _translate(name: str, rules: Sequence[Rule]) -> str | None:
    """Our name, by the first rule that matches; None: there is none."""
    for rule in rules:
        blanks = _match(rule.source, name)
        if blanks is not None:
            return _IGNORED if rule.target is None else _fill(rule.target, blanks)
    return None


def _name_in(names: Iterable[str], target: str, rules: Sequence[Rule]) -> str:
    """The name of this target in a checkpoint with names like `names`."""
    candidates = []
    for rule in rules:
        blanks = None if rule.target is None else _match(rule.target, target)
        if blanks is not None:
            candidates.append(_fill(rule.source, blanks))
    levels = {name: max((_shared_levels(name, other) for other in names), default=0) for name in candidates}
    return max(levels, key=lambda name: levels[name], default=target)


def _shared_levels(name: str, other: str) -> int:
    pairs = zip(name.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _match(template: str, name: str) -> tuple[str, ...] | None:
    """The values of the template's blanks in this name, or None if it does not match."""
    match = _pattern(template).fullmatch(name)
    return match.groups() if match else None


@lru_cache(maxsize=4096)  # an MoE model has tens of thousands of names
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{\}", r"(\d+)").replace(r"\*", r"(\w+)"))


def _fill(template: str, blanks: tuple[str, ...]) -> str:
    return template.replace("*", "{}").format(*blanks)


def _as_shaped(tensor: Tensor, target: Tensor) -> Tensor:
    """Stacked matrices are published as [n, out, in], [n, in, out] and [out, n * in]; `_copy` cuts rows."""
    if tensor.dim() == 2 and target.dim() == 3 and len(tensor) == target.shape[1]:
        return tensor.view(len(tensor), len(target), -1).transpose(0, 1)
    is_rotated = tensor.dim() == 3 and tensor.shape != target.shape and tensor.mT.shape == target.shape
    return tensor.mT if is_rotated else tensor


def _copy(tensor: Tensor, target: Tensor, name: str, file: Path) -> None:
    """A target with more dimensions than the tensor splits its first one, for rows in another order."""
    first = max(target.dim() - tensor.dim(), 0) + 1
    expected = [math.prod(target.shape[:first]), *target.shape[first:]]
    if list(tensor.shape) not in (list(target.shape), expected):
        raise ConfigError(
            f"{name} in {file.name} has the shape {list(tensor.shape)}, but config.json asks for {expected}"
        )
    target.copy_(tensor.view(target.shape))  # converts the dtype and moves to the device


def copy_quantized(tensors: StoredTensors, name: str, target: Tensor, scales: Scales) -> None:
    """One of the checkpoint's tensors into a weight in float8 or INT4."""
    if isinstance(scales, GroupScales):
        _copy_int4(tensors, name, target, scales)
    else:
        _copy_fp8(tensors, name, target, scales)


def _copy_fp8(tensors: StoredTensors, name: str, target: Tensor, scales: Tensor) -> None:
    in_blocks = has_blocks(target, scales)
    pair = tensors.read_fp8(name, in_blocks)
    if pair is None:
        weight = _as_shaped(tensors.read(name).to(target.device), target)
        pair = quantized(weight.contiguous(), in_blocks)
    values, scale = pair
    shaped = _as_shaped(values, target)
    _copy(shaped, target, name, tensors.file_of[name])
    is_rotated = shaped.shape == values.mT.shape != values.shape
    try:
        scales.copy_(scales_for(scale.mT if is_rotated and scale.dim() == 3 else scale, scales.shape))
    except ValueError as error:
        raise ConfigError(f"{name} cannot be read: {error}") from None


def _copy_int4(tensors: StoredTensors, name: str, target: Tensor, scales: GroupScales) -> None:
    assert isinstance(tensors, Int4Tensors), name
    packed, groups = tensors.read_int4(name)
    _copy(_as_shaped(packed, target), target, name, tensors.file_of[name])
    for ours, theirs in zip(scales, groups, strict=True):
        if ours is not None and theirs is not None:
            ours.copy_(_as_shaped(theirs, ours).view(ours.shape))


def by_rules(rules: Sequence[Rule]) -> Place:
    return lambda name: _translate(name, rules)


def int4_targets(
    tensors: Mapping[str, Int4Format], place: Place, wholes: Mapping[str, Whole], *, has_experts: bool
) -> Int4Weights | None:
    """What a checkpoint stores in INT4, by our names. `has_experts`: kernels read experts, too."""
    formats = {target: tensors[name] for name in tensors if (target := place(name))}
    for name in wholes.keys() & formats.keys():
        formats |= dict.fromkeys(wholes[name].parts, formats[name])
    return Int4Weights(formats, has_experts=has_experts) if formats else None


def fp8_targets(tensors: Mapping[str, bool], place: Place, wholes: Mapping[str, Whole]) -> Fp8Weights | None:
    """What a checkpoint stores in float8, by our names. Layouts are not mixed: blocks if it has any."""
    in_blocks = any(tensors.values())
    hits = (place(name) for name, blocks in tensors.items() if blocks == in_blocks)
    names = set(filter(None, hits))
    parts = [wholes[name].parts for name in names if name in wholes]
    return Fp8Weights(in_blocks, frozenset(names.union(*parts))) if names else None


def fill_random(
    targets: Mapping[str, Tensor],
    seed: int,
    device: torch.device | None = None,
    scales: Mapping[str, Scales] = MappingProxyType({}),
) -> None:
    """Random weights, scaled by fan-in so that activations neither vanish nor explode.

    For targets without memory numbers are made too: the others are the same with and without them.
    """
    device = device or next(iter(targets.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, target in targets.items():
        beside = scales.get(name)
        if isinstance(beside, GroupScales):
            fill_packed(target, beside, generator)
            continue
        if beside is not None:
            _fill_fp8(target, beside, generator)
            continue
        tensor = torch.empty_like(target, device=device) if target.is_meta else target
        if name.endswith("bias"):
            tensor.zero_()
        elif name.endswith("weight") and tensor.dim() == 1:  # of a norm
            tensor.fill_(1)
        else:
            fan_in = math.prod(tensor.shape[1:]) if tensor.dim() > 1 else len(tensor)
            tensor.normal_(std=fan_in**-0.5, generator=generator)


def _fill_fp8(target: Tensor, scales: Tensor, generator: torch.Generator) -> None:
    weight = torch.empty(target.shape, device=target.device).normal_(
        std=target.shape[-1] ** -0.5, generator=generator
    )
    values, of_values = quantized(weight, has_blocks(target, scales))
    target.copy_(values)
    scales.copy_(of_values)
