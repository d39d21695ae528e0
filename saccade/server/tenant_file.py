"""Reads and checks the file of tenants (`--api-keys`): names, digests of keys, weights and limits."""

from __future__ import annotations

import hashlib
import logging
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from saccade.errors import ConfigError, is_int_within, is_number_within, quoted
from saccade.types.request import OTHER_LABEL
from saccade.util.plain_files import read_plain

logger = logging.getLogger("saccade.server")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
"""Safe in logs and labels. Without a colon, so that no name looks like a label of our own or IPv6."""

OTHERS = "*"
"""The table for tenants that only a proxy names."""

_MAX_BYTES = 1 << 20
_MAX_LIMIT = 10**15  # floats count exactly up to here
_MAX_WEIGHT = 1000
_PREFIX = "sha256:"
_KEY = re.compile(r"[!-~]{1,1024}")  # what a header can hold
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


class TenantLimits(NamedTuple):
    """None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompts and outputs
    pixels_per_minute: int | None = None  # of images and frames as they were sent
    processor_seconds_per_minute: int | None = None  # of reading requests and decoding media
    open_requests: int | None = None  # outputs that run or wait


class TenantSettings(NamedTuple):
    digests: tuple[bytes, ...] = ()  # SHA-256 of each key
    weight: float = 1.0  # of its share of the engine
    limits: TenantLimits = TenantLimits()
    is_operator: bool = False  # sees the metrics of all tenants
    label: str = OTHER_LABEL  # in the metrics


_FIELDS = ("keys", "weight", "operator", *TenantLimits._fields)


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def read_tenants(file: Path, *, needs_keys: bool) -> dict[str, TenantSettings]:
    """Settings by name, those for `OTHERS` too. ConfigError that names the file, the tenant and the field."""
    tables = _tables(file)
    tenants = {name: _Table(f"{file}: tenant {name}", table).tenant(name) for name, table in tables.items()}
    for name, tenant in tenants.items():
        if name == OTHERS and any((needs_keys, tenant.digests, tenant.is_operator)):
            reason = "is for tenants that a proxy names: no keys, no operator, and set --tenant-header"
            raise ConfigError(f'{file}: the table ["*"] {reason}')
        if needs_keys and not tenant.digests:
            advice = 'add a line such as keys = ["a-long-random-key"]'
            raise ConfigError(f"{file}: tenant {name}: keys is missing or empty; {advice}")
    check_unique(tenants, str(file))
    return tenants


def check_unique(tenants: Mapping[str, TenantSettings], where: str) -> None:
    owners: dict[bytes, str] = {}
    for name, tenant in tenants.items():
        for digest in tenant.digests:
            if digest in owners:
                problem = f"a key of {owners[digest]} is given again for {name}"
                raise ConfigError(f"{where}: tenant {name}: keys: {problem}; a key names one tenant, once")
            owners[digest] = name


def _tables(file: Path) -> dict[str, Any]:
    try:
        data = read_plain(file, _MAX_BYTES)
        mode = file.stat().st_mode
    except OSError as error:
        reason = f"cannot be read ({error.strerror}); check --api-keys and its permissions"
        raise ConfigError(f"{file} {reason}") from None
    try:
        tables = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid TOML in UTF-8: {error}") from None
    if not tables:
        message = "names no tenant, so no client could come in; add a table such as [acme] with its keys"
        raise ConfigError(f"{file} {message}")
    if mode & stat.S_IROTH and _has_plain_keys(tables):
        advice = "run chmod o-r on it, or write keys as sha256:HEX"
        logger.warning("every user of this machine can read the keys in %s; %s", file, advice)
    return tables


def _has_plain_keys(tables: Mapping[str, Any]) -> bool:
    lists = [table.get("keys") for table in tables.values() if isinstance(table, dict)]
    keys = (str(key) for entries in lists if isinstance(entries, list) for key in entries)
    return any(not key.startswith(_PREFIX) for key in keys)


class _Table(NamedTuple):
    where: str  # for errors
    fields: Any

    def tenant(self, name: str) -> TenantSettings:
        is_name = name == OTHERS or NAME.fullmatch(name)
        if name == OTHER_LABEL or not is_name:
            rule = "up to 64 letters, digits and . _ @ + -, the first a letter or digit"
            raise ConfigError(f'{self.where}: the name must be {rule}, and not "{OTHER_LABEL}"')
        if not isinstance(self.fields, dict):
            raise ConfigError(f"{self.where} must be a table: write [{name}] above its fields")
        unknown = sorted(set(self.fields) - set(_FIELDS))
        if unknown:
            names = ", ".join(_FIELDS)
            raise ConfigError(f"{self.where}: {unknown[0]} is no field of a tenant; the fields are {names}")
        operator = self.fields.get("operator", False)
        if not isinstance(operator, bool):
            raise self._error("operator", "must be true or false")
        label = OTHER_LABEL if name == OTHERS else name
        limits = TenantLimits(*map(self._limit, TenantLimits._fields))
        return TenantSettings(self._digests(), self._weight(), limits, operator, label)

    def _weight(self) -> float:
        weight = self.fields.get("weight", 1)
        if not is_number_within(weight, 1 / _MAX_WEIGHT, _MAX_WEIGHT):
            raise self._error("weight", f"must be a number from {1 / _MAX_WEIGHT:g} to {_MAX_WEIGHT}")
        return float(weight)

    def _limit(self, field: str) -> int | None:
        limit = self.fields.get(field)
        if limit is None:
            return None
        if not is_int_within(limit, 1, _MAX_LIMIT):
            raise self._error(field, "must be a whole number of 1 or more; leave it out for no limit")
        return limit

    def _digests(self) -> tuple[bytes, ...]:
        """No error repeats a key."""
        keys = self.fields.get("keys", [])
        if not isinstance(keys, list):
            raise ConfigError(f'{self.where}: keys must be a list such as ["a-long-random-key"]')
        return tuple(self._digest(key, number) for number, key in enumerate(keys, 1))

    def _digest(self, key: Any, number: int) -> bytes:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            rule = "must be a string of 1 to 1024 visible ASCII characters without spaces"
            raise ConfigError(f"{self.where}: keys: key {number} {rule}")
        if not key.startswith(_PREFIX):
            return digest_of(key.encode())
        if not _DIGEST.fullmatch(key.removeprefix(_PREFIX)):
            rule = "must have 64 hex digits after sha256:, as `printf %s KEY | sha256sum` prints them"
            raise ConfigError(f"{self.where}: keys: key {number} {rule}")
        digest = bytes.fromhex(key.removeprefix(_PREFIX))
        if digest == digest_of(b""):  # as of a shell variable that is not set; requests without a key have it
            raise ConfigError(f"{self.where}: keys: key {number} is the SHA-256 of no text; hash the key")
        return digest

    def _error(self, field: str, rule: str) -> ConfigError:
        return ConfigError(f"{self.where}: {field} {rule}, not {quoted(self.fields[field])}")
