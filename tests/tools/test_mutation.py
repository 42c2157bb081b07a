"""Mutants are drawn fairly, asked in a copy of the tree, and judged by the tests that can notice them."""

import ast
from pathlib import Path

import pytest

from benchmarks.report.running import ROOT
from tools.quality.mutation.choice import excluded_spans, kind_of, statement_lines
from tools.quality.mutation.equivalent import EQUIVALENT, reason_for
from tools.quality.mutation.sample import Mutant, interval, shuffled_places
from tools.quality.mutation.workbench import Verdict, Watched, Workbench

CODE = """\
from __future__ import annotations

LIMIT = 3


def chosen(
    values: list[int | None], limit: int = 2
) -> int | None:
    assert limit > 0
    if (
        len(values)
        > limit
    ):
        raise ValueError(f"{len(values) - 1} are too many")
    return max(
        1 + value for value in values if value
    )
"""


def a_mutant(line: int, operator: str = "ReplaceComparisonOperator_Lt_LtE", **given: object) -> Mutant:
    fields = {
        "path": "a.py", "kind": "comparison", "operator": operator, "occurrence": 0, "start": (line, 4),
        "end": (line, 5), "first_line": line, "last_line": line, **given,
    }  # fmt: skip
    return Mutant(**fields)  # type: ignore[arg-type]  # as many types as fields


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("ReplaceBinaryOperator_Add_Sub", "arithmetic"),
        ("ReplaceBinaryOperator_Add_LShift", None),
        ("ReplaceBinaryOperator_BitOr_BitAnd", "arithmetic"),
        ("ReplaceComparisonOperator_Lt_LtE", "comparison"),
        ("ReplaceComparisonOperator_Lt_Is", None),
        ("ReplaceComparisonOperator_Is_IsNot", "comparison"),
        ("ReplaceUnaryOperator_USub_UAdd", "sign"),
        ("ReplaceUnaryOperator_USub_Invert", None),
        ("NumberReplacer", "number"),
        ("RemoveDecorator", None),
    ],
)
def test_only_relevant_mutation_operators_are_used(operator: str, kind: str | None) -> None:
    assert kind_of(operator) == kind


def test_annotations_assertions_and_messages_are_excluded() -> None:
    lines = CODE.splitlines()

    alone = {lines[a - 1][b:d] if a == c else lines[a - 1][b:] for a, b, c, d in excluded_spans(ast.parse(CODE))}

    message = 'raise ValueError(f"{len(values) - 1} are too many")'
    assert alone == {"list[int | None]", "int", "int | None", "assert limit > 0", message}


def test_a_statement_is_met_by_any_of_its_own_lines_and_an_import_by_the_whole_file() -> None:
    tree = ast.parse(CODE)

    assert statement_lines(tree, 3) == (0, 0)
    assert statement_lines(tree, 7) == (0, 0)
    assert statement_lines(tree, 12) == (10, 13)
    assert statement_lines(tree, 16) == (15, 17)


def test_one_seed_gives_one_order_and_each_place_one_mutant() -> None:
    mutants = [a_mutant(line, f"ReplaceComparisonOperator_Lt_{new}") for line in range(1, 30) for new in ("LtE", "Gt")]

    first, again = (list(shuffled_places(order, 7)) for order in (mutants, mutants[::-1]))
    other = list(shuffled_places(mutants, 8))

    assert first == again
    assert [m.start for m in first] != [m.start for m in other]
    assert sorted(m.start[0] for m in first) == list(range(1, 30))
    assert {m.operator.rpartition("_")[2] for m in first} == {"LtE", "Gt"}


def test_the_interval_is_wilsons() -> None:
    """The example of Newcombe (Statistics in Medicine 17, 1998), table I: 81 of 263, 15 of 148."""
    assert interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert interval(0, 0) == (0.0, 1.0)


def test_the_tests_that_meet_the_line_are_asked_quickest_first_then_the_others_of_their_files() -> None:
    seconds = {"t.py::slow": 3.0, "t.py::quick": 1.0, "t.py::beside": 2.0, "u.py::elsewhere": 0.1}
    watched = Watched({"a.py": {5: {"t.py::slow", "t.py::quick"}, 9: {"u.py::elsewhere"}}}, seconds)

    assert watched.tests_for(a_mutant(5), 60.0) == ["t.py::quick", "t.py::slow", "t.py::beside"]
    assert watched.tests_for(a_mutant(5), 3.5) == ["t.py::quick"]
    assert watched.tests_for(a_mutant(6), 60.0) == []
    assert watched.tests_for(a_mutant(3, first_line=0, last_line=0), 60.0)[:2] == ["u.py::elsewhere", "t.py::quick"]
    assert watched.tests_for(a_mutant(5, path="b.py"), 60.0) == []
    assert watched.tests_for(a_mutant(3, path="b.py", first_line=0), 60.0)[0] == "u.py::elsewhere"


def test_each_equivalent_mutant_changes_a_line_of_the_code() -> None:
    for known in EQUIVALENT:
        text = " ".join((ROOT / known.path).read_text(encoding="utf-8").split())

        assert " ".join(known.before.split()) in text, known
        assert known.before != known.after
        assert len(known.reason.split()) >= 5
        assert reason_for(known.path, known.before, known.after) == known.reason
    assert reason_for("gpuenergyd/core/job/measurements/savings.py", "a", "b") is None


@pytest.mark.thorough
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git says which files are the tree's")
def test_mutants_are_asked_in_a_copy_and_one_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Workbench(tmp_path)
    source = ROOT / "gpuenergyd" / "core" / "job" / "measurements" / "savings.py"
    text = source.read_text(encoding="utf-8")
    mutant = a_mutant(1, path="gpuenergyd/core/job/measurements/savings.py")
    tests = {"tests/core/job/measurements/test_brackets.py": 10.0}
    changed = text.replace("CONFIDENCE / 2", "CONFIDENCE * 2")

    same = bench.test(mutant, text, tests)
    detected, by = bench.test(mutant, changed, tests)
    again = bench.test(mutant, text, tests)
    monkeypatch.setattr("tools.quality.mutation.workbench.START_S", 1.0)
    hung = bench.test(mutant, text + "\nwhile True:\n    pass\n", dict.fromkeys(tests, 0.0))
    monkeypatch.setattr("tools.quality.mutation.workbench.START_S", 300.0)
    monkeypatch.setattr("tools.quality.mutation.workbench.SPIN_S", 0.5)
    spun = bench.test(mutant, text.replace("CONFIDENCE / 2", "next(n for n in iter(int, 1) if n)"), {by: 0.0})

    assert changed != text
    assert same == again == (Verdict.SURVIVED, "")
    assert detected is Verdict.DETECTED
    assert by.startswith("tests/core/job/measurements/test_brackets.py::test_")
    assert hung == spun == (Verdict.HUNG, "")
    assert (tmp_path / "tree" / source.relative_to(ROOT)).read_text(encoding="utf-8") == text
    assert source.read_text(encoding="utf-8") == text


def test_protocol_bodies_are_excluded_and_class_bodies_are_not() -> None:
    source = "class {name}:\n    def ask(self, hours: int = 24) -> None: ...\n"

    assert (1, 0, 2, 47) in excluded_spans(ast.parse(source.format(name="A(Protocol)")))
    assert not [span for span in excluded_spans(ast.parse(source.format(name="A(Base)"))) if span[0] < span[2]]
