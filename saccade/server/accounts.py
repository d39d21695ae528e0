"""Rate limits of a tenant: requests, tokens, pixels and processor seconds a minute, and its open requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from saccade.server.errors import ApiError
from saccade.server.tenant_file import TenantLimits, TenantSettings

_SECONDS = 60  # all limits are per minute
_RETRY_AFTER_OPEN = 1.0
_PROCESSOR = "processor-seconds"
_KINDS = ("requests", "tokens", "pixels", _PROCESSOR)  # in the order of `TenantLimits`
LIMIT_HEADERS = [f"x-ratelimit-{what}-{kind}" for kind in _KINDS for what in ("limit", "remaining", "reset")]
_ADVICE = {
    "requests": "send fewer",
    "tokens": "send a shorter prompt, or set or lower max_tokens",
    "pixels": "send fewer or smaller pictures",
}

_DEFAULTS = TenantSettings()

Clock = Callable[[], float]


class LimitExceeded(ApiError):
    """A limit of the tenant refuses the request."""

    def __init__(self, limit: str, message: str, retry_after: float | None) -> None:
        """`retry_after` None: the request can never pass."""
        status, code = (400, "request_too_large") if retry_after is None else (429, "rate_limit_exceeded")
        super().__init__(status, message, code=code, retry_after=retry_after)
        self.limit = limit


class Bucket:
    """A token bucket that refills continuously, `limit` in a minute, and holds at most `limit`."""

    def __init__(self, limit: int, clock: Clock) -> None:
        self.limit = limit
        self._clock = clock
        self._used = 0.0  # what is missing: a new limit keeps it
        self._time = clock()

    @property
    def used(self) -> float:
        now = self._clock()
        self._used = max(0.0, self._used - (now - self._time) * self.limit / _SECONDS)
        self._time = now
        return self._used

    @property
    def remaining(self) -> int:
        return max(0, math.floor(self.limit - self.used))

    @property
    def reset_seconds(self) -> float:
        """Until the bucket is full."""
        return self.used * _SECONDS / self.limit

    def seconds_until(self, amount: int) -> float:
        """0: `amount` can be taken now."""
        return max(0.0, self.used + amount - self.limit) * _SECONDS / self.limit

    def take(self, amount: float) -> None:
        self._used = self.used + amount

    def give_back(self, amount: int) -> None:
        """A negative amount is taken, whether it is left or not: later requests wait for it."""
        self._used = max(0.0, self.used - amount)

    def resize(self, limit: int) -> None:
        """What was used stays used, at most all of the new limit: no tenant waits longer than a minute."""
        self._used = min(self.used, limit)
        self.limit = limit


class TenantCharge(NamedTuple):
    """What a request took. It is given back to the same buckets, whatever limits the tenant has by then."""

    label: str  # the tenant's, in the metrics
    buckets: Mapping[str, Bucket]

    def give_back(self, **amounts: int) -> None:
        for kind, bucket in self.buckets.items():
            bucket.give_back(amounts.get(kind, 0))


class Account:
    """A tenant while the server runs: its settings, and what it has used of its limits."""

    def __init__(
        self, name: str = "", settings: TenantSettings = _DEFAULTS, clock: Clock = time.monotonic
    ) -> None:
        self.name = name
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}
        self.num_open = 0
        self.num_leases = 0  # of requests that are read, wait or run
        self.apply(settings)

    def apply(self, settings: TenantSettings) -> None:
        """New settings. What was used stays used."""
        self.settings = settings
        for kind, limit in zip(_KINDS, settings.limits, strict=False):
            if limit is None:
                self._buckets.pop(kind, None)
            elif kind in self._buckets:
                self._buckets[kind].resize(limit)
            else:
                self._buckets[kind] = Bucket(limit, self._clock)

    @property
    def limits(self) -> TenantLimits:
        return self.settings.limits

    @property
    def max_open(self) -> float:
        limit = self.limits.open_requests
        return math.inf if limit is None else limit

    def take(self, **amounts: int) -> TenantCharge:
        """Takes all amounts or none. LimitExceeded if one is not left now or never can be."""
        limited = {kind: bucket for kind, bucket in self._buckets.items() if amounts.get(kind)}
        for kind, bucket in limited.items():
            if amounts[kind] > bucket.limit:
                message = (
                    f"the request takes {amounts[kind]} {kind} and your limit is {bucket.limit} a minute"
                )
                raise LimitExceeded(kind, f"{message}, so it can never pass; {_ADVICE[kind]}", None)
        waits = {kind: math.ceil(bucket.seconds_until(amounts[kind])) for kind, bucket in limited.items()}
        longest = max(waits.values(), default=0)
        if longest:
            kind = next(kind for kind, wait in waits.items() if wait == longest)
            bucket = limited[kind]
            takes = f"the request takes {amounts[kind]} of your {bucket.limit} {kind} a minute"
            message = f"{takes} and {bucket.remaining} are left; try again in {longest} s"
            raise LimitExceeded(kind, f"{message}, or {_ADVICE[kind]}", longest)
        for kind, bucket in limited.items():
            bucket.take(amounts[kind])
        return TenantCharge(self.settings.label, limited)

    def check_open(self, outputs: int = 1) -> None:
        """LimitExceeded if so many more outputs may not be open."""
        limit = self.max_open
        if self.num_open + outputs > limit:
            count = f"{self.num_open} of your requests are open, counted with n, and {limit} may be"
            message = f"{count}; {outputs} more were asked for; try again when some have ended"
            raise LimitExceeded("open_requests", message, _RETRY_AFTER_OPEN)

    def check_processor(self) -> None:
        """LimitExceeded if the processor seconds of a minute are used up."""
        bucket = self._buckets.get(_PROCESSOR)
        if bucket is not None and bucket.used >= bucket.limit:
            wait = math.ceil(bucket.seconds_until(1))
            usage = f"your requests took {bucket.used:.1f} processor seconds beside the model's own"
            message = f"{usage} and your limit is {bucket.limit} a minute; try again in {wait} s"
            raise LimitExceeded("processor_seconds", message, wait)

    def use_processor(self, seconds: float) -> None:
        """They are over and cannot be refused: what exceeds the limit, later requests wait for."""
        if _PROCESSOR in self._buckets:
            self._buckets[_PROCESSOR].take(seconds)

    def enter(self, outputs: int, more: int) -> None:
        """Holds `more` of the `outputs` of a request. LimitExceeded if they may not be open."""
        limit = self.max_open
        if outputs > limit:
            request = f"the request asks for {outputs} answers, n for each of its prompts"
            message = f"{request}, and {limit} of your requests may be open, so it can never pass"
            raise LimitExceeded("open_requests", f"{message}; lower n or send fewer prompts", None)
        self.check_open(more)
        self.num_open += more

    def leave(self, outputs: int) -> None:
        self.num_open -= outputs
        assert self.num_open >= 0

    @property
    def rest_seconds(self) -> float:
        """Until nothing of it is used any more and it is as good as a new one."""
        if self.num_leases:
            return math.inf
        return max([bucket.reset_seconds for bucket in self._buckets.values()], default=0.0)

    def headers(self) -> dict[str, str]:
        """What is left, in OpenAI's headers; empty for a tenant without limits."""
        headers = {}
        for kind, bucket in self._buckets.items():
            headers[f"x-ratelimit-limit-{kind}"] = str(bucket.limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(bucket.remaining)
            headers[f"x-ratelimit-reset-{kind}"] = f"{math.ceil(bucket.reset_seconds * 1e3) / 1e3:g}s"
        return headers
