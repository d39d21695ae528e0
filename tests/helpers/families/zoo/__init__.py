"""Every family that Transformers answers about images with, as a small random checkpoint."""

from __future__ import annotations

from tests.helpers.families.zoo import first_half, second_half
from tests.helpers.families.zoo.entry import Entry

ZOO: dict[str, Entry] = {**first_half.ENTRIES, **second_half.ENTRIES}
