"""The files of deploy/: valid, with flags, routes and metrics that the server has."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from configparser import RawConfigParser
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml

from saccade import __version__
from saccade.cli.main import _parse
from saccade.server.http.origins import _PROBES
from tools.docs import ROOT

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "saccade"
HADOLINT = Path(sys.executable).parent / "hadolint"


def served(command: list[str]) -> Any:
    """The arguments of a command that `saccade` must take."""
    args = _parse([str(word) for word in command])
    assert args.command == "serve"
    return args


# --- container ----------------------------------------------------------------------------------------------------


@cache
def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, with continued lines joined."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    found = subprocess.run([HADOLINT, "--no-color", DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_dockerfile_has_only_instructions_that_docker_knows() -> None:
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL"}
    assert {name for name, _ in instructions()} <= known | {"ENTRYPOINT", "CMD"}
    assert instructions()[0][0] == "FROM"
    for name, rest in instructions():
        if name in ("ENTRYPOINT", "CMD"):
            assert isinstance(json.loads(rest), list)


def test_the_image_serves_as_a_user_without_rights_and_is_probed() -> None:
    found = dict(instructions())  # the last of each
    assert found["USER"] == "10001"
    served(json.loads(found["CMD"]))
    (path,) = re.findall(r"http://127\.0\.0\.1:8000(/\w+)", found["HEALTHCHECK"])
    assert path in _PROBES and found["EXPOSE"] == "8000"


def test_the_image_copies_files_that_exist() -> None:
    copied = [rest for name, rest in instructions() if name == "COPY" and not rest.startswith("--from")]
    sources = [source for rest in copied for source in rest.split()[:-1]]
    assert sources and all((ROOT / source).exists() for source in sources)


def test_the_page_about_installing_names_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    named = re.findall(r"(?m)^\| `saccade\[([\w-]+)\]`", (ROOT / "docs" / "install.md").read_text("utf-8"))
    assert sorted(named) == sorted(set(extras) - {"dev"})


def test_compose_gives_flags_that_exist_and_time_to_drain() -> None:
    (service,) = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values()
    args = served(service["command"])
    assert float(service["stop_grace_period"].removesuffix("s")) > args.drain_timeout
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert service["ports"] == [f"127.0.0.1:8000:{args.port}"]


def test_the_unit_of_systemd_gives_flags_that_exist_and_time_to_drain() -> None:
    unit = RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "saccade.service")
    args = served(shlex.split(unit["Service"]["ExecStart"])[1:])
    assert float(unit["Service"]["TimeoutStopSec"]) > args.drain_timeout
    assert args.api_keys and unit["Service"]["ExecReload"].endswith("-HUP $MAINPID")


# --- Helm ---------------------------------------------------------------------------------------------------------


@cache
def values() -> dict[str, Any]:
    return dict(yaml.safe_load((CHART / "values.yaml").read_text()))


def value_at(path: str) -> Any:
    found: Any = values()
    for name in path.split("."):
        found = found[name]
    return found


def rendered(template: Path, extra_args: list[str]) -> Any:
    """What the few things that our templates use come to. Anything else fails."""
    text = template.read_text()
    loop = r"(?s) *\{\{- range \.Values\.extraArgs \}\}\n(.*?) *\{\{- end \}\}\n"
    text = re.sub(loop, lambda m: "".join(m[1].replace("{{ . | toJson }}", json.dumps(a)) for a in extra_args), text)

    def fill(match: re.Match[str]) -> str:
        words = match[1].split()
        if words == [".Release.Name"]:
            return "saccade"
        if words[0] == "add":
            return str(value_at(words[1].removeprefix(".Values.")) + int(words[2]))
        found = value_at(words[0].removeprefix(".Values."))
        if words[1:] == ["|", "toJson"]:
            return json.dumps(found)
        assert words[1:] in ([], ["|", "default", ".Chart.AppVersion"]), match[0]
        return str(found or __version__)

    return yaml.safe_load(re.sub(r"\{\{ (.*?) \}\}", fill, text))


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    deployment = rendered(CHART / "templates" / "deployment.yaml", ["--max-model-len=8192", "--strict-params"])
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    template = deployment["spec"]["template"]
    assert template["metadata"]["labels"] == deployment["spec"]["selector"]["matchLabels"]
    return dict(template["spec"])


@pytest.mark.parametrize("version", ["1.29", "1.34"])
@pytest.mark.parametrize("name", ["deployment.yaml", "service.yaml"])
def test_the_chart_follows_the_schemas_of_kubernetes(name: str, version: str) -> None:
    kubernetes_validate.validate(rendered(CHART / "templates" / name, ["--strict-params"]), version, strict=True)


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["apiVersion"], chart["name"], chart["appVersion"]) == ("v2", "saccade", __version__)


def test_every_value_is_used_and_every_used_one_is_there() -> None:
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    used = set(re.findall(r"\.Values\.([\w.]+)", text))
    assert all(value_at(path) is not None for path in used)
    assert {path.split(".")[0] for path in used} == set(values())


def test_the_pods_command_is_one_that_saccade_takes(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    args = served(container["args"])
    assert args.max_model_len == 8192 and args.port == container["ports"][0]["containerPort"]
    assert pod["terminationGracePeriodSeconds"] > args.drain_timeout
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert Path(args.api_keys).parent == Path(mounts["keys"])


def test_probes_ask_for_routes_and_loading_kills_no_pod(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    paths = {kind: container[kind]["httpGet"]["path"] for kind in ("livenessProbe", "readinessProbe")}
    assert paths == {"livenessProbe": "/live", "readinessProbe": "/ready"}
    assert set(paths.values()) <= set(_PROBES)


def test_a_pod_has_no_rights_and_no_variables_of_services(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["enableServiceLinks"] is False


def test_the_service_leads_to_the_pods(pod: dict[str, Any]) -> None:
    service = rendered(CHART / "templates" / "service.yaml", [])
    deployment = rendered(CHART / "templates" / "deployment.yaml", [])
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert service["spec"]["ports"][0]["targetPort"] == pod["containers"][0]["ports"][0]["name"]


# --- alerts and proxies -------------------------------------------------------------------------------------------


def test_what_prometheus_is_asked_is_promql_with_labels_that_the_metrics_have() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    labels = {
        name: set(re.findall(r"`(\w+)`", cell))
        for name, cell in re.findall(r"\| `(saccade:\w+)` \| \w+ \| (.*?) \|", page)
    }
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    panels = json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]
    asked = [rule["expr"] for rule in group["rules"]] + [t["expr"] for panel in panels for t in panel["targets"]]
    for expr in (re.sub(r"\$\w+", "5m", expr) for expr in asked):
        promql_parser.parse(expr)  # raises
        for name, selected in re.findall(r"(saccade:\w+)\{(.*?)\}", expr):
            known = labels[re.sub(r"_(total|bucket|sum|count)$", "", name)]
            assert set(re.findall(r"(\w+)\s*[!=]", selected)) <= known, expr


def test_alerts_ask_for_metrics_that_exist() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    kinds = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    rows = re.findall(r"\| `(saccade:\w+)` \| (\w+) \|", page)
    exposed = {name + suffix for name, kind in rows for suffix in kinds[kind]} | set(
        re.findall(r"`(process_\w+)`", page)
    )
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]:
        used = set(re.findall(r"\b(?:saccade:|process_)\w+", rule["expr"]))
        assert used and used <= exposed, (rule["alert"], used - exposed)
        assert rule["annotations"]["summary"] and rule["labels"]["severity"] in ("warning", "critical")


@pytest.mark.parametrize(("file", "said"), [("nginx.conf", "proxy_buffering off;"), ("Caddyfile", "flush_interval -1")])
def test_proxies_let_tokens_through_and_bodies_as_large_as_ours(file: str, said: str) -> None:
    text = (DEPLOY / file).read_text()
    assert said in text and text.count("{") == text.count("}")
    assert re.search(r"(client_max_body_size|max_size) 96[mM]", text)  # --max-body-mb
