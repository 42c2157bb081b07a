"""import-linter enforces the architecture: forbidden imports fail the check."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from docs.site.house_map import PACKAGES, ROOT
from tests.support.processes import finished


def lint_imports(checkout: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on a checkout as `make layers` does."""
    sources = [str((checkout / source).parent) for source in PACKAGES]
    return finished(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache"],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sources), "COLUMNS": "200"},
    )


def settings() -> dict[str, Any]:
    """Return the project's pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def contract(contract_id: str) -> dict[str, Any]:
    """Return one import-linter contract."""
    contracts: list[dict[str, Any]] = settings()["tool"]["importlinter"]["contracts"]
    return next(c for c in contracts if c["id"] == contract_id)


def distribution(name: str) -> str:
    """Return a distribution's name as PyPI compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


PLANTED = (
    ("gpuenergyd/misplaced.py", "", "misplaced"),
    ("gpuenergyd/core/planted.py", "gpuenergyd.wire", "core, service_manager -> atomic_file, count_text"),
    ("gpuenergyd/gpu/planted.py", "gpuenergyd.store", "store, gpu, wire"),
    ("gpuenergyd/client/planted.py", "msgspec", "standard library only"),
    ("gpuenergyd/daemon/planted.py", "gpuenergyd_policies", "by entry point"),
    ("gpuenergyd/daemon/planted_too.py", "gpuenergyd_prove", "import no plugin"),
    ("plugins/gpuenergyd_carbon/lab/results.py", "gpuenergyd.store", "the plugin carbon uses"),
    ("plugins/gpuenergyd_prove/signing.py", "gpuenergyd.daemon.app", "the plugin prove uses"),
    ("policies/gpuenergyd_policies/planted.py", "gpuenergyd.daemon", "policies know the domain only"),
    ("gpuenergyd/report/planted.py", "sqlalchemy", "only the store"),
)
"""Files with what they must not import, and the contract that says so; the first is in no contract."""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what import-linter says of a copy of the source tree with all these files."""
    checkout = tmp_path_factory.mktemp("checkout")
    for source in PACKAGES:
        shutil.copytree(ROOT / source, checkout / source, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", checkout)
    for path, imported, _ in PLANTED:
        (checkout / path).write_text(f"import {imported}\n" if imported else "", encoding="utf-8")
    result = lint_imports(checkout)
    assert result.returncode == 1
    return result.stdout


@pytest.mark.parametrize(("path", "imported", "broken"), PLANTED, ids=[path for path, *_ in PLANTED])
def test_a_forbidden_import_or_an_unnamed_file_fails(output: str, path: str, imported: str, broken: str) -> None:
    module = path.removeprefix("plugins/").removeprefix("policies/").removesuffix(".py").replace("/", ".")

    assert any(
        broken in row and ("BROKEN" in row or "missing" in row or row.startswith("- ")) for row in output.splitlines()
    ), output
    assert not imported or f"{module} -> {imported}" in output


def test_no_dependency_escapes_the_standard_library_contract() -> None:
    extras = settings()["project"]["optional-dependencies"]
    declared = {
        distribution(re.split(r"[^A-Za-z0-9._-]", requirement)[0])
        for extra in ("daemon", "fast", "trainers")
        for requirement in extras[extra]
    }
    forbidden = set(contract("standard-library")["forbidden_modules"])
    provided_by = metadata.packages_distributions()

    covered = {distribution(name) for module in forbidden for name in provided_by.get(module, ())}

    assert declared <= covered
    assert forbidden - {"pynvml"} == set(contract("gpu")["forbidden_modules"])
