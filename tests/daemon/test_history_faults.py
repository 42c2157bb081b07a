"""Database faults do not affect GPUs: clocks are set and restored, and the changes are recorded later.

One daemon on a small disk of its own; each test causes a fault and ends when the daemon has recovered.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.errors import StoreError
from gpuenergyd.store import HistoryWriter, open_history
from tests.support.daemon_process import DaemonProcess, running_daemon
from tests.support.small_disk import fill, remount, small_disk
from tests.support.waiting import LIMIT_S, wait_until

GPU = "2"
DAMAGE = b"\xa5" * 4096


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with small_disk(tmp_path_factory.mktemp("history-faults") / "disk", "48m") as disk:
        yield disk


@pytest.fixture(scope="module")
def shared(disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("history-faults-daemon")
    with running_daemon(folder, state_dir=str(disk), history_reserve_bytes=4 * 2**20) as daemon:
        yield daemon


@pytest.fixture
def daemon(shared: DaemonProcess) -> Iterator[DaemonProcess]:
    yield shared
    change_a_clock(shared)
    wait_until(lambda: is_well(shared))


def change_a_clock(daemon: DaemonProcess) -> str:
    """Lock a clock and release it as an administrator; return the lease id."""
    client = daemon.client()
    try:
        granted = client.post("/v1/leases", {"gpu": GPU, "sm_clock_mhz": 900})
        assert daemon.locks_mhz()[int(GPU)] == 900
        client.post("/v1/leases/release", {"gpu": GPU})
        assert daemon.is_as_found()
    finally:
        client.close()
    lease_id: str = granted["lease_id"]
    return lease_id


def history_troubles(daemon: DaemonProcess) -> list[str]:
    status: dict[str, Any] = daemon.status()
    assert status["is_degraded"] == bool(status["degraded_reasons"])
    return [reason for reason in status["degraded_reasons"] if reason.startswith("history: ")]


def is_well(daemon: DaemonProcess) -> bool:
    return not history_troubles(daemon)


def wait_for_trouble(daemon: DaemonProcess, *words: str, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Wait until the status is degraded with one of these words, while changes keep producing records."""

    def has_it() -> bool:
        meanwhile()
        change_a_clock(daemon)
        return any(word in reason for reason in history_troubles(daemon) for word in words)

    wait_until(has_it)


def leases_on_record(path: Path) -> list[str]:
    """Return the leases whose restore is in the database."""
    try:
        with open_history(path) as history:
            return [e.reason.removeprefix("lease ") for e in history.control_events() if e.action == "restore"]
    except StoreError:
        return []  # not created yet


def is_on_record(path: Path, lease_ids: list[str]) -> Callable[[], bool]:
    return lambda: set(lease_ids) <= set(leases_on_record(path))


@pytest.mark.fault(18)
def test_on_a_full_disk_clocks_are_set_restored_and_recorded(daemon: DaemonProcess, disk: Path) -> None:
    change_a_clock(daemon)
    wait_until((disk / "history.sqlite3.reserve").exists)
    ballast = fill(disk)
    try:
        wait_for_trouble(daemon, "disk full")
        during = [change_a_clock(daemon) for _ in range(3)]
        wait_until(is_on_record(disk / "history.sqlite3", during))
        still_full = history_troubles(daemon)
    finally:
        ballast.unlink()

    assert still_full


@pytest.mark.fault(19)
def test_while_the_database_is_locked_clocks_are_set_restored_and_recorded_later(
    daemon: DaemonProcess, disk: Path
) -> None:
    backup = sqlite3.connect(disk / "history.sqlite3", isolation_level=None, timeout=LIMIT_S)
    backup.execute("BEGIN EXCLUSIVE")
    try:
        wait_for_trouble(daemon, "locked")
        during = [change_a_clock(daemon) for _ in range(3)]
    finally:
        backup.execute("ROLLBACK")
        backup.close()

    wait_until(is_on_record(disk / "history.sqlite3", during))


@pytest.mark.fault(18)
def test_on_a_read_only_disk_clocks_are_set_restored_and_recorded_later(daemon: DaemonProcess, disk: Path) -> None:
    remount(disk, "ro")
    try:
        wait_for_trouble(daemon, "readonly", "read-only", "unable to open")
        during = [change_a_clock(daemon) for _ in range(3)]
    finally:
        remount(disk, "rw")

    wait_until(is_on_record(disk / "history.sqlite3", during))


@pytest.mark.fault(20)
def test_a_corrupt_database_is_moved_aside_and_clocks_are_set_and_restored(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        before = change_a_clock(daemon)
        wait_until(is_on_record(daemon.database_path, [before]))
        with daemon.database_path.open("r+b") as file:

            def damage() -> None:
                # Repeatedly and completely, since a checkpoint of the write-ahead log would repair the file.
                file.seek(0)
                file.write(DAMAGE * (os.fstat(file.fileno()).st_size // len(DAMAGE)))
                file.flush()

            wait_for_trouble(daemon, ".recover", meanwhile=damage)
        during = [change_a_clock(daemon) for _ in range(3)]

        wait_until(is_on_record(daemon.database_path, during))
        reported = history_troubles(daemon)
        assert daemon.stop() == 0

    kept = sorted(daemon.database_path.parent.glob("history.sqlite3.corrupt-*"))
    assert f"`sqlite3 {kept[0]} .recover` shows what can be recovered" in reported[0]
    assert DAMAGE in kept[0].read_bytes()


@pytest.mark.fault(20)
def test_a_database_of_a_newer_version_is_not_modified_and_clocks_are_set_and_restored(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history.sqlite3"
    writer = HistoryWriter(path)
    writer.start()
    writer.close(30)
    newer = sqlite3.connect(path)
    newer.execute("UPDATE alembic_version SET version_num = '9999'")
    newer.commit()
    newer.close()
    as_it_was = path.read_bytes()

    with running_daemon(tmp_path) as daemon:
        wait_for_trouble(daemon, "written by a newer version")
        assert daemon.stop() == 0

    assert path.read_bytes() == as_it_was
