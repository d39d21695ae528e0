"""The bill of a prompt: what it costs in tokens, KV blocks and encoder cache, known before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from saccade.costs import blocks_for
from saccade.processor.images import bill_item
from saccade.processor.video import video_bill_item
from saccade.types.bill import Bill, BillItem
from saccade.types.media import short_key
from saccade.types.prompt import Prompt


def bill_of(prompt: Prompt, block_size: int, slot_bytes: int) -> Bill:
    """What the prompt costs, from its headers alone. `slot_bytes`: encoder cache bytes per embedding."""
    media = sum(span.length for span in prompt.spans)
    pinned = [span for span in prompt.spans if span.is_cross_attended]
    pinned_bytes = {short_key(span.key): span.num_embeds * slot_bytes for span in pinned}
    each = _bill_items(prompt, block_size)
    items = tuple(replace(item, encoder_cache_bytes=pinned_bytes.get(item.key, 0)) for item in each)
    video_tokens = sum(item.tokens for item in items if item.kind == "video")
    return Bill(
        text_tokens=len(prompt) - media,
        image_tokens=media - video_tokens,
        video_tokens=video_tokens,
        kv_blocks=blocks_for(len(prompt), block_size),
        items=items,
        encoder_cache_bytes=sum(pinned_bytes.values()),
    )


def _bill_items(prompt: Prompt, block_size: int) -> Iterator[BillItem]:
    """One per image and per video, in prompt order."""
    runs = {run.first: run for run in prompt.videos}
    index = 0
    while index < len(prompt.items):
        run = runs.get(index)
        if run is None:
            yield bill_item(prompt.items[index], block_size)
        else:
            yield video_bill_item(prompt.items[index : index + run.groups], run, block_size)
        index += run.groups if run else 1
