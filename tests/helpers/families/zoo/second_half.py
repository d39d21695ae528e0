"""Families by name."""

from __future__ import annotations

from tests.helpers.families.zoo.entry import Entry

ENTRIES: dict[str, Entry] = {}
