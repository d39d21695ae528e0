"""What share of a GPU's published speed the engine reaches, and the host's own times, as measured."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from saccade.apps.plan.hardware import PRESETS, Hardware, read_hardware
from saccade.errors import ConfigError, is_number_within
from saccade.util.plain_files import read_text

SHARES = ("gemm", "tower", "bandwidth")
_MAX_BYTES = 1 << 20
_FILE = Path(__file__).with_name("calibrations.json")


@dataclass(frozen=True, slots=True)
class Calibration:
    gemm: float  # share of the FLOP/s in the decoder's layers
    tower: float  # the same in the vision tower
    bandwidth: float  # share of the memory bandwidth
    layer_us: float  # launches of a decoder layer that nothing hides
    expert_layer_us: float  # more of them in a layer with experts
    latent_layer_us: float  # and in one with MLA
    tower_layer_us: float  # of a layer of the tower
    request_ms: float  # host: from the call to the first kernel, and from the last to the token
    megapixel_ms: float  # host: decoding, resizing and copying a JPEG, on one core
    source: str  # what it was fitted to


def calibration_for(hardware: Hardware) -> Calibration:
    """The GPU's own, or the one for all others."""
    calibrations: Mapping[str, Any] = json.loads(_FILE.read_text("utf-8"))
    names = [name for name, preset in PRESETS.items() if preset.name == hardware.name]
    names.append("cpu" if hardware.is_cpu else "default")
    values = next(calibrations[name] for name in names if name in calibrations)
    return read_values(values, str(_FILE))


def read_calibration(path: Path) -> tuple[Calibration, Hardware | None]:
    """A file that `saccade bench --calibrate` wrote, or one made by hand; with the machine it is for."""
    text = read_text(path, _MAX_BYTES, f"--calibration {path}")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--calibration {path} cannot be read ({error})") from None
    match values:
        case {"hardware": machine, **values} if machine:
            return read_values(values, str(path)), read_hardware(machine, str(path))
        case {"hardware": _, **values}:
            pass
    return read_values(values, str(path)), None


def read_values(values: Any, file: str) -> Calibration:
    names = [field.name for field in fields(Calibration)]
    entries = values if isinstance(values, dict) else {}
    wrong = [name for name in names if not _is_valid(name, entries.get(name))]
    if wrong := wrong or sorted(set(entries) - set(names)):
        expected = f"a calibration has {', '.join(names)}: shares up to 1, times from 0, and words"
        raise ConfigError(f"{file}: {', '.join(wrong)}: {expected}")
    return Calibration(**entries)


def _is_valid(name: str, value: Any) -> bool:
    if name == "source":
        return isinstance(value, str)
    if name in SHARES:
        return is_number_within(value, math.ulp(0), 1)
    return is_number_within(value, 0, sys.float_info.max)
