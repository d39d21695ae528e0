"""All of them, by name."""

from __future__ import annotations

from tests.helpers.families.layouts import flat, intern, nemotron, ocr, phi
from tests.helpers.families.layouts.base import Published

PUBLISHED: dict[str, Published] = {
    **intern.PUBLISHED,
    **ocr.PUBLISHED,
    **phi.PUBLISHED,
    **nemotron.PUBLISHED,
    **flat.PUBLISHED,
}
