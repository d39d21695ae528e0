"""Settings of `saccade serve`: flags over the environment over a file over the defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from saccade.errors import ConfigError
from saccade.options.engine import MediaPolicy, Options
from saccade.options.server import ServerOptions
from saccade.processor.checkpoint_files import open_checkpoint
from saccade.processor.input_processor import Processor
from saccade.server.config import load_settings, log_unused
from saccade.server.serve import check_context
from tests.helpers.engine.scheduling import make_config


def test_without_anything_the_defaults_hold() -> None:
    assert load_settings({}, {}, None) == (Options(), ServerOptions())


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "saccade.yaml"
    file.write_text("port: 1\nmax-num-seqs: 11\nmax_waiting: 5\n")
    settings = load_settings({"port": 3}, {"SACCADE_PORT": "2", "SACCADE_MAX_NUM_SEQS": "22"}, str(file))
    assert settings.server.port == 3
    assert settings.engine.max_num_seqs == 22
    assert settings.engine.max_waiting == 5


def test_lists_limits_and_truth_values_are_read_from_text() -> None:
    environ = {
        "SACCADE_API_KEY": "one, two",
        "SACCADE_LIMIT_MM_PER_PROMPT": "image=2",
        "SACCADE_STRICT_PARAMS": "true",
        "SACCADE_ENABLE_PREFIX_CACHING": "off",
        "SACCADE_OVERRIDE_GENERATION_CONFIG": '{"temperature": 0.5, "top_k": null}',
    }
    engine, server = load_settings({}, environ, None)
    assert server.api_key == ("one", "two") and server.strict_params
    assert engine.limit_mm_per_prompt == {"image": 2} and not engine.enable_prefix_caching
    assert engine.override_generation_config == {"temperature": 0.5, "top_k": None}


def test_a_file_may_write_lists_and_mappings_as_such(tmp_path: Path) -> None:
    file = tmp_path / "saccade.yaml"
    file.write_text("api_key: [a, b]\nlimit_mm_per_prompt: {image: 3}\ndrain_timeout: 5\nmax_model_len: null\n")
    engine, server = load_settings({}, {}, str(file))
    assert server.api_key == ("a", "b") and server.drain_timeout == 5.0
    assert engine.limit_mm_per_prompt == {"image": 3} and engine.max_model_len is None


@pytest.mark.parametrize(
    ("text", "named"),
    [("prot: 1", "prot"), ("port: many", "port"), ("port: [1]", "port"), ("- a", "option"), ("port: {", "cannot")],
)
def test_a_file_with_a_mistake_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "saccade.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load_settings({}, {}, str(file))


@pytest.mark.parametrize("text", ["temperature=0.5", "[0.5]", "{"])
def test_an_override_that_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="SACCADE_OVERRIDE_GENERATION_CONFIG: expected a JSON object such as"):
        load_settings({}, {"SACCADE_OVERRIDE_GENERATION_CONFIG": text}, None)


def test_a_bad_environment_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="SACCADE_PORT"):
        load_settings({}, {"SACCADE_PORT": "10.0.0.1:8000"}, None)


@pytest.mark.parametrize("link", ["tcp://10.0.0.1:8000", "tcp://[fd00::1]:80", "udp://10.0.0.1:53"])
def test_a_port_that_kubernetes_sets_for_a_service_is_only_logged(link: str, caplog: pytest.LogCaptureFixture) -> None:
    assert load_settings({}, {"SACCADE_PORT": link}, None).server.port == 8000
    assert load_settings({"port": 3}, {"SACCADE_PORT": link}, None).server.port == 3
    log_unused({"SACCADE_PORT": link})
    assert f"SACCADE_PORT={link} is made by Kubernetes" in caplog.text


def test_an_unknown_environment_variable_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"SACCADE_SERVICE_HOST": "10.0.0.1", "SACCADE_PORT": "8001"}
    assert load_settings({}, environ, None).server.port == 8001
    log_unused(environ)
    assert "SACCADE_SERVICE_HOST" in caplog.text and "SACCADE_PORT" not in caplog.text


@pytest.mark.parametrize(
    ("given", "free_mb", "held_mb"),
    [({}, 64_000, 1024), ({}, 4_000, 500), ({}, 500, 192), ({"max_inflight_mb": 2048}, 500, 2048)],
)
def test_bodies_may_hold_a_part_of_the_memory_that_is_free(given: dict[str, int], free_mb: int, held_mb: int) -> None:
    assert ServerOptions(**given).max_inflight_bytes(free_mb << 20) == held_mb << 20  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        {"port": 70000},
        {"replicas": 0},
        {"replicas": 65},
        {"encoders": -1},
        {"encoders": 65},
        {"min_replicas": 2},
        {"max_replicas": 1, "replicas": 2},
        {"max_replicas": 65},
        {"ray_cpus": 0},
        {"max_body_mb": 0},
        {"max_inflight_mb": 1},
        {"drain_timeout": -1.0},
        {"media_fetch_timeout": 0.0},
        {"api_key": ("",)},
        {"allow_private_media_addresses": True},
        {"allow_private_media_addresses": True, "allowed_media_domains": ("a.example", "*")},
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        load_settings(given, {}, None)


# --- a context without room ---------------------------------------------------------------------------------------


def test_a_cache_that_can_take_no_image_is_refused_with_the_numbers() -> None:
    processor = Processor(open_checkpoint(None), MediaPolicy.of(Options()))
    small = make_config(max_model_len=4, num_blocks=1, block_size=4)
    message = r"may have 4 tokens \(1 KV blocks of 4\), and an image .* takes \d+; raise --kv-cache-gb"
    with pytest.raises(ConfigError, match=message):
        check_context(processor, small)
    check_context(processor, make_config(max_model_len=256))
    check_context(Processor(open_checkpoint(None), MediaPolicy.of(Options(limit_mm_per_prompt={"image": 0}))), small)
