"""Weight loading: safetensors into a model's parameters, renamed by rules; or random weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from saccade.checkpoint.files import weight_files
from saccade.errors import ConfigError
from saccade.models.state_dict import Whole

_INDEX = "model.safetensors.index.json"
_SHOWN = 5  # names listed in an error before it only counts


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


def load_weights(
    folder: Path,
    targets: Mapping[str, Tensor],
    rules: Sequence[Rule],
    *,
    progress: bool,
    wholes: Mapping[str, Whole] | None = None,
) -> None:
    """Load a folder's safetensors into `targets`, one tensor at a time. Every target is loaded exactly once.

    A fused tensor of `wholes` counts as all targets that it covers. Targets without memory are not read.
    """
    tensor_files = _tensor_files(folder)
    wholes = wholes or {}
    targets = _stored_targets(tensor_files, targets, rules, wholes)
    plan = _plan(tensor_files, targets, rules)
    by_file: dict[Path, list[str]] = {}
    wanted = [name for name, target in plan.items() if not targets[target].is_meta]
    for name in wanted:
        by_file.setdefault(tensor_files[name], []).append(name)
    with tqdm(total=len(wanted), desc="Loading weights", unit=" tensors", disable=not progress) as bar:
        for file, names in by_file.items():
            with _open(file) as handle:
                for name in names:
                    stored = handle.get_tensor(name)
                    target = targets[plan[name]]
                    _copy(_as_shaped(stored, target) if plan[name] in wholes else stored, target, name, file)
                    bar.update()


def _tensor_files(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor."""
    tensor_files: dict[str, Path] = {}
    for file in _files(folder):
        with _open(file) as handle:
            tensor_files |= dict.fromkeys(handle.keys(), file)
    return tensor_files


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        return _shards(index)
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(filter(Path.is_file, folder.glob("*.safetensors")))
    if not files:
        others = ", ".join(sorted(p.name for p in folder.glob("*.bin"))[:_SHOWN])
        hint = f"; {others} cannot be read, convert to safetensors first" if others else ""
        raise ConfigError(f"{folder} holds no .safetensors file{hint}")
    return files


def _shards(index: Path) -> list[Path]:
    names = weight_files(index)
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ConfigError(
            f"{index.parent} lacks {len(missing)} of the {len(names)} weight files that {_INDEX} names "
            f"({_some(missing)}); the download is incomplete, run it again"
        )
    return [index.parent / name for name in names]


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is damaged or half-downloaded ({error}); download it again") from error


def _stored_targets(
    names: Iterable[str], targets: Mapping[str, Tensor], rules: Sequence[Rule], wholes: Mapping[str, Whole]
) -> Mapping[str, Tensor]:
    """The targets, with those that this checkpoint stores fused replaced by the fused tensor."""
    if not wholes:
        return targets
    found = {hit.target for name in names if (hit := _translate(name, rules)) is not None}
    stored = {name: whole for name, whole in wholes.items() if name in found}
    covered = {part for whole in stored.values() for part in whole.parts}
    separate = {name: tensor for name, tensor in targets.items() if name not in covered}
    return {**separate, **{name: whole.tensor for name, whole in stored.items()}}


def _plan(names: Iterable[str], targets: Mapping[str, Tensor], rules: Sequence[Rule]) -> dict[str, str]:
    """Checkpoint name -> target. Unexpected and missing tensors are errors."""
    found = {name: _translate(name, rules) for name in names}
    unexpected = [n for n, hit in found.items() if hit is None or (hit.target and hit.target not in targets)]
    if unexpected:
        raise ConfigError(
            f"the checkpoint has {len(unexpected)} tensors that a model of this config.json has no place for "
            f"({_some(unexpected)})"
        )
    plan = {name: hit.target for name, hit in found.items() if hit and hit.target}
    by_target = {target: name for name, target in plan.items()}
    twice = [name for name, target in plan.items() if by_target[target] != name]
    if twice:
        pairs = [f"{name} and {by_target[plan[name]]}" for name in twice]
        raise ConfigError(f"the checkpoint holds {len(twice)} tensors under two names ({_some(pairs)})")
    missing = sorted(targets.keys() - by_target.keys())
    if missing:
        shown = [_name_in(found, target, rules) for target in missing[: _SHOWN + 1]]  # slow for thousands
        lacking = f"{len(missing)} tensors that config.json asks for"
        raise ConfigError(f"the checkpoint lacks {lacking} ({_some(shown)})")
    return plan


