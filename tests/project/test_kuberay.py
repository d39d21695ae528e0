"""The example for Kubernetes: valid YAML, with flags that `saccade serve` has and numbers that agree."""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from saccade.cli.main import _parse
from tools.docs import ROOT


def spec() -> dict[str, Any]:
    manifest = yaml.safe_load((ROOT / "docs" / "kuberay.yaml").read_text("utf-8"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayCluster")
    return dict(manifest["spec"])


def container(group: dict[str, Any]) -> dict[str, Any]:
    (found,) = group["template"]["spec"]["containers"]
    mounts = {mount["name"] for mount in found["volumeMounts"]}
    assert mounts == {volume["name"] for volume in group["template"]["spec"]["volumes"]}
    return dict(found)


def test_the_servers_command_is_one_that_saccade_takes() -> None:
    (script,) = container(spec()["headGroupSpec"])["args"]
    command = shlex.split(script.partition("exec saccade ")[2])
    args = _parse(command)
    assert args.ray_address == "auto" and args.device == "cuda"
    (workers,) = spec()["workerGroupSpecs"]
    assert (args.min_replicas, args.replicas, args.max_replicas) == (
        workers["minReplicas"],
        workers["replicas"],
        workers["maxReplicas"],
    )


def test_workers_have_what_an_engine_reserves() -> None:
    (script,) = container(spec()["headGroupSpec"])["args"]
    args = _parse(shlex.split(script.partition("exec saccade ")[2]))
    (workers,) = spec()["workerGroupSpecs"]
    resources = container(workers)["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == 1
    assert int(resources["requests"]["cpu"]) >= args.ray_cpus
