"""What a route knows of a request: its sender, its body, what it holds, and where its response goes."""

from __future__ import annotations

from typing import NamedTuple

from saccade.server.accounts import Account
from saccade.server.http.limits import ByteLease, HttpBody
from saccade.server.http.response import ResponseWriter
from saccade.server.request_record import RequestRecord


class Caller(NamedTuple):
    request_id: str
    tenant: str
    record: RequestRecord  # for the log and the trace
    client: str = ""  # shares are per client: the tenant, or without one the address
    account: Account = Account()  # the tenant's weight and limits


class Exchange(NamedTuple):
    caller: Caller
    body: HttpBody
    lease: ByteLease
    writer: ResponseWriter
