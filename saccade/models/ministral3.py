"""The decoder of Ministral 3 without a vision tower; with one it is a `mistral3`."""

from __future__ import annotations

from saccade.models.temper import WHY_PLAIN
from saccade.models.text import Text


class Ministral3(Text):
    why_plain = WHY_PLAIN
