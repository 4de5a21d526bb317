"""The Kubernetes example: it parses, and its settings are ones that the application reads."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.server.serving import ROOT
from verifypd.cli.deploy import NAME
from verifypd.cluster.config import read


@pytest.fixture
def service() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "deploy" / "kuberay.yaml").read_text())


def test_its_settings_are_read(service: dict[str, Any]) -> None:
    written = yaml.safe_load(service["spec"]["serveConfigV2"])
    [application] = written["applications"]
    assert application["import_path"] == "verifypd.serve_app:app" and application["name"] == NAME
    chosen = read(application["args"])
    assert chosen.cluster.most == 8 and chosen.cluster.gpus_per_replica == 1


def test_there_is_room_for_as_many_engines_as_there_may_be(service: dict[str, Any]) -> None:
    chosen = read(yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]).cluster
    [workers] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (chosen.replicas, chosen.most)
    assert service["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] is True, "or there are never more nodes"
    [container] = workers["template"]["spec"]["containers"]
    assert float(container["resources"]["limits"]["nvidia.com/gpu"]) >= chosen.gpus_per_replica
    assert float(container["resources"]["limits"]["cpu"]) >= chosen.cpus_per_replica
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert ports["serve"] == yaml.safe_load(service["spec"]["serveConfigV2"])["http_options"]["port"]


def test_every_node_has_the_secrets(service: dict[str, Any]) -> None:
    """A gated model is fetched where it is read, by engines and by the ingress."""
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        [container] = group["template"]["spec"]["containers"]
        secrets = {entry["name"]: entry["valueFrom"]["secretKeyRef"]["key"] for entry in container["env"]}
        assert secrets == {"VERIFYPD_API_KEY": "api-key", "HF_TOKEN": "hf-token"}
