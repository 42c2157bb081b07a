"""The conda recipe, rendered by rattler-build, has the version, the program and the dependencies of this package."""

import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from gpuenergyd import __version__
from tests.support.tools_environment import CONDA, tools_environment

ROOT = Path(__file__).resolve().parents[2]
RENDER = """
import json, sys
from rattler_build import Stage0Recipe
rendered = Stage0Recipe.from_yaml(open(sys.argv[1]).read()).render()
print(json.dumps([variant.recipe.to_dict() for variant in rendered]))
"""
CONDA_NAMES = {"prometheus-client": "prometheus_client"}


@pytest.fixture(scope="module")
def outputs() -> dict[str, Any]:
    """Return the rendered recipe of each package by its name."""
    command = [str(tools_environment(CONDA) / "python"), "-c", RENDER, str(ROOT / "deploy" / "conda" / "recipe.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {output["package"]["name"]: output for output in json.loads(done.stdout)}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def test_the_client_needs_python_alone_and_the_daemon_what_its_extras_need(
    outputs: dict[str, Any], project: dict[str, Any]
) -> None:
    extras = project["optional-dependencies"]
    needed = [Requirement(text) for extra in ("daemon", "fast") for text in extras[extra]]

    client, daemon = outputs["gpuenergyd"], outputs["gpuenergyd-daemon"]
    assert {output["package"]["version"] for output in outputs.values()} == {__version__}
    assert client["requirements"]["run"] == [f"python {project['requires-python']}"]
    (scripts,) = project["scripts"].items()
    assert client["build"]["python"]["entry_points"] == [" = ".join(scripts)]
    pin, *listed = daemon["requirements"]["run"]
    assert pin == {"pin_subpackage": {"name": "gpuenergyd", "exact": True}}
    wanted = {CONDA_NAMES.get(one.name, one.name): sorted(map(str, one.specifier)) for one in needed}
    assert {name: sorted(floor.split(",")) for name, floor in (text.split() for text in listed)} == wanted


def test_the_package_has_one_name_everywhere(outputs: dict[str, Any], project: dict[str, Any]) -> None:
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "gpuenergyd" / "Chart.yaml").read_text(encoding="utf-8"))

    assert {project["name"], chart["name"], min(outputs, key=len)} == {"gpuenergyd"}
