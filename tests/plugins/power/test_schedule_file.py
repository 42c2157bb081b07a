"""Schedules of power budgets: every invalid line is named, and a broken file does not replace a valid one."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuenergyd.errors import UsageError
from gpuenergyd_power.schedule_file import MAX_ENTRIES, ScheduleFile, read_schedule

HEADER = "start,end,power_budget_w,reason\n"
GOOD = "2026-11-23T18:00:00Z,2026-11-23T20:00:00+01:00,1800,evening peak\n"


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_times_have_zones_and_entries_may_overlap_or_be_over(tmp_path: Path) -> None:
    text = HEADER + GOOD.replace("20:00", "21:00") + "2020-01-01T00:00Z,2030-01-01T00:00Z,900,\n\n"
    first, second = read_schedule(_write(tmp_path / "power.csv", text))
    assert first.start_at == datetime(2026, 11, 23, 18, tzinfo=UTC)
    assert first.end_at == datetime(2026, 11, 23, 20, tzinfo=UTC)
    assert (first.budget_w, first.reason) == (1800.0, "evening peak")
    assert second.budget_w == 900.0


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ("2026-11-23T18:00:00Z,2026-11-23T17:00:00Z,1800,", "must be after the start"),
        ("2026-11-23T18:00:00Z,2026-11-23T18:00:00Z,1800,", "must be after the start"),
        ("2026-11-23T18:00:00,2026-11-23T19:00:00Z,1800,", "time with its zone"),
        ("yesterday,2026-11-23T19:00:00Z,1800,", "'yesterday'"),
        ("2026-11-23T18:00:00Z,2026-11-23T19:00:00Z,-5,", "-5 W: valid are finite values above 0"),
        ("2026-11-23T18:00:00Z,2026-11-23T19:00:00Z,nan,", "nan W"),
        ("2026-11-23T18:00:00Z,2026-11-23T19:00:00Z,inf,", "inf W"),
        ("2026-11-23T18:00:00Z,2026-11-23T19:00:00Z,many,", "'many' must be a number of watts"),
        ("2026-11-23T18:00:00Z,2026-11-23T19:00:00Z", "2 values"),
        ("2026-11-23T18:00:00Z,2026-11-23T19:00:00Z,1800,a\tb", "one printable line"),
        ("2026-11-23T18:00:00Z,2026-11-23T19:00:00Z,1800," + "x" * 300, "at most 200 characters"),
        ("9999-12-31T23:59:59-23:00,9999-12-31T23:59:59-22:00,1800,", "time with its zone"),
    ],
)
def test_an_invalid_line_is_named(tmp_path: Path, row: str, wrong: str) -> None:
    with pytest.raises(UsageError, match=r"power\.csv: line 3: ") as refused:
        read_schedule(_write(tmp_path / "power.csv", HEADER + GOOD.replace("20:00:00+01", "20:00:00+00") + row + "\n"))
    assert wrong in str(refused.value)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "valid: start,end,power_budget_w,reason"),
        ("begin,end,watts\n", "columns 'begin,end,watts'"),
        (HEADER + GOOD.replace("20:00:00+01", "20:00:00+00") * (MAX_ENTRIES + 1), f"at most {MAX_ENTRIES}"),
        (HEADER + "#" * 2**21, "larger than"),
    ],
    ids=["empty", "columns", "entries", "size"],
)
def test_a_file_that_is_no_schedule_is_refused(tmp_path: Path, text: str, wrong: str) -> None:
    with pytest.raises(UsageError, match=r"power\.csv: ") as refused:
        read_schedule(_write(tmp_path / "power.csv", text))
    assert wrong in str(refused.value)


def _trouble(schedule: ScheduleFile) -> str:
    """Return why the file does not count; empty if it does."""
    schedule.entries()
    return schedule.trouble or ""


def test_a_broken_file_leaves_the_last_valid_schedule_in_force(tmp_path: Path) -> None:
    path = _write(tmp_path / "power.csv", HEADER + GOOD.replace("20:00:00+01", "20:00:00+00"))
    schedule = ScheduleFile(path)
    assert len(schedule.entries()) == 1
    assert _trouble(schedule) == ""
    _write(path, HEADER + "rubbish\n")
    assert len(schedule.entries()) == 1
    assert "the last valid schedule counts" in _trouble(schedule)
    path.unlink()
    assert len(schedule.entries()) == 1
    _write(path, HEADER)
    assert schedule.entries() == ()
    assert _trouble(schedule) == ""
    assert ScheduleFile(None).entries() == ()
