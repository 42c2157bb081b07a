"""Energy of CPU packages and memory: counter wraps, no double counting, missing readings."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpuenergyd.daemon.gpus.host_energy import HostEnergy
from gpuenergyd.store import open_history
from gpuenergyd.store.records import HostRollupRecord
from tests.support.stored_history import write_records

START = datetime(2026, 3, 1, 10, 59, 30, tzinfo=UTC)
RANGE_UJ = 262_143_328_850


def powercap(root: Path, counters: dict[str, tuple[str, int]]) -> Path:
    """Write a powercap tree like the kernel's: one directory per counter, children named after their parent."""
    for folder, (name, energy_uj) in counters.items():
        path = root / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / "name").write_text(f"{name}\n", encoding="utf-8")
        (path / "energy_uj").write_text(f"{energy_uj}\n", encoding="utf-8")
        (path / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n", encoding="utf-8")
    return root


def set_counter(root: Path, folder: str, energy_uj: int) -> None:
    (root / folder / "energy_uj").write_text(f"{energy_uj}\n", encoding="utf-8")


def look(host: HostEnergy, second: float) -> list[HostRollupRecord]:
    return list(host.records(int((1000 + second) * 1e9), START + timedelta(seconds=second)))


def minutes(records: Iterable[HostRollupRecord]) -> dict[str, float | None]:
    return {record.domain: record.energy_j for record in records if record.bucket_s == 60}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return powercap(
        tmp_path / "powercap",
        {
            "intel-rapl:0": ("package-0", 1_000_000),
            "intel-rapl:0:0": ("core", 500_000),
            "intel-rapl:0:1": ("dram", 2_000_000),
            "intel-rapl:1": ("package-1", RANGE_UJ - 3_000_000),
            "intel-rapl:2": ("psys", 0),
        },
    )


def test_cpu_packages_and_memory_are_counted_without_their_subdomains(root: Path) -> None:
    host = HostEnergy(root)
    assert look(host, 0) == []
    set_counter(root, "intel-rapl:0", 501_000_000)
    set_counter(root, "intel-rapl:0:1", 22_000_000)
    set_counter(root, "intel-rapl:1", 2_000_000)  # it has wrapped

    used = minutes(look(host, 10))

    assert used == {"package-0": 500.0, "package-0/dram": 20.0, "package-1": pytest.approx(5.0)}
    assert host.status() == {"domains": ["package-0", "package-0/dram", "package-1"], "reason": None}


def test_an_interval_counts_in_the_minute_and_hour_of_its_start(root: Path) -> None:
    host = HostEnergy(root)
    look(host, 0)

    records = look(host, 40)

    assert {(r.bucket_s, r.started_at.minute, r.started_at.hour) for r in records} == {(60, 59, 10), (3600, 0, 10)}
    assert {r.measured_s for r in records} == {40.0}


def test_counters_are_read_at_most_once_per_period(root: Path) -> None:
    host = HostEnergy(root)
    look(host, 0)

    assert look(host, 9.9) == []
    assert len(look(host, 10.0)) == 6


def test_an_unreadable_counter_is_missing_never_zero_with_the_reason_in_status(root: Path) -> None:
    host = HostEnergy(root)
    look(host, 0)
    (root / "intel-rapl:1" / "energy_uj").unlink()
    gone = look(host, 10)
    reason = host.reason
    set_counter(root, "intel-rapl:1", 7)
    back = look(host, 20)

    assert minutes(gone)["package-1"] is None
    assert {r.missing_s for r in gone if r.domain == "package-1"} == {10.0}
    assert reason == f"package-1: cannot read {root}/intel-rapl:1/energy_uj: No such file or directory"
    assert minutes(back)["package-1"] is None, "nobody knows what it counted while it was gone"
    assert minutes(back)["package-0"] == 0.0
    assert host.reason is None


def test_energy_over_a_long_gap_is_missing_since_the_counter_may_have_wrapped(root: Path) -> None:
    host = HostEnergy(root)
    look(host, 0)
    set_counter(root, "intel-rapl:0", 2_000_000)

    assert minutes(look(host, 4000))["package-0"] is None


def test_a_host_without_counters_reports_the_reason(tmp_path: Path) -> None:
    host = HostEnergy(tmp_path)

    assert look(host, 0) == look(host, 100) == []
    assert host.status() == {"domains": [], "reason": f"no CPU energy counters in {tmp_path}"}


def test_host_energy_adds_up_in_the_database(root: Path, tmp_path: Path) -> None:
    host = HostEnergy(root)
    records = []
    for tick in range(13):
        set_counter(root, "intel-rapl:0", 1_000_000 * (1 + 100 * tick))
        records += look(host, 10 * tick)
    write_records(tmp_path / "history.sqlite3", *records)

    with open_history(tmp_path / "history.sqlite3") as history:
        used = {(row.domain, row.started_at.hour): row for row in history.host_energy()}

    assert used["package-0", 10].energy_j == pytest.approx(300.0)
    assert used["package-0", 11].energy_j == pytest.approx(900.0)
    assert used["package-0", 11].measured_s == pytest.approx(90.0)
