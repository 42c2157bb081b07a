"""Journals with impossible values: what is right in them is restored, every GPU that they may be about is reset."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.gpu.process_identity import read_boot_id
from gpuenergyd.gpu.restore.command import restore
from gpuenergyd.gpu.restore.executor import RestoreOutcome, RestoreResult, restore_from_journal
from gpuenergyd.gpu.restore.journal import Control, Journal, KnownBy
from gpuenergyd.gpu.restore.journal_content import JournalEntry
from gpuenergyd.gpu.restore.repair import RepairingHost, repair_journal
from gpuenergyd_sim.driver.host import SimulatedHost
from tests.gpu.restore.test_journal import entry
from tests.support.examples import examples
from tests.support.measured_tables import SHARED

CASES = SHARED / "cases" / "daemon" / "journals.json"
OURS_MHZ, FOREIGN_MHZ, BASELINE_MHZ = 900, 1200, 1380
IMPOSSIBLE = [
    float("nan"), float("inf"), float("-inf"), -1, -0.5, 10**400, 1 << 70, "1410", "", "\ud800", "a\0b", [],
    [["GPU"]], {}, {"a": {"b": None}}, True, json.loads("[" * 500 + "]" * 500),
]  # fmt: skip
"""Of no field but a flag, which a test leaves alone."""


class Start:
    """Two simulated GPUs that are locked, and a journal; restores them as the worker does at its start."""

    def __init__(self, folder: Path) -> None:
        self.host = SimulatedHost.create(folder / "world", ["a100-sxm"] * 2, seed=3, sleep=lambda _: None)
        self.gpus = [own.gpu_uuid for own in self.host.identities()]
        self.journal = Journal(folder / "journal.json")

    def document(self, *, saved_value: float | None = None) -> dict[str, Any]:
        """Return a journal of both GPUs, as it is in the file."""
        entries = [replace(entry(gpu, saved_value=saved_value), world_path=str(self.host.path)) for gpu in self.gpus]
        listed = [asdict(one) for one in entries]
        return {"version": 4, "boot_id": read_boot_id(), "entries": listed, "foreign_locks_mhz": {}}

    def write(self, text: str | bytes | dict[str, Any]) -> None:
        """Write the journal, and lock both GPUs as its writer did."""
        body = json.dumps(text) if isinstance(text, dict) else text
        self.journal.path.unlink(missing_ok=True)
        self.journal.path.write_bytes(body if isinstance(body, bytes) else body.encode())
        self.journal.path.chmod(0o600)
        for gpu in self.gpus:
            self.host.lock_sm_clock(gpu, OURS_MHZ)

    def run(self) -> dict[str, list[RestoreOutcome]]:
        """Restore every GPU, and return the outcomes."""
        repair_journal(self.journal, RepairingHost(self.gpus, "simulated", str(self.host.path)))
        return {gpu: list(restore_from_journal(self.journal, self.host, gpu_uuids=[gpu])) for gpu in self.gpus}

    @property
    def locks(self) -> list[int | None]:
        """The clock locks installed now."""
        return [self.host.locked_sm_clock_mhz(gpu) for gpu in self.gpus]

    def kept(self) -> list[bytes]:
        """Return what was kept beside the journal."""
        return [path.read_bytes() for path in self.journal.path.parent.glob("journal.json.corrupt-*")]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Two GPUs and an empty journal."""
    made = Start(tmp_path)
    yield made
    made.host.close()


def cases() -> list[Any]:
    """Return the journals that once stopped a worker."""
    if not CASES.exists():
        return [pytest.param({}, marks=pytest.mark.skip(f"no {CASES}"))]
    found = json.loads(CASES.read_text(encoding="utf-8"))["journals"]
    return [pytest.param(case, id=case["name"]) for case in found]


@pytest.mark.fault(54)
@pytest.mark.parametrize("case", cases())
def test_no_journal_of_the_cases_leaves_a_gpu_lowered(start: Start, case: dict[str, str]) -> None:
    text = "[" * 100_000 if case["text"].startswith("repeat") else case["text"]
    start.write(text.replace('"GPU2"', f'"{start.gpus[1]}"').replace('"GPU"', f'"{start.gpus[0]}"'))

    start.run()

    assert start.locks[0] is None
    assert start.journal.read().entries == ()
    assert len(start.kept()) == 1


