"""Every identifier in the glossary exists in the code."""

import ast
import re

from docs.site.house_map import PACKAGES, ROOT

SOURCES = [path for root in PACKAGES for path in sorted((ROOT / root).rglob("*.py"))]


def names_in_code() -> set[str]:
    """Return the names of all modules, classes, functions, fields, enum members and constants."""
    names = set()
    for path in SOURCES:
        names |= {path.stem, path.parent.name}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            if isinstance(node, ast.ClassDef | ast.Module):
                assignments = [line for line in node.body if isinstance(line, ast.Assign | ast.AnnAssign)]
                names |= {name.id for line in assignments for name in ast.walk(line) if isinstance(name, ast.Name)}
    return names


def names_in_glossary() -> set[str]:
    """Return the identifiers in the last column of the glossary's tables."""
    page = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if "|" in line]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.rsplit("|", 2)[1])}


def test_every_identifier_in_the_glossary_exists_in_the_code() -> None:
    assert len(names_in_glossary()) > 80
    assert names_in_glossary() - names_in_code() == set()
