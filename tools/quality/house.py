"""Size of the code: lines, files per folder, long files, constants of the policies; `python -m tools.quality.house`.

Some figures have an upper limit, slightly above their value when it was set, and some a target. A test holds the limits
(`tests/project/test_house.py`). When a figure falls, lower its limit; a commit that raises one says why.
"""

import ast
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ("gpuenergyd", "policies", "trainers")
PRODUCT = (*CORE, "plugins")
MAX_FILES = 16
"""Most files of its own that a folder may have, `__init__.py` included."""
MAX_LINES = 400
REASON = f"Longer than {MAX_LINES} lines"
"""Begins the sentence in the docstring of a longer file that says why it is not shorter."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure with its upper limit and its target, if it has them."""

    name: str
    value: int
    limit: int | None = None
    target: int | None = None
    details: tuple[str, ...] = ()

    @property
    def is_within_limit(self) -> bool:
        return self.limit is None or self.value <= self.limit


def figures(root: Path = ROOT) -> tuple[Figure, ...]:
    """Return all figures of a checkout."""
    lines = {part: _lines(root, part) for part in (*PRODUCT, "tests")}
    product = {path: count for part in PRODUCT for path, count in lines[part].items()}
    folders = Counter(str(Path(path).parent) for path in product)
    crowded = tuple(f"{folder}: {count}" for folder, count in sorted(folders.items()) if count > MAX_FILES)
    long = tuple(
        f"{path}: {count}"
        for path, count in sorted(product.items())
        if count > MAX_LINES and REASON not in (ast.get_docstring(_tree(root / path)) or "")
    )
    constants = sum(num_constants(_tree(root / path)) for path in lines["policies"])
    return (
        Figure("lines of gpuenergyd, policies, trainers", _total(lines, CORE), limit=62_000, target=62_000),
        Figure("lines with plugins", sum(product.values()), limit=98_804, target=77_000),
        Figure("lines of tests", _total(lines, ("tests",)), limit=92_430, target=70_000),
        Figure(f"folders with more than {MAX_FILES} files", len(crowded), limit=0, target=0, details=crowded),
        Figure(f"files over {MAX_LINES} lines without a reason", len(long), limit=0, target=0, details=long),
        Figure("numeric constants of policies", constants, limit=241),
        *(Figure(f"  lines of {part}", sum(own.values())) for part, own in lines.items()),
    )


def num_constants(tree: ast.Module) -> int:
    """Return how many numbers a module chooses: named ones, defaults of fields, and inline ones that are not plain."""
    counted: set[int] = set()
    num_named = 0
    for statement in tree.body:
        chosen: list[ast.expr] = []
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            chosen.append(statement.value)
        if isinstance(statement, ast.ClassDef):
            defaults = (field.value for field in statement.body if isinstance(field, ast.AnnAssign))
            chosen += [value for value in defaults if value is not None and _number(value) is not None]
        for value in chosen:
            numbers = [id(node) for node in ast.walk(value) if _number(node) is not None]
            counted.update(numbers)
            num_named += bool(numbers)
    inline = [_number(node) for node in ast.walk(tree) if id(node) not in counted]
    return num_named + sum(number is not None and not _is_plain(number) for number in inline)


def _number(node: ast.AST) -> float | None:
    """Return the number that a node is; None for any other node."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    return None


def _is_plain(value: float) -> bool:
    """Return whether a number is no choice: a small count, a half, or a power of ten."""
    if value in {0, 1, 2, 3, 0.5}:
        return True
    return value > 0 and math.isclose(math.log10(value), round(math.log10(value)), abs_tol=1e-9)


def _lines(root: Path, part: str) -> dict[str, int]:
    return {str(path.relative_to(root)): len(path.read_text().splitlines()) for path in _python_files(root / part)}


def _python_files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts)


def _total(lines: dict[str, dict[str, int]], parts: Sequence[str]) -> int:
    return sum(sum(lines[part].values()) for part in parts)


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def main() -> int:
    """Print all figures; return 1 if one exceeds its limit."""
    found = figures()
    rows = [f"{'':44}{'present':>9}{'limit':>9}{'target':>9}"]
    for figure in found:
        limit, target = ("" if most is None else f"{most:,}" for most in (figure.limit, figure.target))
        rows += [f"{figure.name:44}{figure.value:>9,}{limit:>9}{target:>9}", *(f"    {own}" for own in figure.details)]
    sys.stdout.write("\n".join(rows) + "\n")
    return 0 if all(figure.is_within_limit for figure in found) else 1


if __name__ == "__main__":
    sys.exit(main())
