"""Families by name."""

from __future__ import annotations

from tests.helpers.families.zoo import second_half_grids, second_half_llava
from tests.helpers.families.zoo.entry import Entry

ENTRIES: dict[str, Entry] = {**second_half_llava.ENTRIES, **second_half_grids.ENTRIES}
