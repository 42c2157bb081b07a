"""CSV tables are read as text by spreadsheets, whatever users have named their jobs."""

import csv
import io

import pytest

from gpuenergyd.report.csv_table import csv_text


@pytest.mark.fault(59)
@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("+cmd", "'+cmd"),
        ("-2+3", "'-2+3"),
        ("@sum(a1)", "'@sum(a1)"),
        ("\t=1+1", "\\t=1+1"),
        ("two\nlines", "two\\nlines"),
        ("gpt, large", "gpt, large"),
    ],
)
def test_a_name_is_never_a_formula_and_has_one_line(name: str, cell: str) -> None:
    (row,) = csv.DictReader(io.StringIO(csv_text([{"job_name": name, "saving_ratio": -0.125, "ended_at": None}])))

    assert row == {"job_name": cell, "saving_ratio": "-0.125", "ended_at": ""}
