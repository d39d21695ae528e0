"""The file of --api-keys: what it may say, and that each mistake is named with its tenant and field."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from saccade.errors import ConfigError
from saccade.server.tenant_file import TenantLimits, digest_of, read_tenants
from saccade.types.request import OTHER_LABEL

SECRET = "sk-very-secret"
HASHED = f"sha256:{hashlib.sha256(b'sk-other').hexdigest()}"


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "tenants.toml"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_a_tenant_has_keys_a_weight_and_limits(tmp_path: Path) -> None:
    text = f"""
        [acme]
        keys = ["{SECRET}", "{HASHED}"]
        weight = 2.5
        requests_per_minute = 60
        tokens_per_minute = 100_000
        pixels_per_minute = 50_000_000
        processor_seconds_per_minute = 30
        open_requests = 8
        operator = true
    """
    tenant = read_tenants(written(tmp_path, text), needs_keys=True)["acme"]
    assert tenant.digests == (digest_of(SECRET.encode()), digest_of(b"sk-other"))
    assert tenant.weight == 2.5 and tenant.is_operator and tenant.label == "acme"
    assert tenant.limits == TenantLimits(60, 100_000, 50_000_000, 30, 8)


def test_what_is_left_out_has_no_limit_and_weight_one(tmp_path: Path) -> None:
    tenant = read_tenants(written(tmp_path, f'[acme]\nkeys = ["{SECRET}"]'), needs_keys=True)["acme"]
    assert tenant.weight == 1 and tenant.limits == TenantLimits(None, None, None, None, None) and not tenant.is_operator


def test_with_a_tenant_header_tenants_need_no_keys_and_others_may_have_limits(tmp_path: Path) -> None:
    text = '[acme]\nweight = 2\n["*"]\nrequests_per_minute = 5'
    tenants = read_tenants(written(tmp_path, text), needs_keys=False)
    assert tenants["acme"].digests == () and tenants["*"].limits.requests_per_minute == 5
    assert tenants["*"].label == OTHER_LABEL


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ["names no tenant", "[acme]"]),
        ("[acme\n", ["not valid TOML", "line 1"]),
        ("x = " + "[" * 5000, ["not valid TOML"]),
        ("acme = 3", ["tenant acme", "must be a table", "[acme]"]),
        ("[acme]", ["tenant acme", "keys is missing"]),
        ("[acme]\nkeys = []", ["tenant acme", "keys is missing or empty"]),
        ("[acme]\nkeys = 'sk'", ["tenant acme", "keys must be a list"]),
        ("[acme]\nkeys = ['sk', '']", ["tenant acme", "keys", "key 2"]),
        ("[acme]\nkeys = ['with space']", ["tenant acme", "keys", "key 1", "without spaces"]),
        ("[acme]\nkeys = ['sha256:abc']", ["tenant acme", "keys", "64 hex digits"]),
        ("[acme]\nkeys = ['sk', 'sk']", ["tenant acme", "keys", "again"]),
        (f"[acme]\nkeys = ['sk-other']\n[other2]\nkeys = ['{HASHED}']", ["tenant other2", "keys", "key of acme"]),
        ("[acme]\nkeys = ['sk']\n[acme]\nkeys = ['sk2']", ["not valid TOML", "acme", "line 3"]),
        ("['a b']\nkeys = ['sk']", ["tenant a b", "name must be"]),
        ("[other]\nkeys = ['sk']", ["tenant other", "name must be"]),
        ("['*']\nweight = 2", ["--tenant-header"]),
        ("[acme]\nkeys = ['sk']\nwieght = 2", ["tenant acme", "wieght", "weight"]),
        ("[acme]\nkeys = ['sk']\nweight = 0", ["tenant acme", "weight", "not 0"]),
        ("[acme]\nkeys = ['sk']\nweight = nan", ["tenant acme", "weight", "nan"]),
        ("[acme]\nkeys = ['sk']\nweight = true", ["tenant acme", "weight", "True"]),
        ("[acme]\nkeys = ['sk']\nrequests_per_minute = 0", ["tenant acme", "requests_per_minute", "not 0"]),
        ("[acme]\nkeys = ['sk']\ntokens_per_minute = 1.5", ["tenant acme", "tokens_per_minute", "1.5"]),
        ("[acme]\nkeys = ['sk']\npixels_per_minute = '9'", ["tenant acme", "pixels_per_minute", "'9'"]),
        ("[acme]\nkeys = ['sk']\nopen_requests = true", ["tenant acme", "open_requests", "True"]),
        ("[acme]\nkeys = ['sk']\noperator = 1", ["tenant acme", "operator", "true or false"]),
        ("#" * (1 << 20) + "\n", ["bytes"]),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, named: list[str]) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_tenants(file, needs_keys=True)
    for part in (str(file), *named):
        assert part in str(caught.value)


def test_the_table_for_others_has_no_keys(tmp_path: Path) -> None:
    for field in ('keys = ["sk"]', "operator = true"):
        with pytest.raises(ConfigError, match="no keys, no operator"):
            read_tenants(written(tmp_path, f'["*"]\n{field}'), needs_keys=False)


def test_the_digest_of_no_key_is_refused(tmp_path: Path) -> None:
    """`printf %s "$KEY" | sha256sum` without a KEY: every request without a key would match it."""
    nothing = hashlib.sha256(b"").hexdigest()
    with pytest.raises(ConfigError, match="SHA-256 of no text"):
        read_tenants(written(tmp_path, f'[a]\nkeys = ["sha256:{nothing}"]'), needs_keys=True)


def test_no_error_repeats_a_key(tmp_path: Path) -> None:
    for text in (f"[a]\nkeys = ['{SECRET} ']", f"[a]\nkeys = '{SECRET}'", f"[a]\nkeys = ['{SECRET}', '{SECRET}']"):
        with pytest.raises(ConfigError) as caught:
            read_tenants(written(tmp_path, text), needs_keys=True)
        assert SECRET not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read"):
        read_tenants(tmp_path / "nowhere.toml", needs_keys=True)


@pytest.mark.parametrize(
    ("mode", "key", "warns"), [(0o644, SECRET, True), (0o640, SECRET, False), (0o644, HASHED, False)]
)
def test_plain_keys_that_every_user_can_read_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, key: str, warns: bool
) -> None:
    read_tenants(written(tmp_path, f"[a]\nkeys = ['{key}']", mode), needs_keys=True)
    assert ("chmod o-r" in caplog.text) == warns and SECRET not in caplog.text
