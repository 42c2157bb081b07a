import os
from dataclasses import replace
from pathlib import Path

import pytest

from gpuenergyd.errors import GpuLostError, JournalError
from gpuenergyd.gpu.restore.command import reset_all, restore
from gpuenergyd.gpu.restore.executor import RestoreResult, restore_from_journal
from gpuenergyd.gpu.restore.journal import Control, Journal, JournalEntry, KnownBy
from gpuenergyd_sim.driver.host import SimulatedHost
from tests.gpu.restore.test_journal import entry


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.json")


def _entries(host: SimulatedHost, *, saved_value: float | None = None) -> list[JournalEntry]:
    return [replace(entry(i.gpu_uuid, saved_value=saved_value), world_path=str(host.path)) for i in host.identities()]


def _locks(host: SimulatedHost) -> list[int | None]:
    return [host.locked_sm_clock_mhz(i.gpu_uuid) for i in host.identities()]


def _lock_all(host: SimulatedHost, clock: int) -> None:
    for identity in host.identities():
        host.lock_sm_clock(identity.gpu_uuid, clock)


@pytest.mark.fault(15)
def test_configured_baseline_is_restored_instead_of_no_lock(host: SimulatedHost, journal: Journal) -> None:
    journal.add(_entries(host, saved_value=1380.0))
    _lock_all(host, 900)

    restore(journal.path)

    assert _locks(host) == [1380, 1380]


def test_missing_journal_or_folder_restores_nothing(tmp_path: Path) -> None:
    assert restore(tmp_path / "journal.json") == ()
    assert restore(tmp_path / "absent" / "journal.json") == ()


def test_failing_gpu_stays_journalled_and_the_others_are_restored(host: SimulatedHost, journal: Journal) -> None:
    one, other = (i.gpu_uuid for i in host.identities())

    class OneLost(SimulatedHost):
        def reset_sm_clock(self, gpu_uuid: str) -> None:
            if gpu_uuid == one:
                raise GpuLostError(f"{one} fell off the bus")
            super().reset_sm_clock(gpu_uuid)

    journal.add(_entries(host))
    _lock_all(host, 900)
    lost = OneLost(host.path, sleep=lambda _: None)

    outcomes = {o.gpu_uuid: o for o in restore_from_journal(journal, lost, driver="simulated")}
    lost.close()

    assert outcomes[one].result is RestoreResult.FAILED
    assert "fell off the bus" in outcomes[one].detail
    assert outcomes[other].result is RestoreResult.RESTORED
    assert {e.gpu_uuid for e in journal.read().entries} == {one}


def test_missing_world_file_is_reported_and_stays_journalled(host: SimulatedHost, journal: Journal) -> None:
    journal.add([replace(e, world_path="/nowhere/world") for e in _entries(host)])

    outcomes = restore(journal.path)

    assert [o.result for o in outcomes] == [RestoreResult.FAILED] * 2
    assert "/nowhere/world" in outcomes[0].detail
    assert len(journal.read().entries) == 2


@pytest.mark.fault(6)
def test_change_of_an_earlier_boot_is_dropped_and_not_undone(host: SimulatedHost, tmp_path: Path) -> None:
    Journal(tmp_path / "journal.json", boot_id=lambda: "before").add(_entries(host))
    _lock_all(host, 900)

    outcomes = restore(tmp_path / "journal.json")

    assert [o.result for o in outcomes] == [RestoreResult.FORGOTTEN] * 2
    assert _locks(host) == [900, 900]
    assert Journal(tmp_path / "journal.json").read().entries == ()


def test_what_one_gpu_drops_of_an_earlier_boot_does_not_make_the_rest_ours(host: SimulatedHost, tmp_path: Path) -> None:
    """GPUs are restored side by side, each from a journal that the others change meanwhile."""
    Journal(tmp_path / "journal.json", boot_id=lambda: "before").add(_entries(host))
    _lock_all(host, 900)
    journal = Journal(tmp_path / "journal.json")

    for identity in host.identities():
        (outcome,) = restore_from_journal(journal, host, gpu_uuids={identity.gpu_uuid})
        assert outcome.result is RestoreResult.FORGOTTEN

    assert _locks(host) == [900, 900]
    assert journal.read().entries == ()


def test_damaged_journal_is_moved_aside_and_the_error_names_the_remedy(host: SimulatedHost, tmp_path: Path) -> None:
    (tmp_path / "journal.json").write_text("{")
    (tmp_path / "journal.json").chmod(0o600)

    with pytest.raises(JournalError, match=r"is damaged.*moved it to .*corrupt-\d+.*restore --all"):
        restore(tmp_path / "journal.json")

    assert Journal(tmp_path / "journal.json").read().is_incomplete
    with pytest.raises(JournalError, match=r"lacks GPUs of a damaged one.*restore --all"):
        restore(tmp_path / "journal.json")
    _lock_all(host, 900)
    assert [o.result for o in reset_all("simulated", host.path)] == [RestoreResult.RESTORED] * 2
    assert _locks(host) == [None, None]


def test_dry_run_changes_nothing_and_names_the_owner(host: SimulatedHost, journal: Journal) -> None:
    journal.add(_entries(host))
    _lock_all(host, 900)

    outcomes = restore(journal.path, is_dry_run=True)

    assert [o.result for o in outcomes] == [RestoreResult.WOULD_RESTORE] * 2
    assert f"pid {os.getpid()}" in outcomes[0].detail
    assert _locks(host) == [900, 900]
    assert len(journal.read().entries) == 2


@pytest.mark.fault(14, 15)
@pytest.mark.parametrize(
    ("now_w", "result", "after_w"),
    [
        (300.0, RestoreResult.RESTORED, 480.0),  # still as we set it
        (480.0, RestoreResult.RESTORED, 480.0),  # restored already
        (350.0, RestoreResult.CHANGED_BY_OTHER, 350.0),  # of another program
    ],
)
def test_power_limit_is_restored_only_where_it_is_still_ours(
    host: SimulatedHost, journal: Journal, now_w: float, result: RestoreResult, after_w: float
) -> None:
    gpu = host.identities()[0].gpu_uuid
    ours = replace(
        _entries(host, saved_value=480.0)[0], control=Control.POWER_LIMIT, known_by=KnownBy.READ, intended_value=300.0
    )
    journal.add([ours])
    host.set_power_limit(gpu, now_w)

    (outcome,) = restore(journal.path)

    assert outcome.result is result
    assert host.power_limit_w(gpu) == after_w
    assert journal.read().entries == ()
