"""The Helm chart, by Helm's own engine: it lints, and renders what the manifest for kubectl has, and its values."""

import json
import shutil
import subprocess
from typing import Any

import pytest

import gpuenergyd
from tests.support.daemon_process import ROOT
from tests.support.tools_environment import HELM, tools_environment

CHART = ROOT / "deploy" / "helm" / "gpuenergyd"
RENDER = """
import json, sys
from helm_python import chart, errors
values = json.loads(sys.argv[2])
found = {"lint": chart.lint(sys.argv[1], values, strict=True)}
try:
    with chart.Chart.load(sys.argv[1]) as loaded:
        loaded.validate_schema(values)
        found["manifests"] = loaded.render(values, name="gpuenergyd", namespace="gpuenergyd")
except errors.HelmError as error:
    found["error"] = str(error)
print(json.dumps(found))
"""


def rendered(**values: Any) -> dict[str, Any]:
    python = tools_environment(HELM) / "python"
    done = subprocess.run([python, "-c", RENDER, CHART, json.dumps(values)], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def documents(**values: Any) -> dict[str, dict[str, Any]]:
    """Return the rendered objects by kind, each valid by the schema of Kubernetes where that has one."""
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifest")
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate has the schemas")
    texts = rendered(**values)["manifests"].values()
    found = {document["kind"]: document for text in texts for document in yaml.safe_load_all(text) if document}
    for version in ("1.28", "1.37"):
        kubernetes_validate.validate(found["DaemonSet"], version, strict=True)
    return found


def applied() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifest")
    manifest = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "daemonset.yaml").read_text())
    return next(document for document in manifest if document["kind"] == "DaemonSet")


def test_the_chart_lints_without_warnings() -> None:
    found = rendered(metrics={"enabled": True, "podMonitor": {"enabled": True}})["lint"]

    assert found["errors"] == []
    assert [message for message in found["messages"] if message["severity"] > 1] == []


def test_the_default_is_the_manifest_for_kubectl() -> None:
    found = documents()
    for container in (
        *found["DaemonSet"]["spec"]["template"]["spec"]["initContainers"],
        *found["DaemonSet"]["spec"]["template"]["spec"]["containers"],
    ):
        assert container.pop("imagePullPolicy") == "IfNotPresent"
        assert container["image"] == f"gpuenergyd:{gpuenergyd.__version__}"

    assert found == {"DaemonSet": applied()}


def test_values_select_nodes_and_mode_and_add_metrics() -> None:
    found = documents(
        mode="control",
        nodeSelector={"pool": "training"},
        runtimeClassName="",
        env=[{"name": "GPUENERGYD_PUE", "value": "1.2"}],
        metrics={"enabled": True, "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    )
    pod = found["DaemonSet"]["spec"]["template"]["spec"]
    daemon, metrics = pod["containers"]
    environ = {variable["name"]: variable.get("value") for variable in daemon["env"]}

    assert (environ["GPUENERGYD_MODE"], environ["GPUENERGYD_PUE"]) == ("control", "1.2")
    assert pod["nodeSelector"]["pool"] == "training"
    assert "runtimeClassName" not in pod
    assert metrics["securityContext"]["runAsNonRoot"] is True
    (endpoint,) = found["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == metrics["ports"][0]["name"]
    labels = found["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    assert found["PodMonitor"]["spec"]["selector"]["matchLabels"] == labels
    assert found["PodMonitor"]["metadata"]["labels"]["release"] == "prometheus"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"mode": "save"}, "'observe', 'control'"),
        ({"image": {"tag": "latest"}}, "/image/tag"),
        ({"metrics": {"podMonitor": {"enabled": True}}}, "needs metrics.enabled"),
        ({"nodeSelectors": {}}, "nodeSelectors"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], reason: str) -> None:
    assert reason in rendered(**values)["error"]


def test_the_overlay_differs_from_its_base_in_the_mode_only() -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl, which contains Kustomize, is not installed")

    def environ_and_rest(folder: str) -> tuple[dict[str, Any], str]:
        command = [kubectl, "kustomize", str(ROOT / "deploy" / folder)]
        yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifest")
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        objects = list(yaml.safe_load_all(done.stdout))
        (daemon,) = objects[-1]["spec"]["template"]["spec"]["containers"]
        return {variable["name"]: variable for variable in daemon.pop("env")}, json.dumps(objects)

    base, rest = environ_and_rest("kubernetes")
    control, other_rest = environ_and_rest("kustomize/control")

    assert rest == other_rest
    assert {name for name in base | control if base.get(name) != control.get(name)} == {"GPUENERGYD_MODE"}
    assert control["GPUENERGYD_MODE"]["value"] == "control"
