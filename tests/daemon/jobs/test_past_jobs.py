"""Past jobs in the history: of one user only, of one GPU model, bounded, forgettable, and never from damaged rows."""

import asyncio
import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.daemon.jobs.past_jobs import NUM_SLOTS, PastJobStore, past_job_record
from gpuenergyd.errors import UsageError
from gpuenergyd.store import open_history
from gpuenergyd.store.records import PastJobRecord
from gpuenergyd.wire.operator_messages import MAX_IMPORTED
from tests.support.daemon_process import DaemonProcess, running_daemon, training
from tests.support.job_stage import FakeHistory
from tests.support.past_jobs import changed, past_job, sure
from tests.support.stored_history import write_records
from tests.support.waiting import wait_until

ALICE, BOB = 1000, 10001
"""One uid begins like the other."""
TWO_REPLICAS = ("--replicas", "2", "--ranks", "2", "--job", "gpt")
NUM_ITERATIONS = 20
KINDS = ("energy_j", "estimated_j")


def stored(tmp_path: Path, *records: PastJobRecord) -> PastJobStore:
    return PastJobStore(write_records(tmp_path / "history.sqlite3", *records), FakeHistory())


def names(jobs: tuple[PastJob, ...]) -> list[str]:
    return sorted(job.job_name for job in jobs)


THREE = tuple(
    past_job_record(past_job(name), uid) for name, uid in (("own", ALICE), ("of-bob", BOB), ("imported", None))
)


def test_a_job_gets_past_jobs_of_its_user_and_its_gpu_model_and_imported_ones(tmp_path: Path) -> None:
    store = stored(tmp_path, past_job_record(past_job("own-on-v100", gpu_model_name="V100"), ALICE), *THREE)

    found = asyncio.run(store.recall(ALICE, "A100"))

    assert names(found) == ["imported", "own"]
    assert [job.job_name for job in found if job.is_imported] == ["imported"]
    assert names(asyncio.run(store.recall(100, "A100"))) == ["imported"]
    assert asyncio.run(store.recall(ALICE, "H100")) == ()


def test_a_user_is_shown_own_and_imported_past_jobs_only(tmp_path: Path) -> None:
    store = stored(tmp_path, *THREE)

    assert {(own.uid, own.job.job_name) for own in asyncio.run(store.of_user(ALICE))} == {
        (ALICE, "own"),
        (None, "imported"),
    }
    assert len(asyncio.run(store.of_all_users())) == 3


def test_a_user_cannot_claim_that_a_past_job_was_imported(tmp_path: Path) -> None:
    lie = past_job("own")
    store = stored(tmp_path, past_job_record(PastJob(lie.job_id, "own", lie.learned_at, lie.learned, True), ALICE))

    assert [job.is_imported for job in asyncio.run(store.recall(ALICE, "A100"))] == [False]
    assert asyncio.run(store.recall(BOB, "A100")) == ()


def test_gpus_are_kept_for_own_past_jobs_and_removed_from_imported_ones(tmp_path: Path) -> None:
    job = replace(past_job("own"), gpu_uuids=("GPU-1",))
    history = FakeHistory()
    PastJobStore(tmp_path / "history.sqlite3", history).import_for_all([replace(job, job_name="imported")])
    imported = [own for own in history.records if isinstance(own, PastJobRecord)]
    store = stored(tmp_path, past_job_record(job, ALICE), *imported)

    found = {own.job_name: own for own in asyncio.run(store.recall(ALICE, "A100"))}

    assert found["own"].was_measured_on_one_of({"GPU-1", "GPU-2"})
    assert not found["own"].was_measured_on_one_of({"GPU-2"})
    assert found["imported"].gpu_uuids == ()
    assert not found["imported"].was_measured_on_one_of({"GPU-1"})


def test_a_job_of_the_same_name_and_stages_replaces_the_one_before(tmp_path: Path) -> None:
    newer = changed(past_job("gpt"), sure)
    store = stored(tmp_path, past_job_record(past_job("gpt"), ALICE), past_job_record(newer, ALICE))

    assert asyncio.run(store.recall(ALICE, "A100")) == (newer,)


def test_past_jobs_of_a_user_on_a_gpu_model_are_bounded() -> None:
    keys = {past_job_record(past_job(f"job-{k}"), ALICE).signature for k in range(5000)}

    assert len(keys) == NUM_SLOTS
    assert all(len(key) <= 64 for key in keys)


def test_forgetting_deletes_own_past_jobs_and_with_all_users_everything(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    store = stored(tmp_path, *THREE)
    written = store.history
    assert isinstance(written, FakeHistory)

    assert asyncio.run(store.forget(ALICE)) == 1
    write_records(path, *written.records)
    assert {own.job.job_name for own in asyncio.run(store.of_all_users())} == {"of-bob", "imported"}
    with open_history(path) as history:
        assert all(b"own" not in record.model for record in history.past_jobs("past:"))
    assert asyncio.run(store.forget(None)) == 2
    write_records(path, *written.records)
    assert asyncio.run(store.of_all_users()) == ()


@pytest.mark.parametrize(
    "blob", [b"no zlib", zlib.compress(b"{}"), zlib.compress(b"[1, 2"), zlib.compress(b" " * 10**6)]
)
def test_a_damaged_row_is_left_out(tmp_path: Path, blob: bytes) -> None:
    good = past_job_record(past_job("good"), ALICE)
    bad = PastJobRecord(good.signature.rpartition(":")[0] + ":999", "bad", good.learned_at, blob)

    assert names(asyncio.run(stored(tmp_path, good, bad).recall(ALICE, "A100"))) == ["good"]


def test_an_impossible_row_is_left_out(tmp_path: Path) -> None:
    bad = changed(past_job("bad"), lambda point, _: type(point)(point.sm_clock_mhz, 9.0, 0.0, 1.0, 0.0))

    assert asyncio.run(stored(tmp_path, past_job_record(bad, ALICE)).recall(ALICE, "A100")) == ()


def test_without_a_history_there_are_no_past_jobs(tmp_path: Path) -> None:
    assert asyncio.run(PastJobStore(tmp_path / "none.sqlite3", FakeHistory()).recall(ALICE, "A100")) == ()


def test_imported_past_jobs_do_not_replace_each_other(tmp_path: Path) -> None:
    jobs = [past_job(f"job-{k}") for k in range(2 * NUM_SLOTS)]

    store = stored(tmp_path, *(past_job_record(job, None) for job in [*jobs, jobs[0]]))

    assert names(tuple(own.job for own in asyncio.run(store.of_user(ALICE)))) == names(tuple(jobs))


def test_an_import_is_all_or_nothing(tmp_path: Path) -> None:
    store = stored(tmp_path)
    written = store.history
    assert isinstance(written, FakeHistory)
    bad = changed(past_job("bad"), lambda point, _: type(point)(point.sm_clock_mhz, 9.0, 0.0, 1.0, 0.0))

    with pytest.raises(UsageError, match="past job 2: curve of F: time_ratio 9 at 1320 MHz"):
        store.import_for_all([past_job("good"), bad])
    with pytest.raises(UsageError, match=f"at most {MAX_IMPORTED}"):
        store.import_for_all([past_job(f"job-{k}") for k in range(MAX_IMPORTED + 1)])
    assert written.records == []
    assert store.import_for_all([past_job("good")]) == 1
    assert len(written.records) == 1


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
