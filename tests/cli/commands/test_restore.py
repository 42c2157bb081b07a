"""`gpuenergyd restore` restores journaled GPUs without a daemon and reports the GPUs that it could not restore."""

import json
from pathlib import Path

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd.gpu.restore.journal import Control, Journal, JournalEntry, KnownBy
from gpuenergyd_sim.driver.host import SimulatedHost


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """Return a host of two simulated GPUs, both left slowed down."""
    path = tmp_path / "world"
    host = SimulatedHost.create(path, ["a100-sxm", "a100-sxm"])
    for gpu in host.identities():
        host.lock_sm_clock(gpu.gpu_uuid, 900)
    host.close()
    return path


@pytest.fixture
def journal(tmp_path: Path, world: Path) -> Path:
    """Return the journal that a crashed worker left: the first GPU was locked by it, the second by someone else."""
    path = tmp_path / "journal.json"
    entry = JournalEntry(
        gpu_uuid=uuids(world)[0], control=Control.SM_CLOCK_LOCK, saved_value=None, known_by=KnownBy.ASSUMED_DEFAULT,
        lease_id="lease", job_id="job-1", owner_pid=1, owner_uid=0, owner_start_ticks=None, driver="simulated",
        world_path=str(world), recorded_boottime_ns=0, intended_value=900.0,
    )  # fmt: skip
    Journal(path).add([entry])
    return path


def uuids(world: Path) -> list[str]:
    host = SimulatedHost.open(world)
    try:
        return [gpu.gpu_uuid for gpu in host.identities()]
    finally:
        host.close()


def locks(world: Path) -> list[int | None]:
    """Return the clock lock of each GPU."""
    host = SimulatedHost.open(world)
    try:
        return [host.locked_sm_clock_mhz(gpu.gpu_uuid) for gpu in host.identities()]
    finally:
        host.close()


def test_journaled_gpus_are_restored_and_others_left_alone(
    world: Path, journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["restore", "--journal", str(journal), "--json"]) == 0

    body = json.loads(capsys.readouterr().out)
    assert locks(world) == [None, 900]
    assert body["is_complete"] is True
    assert [(o["gpu_uuid"], o["result"]) for o in body["outcomes"]] == [(uuids(world)[0], "restored")]


def test_a_second_restore_finds_nothing(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["restore", "--journal", str(journal)])
    capsys.readouterr()

    assert run(["restore", "--journal", str(journal)]) == 0
    assert capsys.readouterr().out == f"nothing to restore in {journal}\n"


def test_a_dry_run_lists_changes_and_makes_none(world: Path, journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["restore", "--journal", str(journal), "--dry-run"]) == 0

    assert locks(world) == [900, 900]
    assert "would restore: remove the clock lock; changed by job job-1 (pid 1)" in capsys.readouterr().out


def test_a_gpu_that_cannot_be_restored_stays_journaled_and_exits_with_4(
    world: Path, journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.unlink()

    assert run(["restore", "--journal", str(journal), "--json"]) == 4

    assert json.loads(capsys.readouterr().out)["is_complete"] is False
    assert len(Journal(journal).read().entries) == 1


def test_all_resets_every_gpu_without_a_journal(world: Path) -> None:
    assert run(["restore", "--all", "--driver", "simulated", "--world", str(world)]) == 0
    assert locks(world) == [None, None]


@pytest.mark.parametrize("arguments", [["--driver", "abacus"], ["--driver", "simulated"]])
def test_an_unknown_driver_or_no_world_is_a_usage_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["restore", "--all", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
