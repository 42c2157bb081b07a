"""The DaemonSet and the Containerfile refer only to existing settings, files, commands and group ids."""

import json
import re
import tomllib
from typing import Any

import pytest

from gpuenergyd.client.environment import SYSTEM_SOCKET_PATH
from gpuenergyd.daemon.settings import ENVIRONMENT_PREFIX, Settings
from gpuenergyd_policies.planning import kernel_cache
from tests.support.daemon_process import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
CONTAINERFILE = (KUBERNETES / "Containerfile").read_text()


def daemon_set() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifest")
    documents: list[dict[str, Any]] = list(yaml.safe_load_all((KUBERNETES / "daemonset.yaml").read_text()))
    return next(document for document in documents if document["kind"] == "DaemonSet")


def test_every_setting_in_the_manifest_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = daemon_set()["spec"]["template"]["spec"]
    environ = [v for v in pod["containers"][0]["env"] if v["name"].startswith(ENVIRONMENT_PREFIX)]
    variables = {v["name"]: v.get("value", "what the cluster fills in") for v in environ}
    assert {name.removeprefix(ENVIRONMENT_PREFIX).lower() for name in variables} <= set(Settings.model_fields)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    settings = Settings()
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
    assert "hostNetwork" not in pod
    for container in (*pod["initContainers"], *pod["containers"]):
        privilege = container["securityContext"]
        assert "privileged" not in privilege
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

    assert f"supplementalGroups: [{number}]" in (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
