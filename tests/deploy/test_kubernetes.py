"""The DaemonSet and the Containerfile refer only to existing settings, files, commands and group ids."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.client import probe
from gpuenergyd.client.environment import SYSTEM_SOCKET_PATH
from gpuenergyd.daemon.settings import ENVIRONMENT_PREFIX, Settings
from gpuenergyd_policies.planning import kernel_cache
from tests.support.daemon_process import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
HOW_TO = ROOT / "docs" / "how-to" / "kubernetes.md"
CONTAINERFILE = (KUBERNETES / "Containerfile").read_text()


def daemon_set() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifest")
    documents: list[dict[str, Any]] = list(yaml.safe_load_all((KUBERNETES / "daemonset.yaml").read_text()))
    return next(document for document in documents if document["kind"] == "DaemonSet")


@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_the_manifest_is_valid_by_the_schema_of_kubernetes(version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate has the schemas")
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifest")
    documents = list(yaml.safe_load_all((KUBERNETES / "daemonset.yaml").read_text()))
    documents.append(training_pod())

    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)
    wrong = daemon_set()
    wrong["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def training_pod() -> dict[str, Any]:
    """Return a pod with what the document adds to one."""
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifest")
    (text,) = re.findall(r"```text\n(spec:\n.*?)```", HOW_TO.read_text(), re.DOTALL)
    pod: dict[str, Any] = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train"}, **yaml.safe_load(text)}
    pod["spec"]["containers"][0]["image"] = "train:latest"
    return pod


def test_a_training_pod_has_the_folder_of_the_sockets_and_their_group() -> None:
    pod, daemon = training_pod()["spec"], daemon_set()["spec"]["template"]["spec"]
    (volume,) = pod["volumes"]
    (mount,) = pod["containers"][0]["volumeMounts"]

    assert volume["hostPath"]["path"] in {volume["hostPath"]["path"] for volume in daemon["volumes"]}
    assert (mount["name"], mount["mountPath"]) == (volume["name"], str(Path(SYSTEM_SOCKET_PATH).parent))
    assert not {"hostPID", "hostNetwork"} & pod.keys()


def test_every_probe_runs_the_check_of_the_client() -> None:
    (daemon,) = daemon_set()["spec"]["template"]["spec"]["containers"]
    probes = [daemon[name]["exec"]["command"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]

    assert probes == 3 * [["python", "-I", "-m", probe.__spec__.name]]


def test_every_setting_in_the_manifest_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = daemon_set()["spec"]["template"]["spec"]
    environ = [v for v in pod["containers"][0]["env"] if v["name"].startswith(ENVIRONMENT_PREFIX)]
    variables = {v["name"]: v.get("value", "what the cluster fills in") for v in environ}
    assert {name.removeprefix(ENVIRONMENT_PREFIX).lower() for name in variables} <= set(Settings.model_fields)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    settings = Settings()
    assert (settings.mode, settings.mode_note) == ("observe", None)
    assert str(settings.socket_path) == SYSTEM_SOCKET_PATH
    restore = pod["initContainers"][0]
    assert restore["command"][-1] == str(settings.journal_path)


def test_socket_and_journal_are_on_the_host_and_outlive_a_container() -> None:
    pod = daemon_set()["spec"]["template"]["spec"]
    on_host = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"]}

    for container in (*pod["initContainers"], *pod["containers"]):
        assert {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]} == on_host


def test_the_pod_has_host_pids_and_only_the_needed_capabilities() -> None:
    pod = daemon_set()["spec"]["template"]["spec"]

    assert pod["hostPID"] is True
    assert not {"hostNetwork", "hostIPC"} & pod.keys()
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert pod["automountServiceAccountToken"] is False
    for container in (*pod["initContainers"], *pod["containers"]):
        privilege = container["securityContext"]
        assert "privileged" not in privilege
        assert privilege["allowPrivilegeEscalation"] is False
        assert privilege["readOnlyRootFilesystem"] is True
        assert privilege["capabilities"]["drop"] == ["ALL"]
        changes_gpus = container["name"] in {"restore", "gpuenergyd"}
        assert ("SYS_ADMIN" in privilege["capabilities"].get("add", [])) is changes_gpus


def test_the_planner_is_compiled_into_the_image_and_on_each_node_where_the_daemon_looks_for_it() -> None:
    pod = daemon_set()["spec"]["template"]["spec"]
    cache = {
        container["name"]: {variable["name"]: variable.get("value") for variable in container.get("env", [])}.get(
            "NUMBA_CACHE_DIR"
        )
        for container in (*pod["initContainers"], *pod["containers"])
    }
    (mounted,) = (volume["mountPath"] for volume in pod["containers"][0]["volumeMounts"] if volume["name"] == "state")

    assert [container["name"] for container in pod["initContainers"]] == ["restore", "compile-planner"]
    assert pod["initContainers"][1]["command"][1:] == ["-I", "-m", kernel_cache.__name__]
    assert f"/opt/gpuenergyd/bin/python -I -m {kernel_cache.__name__}" in CONTAINERFILE
    assert cache["compile-planner"] == cache["gpuenergyd"] == f"{mounted}/planner"


def test_selector_and_labels_agree() -> None:
    spec = daemon_set()["spec"]

    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]


def test_the_containerfile_uses_existing_files_extras_and_commands() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"'/src\[([a-z,]+)\]'", CONTAINERFILE)
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", CONTAINERFILE, re.MULTILINE)

    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert json.loads(entry)[0] in project["scripts"]
    assert (ROOT / "constraints.txt").exists()
    assert project["requires-python"] == ">=3.11"
    assert "python:3.11" in CONTAINERFILE


def test_the_documented_group_id_matches_the_containerfile() -> None:
    (number,) = re.findall(r"groupadd --gid (\d+) gpuenergy", CONTAINERFILE)

    assert f"supplementalGroups: [{number}]" in HOW_TO.read_text()