@pytest.mark.fault(54)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1410", -1, 10**400, [1410], True])
def test_a_bad_entry_resets_its_gpu_and_the_good_one_is_restored(start: Start, value: Any) -> None:
    document = start.document(saved_value=BASELINE_MHZ)
    document["entries"][0]["saved_value"] = value
    start.write(document)

    outcomes = start.run()

    assert start.locks == [None, BASELINE_MHZ]
    assert [o.result for gpu in start.gpus for o in outcomes[gpu]] == [RestoreResult.RESTORED] * 2
    assert [json.loads(body)["entries"][1]["saved_value"] for body in start.kept()] == [BASELINE_MHZ]


@pytest.mark.fault(54)
def test_a_lock_of_another_program_stays_when_a_bad_entry_is_reset(start: Start) -> None:
    document = start.document()
    document["entries"][0]["saved_value"] = float("nan")
    document["foreign_locks_mhz"] = {start.gpus[0]: FOREIGN_MHZ, start.gpus[1]: "1200"}
    del document["entries"][1]
    start.write(document)

    start.run()

    assert start.locks == [FOREIGN_MHZ, OURS_MHZ]  # the journal says nothing of the second


@pytest.mark.fault(54)
def test_a_saved_clock_that_the_gpu_does_not_have_removes_the_lock(start: Start) -> None:
    start.write(start.document(saved_value=99_999))

    outcomes = start.run()

    assert start.locks == [None, None]
    assert outcomes[start.gpus[0]][0].detail == "clock lock removed: 99999 MHz is no clock of this GPU"
    assert start.kept() == []


@pytest.mark.fault(54)
@pytest.mark.parametrize(
    ("fields", "now_w", "after_w"),
    [
        ({"saved_value": float("nan")}, 300.0, 480.0),
        ({"saved_value": 1e6}, 300.0, 480.0),
        ({"saved_value": 350.0, "owner_pid": "1"}, 300.0, 480.0),
        ({"saved_value": float("nan")}, 333.0, 333.0),  # of another program
    ],
)
def test_a_power_limit_whose_saved_value_is_lost_returns_to_the_default_if_it_is_ours(
    start: Start, fields: dict[str, Any], now_w: float, after_w: float
) -> None:
    document = start.document()
    document["entries"][0] |= {"control": "power_limit", "known_by": "read", "intended_value": 300.0, **fields}
    start.write(document)
    start.host.set_power_limit(start.gpus[0], now_w)

    start.run()

    assert start.host.power_limit_w(start.gpus[0]) == after_w


@pytest.mark.fault(54)
@pytest.mark.parametrize(
    "change", [{"version": 5}, {"version": None}, {"version": "4"}, {"entries": {}}, {"entries": 3}]
)
def test_a_journal_of_another_format_resets_the_gpus_that_it_may_be_about(start: Start, change: dict[str, Any]) -> None:
    start.write(start.document() | change)

    start.run()

    assert start.locks == [None, None]


@pytest.mark.parametrize("boot_id", [None, "", 3, []])
def test_without_a_boot_that_can_be_right_entries_are_restored_not_forgotten(start: Start, boot_id: Any) -> None:
    start.write(start.document() | {"boot_id": boot_id})

    start.run()

    assert start.locks == [None, None]


@pytest.mark.fault(43)
@pytest.mark.parametrize("kind", ["writable", "link", "folder", "pipe"])
def test_a_file_that_others_may_have_put_there_is_moved_aside_unread(start: Start, tmp_path: Path, kind: str) -> None:
    start.write(start.document(saved_value=600))
    path = start.journal.path
    if kind == "writable":
        path.chmod(0o666)
    else:
        path.rename(tmp_path / "elsewhere")
        if kind == "link":
            path.symlink_to(tmp_path / "elsewhere")
        elif kind == "folder":
            path.mkdir()
        else:
            os.mkfifo(path, 0o600)

    start.run()

    assert start.locks == [None, None]
    assert len(list(tmp_path.glob("journal.json.corrupt-*"))) == 1


