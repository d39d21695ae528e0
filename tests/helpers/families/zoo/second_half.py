"""Families by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.helpers.families.zoo import (
    second_half_captions,
    second_half_grids,
    second_half_llava,
    second_half_tiles,
    second_half_timm,
    stand_in_timm,
    stand_in_torchvision,
)
from tests.helpers.families.zoo.entry import Entry

ENTRIES: dict[str, Entry] = {
    **second_half_llava.ENTRIES,
    **second_half_grids.ENTRIES,
    **second_half_tiles.ENTRIES,
    **second_half_timm.ENTRIES,
    **second_half_captions.ENTRIES,
}
TORCHVISION = frozenset((*second_half_tiles.ENTRIES, "perception_lm", "pp_formulanet"))
TIMM = frozenset(second_half_timm.ENTRIES)


@contextmanager
def libraries(name: str) -> Iterator[None]:
    """What the family's code in Transformers needs and is not installed: load its processor and its model inside."""
    with ExitStack() as stack:
        if name in TORCHVISION:
            stack.enter_context(stand_in_torchvision.provided())
        if name in TIMM:
            stack.enter_context(stand_in_timm.provided())
        yield
