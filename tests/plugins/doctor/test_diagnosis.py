"""Diagnosis: level and fix of each problem."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gpuenergyd_doctor.diagnosis import Diagnosis, Level, Subject, diagnose
from gpuenergyd_doctor.facts import (
    CallerFacts,
    CarbonFacts,
    DaemonFacts,
    DiskFacts,
    DriverFacts,
    GpuFacts,
    HistoryFacts,
    HostFacts,
    JournalFacts,
    SocketState,
    UnitFacts,
)

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
GPU = GpuFacts("A100 GPU-a", 81, None, is_persistent=True)
DAEMON = DaemonFacts("/run/gpuenergyd/gpuenergyd.sock", SocketState.ANSWERS, "gpuenergy")
_CORE, _FETCHER = "gpuenergyd.service", "gpuenergyd-carbon.service"
UNITS = UnitFacts(
    is_managed=True, active_states={"gpuenergyd.service": "active"}, enabled_states={"gpuenergyd.service": "enabled"}
)
WELL = HostFacts(
    now=NOW,
    driver=DriverFacts("nvml", (GPU,)),
    caller=CallerFacts("alice", may_change_gpus=False),
    daemon=DAEMON,
    units=UNITS,
    is_time_synchronised=True,
    history=HistoryFacts("/h", is_there=True, last_record_at=NOW),
    disk=DiskFacts("/", 2**40, is_read_only=False),
    carbon=CarbonFacts("GB", newest_at=NOW),
)
ABSENT = replace(DAEMON, socket_state=SocketState.ABSENT)


def about(facts: HostFacts, subject: Subject) -> list[Diagnosis]:
    return [d for d in diagnose(facts) if d.subject is subject and d.level is not Level.FINE]


def test_a_healthy_host_passes_all_checks() -> None:
    found = diagnose(WELL)

    assert {d.level for d in found} == {Level.FINE}
    assert [d.subject for d in found] == list(Subject)
    assert {d.fix for d in found} == {None}


PROBLEMS: list[tuple[Subject, str, dict[str, Any]]] = [
    (Subject.SETTINGS, "correct the setting", {"settings_trouble": "/etc/c.toml: mode = 'fast'"}),
    (Subject.DRIVER, "load it", {"driver": DriverFacts("nvml", trouble="no driver; load it")}),
    (Subject.DRIVER, "nvidia-smi", {"driver": DriverFacts("nvml", trouble="odd")}),
    (Subject.PERMISSIONS, "CAP_SYS_ADMIN", {"daemon": replace(DAEMON, uncontrolled_gpus=("GPU-a",))}),
    (
        Subject.CLOCKS,
        "disable MIG",
        {"driver": DriverFacts("nvml", (replace(GPU, observe_only_reason="MIG is enabled"),))},
    ),
    (Subject.CLOCKS, "gpuenergyd restore --journal /j", {"journal": JournalFacts("/j", ("GPU-a",))}),
    (Subject.CLOCKS, "restore --all", {"journal": JournalFacts("/j", damage="damaged")}),
    (Subject.SOCKET, "usermod -aG gpuenergy alice", {"daemon": replace(DAEMON, socket_state=SocketState.DENIED)}),
    (Subject.SOCKET, "start the daemon", {"daemon": replace(DAEMON, socket_state=SocketState.STALE)}),
    (Subject.SOCKET, "restart", {"daemon": replace(DAEMON, socket_state=SocketState.SILENT)}),
    (Subject.DAEMON, "journalctl", {"daemon": replace(DAEMON, degraded_reasons=("history: disk full",))}),
    (Subject.DATABASE, "install that version", {"history": HistoryFacts("/h", True, "a newer one")}),
    (Subject.DATABASE, "moves the damaged database", {"history": HistoryFacts("/h", True, "malformed")}),
    (Subject.DATABASE, "database_url", {"history": HistoryFacts("/h", True, "is not a history")}),
    (Subject.DISK, "free disk space", {"disk": DiskFacts("/", 2**20, is_read_only=False)}),
    (Subject.DISK, "remount,rw", {"disk": DiskFacts("/", 2**40, is_read_only=True)}),
    (Subject.TIME, "set the clock", {"history": HistoryFacts("/h", True, last_record_at=NOW + timedelta(hours=2))}),
    (Subject.TIME, "chrony", {"is_time_synchronised": False}),
    (Subject.CARBON, "carbon now --zone GB", {"carbon": CarbonFacts("GB", trouble="HTTP 401")}),
    (Subject.CARBON, "carbon now --zone GB", {"carbon": CarbonFacts("GB", newest_at=NOW - timedelta(days=1))}),
    (
        Subject.UNITS,
        "systemctl start gpuenergyd-carbon.service",
        {
            "carbon": CarbonFacts("GB", newest_at=NOW, is_fetched=True),
            "units": UnitFacts(True, {_CORE: "active", _FETCHER: "inactive"}, {_CORE: "enabled"}),
        },
    ),
    (
        Subject.UNITS,
        "gpuenergyd install",
        {
            "carbon": CarbonFacts("GB", newest_at=NOW, is_fetched=True),
            "units": UnitFacts(True, {_CORE: "active"}, {_CORE: "enabled"}),
        },
    ),
    (Subject.UNITS, "disable --now zeusd", {"units": replace(UNITS, rivals=("zeusd.service",))}),
    (
        Subject.UNITS,
        "reset-failed gpuenergyd.service",
        {"units": replace(UNITS, active_states={"gpuenergyd.service": "failed"})},
    ),
]
NOTES: list[tuple[Subject, str, dict[str, Any]]] = [
    (Subject.PERMISSIONS, "as root or by its unit", {"daemon": ABSENT}),
    (
        Subject.PERSISTENCE_MODE,
        "nvidia-persistenced",
        {"driver": DriverFacts("nvml", (replace(GPU, is_persistent=False),))},
    ),
    (Subject.CLOCKS, "as root", {"journal": JournalFacts("/j", unreadable="not yours")}),
    (Subject.SOCKET, "gpuenergyd serve", {"daemon": ABSENT}),
    (
        Subject.DATABASE,
        "sqlite3 /h.corrupt-1 .recover",
        {"history": HistoryFacts("/h", True, set_aside=("/h.corrupt-1",))},
    ),
    (Subject.TIME, "chrony", {"is_time_synchronised": False, "carbon": None}),
    (Subject.UNITS, "gpuenergyd restore", {"units": UnitFacts(False, {}, {})}),
    (Subject.UNITS, "gpuenergyd install", {"units": UnitFacts(True, {}, {})}),
    (Subject.UNITS, "systemctl enable", {"units": replace(UNITS, enabled_states={"gpuenergyd.service": "disabled"})}),
]
"""Subject, a part of the fix, and the facts that differ from those of a host that is well."""


@pytest.mark.parametrize(
    ("level", "subject", "fix", "changes"),
    [*((Level.DEGRADED, *case) for case in PROBLEMS), *((Level.NOTE, *case) for case in NOTES)],
    ids=str,
)
def test_each_problem_is_reported_with_its_fix(
    level: Level, subject: Subject, fix: str, changes: dict[str, Any]
) -> None:
    found = about(replace(WELL, **changes), subject)

    assert [d.level for d in found] == [level]
    assert found[0].fix is not None
    assert fix in found[0].fix
