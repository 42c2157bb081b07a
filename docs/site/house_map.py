"""The code map: every folder and module of the packages with the first line of its docstring."""

import ast
import os
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from docs.site.markdown import code, page, table

ROOT = Path(__file__).resolve().parents[2]
_HATCH = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
PACKAGES: tuple[str, ...] = tuple(_HATCH["build"]["targets"]["wheel"]["packages"])
"""Folders of the packages, relative to the root."""
SOURCES = tuple(dict.fromkeys((ROOT / package).parent for package in PACKAGES))
"""Folders that Python searches for the packages."""
PYTHON_PATH = os.pathsep.join(map(str, SOURCES))
"""PYTHONPATH of a process that imports the packages of the checkout."""
_MIGRATIONS = ROOT / "gpuenergyd" / "store" / "migrations"


def map_page() -> str:
    """Return the page with a section per folder and a line per module."""
    parts = [
        (
            "Three packages: `gpuenergyd` measures, controls, records and serves but never decides;"
            " `gpuenergyd_policies` decides; `gpuenergyd_trainers` attaches training programs. `plugins/` contains what"
            " can be left out. Each line is the first line of a module's docstring, so that this page cannot disagree"
            " with the code. `[tool.importlinter]` in `pyproject.toml` defines which folder may import which;"
            " [how an iteration flows](../explanation/iteration-flow.md) follows one path through the map."
        )
    ]
    for folder in folders():
        rows = [(f"[{code(path.name)}](../../{path.relative_to(ROOT)})", first_line(path)) for path in modules(folder)]
        parts += [f"## {folder.relative_to(ROOT)}", first_line(folder / "__init__.py")]
        if rows:
            parts.append(table(("module", "contents"), rows))
    return page("Code map", *parts)


def folders() -> Iterator[Path]:
    """Yield every folder of the packages that contains modules, outer folders first."""
    for package in PACKAGES:
        for init in sorted((ROOT / package).rglob("__init__.py"), key=lambda path: path.parent.parts):
            if init.parent == _MIGRATIONS or _MIGRATIONS not in init.parents:
                yield init.parent


def modules(folder: Path) -> list[Path]:
    """Return the modules of a folder by name."""
    return [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]


@cache
def first_line(path: Path) -> str:
    """Return the first line of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].replace("<", "&lt;")
