"""One of anything is written in the singular: `1 rank`, not `1 ranks`, in every output, error and log line."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.site.house_map import PACKAGES, ROOT
from gpuenergyd.count_text import count_text

_SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
_THINGS = (
    "GPUs blocks budgets bytes changes characters chunks clocks columns connections curves days deviations edges"
    " energies entries events files forecasts forwards hosts hours instructions intervals items iterations jobs kinds"
    " layers lines"
    " messages microbatches orders plans processes ranks records replays requests rounds rows samples segments slots"
    " stages tags targets times trainings units values windows zones"
)
_ADJECTIVES = (
    "clock data-parallel equal extra field grid measured past pipeline profiling registered similar simulated sound"
    " tuned unknown usable"
)
_PLURAL = rf" (?:(?:{_ADJECTIVES.replace(' ', '|')}) )?(?:{_THINGS.replace(' ', '|')})\b"
_CONSTANT = re.compile(r"(\w+\.)*_?[A-Z][A-Z0-9_]*(\[.*\])?")
_NOT_A_COUNT = {
    "asked",
    "word",
    "self.gpu_model",
    "', '.join(map(str, task.limits))",
    "list(with_extra.extra_inflight)",
}
"""Words and lists in front of a plural."""


def _counts_without_a_singular(source: str) -> Iterator[str]:
    """Yield what prints a number in front of a plural; above a maximum a number is never 1."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            for value, text in zip(node.values, node.values[1:], strict=False):
                if not isinstance(value, ast.FormattedValue) or not isinstance(text, ast.Constant):
                    continue
                expression, then = ast.unparse(value.value), str(text.value)
                spec = ast.unparse(value.format_spec) if value.format_spec is not None else "f'g'"
                is_exempt = _CONSTANT.fullmatch(expression) or expression in _NOT_A_COUNT or "at most" in then
                if re.match(_PLURAL, then) and spec == "f'g'" and not is_exempt:
                    yield f"{node.lineno}: {expression}{then}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (f"{node.lineno}: {found}" for found in re.findall(rf"%d{_PLURAL}", node.value))


@pytest.mark.parametrize(
    "source",
    ['f"{n} ranks"', 'f"{len(x):g} clock changes seen"', 'log.info("%d jobs left", n)', 'f"of {a} and {b} stages"'],
)
def test_a_number_before_a_plural_is_found(source: str) -> None:
    assert list(_counts_without_a_singular(source))


def test_every_count_has_a_singular() -> None:
    found = {str(path.relative_to(ROOT)): list(_counts_without_a_singular(path.read_text())) for path in _SOURCES}

    assert {path: lines for path, lines in found.items() if lines} == {}, "use gpuenergyd.count_text"
    assert len(found) > 500


@pytest.mark.parametrize(
    "template", sorted((ROOT / "plugins/gpuenergyd_formats/templates").glob("*.j2")), ids=lambda p: p.name
)
def test_every_count_of_a_page_has_a_singular(template: Path) -> None:
    assert re.findall(rf"\}}{_PLURAL}", template.read_text()) == []


@pytest.mark.parametrize(
    ("number", "what", "text"),
    [
        (1, "rank", "1 rank"),
        (0, "rank", "0 ranks"),
        (2, "microbatch", "2 microbatches"),
        (2, "entry", "2 entries"),
        (2, "day", "2 days"),
        (1.0, "clock change", "1 clock change"),
        (2.5, "data-parallel rank", "2.5 data-parallel ranks"),
        (1_500_000, "byte", "1500000 bytes"),
    ],
)
def test_a_count_is_written_in_words(number: float, what: str, text: str) -> None:
    assert count_text(number, what) == text