def _translate(name: str, rules: Sequence[Rule]) -> Rule | None:
    """The first rule that matches this name, with its blanks filled in."""
    for rule in rules:
        blanks = _match(rule.source, name)
        if blanks is not None:
            return Rule(name, None if rule.target is None else _fill(rule.target, blanks))
    return None


def _name_in(found: Iterable[str], target: str, rules: Sequence[Rule]) -> str:
    """The name of this target in a checkpoint with names like `found`."""
    candidates = []
    for rule in rules:
        blanks = None if rule.target is None else _match(rule.target, target)
        if blanks is not None:
            candidates.append(_fill(rule.source, blanks))
    levels = {name: max((_shared_levels(name, other) for other in found), default=0) for name in candidates}
    return max(levels, key=lambda name: levels[name], default=target)


def _shared_levels(name: str, other: str) -> int:
    pairs = zip(name.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _match(template: str, name: str) -> tuple[str, ...] | None:
    """The values of the template's blanks in this name, or None if it does not match."""
    found = _pattern(template).fullmatch(name)
    return found.groups() if found else None


@lru_cache(maxsize=4096)  # an MoE model has tens of thousands of names
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{\}", r"(\d+)").replace(r"\*", r"(\w+)"))


def _fill(template: str, blanks: tuple[str, ...]) -> str:
    return template.replace("*", "{}").format(*blanks)


def _as_shaped(stored: Tensor, target: Tensor) -> Tensor:
    """Stacked matrices are published as [n, out, in], [n, in, out] and [out, n * in]; `_copy` cuts rows."""
    if stored.dim() == 2 and target.dim() == 3 and len(stored) == target.shape[1]:
        return stored.view(len(stored), len(target), -1).transpose(0, 1)
    is_rotated = stored.dim() == 3 and stored.shape != target.shape and stored.mT.shape == target.shape
    return stored.mT if is_rotated else stored


def _copy(tensor: Tensor, target: Tensor, name: str, file: Path) -> None:
    """A target with more dimensions than the tensor splits its first one, for rows in another order."""
    first = max(target.dim() - tensor.dim(), 0) + 1
    expected = [math.prod(target.shape[:first]), *target.shape[first:]]
    if tensor.shape != target.shape and list(tensor.shape) != expected:
        raise ConfigError(
            f"{name} in {file.name} has the shape {list(tensor.shape)}, but config.json asks for {expected}"
        )
    target.copy_(tensor.view(target.shape))  # converts the dtype and moves to the device


def _some(names: Sequence[str]) -> str:
    shown = sorted(names)[:_SHOWN]
    return ", ".join(shown) + (", ..." if len(names) > _SHOWN else "")


def fill_random(targets: Mapping[str, Tensor], seed: int, device: torch.device | None = None) -> None:
    """Random weights, scaled by fan-in so that activations neither vanish nor explode.

    For targets without memory numbers are made too: the others are the same with and without them.
    """
    device = device or next(iter(targets.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, target in targets.items():
        tensor = torch.empty_like(target, device=device) if target.is_meta else target
        if name.endswith("bias"):
            tensor.zero_()
        elif name.endswith("weight") and tensor.dim() == 1:  # of a norm
            tensor.fill_(1)
        else:
            fan_in = math.prod(tensor.shape[1:]) if tensor.dim() > 1 else len(tensor)
            tensor.normal_(std=fan_in**-0.5, generator=generator)
