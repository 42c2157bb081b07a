"""Two replicas under a real daemon are two jobs and one training; a second run with the same key is another one."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.cli.main import run
from tests.support.daemon_process import DaemonProcess, running_daemon, training
from tests.support.waiting import wait_until

TWO_REPLICAS = ("--replicas", "2", "--ranks", "2", "--job", "gpt")
NUM_ITERATIONS = 20
KINDS = ("energy_j", "estimated_j")


def has_run(daemon: DaemonProcess) -> bool:
    """Return whether both replicas have run for a while."""
    jobs = daemon.status()["jobs"]
    return len(jobs) == 2 and all(job["num_iterations"] >= NUM_ITERATIONS for job in jobs)


def known_sum(rows: list[dict[str, Any]], *names: str) -> float | None:
    known = [row[name] for row in rows for name in names if row[name] is not None]
    return sum(known) if known else None


def groups(database: Path, by: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run(["report", "--group-by", by, "--json", "--database", str(database)]) == 0
    out, err = capsys.readouterr()
    assert err == "", "the processes did not tell how many there are"
    rows: list[dict[str, Any]] = json.loads(out)["groups"]
    return rows


def test_the_replicas_of_a_run_are_one_training_and_the_next_run_is_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_daemon(tmp_path / "daemon") as daemon:
        for _ in range(2):
            with training(daemon, arguments=TWO_REPLICAS) as run_of_both:
                wait_until(lambda: has_run(daemon))
                assert run_of_both.finish() == 0
            wait_until(lambda: not daemon.status()["jobs"])
        assert daemon.stop() == 0

    first, second, idle = groups(daemon.database_path, "training", capsys)
    by_gpu = groups(daemon.database_path, "gpu", capsys)

    assert idle["group"] == "(idle)"
    for row in (first, second):
        assert (row["job_name"], row["run_key"], row["world_size"]) == ("gpt", "run-1", None)
        counts = ("num_jobs", "num_hosts", "num_replicas", "num_stages", "num_gpus", "num_ranks")
        assert [row[name] for name in counts] == [2, 1, 2, 2, 4, 4]
        assert row["ended_at"] > row["started_at"]
        for name in ("by_replica", "by_stage", "by_host", "by_gpu"):
            assert [known_sum(row[name], kind) for kind in KINDS] == [row[kind] for kind in KINDS]
        assert known_sum([row], "energy_j", "estimated_j"), "on a busy machine some of it is estimated"
    assert second["started_at"] >= first["ended_at"]
    of_jobs_j = known_sum(by_gpu, "job_energy_j") or 0.0
    assert (known_sum([first, second], "energy_j") or 0.0) == pytest.approx(of_jobs_j, abs=0.01)
