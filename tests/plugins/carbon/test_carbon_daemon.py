"""Carbon in a daemon with real processes: fetching, storing, targets, reports, and a killed fetcher."""

import json
import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpuenergyd.core.carbon.intensity import HOUR
from gpuenergyd.store import open_history
from tests.plugins.carbon.sources.scripted_server import Asked, Reply, json_reply, serving
from tests.support.daemon_process import running_daemon, training
from tests.support.waiting import LIMIT_S, wait_until

ZONE = "GB"


def half_hours(_asked: Asked) -> Reply:
    """Return a reply as NESO documents it: two days of half-hours, future ones with a forecast only."""
    now_at = datetime.now(tz=UTC)
    slot_at = now_at.replace(minute=now_at.minute // 30 * 30, second=0, microsecond=0)
    rows = []
    for k in range(-48, 48):
        at = slot_at + k * timedelta(minutes=30)
        actual = 150 + k % 4 if k < 0 else None
        rows.append(
            {
                "from": f"{at:%Y-%m-%dT%H:%MZ}",
                "to": f"{at + timedelta(minutes=30):%Y-%m-%dT%H:%MZ}",
                "intensity": {"forecast": 180 + k % 4, "actual": actual, "index": "moderate"},
            }
        )
    return json_reply({"data": rows})


@pytest.mark.thorough
def test_the_fetcher_process_is_restarted_when_it_dies(tmp_path: Path) -> None:
    with (
        serving(half_hours) as server,
        running_daemon(tmp_path, carbon_zone=ZONE, carbon_base_url=server.url) as daemon,
    ):
        wait_until(lambda: daemon.status()["carbon"]["basis"] == "live")
        grid = daemon.status()["carbon"]
        environment = Path(f"/proc/{grid['fetcher']['pid']}/environ").read_bytes()
        privileges = Path(f"/proc/{grid['fetcher']['pid']}/status").read_text()
        os.kill(grid["fetcher"]["pid"], signal.SIGKILL)
        wait_until(lambda: daemon.status()["carbon"]["fetcher"]["num_restarts"] == 1)
        wait_until(lambda: daemon.status()["carbon"]["fetcher"]["pid"] is not None)
        assert daemon.status()["carbon"]["basis"] == "live"
        assert daemon.stop() == 0

    assert (grid["zone"], grid["source"], grid["unit"]) == (ZONE, "neso", "g/kWh")
    assert 150 <= grid["value"] <= 190
    assert grid["forecast_model"] == "neso (provider)"
    assert b"GPUENERGYD" not in environment
    assert "NoNewPrivs:\t1" in privileges
    with open_history(daemon.database_path) as history:
        stored = history.intensities(zone=ZONE)
    assert len(stored) >= 40
    assert {row.signal.source for row in stored} == {"neso"}


def test_a_zone_without_a_source_is_named_once_with_what_is_valid(tmp_path: Path) -> None:
    with running_daemon(tmp_path, carbon_zone="XX") as daemon:
        wait_until(lambda: daemon.status()["is_degraded"])
        reasons = daemon.status()["degraded_reasons"]
        fetcher = daemon.status()["carbon"]["fetcher"]
        log = daemon.log

    (reason,) = reasons
    assert reason.startswith("carbon: zone 'XX' requires a source: only GB has one without a key; installed: ")
    assert "electricity-maps" in reason
    assert fetcher["num_restarts"] == 0
    assert fetcher["message"] == reason.removeprefix("carbon: ")
    assert log.count("zone 'XX' requires a source") == 1


def test_without_a_zone_no_fetcher_runs(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        status = daemon.status()

    assert status["carbon"] is None


def test_a_refusing_provider_is_reported_in_status_and_training_continues(tmp_path: Path) -> None:
    with (
        serving(lambda _asked: Reply(b"<html>busy</html>", 403)) as server,
        running_daemon(tmp_path, carbon_zone=ZONE, carbon_base_url=server.url, target="carbon") as daemon,
        training(daemon),
    ):
        wait_until(lambda: daemon.status()["carbon"]["fetcher"]["num_failures"] > 0)
        job = daemon.wait_for_phase("baseline", "trial", "tuned")
        status = daemon.status()

    assert status["is_degraded"]
    assert any("carbon" in reason for reason in status["degraded_reasons"])
    assert status["carbon"]["basis"] == "neutral"
    assert job["num_iterations"] > 0


@pytest.mark.thorough
def test_a_slowdown_account_survives_a_killed_daemon(tmp_path: Path) -> None:
    first_at = datetime(2024, 1, 1, tzinfo=UTC)
    path = tmp_path / "XX_synthetic_2024.csv"
    rows = [f"{first_at + k * HOUR:%Y-%m-%dT%H:%M:%SZ},{600 if k % 2 else 60}" for k in range(60 * 24)]
    path.write_text("timestamp_utc,carbon_intensity_g_per_kwh\n" + "\n".join(rows) + "\n")
    accounts = tmp_path / "state" / "carbon-accounts.json"
    with (
        running_daemon(
            tmp_path,
            target="carbon",
            carbon_signal=str(path),
            carbon_replay_from="2024-01-10T00:00:00Z",
            carbon_replay_hour_s=3.0,
        ) as daemon,
        training(daemon, arguments=("--policy", "uniform")),
    ):
        wait_until(lambda: _saved_account(accounts).get("num_iterations", 0) >= 10)
        earlier_id = daemon.job()["job_id"]  # type: ignore[index]  # it runs
        assert daemon.process is not None
        daemon.process.kill()
        daemon.process.wait(LIMIT_S)
        before = _saved_account(accounts)
        daemon.start()
        wait_until(lambda: (job := daemon.job()) is not None and job["target"]["is_taken_over"])
        wait_until(lambda: _saved_account(accounts).get("num_iterations", 0) > before["num_iterations"])
        after = _saved_account(accounts)
        job = daemon.job()

    assert job is not None
    assert job["job_id"] != earlier_id
    assert after["full_speed_s"] > before["full_speed_s"]


def _saved_account(accounts: Path) -> dict[str, float]:
    """Return the account of the only saved job, empty while there is none."""
    if not accounts.exists():
        return {}
    jobs = json.loads(accounts.read_text())["jobs"]
    return jobs[0]["account"]["account"] if jobs else {}
