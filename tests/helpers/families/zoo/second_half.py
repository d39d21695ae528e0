"""Families by name."""

from __future__ import annotations

from tests.helpers.families.zoo import (
    second_half_captions,
    second_half_grids,
    second_half_llava,
    second_half_tiles,
)
from tests.helpers.families.zoo.entry import Entry

ENTRIES: dict[str, Entry] = {
    **second_half_llava.ENTRIES,
    **second_half_grids.ENTRIES,
    **second_half_tiles.ENTRIES,
    **second_half_captions.ENTRIES,
}
TORCHVISION = frozenset((*second_half_tiles.ENTRIES, "pp_formulanet"))
"""Whose processor needs torchvision: `stand_in_torchvision.provided` has what they need of it."""
