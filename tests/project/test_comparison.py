"""Every claim of the comparison has evidence: a test or benchmark for gpuenergyd, a source for other tools."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "explanation" / "comparison.md").read_text(encoding="utf-8")
EVIDENCE = re.findall(r"^(\d+)\. \[([^\]]+)\]\(\.\./\.\./([^)]+)\)(?: `(test_\w+)`)?", PAGE, re.MULTILINE)
CLAIMS = re.sub(r"<!-- generated: .*?<!-- end -->", "", PAGE, flags=re.DOTALL)
"""The page without tables of figures, whose evidence is the benchmark that they are generated from."""
TABLES = [
    [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")]
    for table in re.findall(r"(?:^\|.*\n)+", CLAIMS, re.MULTILINE)
]
ROWS = [row for _, *rows in TABLES for row in rows]


def test_every_piece_of_evidence_exists() -> None:
    for _, shown, path, test in EVIDENCE:
        assert shown == path
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not path.startswith("tests/") or f"def {test}(" in text, f"{path} has no {test}"


def test_every_claim_about_gpuenergyd_has_evidence_and_all_evidence_is_used() -> None:
    numbers = {number for number, *_ in EVIDENCE}
    named: set[str] = set()
    for feature, ours, *_ in ROWS:
        found = re.fullmatch(r"yes \[([\d, ]+)\]|part \[([\d, ]+)\]: .+|\*\*no\*\*: .+", ours)
        assert found, f"{feature}: {ours}"
        named |= set((found[1] or found[2] or "").replace(" ", "").split(",")) - {""}

    assert named == numbers
    assert [int(number) for number, *_ in EVIDENCE] == list(range(1, len(EVIDENCE) + 1))


def test_every_claim_about_other_tools_has_a_source() -> None:
    sources = set(re.findall(r"^- (\[[A-Z]\])", PAGE, re.MULTILINE))

    assert {len(row) - len(header) for header, *rows in TABLES for row in rows} == {0}
    for feature, _, *others in ROWS:
        for cell in others:
            assert cell in {"-", "?"} or cell[-3:] in sources, f"{feature}: {cell}"
