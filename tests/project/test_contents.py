"""The docstring of a package is its table of contents: it lists every file."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [
    init.parent
    for root in ("gpuenergyd", "policies/gpuenergyd_policies", "trainers/gpuenergyd_trainers")
    for init in sorted((ROOT / root).rglob("__init__.py"))
    # The package itself is documented in docs/; Alembic names its own folders.
    if init.parent != ROOT / "gpuenergyd" and "migrations" not in init.parts
]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: str(package.relative_to(ROOT)))
def test_the_docstring_of_a_package_lists_all_of_its_files(package: Path) -> None:
    contents = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    named = set(re.findall(r"\w+", contents))
    there = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/__init__.py")}

    assert there - {"__init__"} <= named
