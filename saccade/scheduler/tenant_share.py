"""The service that a tenant received, which decides whose turn it is. Knows no requests."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from saccade.types.request import OTHER_LABEL, Tenant

# Service is counted in prompt tokens that are computed; what a cache has costs nothing.
OUTPUT_COST = 2.0  # of a sampled token, as in the paper: a decode step reads all weights for few tokens
EMBEDDING_COST = 1.0  # of the encoder's: four patches of a tower with a fourth of the decoder's parameters
DECODED_PIXEL_COST = 1 / 4096  # of a plain JPEG; a photo of a megapixel adds a fifth of its tokens
MAX_LABELS = 128  # with counters of their own: tenants with further ones are counted as others

Rank = tuple[float, int]  # of a tenant: its counter, and its number where counters are equal
LAST: Rank = (math.inf, 0)


@dataclass(slots=True, eq=False)
class LabelTotal:
    """What tenants of one label received. It stays when they are forgotten: a counter never falls."""

    service: float = 0.0


def counted_as(tenant: Tenant, labels: Collection[str]) -> str:
    """Under which label, where these have counters already."""
    label = tenant.label or tenant.name
    if label in labels or len(labels) < MAX_LABELS:
        return label
    return OTHER_LABEL


@dataclass(slots=True, eq=False)
class TenantShare:
    """A tenant's part of the engine, and what it received of it."""

    name: str = ""
    weight: float = 1.0
    number: int = 0  # of its first arrival: the earlier tenant goes first where counters are equal
    counter: float = 0.0  # service by weight; grows only
    service: float = 0.0
    label: str = ""
    total: LabelTotal = field(default_factory=LabelTotal)  # of its label
    gives_back_at: float = 0.0  # service with which it may have to give up a place again

    @property
    def rank(self) -> Rank:
        return self.counter, self.number

    def charge(self, service: float) -> None:
        self.service += service
        self.total.service += service
        self.counter += service / self.weight
