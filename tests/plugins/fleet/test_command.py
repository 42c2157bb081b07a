"""`gpuenergyd fleet` on a database of its own: the budget, hosts, events, and reports as text, CSV and JSON."""

import csv
import io
import json
import time
from pathlib import Path

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd_fleet.decisions.coordination import decide
from gpuenergyd_fleet.decisions.grid_event import GridEvent, LoadUnit
from gpuenergyd_fleet.store.store import FleetStore, HostReport


@pytest.fixture
def database(tmp_path: Path) -> str:
    return str(tmp_path / "history.sqlite3")


def _fleet(database: str, *options: str) -> int:
    return run(["fleet", *options, "--database", database])


def test_budget_hosts_and_events_are_shown(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _fleet(database, "show") == 0
    assert "no fleet budget" in capsys.readouterr().out
    assert _fleet(database, "set", "5000", "--reason", "contract") == 0
    now_s = time.time()
    store = FleetStore(database)
    store.report("gpu-1", HostReport(1000.0, 700.0, 6.0, ((400.0, 4.0), (800.0, 7.0))))
    store.cycle(decide, least_period_s=0.5)
    store.put_event(GridEvent("event-17", now_s + 600, now_s + 1200, 70.0, LoadUnit.PERCENT, reason="peak"))
    store.close()
    assert _fleet(database, "show") == 0
    shown = capsys.readouterr().out
    assert "fleet budget: 5000 W (contract); 1 host may draw" in shown
    assert "gpu-1: measured 700 W, lease 5000 W for" in shown
    assert "share 1000 W" in shown
    assert "70 percent" in shown
    assert _fleet(database, "show", "--json") == 0
    shown_json = json.loads(capsys.readouterr().out)
    assert shown_json["hosts"][0]["in_contact"]
    assert _fleet(database, "events", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["event_id"] == "event-17"
    assert _fleet(database, "remove", "gpu-1") == 0
    assert _fleet(database, "remove", "gpu-1") == 2
    assert "no host 'gpu-1' in the fleet" in capsys.readouterr().err


def test_a_report_is_text_csv_and_json_with_empty_fields_for_what_is_missing(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _fleet(database, "set", "5000") == 0
    now_s = time.time()
    store = FleetStore(database)
    store.put_event(GridEvent("event-17", now_s - 10, now_s + 1200, 70.0, LoadUnit.PERCENT))
    store.close()
    assert _fleet(database, "report", "event-17") == 0
    assert "delivered: unknown" in capsys.readouterr().out
    assert _fleet(database, "report", "event-17", "--csv") == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (row["event_id"], row["delivered_reduction_w"], row["limit_w"]) == ("event-17", "", "3500.0")
    assert _fleet(database, "report", "event-17", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == list(row)
    assert report["delivered_reduction_w"] is None
    assert _fleet(database, "report", "other") == 2
    assert "no grid event 'other'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (("set", "-5"), "No such option"),
        (("set", "0"), "WATTS 0: valid are values above 0"),
        (("set", "nan"), "WATTS nan: valid are"),
        (("set", "5", "--reason", "x" * 201), "at most 200 characters"),
        (("listen", "--key-file", "/nowhere/key"), "key file /nowhere/key"),
    ],
)
def test_wrong_values_are_reported_in_one_line(
    database: str, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], wrong: str
) -> None:
    assert _fleet(database, *options) != 0
    assert wrong in capsys.readouterr().err


def test_a_short_key_is_refused(database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key"
    key.write_text("short")
    key.chmod(0o600)
    assert _fleet(database, "listen", "--key-file", str(key), "--port", "0") == 2
    assert "at least 32 are needed" in capsys.readouterr().err
