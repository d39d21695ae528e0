"""Families by name."""

from __future__ import annotations

from tests.helpers.families.zoo import (
    first_half_gemma,
    first_half_glm,
    first_half_grids,
    first_half_tiles,
    first_half_towers,
)
from tests.helpers.families.zoo.entry import Entry

ENTRIES: dict[str, Entry] = {
    **first_half_glm.ENTRIES,
    **first_half_gemma.ENTRIES,
    **first_half_grids.ENTRIES,
    **first_half_tiles.ENTRIES,
    **first_half_towers.ENTRIES,
}
