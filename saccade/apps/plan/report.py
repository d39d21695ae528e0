"""A plan as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

from saccade import costs
from saccade.apps.plan.alternatives import Alternative
from saccade.apps.plan.hardware import PRESETS
from saccade.apps.plan.model_cards import card_names
from saccade.apps.plan.planner import DeploymentPlan
from saccade.apps.plan.throughput import MAX_LOAD

_TITLE = 16  # columns of a row's title
_NAMES = {"kv": "KV"}  # of parts of memory


def listing() -> str:
    """The models and GPUs that have names here."""
    gpus = [
        f"  {name:<10}{gpu.memory_gib:>7.1f} GiB {gpu.bandwidth_gb_s:>6g} GB/s {gpu.tflops:>6g} TFLOP/s"
        for name, gpu in PRESETS.items()
    ]
    example = "Example: saccade plan Qwen/Qwen3-VL-8B --gpu h200 --image 1280x720 --rate 20"
    return "\n".join(["Models:", *(f"  {name}" for name in card_names()), "GPUs:", *gpus, example])


def table(plan: DeploymentPlan, alternatives: Sequence[Alternative]) -> str:
    deployment = plan.deployment
    copies = "one" if plan.capacity.gpus == 1 else str(plan.capacity.gpus)
    head = f"{deployment.checkpoint.path} on {copies} {deployment.hardware.name}, {deployment.dtype}"
    if deployment.fp8_params:
        head += ", FP8 weights"
    if deployment.int4:
        head += ", INT4 weights"
    if deployment.kv_dtype == costs.FP8:
        head += ", FP8 KV cache"
    rows = [f"{title:<{_TITLE}}{words}" for title, words in _rows(plan)]
    return "\n".join(
        [head, "", *rows, "", *_compared(plan, alternatives), "", *(f"- {note}" for note in notes(plan))]
    )


def _rows(plan: DeploymentPlan) -> Iterator[tuple[str, str]]:
    cost = plan.cost
    capacity = plan.capacity
    for image in cost.images:
        size = f"{image.size.width}x{image.size.height}"
        resized = f"{image.geometry.resized.width}x{image.geometry.resized.height}"
        share = f", {image.share:.0%} of images" if len(cost.images) > 1 else ""
        yield "image", f"{size}, resized to {resized}: {image.geometry.tokens:,} tokens{share}"
    per_request = cost.tokens * capacity.kv_bytes_per_token / 1e6
    blocks = f"{capacity.kv_blocks_per_request:,} KV blocks, {per_request:,.1f} MB of KV"
    images = "1 image" if cost.num_images == 1 else f"{cost.num_images} images"
    parts = f"{images}, {cost.text_tokens:,} tokens of text, {cost.output_tokens:,} out"
    yield "request", f"{cost.tokens:,} tokens ({parts}), {blocks}"
    yield "memory, GiB", _memory(plan)
    limit = f" ({capacity.bound_by})"
    if capacity.running < capacity.concurrent:
        limit = f", of which {capacity.running:,} run (max_num_seqs)"
    yield "fit at once", f"{capacity.concurrent:,} requests{limit}"
    first = plan.first_token
    stages = f"preprocess {first.preprocess:.1f}, encode {first.encode:.1f}, prefill {first.prefill:.1f}"
    yield (
        "first token",
        f"{first.total:.1f} ms: {stages}, queue {first.queue:.1f} ({first.queue_p99:.1f} at p99)",
    )
    if cost.num_images:
        yield "", f"{plan.seen_ms + first.queue:.1f} ms where the images came before"
    yield "between tokens", f"{plan.between_ms:.1f} ms"
    yield "sustained", f"{plan.rate:.2f} requests/s, limited by {plan.bound_by}"
    yield "GPUs", _gpus(plan)


def _memory(plan: DeploymentPlan) -> str:
    parts = plan.capacity.parts
    sizes = {field.name: getattr(parts, field.name) / costs.GIB for field in fields(parts)}
    items = ", ".join(f"{_NAMES.get(name, name)} {size:.1f}" for name, size in sizes.items() if size >= 0.05)
    total = plan.deployment.hardware.memory_gib * plan.capacity.gpus
    return f"{items}: {parts.total / costs.GIB:.1f} of {total:.1f}"


def _gpus(plan: DeploymentPlan) -> str:
    rate = plan.deployment.workload.rate
    if rate is None:
        return f"{plan.gpus} for a copy of the model; --rate says how many requests/s are to be served"
    if not plan.copies:
        return f"no number of them serves {rate:g} requests/s: {plan.bound_by}"
    return f"{plan.gpus} for {rate:g} requests/s"


def _compared(plan: DeploymentPlan, alternatives: Sequence[Alternative]) -> list[str]:
    rows = [("what would change", "requests/s a GPU", "gain", "first token, ms", "fit at once", "GPUs", "")]
    rows.append(("the plan", *_figures(plan, 1.0), ""))
    for other in alternatives:
        figures = _figures(other.plan, other.gain) if other.plan else ("-",) * 5
        rows.append((other.name, *figures, other.note))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = []
    for name, *cells, note in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *aligned, note]).rstrip())
    return lines


def _figures(plan: DeploymentPlan, gain: float | None) -> tuple[str, str, str, str, str]:
    change = "-" if gain is None else f"{gain - 1:+.0%}"
    first = f"{plan.first_token.total:.1f}"
    gpus = f"{plan.gpus:,}" if plan.copies else "-"
    return f"{plan.rate_per_gpu:.2f}", change, first, f"{plan.capacity.concurrent:,}", gpus


def notes(plan: DeploymentPlan) -> list[str]:
    deployment = plan.deployment
    lines = [f"times: {deployment.calibration.source}"]
    if plan.capacity.gpus > 1:
        limit = "not yet served by this version"
        lines.append(f"one model over several GPUs is {limit}; times are those of ideal scaling")
    if deployment.kv_gb is not None:
        block_bytes = deployment.options.block_size * plan.capacity.kv_bytes_per_token
        fit = int(plan.capacity.kv_bytes // (plan.capacity.kv_blocks_per_request * block_bytes))
        lines.append(
            f"--kv-gb {deployment.kv_gb:g} is counted by the byte; in whole blocks {fit:,} requests fit"
        )
    if plan.cost.is_cross_attended:
        lines.append("images are in the encoder cache until their request ends, and take one KV token each")
    if (deployment.workload.ttft_ms, deployment.workload.itl_ms) == (None, None):
        lines.append(
            f"no service level: sustained is where the GPU is full; GPUs are planned to {MAX_LOAD:.0%}"
        )
    if plan.cost.num_images and deployment.workload.repeated:
        lines.append("repeated images save encoding; what the prefix cache saves comes on top")
    return lines


def as_json(plan: DeploymentPlan, alternatives: Sequence[Alternative]) -> dict[str, Any]:
    capacity = plan.capacity
    first = plan.first_token
    workload = plan.deployment.workload
    return {
        "model": str(plan.deployment.checkpoint.path),
        "gpu": asdict(plan.deployment.hardware),
        "dtype": plan.deployment.dtype,
        "fp8_weights": plan.deployment.fp8_params > 0,
        "int4_weights": bool(plan.deployment.int4),
        "kv_cache_dtype": plan.deployment.kv_dtype,
        "images": [_image(plan, index) for index in range(len(plan.cost.images))],
        "image_tokens": _whole(plan.cost.image_tokens),
        "prompt_tokens": plan.cost.prompt_tokens,
        "request_tokens": plan.cost.tokens,
        "kv_bytes_per_token": _whole(capacity.kv_bytes_per_token),
        "kv_bytes_per_request": _whole(plan.cost.tokens * capacity.kv_bytes_per_token),
        "kv_blocks_per_request": capacity.kv_blocks_per_request,
        "kv_bytes": capacity.kv_bytes,
        "weights_bytes": capacity.parts.weights,
        "memory_bytes": asdict(capacity.parts),
        "encoder_cache_images": capacity.encoder_cache_images,
        "max_model_len": capacity.scheduler.max_model_len,
        "concurrent_requests": capacity.concurrent,
        "running_requests": capacity.running,
        "ttft_ms": {**asdict(first), "total": first.total},
        "ttft_seen_ms": plan.seen_ms + first.queue,
        "itl_ms": plan.between_ms,
        "requests_per_s": plan.rate,
        "saturated_requests_per_s": plan.saturated,
        "bound_by": plan.bound_by,
        "gpus": plan.gpus if plan.copies else None,
        "gpus_per_copy": capacity.gpus,
        "rate": workload.rate,
        "alternatives": [_alternative(other) for other in alternatives],
        "notes": notes(plan),
    }


def _image(plan: DeploymentPlan, index: int) -> dict[str, Any]:
    image = plan.cost.images[index]
    block = plan.deployment.options.block_size
    return {
        "width": image.size.width,
        "height": image.size.height,
        "resized_width": image.geometry.resized.width,
        "resized_height": image.geometry.resized.height,
        "tokens": image.geometry.tokens,
        "kv_blocks": costs.blocks_for(image.geometry.tokens, block),
        "share": image.share,
    }


def _alternative(other: Alternative) -> dict[str, Any]:
    row: dict[str, Any] = {"name": other.name, "gain": other.gain, "note": other.note}
    if other.plan is not None:
        row |= {
            "requests_per_s": other.plan.rate,
            "requests_per_s_a_gpu": other.plan.rate_per_gpu,
            "ttft_ms": other.plan.first_token.total,
            "concurrent_requests": other.plan.capacity.concurrent,
            "gpus": other.plan.gpus if other.plan.copies else None,
        }
    return row


def _whole(value: float) -> int | float:
    return int(value) if value == int(value) else value
