"""The body of POST /v1/plan: the arguments of `saccade plan` under the same names, with limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from saccade.apps.plan.hardware import DEFAULT, Hardware, find_hardware
from saccade.apps.plan.workload import SizeShare, Workload
from saccade.errors import ConfigError, RequestError, quoted
from saccade.server.request.fields import FieldReader, Schema
from saccade.types.media import Size

MAX_SIZES = 64  # of images in one plan
_SIZE = r"([1-9]\d{0,4})x([1-9]\d{0,4})(?::(\d{1,6}(?:\.\d{1,6})?))?"
_FLAG = re.compile(r"--([a-z][a-z-]*)")


def _whole(minimum: int, maximum: int) -> Schema:
    return {"type": "integer", "minimum": minimum, "maximum": maximum}


def _number(minimum: float, maximum: float) -> Schema:
    return {"type": "number", "minimum": minimum, "maximum": maximum}


PLAN: Mapping[str, Schema] = {
    "model": {"type": "string"},
    "gpu": {"type": "string", "maxLength": 64},
    "gpu_memory_gib": _number(0.1, 100_000),
    "gpu_bandwidth": _number(0.1, 1_000_000),
    "gpu_tflops": _number(0.01, 1_000_000),
    "image": {"type": "array", "items": {"type": "string", "pattern": f"^{_SIZE}$"}, "maxItems": MAX_SIZES},
    "images": _whole(0, 10_000),
    "input_tokens": _whole(1, 10_000_000),
    "output_tokens": _whole(0, 10_000_000),
    "rate": _number(0.001, 1_000_000),
    "repeated": _number(0, 1),
    "catalogue": _whole(1, 1_000_000_000),
    "slo_ttft_ms": _number(0.1, 10_000_000),
    "slo_itl_ms": _number(0.01, 10_000_000),
}
_WORKLOAD = {  # fields that have other names there
    **{name: name for name in ("input_tokens", "output_tokens", "rate", "repeated", "catalogue")},
    "slo_ttft_ms": "ttft_ms",
    "slo_itl_ms": "itl_ms",
}


@dataclass(frozen=True, slots=True)
class PlanRequest:
    model: str | None
    hardware: Hardware
    workload: Workload


def read_plan(body: Mapping[str, Any], fields: FieldReader, usual_images: int) -> PlanRequest:
    """`usual_images`: of a request, where the body does not say."""
    values = fields.read(body, PLAN)
    for name, value in values.items():
        _check_range(name, value)
    numbers = (values.get(name) for name in ("gpu_memory_gib", "gpu_bandwidth", "gpu_tflops"))
    settings = {theirs: values[ours] for ours, theirs in _WORKLOAD.items() if ours in values}
    workload = Workload(images=values.get("images", usual_images), **settings)
    if sizes := values.get("image"):
        workload = replace(workload, sizes=_sizes(sizes))
    try:
        hardware = find_hardware(values.get("gpu", DEFAULT)).having(*numbers)
    except ConfigError as error:
        raise plan_error(error) from None
    return PlanRequest(values.get("model"), hardware, workload)


def _check_range(name: str, value: Any) -> None:
    low = PLAN[name].get("minimum")
    if low is None:
        return
    high = PLAN[name]["maximum"]
    if not low <= value <= high:
        raise RequestError(f"{name} is {value:g}; give a value from {low:,} to {high:,}", param=name)


def _sizes(texts: list[str]) -> tuple[SizeShare, ...]:
    if len(texts) > MAX_SIZES:
        message = f"image has {len(texts)} sizes and may have {MAX_SIZES}; give the most common ones"
        raise RequestError(message, param="image")
    return tuple(_size(index, text) for index, text in enumerate(texts))


def _size(index: int, text: str) -> SizeShare:
    match = re.fullmatch(_SIZE, text, re.ASCII)
    width, height, share = match.groups("1") if match else ("0", "0", "0")
    if not float(share):
        example = "give WIDTHxHEIGHT or WIDTHxHEIGHT:SHARE with a share above 0, such as 1280x720:3"
        raise RequestError(f"image[{index}] is {quoted(text)}; {example}", param=f"image[{index}]")
    return SizeShare(Size(int(width), int(height)), float(share))


def plan_error(error: ConfigError) -> RequestError:
    """The same sentence with fields of the body for flags of the command. Flags of the server stay."""
    names: list[str] = []

    def field_of(flag: re.Match[str]) -> str:
        name = flag[1].replace("-", "_")
        if name not in PLAN:
            return flag[0]
        names.append(name)
        return name

    message = _FLAG.sub(field_of, str(error))
    return RequestError(message, param=names[0] if names else None)
