"""A request and whose it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from saccade.types.prompt import Prompt

if TYPE_CHECKING:
    from saccade.sampling_params import SamplingParams


class Thinking(NamedTuple):
    """How an output may think before it answers: structured output begins after it, and it may be limited."""

    open: str  # marker before the thinking
    close: str  # marker after it
    is_open: bool  # the prompt ends with the opening marker; otherwise the model may write it
    open_id: int | None = None  # the marker's token, where it is one
    close_id: int | None = None


class Tenant(NamedTuple):
    """A customer of the engine. When there is too little for all, each gets service by its weight."""

    name: str = ""
    weight: float = 1.0
    label: str = ""  # of its counters, which tenants may share; empty: its name


NO_TENANT = Tenant()


OTHER_LABEL = "other"  # of tenants without a label of their own


def family_of(request_id: str) -> str:
    """The common part of the ids of one client request's `n` completions, which are FAMILY/INDEX."""
    return request_id.rpartition("/")[0] or request_id


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    request_id: str
    prompt: Prompt
    params: SamplingParams
    max_tokens: int  # resolved: params.max_tokens or what is left of the context
    eos_token_ids: frozenset[int]  # the model's own end tokens; empty when the request ignores them
    seed: int  # of its sampling noise; set for every request, so a resumed one repeats itself
    tenant: Tenant = NO_TENANT
    priority: int = 0  # among the requests of its tenant: lower values go first
    thinking: Thinking | None = None  # before structured output or within a budget; None: neither

    @property
    def family(self) -> str:
        return family_of(self.request_id)