@pytest.mark.fault(54)
def test_the_restore_command_restores_what_is_right_and_leaves_the_rest_to_the_worker(start: Start) -> None:
    document = start.document(saved_value=BASELINE_MHZ)
    document["entries"][0] = 17
    start.write(document)

    outcomes = restore(start.journal.path)

    assert [o.result for o in outcomes] == [RestoreResult.RESTORED, RestoreResult.FAILED]
    assert "an entry is 17; moved it to" in outcomes[1].detail
    assert start.locks == [OURS_MHZ, BASELINE_MHZ]
    start.run()
    assert start.locks == [None, None]


def test_entries_without_the_fields_of_later_versions_are_read(start: Start) -> None:
    document: dict[str, Any] = start.document(saved_value=BASELINE_MHZ) | {"version": 1}
    del document["foreign_locks_mhz"]
    for one in document["entries"]:
        for name in ("restore_policy", "locked_sm_clock_mhz", "is_lock_settled", "is_unconfirmed"):
            del one[name]
    start.write(document)

    start.run()

    assert start.locks == [BASELINE_MHZ, BASELINE_MHZ]
    assert start.kept() == []


MUTABLE = sorted(set(asdict(entry("GPU-a"))) - {"gpu_uuid", "is_lock_settled", "is_unconfirmed"})
CHANGES = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from([*MUTABLE, "deleted", "unknown"]), st.sampled_from(IMPOSSIBLE)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=CHANGES,
    top=st.dictionaries(
        st.sampled_from(["version", "foreign_locks_mhz", "x"]), st.sampled_from(IMPOSSIBLE), max_size=1
    ),
    saved_value=st.sampled_from([None, BASELINE_MHZ]),
)
def test_a_journal_with_any_impossible_values_leaves_no_gpu_at_our_lock(
    start: Start, changes: list[tuple[int, str, Any]], top: dict[str, Any], saved_value: float | None
) -> None:
    document = start.document(saved_value=saved_value)
    for index, name, value in changes:
        if name == "deleted":
            document["entries"][index].pop("owner_pid", None)
        else:
            document["entries"][index][name] = value
    start.write(document | top)

    start.run()

    assert set(start.locks) <= {None, BASELINE_MHZ}
    assert start.journal.read().entries == ()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
DOCUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "version": st.integers(0, 9) | JSON_VALUES,
        "boot_id": st.just(read_boot_id()) | JSON_VALUES,
        "entries": st.lists(JSON_VALUES, max_size=3) | JSON_VALUES,
        "foreign_locks_mhz": JSON_VALUES,
        "is_incomplete": JSON_VALUES,
    },
)


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200) | (JSON_VALUES | DOCUMENTS).map(lambda value: json.dumps(value).encode()))
def test_whatever_is_in_the_file_the_worker_starts_and_journals_again(start: Start, content: bytes) -> None:
    start.write(content)

    start.run()

    start.journal.add([entry(start.gpus[0])])
    assert start.journal.holds(start.gpus[0], Control.SM_CLOCK_LOCK)


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 5_000), junk=st.binary(max_size=3))
def test_a_journal_that_is_cut_off_anywhere_leaves_no_gpu_at_our_lock(start: Start, cut: int, junk: bytes) -> None:
    body = json.dumps(start.document()).encode()
    start.write(body[: cut % len(body)] + junk)

    start.run()

    assert start.locks == [None, None]


def test_a_good_journal_is_not_touched(start: Start) -> None:
    start.journal.add([JournalEntry(**asdict(entry(start.gpus[0])))])
    before = start.journal.path.stat()

    assert repair_journal(start.journal, RepairingHost(start.gpus, "simulated")) is None

    assert start.journal.path.stat() == before


def test_a_journal_that_cannot_be_replaced_is_an_error_of_this_project(start: Start) -> None:
    start.write("{")
    lock_path = start.journal.path.with_name("journal.json.lock")
    lock_path.unlink(missing_ok=True)
    lock_path.mkdir()

    with pytest.raises(GpuEnergyError, match="cannot lock the journal"):
        start.run()


def test_the_entry_of_a_reset_names_its_source(start: Start) -> None:
    start.write("{")

    repair_journal(start.journal, RepairingHost(start.gpus, "simulated", str(start.host.path)))

    entries = start.journal.read().entries
    assert {(e.lease_id, e.saved_value, e.known_by) for e in entries} == {
        ("repair of the journal", None, KnownBy.ASSUMED_DEFAULT)
    }
