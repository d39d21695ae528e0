"""Who sent a request, and when."""

from __future__ import annotations

from typing import NamedTuple


class Caller(NamedTuple):
    """Who sent a request, and when."""

    request_id: str
    tenant: str
    arrived: float  # on the clock of time.perf_counter
    client: str = ""  # whose share of the server it takes: the tenant, or without keys the address it came from
