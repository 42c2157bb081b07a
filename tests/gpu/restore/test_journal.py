import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuenergyd.errors import JournalError
from gpuenergyd.gpu.restore.journal import Control, DamagedJournalError, Journal, JournalEntry, KnownBy
from tests.support.examples import examples


def entry(gpu_uuid: str, *, saved_value: float | None = None, lease_id: str = "L1") -> JournalEntry:
    return JournalEntry(
        gpu_uuid=gpu_uuid, control=Control.SM_CLOCK_LOCK, saved_value=saved_value, known_by=KnownBy.ASSUMED_DEFAULT,
        lease_id=lease_id, job_id="job", owner_pid=os.getpid(), owner_uid=os.getuid(), owner_start_ticks=1,
        driver="simulated", world_path="/w", recorded_boottime_ns=5,
    )  # fmt: skip


def test_absent_journal_is_empty(tmp_path: Path) -> None:
    assert Journal(tmp_path / "j").read().entries == ()


def test_added_entries_are_read_by_another_instance(tmp_path: Path) -> None:
    Journal(tmp_path / "j").add([entry("GPU-a"), entry("GPU-b", saved_value=1200.0)])

    assert Journal(tmp_path / "j").read().entries == (entry("GPU-a"), entry("GPU-b", saved_value=1200.0))
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o600


def test_first_saved_value_is_kept_when_a_gpu_is_leased_again(tmp_path: Path) -> None:
    """The second saved value would be our own change."""
    journal = Journal(tmp_path / "j")
    journal.add([entry("GPU-a", saved_value=1400.0)])

    journal.add([entry("GPU-a", saved_value=900.0, lease_id="L2")])

    (kept,) = journal.read().entries
    assert (kept.saved_value, kept.lease_id) == (1400.0, "L2")


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(st.booleans(), st.sets(st.sampled_from("abcdef"), min_size=1)), min_size=1, max_size=12)
)
def test_journal_is_the_set_of_what_was_added_and_not_removed(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bool, set[str]]]
) -> None:
    path = tmp_path_factory.mktemp("journal") / "j"
    writer, reader = Journal(path), Journal(path)
    model: set[str] = set()
    for is_adding, uuids in steps:
        if is_adding:
            writer.add([entry(u) for u in sorted(uuids)])
            model |= uuids
        else:
            writer.remove({(u, Control.SM_CLOCK_LOCK) for u in uuids})
            model -= uuids

        assert {e.gpu_uuid for e in reader.read().entries} == model
        assert {u for u in "abcdef" if reader.holds(u, Control.SM_CLOCK_LOCK)} == model


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"version": 1}',
        b'{"version": 1, "boot_id": "x", "entries": [{"gpu_uuid": 3}]}',
        b"\xff\xfe",
    ],
)
def test_damaged_journal_is_an_error_and_never_treated_as_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "j").write_bytes(content)
    (tmp_path / "j").chmod(0o600)

    with pytest.raises(DamagedJournalError, match="is damaged"):
        Journal(tmp_path / "j").read()


def test_journal_of_a_later_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "j").write_text(json.dumps({"version": 9, "boot_id": "x", "entries": []}))

    with pytest.raises(JournalError, match="has version 9; expected 4"):
        Journal(tmp_path / "j").read()


@pytest.mark.fault(43)
def test_symlink_in_place_of_the_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("{}")
    (tmp_path / "j").symlink_to(tmp_path / "real")

    with pytest.raises(JournalError, match="cannot read the journal"):
        Journal(tmp_path / "j").read()


@pytest.mark.fault(43)
def test_journal_that_others_can_write_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "j").add([entry("GPU-a")])
    (tmp_path / "j").chmod(0o666)

    with pytest.raises(JournalError, match="writable by other users"):
        Journal(tmp_path / "j").read()


def test_fifo_in_place_of_the_journal_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "j", 0o600)

    with pytest.raises(JournalError, match="is not a regular file"):
        Journal(tmp_path / "j").read()


def test_unwritable_folder_is_an_error_before_anything_is_changed(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot lock the journal"):
        Journal(tmp_path / "absent" / "j").add([entry("GPU-a")])


def test_disk_that_fills_up_half_way_through_the_journal_leaves_the_old_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.add([entry("GPU-a")])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "j").stat().st_size + 100, limits[1]))
    try:
        with pytest.raises(JournalError, match="cannot write the journal"):
            journal.add([entry("GPU-b"), entry("GPU-c")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert [e.gpu_uuid for e in journal.read().entries] == ["GPU-a"]
    assert {file.name for file in tmp_path.iterdir()} == {"j", "j.lock"}


def test_entries_of_another_boot_are_dropped_by_the_next_lease(tmp_path: Path) -> None:
    Journal(tmp_path / "j", boot_id=lambda: "before").add([entry("GPU-a")])
    now = Journal(tmp_path / "j", boot_id=lambda: "now")

    assert not now.is_of_this_boot(now.read())
    now.add([entry("GPU-b")])

    assert [e.gpu_uuid for e in now.read().entries] == ["GPU-b"]


def test_lock_of_one_gpu_does_not_block_another(tmp_path: Path) -> None:
    one, other = Journal(tmp_path / "j"), Journal(tmp_path / "j")

    with one.gpu_lock("GPU-a"):
        with other.gpu_lock("GPU-b", wait_s=0.0):
            pass
        with pytest.raises(JournalError, match="has held a lock"), other.gpu_lock("GPU-a", wait_s=0.01):
            pass
    with other.gpu_lock("GPU-a", wait_s=0.0):
        pass


@pytest.mark.kill
def test_killed_writers_leave_a_complete_journal(tmp_path: Path) -> None:
    writer_code = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.gpu.restore.test_journal import entry
from gpuenergyd.gpu.restore.journal import Journal
journal = Journal(Path(sys.argv[1]))
print("ready", flush=True)
n = 0
while True:
    n += 1
    uuids = ["GPU-%d" % k for k in range(n % 7 + 1)]
    journal.add([entry(u) for u in uuids])
    journal.remove({e.key for e in journal.read().entries})
"""
    root = str(Path(__file__).resolve().parents[3])
    rng = random.Random(3)
    for _ in range(6):
        arguments = [sys.executable, "-c", writer_code, str(tmp_path / "j"), root]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            threading.Event().wait(rng.uniform(0.0, 0.02))
            writer.send_signal(signal.SIGKILL)

        entries = Journal(tmp_path / "j").read().entries
        assert [e.gpu_uuid for e in entries] == [f"GPU-{k}" for k in range(len(entries))]
        assert {file.name for file in tmp_path.iterdir()} <= {"j", "j.lock", ".j.unfinished"}
