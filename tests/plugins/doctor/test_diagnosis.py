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


@pytest.mark.parametrize(
    ("changes", "subject", "level", "fix"),
    [
        ({"settings_trouble": "/etc/c.toml: mode = 'fast'"}, Subject.SETTINGS, Level.DEGRADED, "correct the setting"),
        ({"driver": DriverFacts("nvml", trouble="no driver; load it")}, Subject.DRIVER, Level.DEGRADED, "load it"),
        ({"driver": DriverFacts("nvml", trouble="odd")}, Subject.DRIVER, Level.DEGRADED, "nvidia-smi"),
        (
            {"daemon": replace(DAEMON, uncontrolled_gpus=("GPU-a",))},
            Subject.PERMISSIONS,
            Level.DEGRADED,
            "CAP_SYS_ADMIN",
        ),
        ({"daemon": ABSENT}, Subject.PERMISSIONS, Level.NOTE, "as root or by its unit"),
        (
            {"driver": DriverFacts("nvml", (replace(GPU, is_persistent=False),))},
            Subject.PERSISTENCE_MODE,
            Level.NOTE,
            "nvidia-persistenced",
        ),
        (
            {"driver": DriverFacts("nvml", (replace(GPU, observe_only_reason="MIG is enabled"),))},
            Subject.CLOCKS,
            Level.DEGRADED,
            "disable MIG",
        ),
        (
            {"journal": JournalFacts("/j", ("GPU-a",))},
            Subject.CLOCKS,
            Level.DEGRADED,
            "gpuenergyd restore --journal /j",
        ),
        ({"journal": JournalFacts("/j", damage="damaged")}, Subject.CLOCKS, Level.DEGRADED, "restore --all"),
        ({"journal": JournalFacts("/j", unreadable="not yours")}, Subject.CLOCKS, Level.NOTE, "as root"),
        ({"daemon": ABSENT}, Subject.SOCKET, Level.NOTE, "gpuenergyd serve"),
        (
            {"daemon": replace(DAEMON, socket_state=SocketState.DENIED)},
            Subject.SOCKET,
            Level.DEGRADED,
            "usermod -aG gpuenergy alice",
        ),
        (
            {"daemon": replace(DAEMON, socket_state=SocketState.STALE)},
            Subject.SOCKET,
            Level.DEGRADED,
            "start the daemon",
        ),
        ({"daemon": replace(DAEMON, socket_state=SocketState.SILENT)}, Subject.SOCKET, Level.DEGRADED, "restart"),
        (
            {"daemon": replace(DAEMON, degraded_reasons=("history: disk full",))},
            Subject.DAEMON,
            Level.DEGRADED,
            "journalctl",
        ),
        (
            {"history": HistoryFacts("/h", True, "a newer one")},
            Subject.DATABASE,
            Level.DEGRADED,
            "install that version",
        ),
        (
            {"history": HistoryFacts("/h", True, "malformed")},
            Subject.DATABASE,
            Level.DEGRADED,
            "moves the damaged database",
        ),
        ({"history": HistoryFacts("/h", True, "is not a history")}, Subject.DATABASE, Level.DEGRADED, "database_url"),
        (
            {"history": HistoryFacts("/h", True, set_aside=("/h.corrupt-1",))},
            Subject.DATABASE,
            Level.NOTE,
            "sqlite3 /h.corrupt-1 .recover",
        ),
        ({"disk": DiskFacts("/", 2**20, is_read_only=False)}, Subject.DISK, Level.DEGRADED, "free disk space"),
        ({"disk": DiskFacts("/", 2**40, is_read_only=True)}, Subject.DISK, Level.DEGRADED, "remount,rw"),
        (
            {"history": HistoryFacts("/h", True, last_record_at=NOW + timedelta(hours=2))},
            Subject.TIME,
            Level.DEGRADED,
            "set the clock",
        ),
        ({"is_time_synchronised": False}, Subject.TIME, Level.DEGRADED, "chrony"),
        ({"is_time_synchronised": False, "carbon": None}, Subject.TIME, Level.NOTE, "chrony"),
        ({"carbon": CarbonFacts("GB", trouble="HTTP 401")}, Subject.CARBON, Level.DEGRADED, "carbon now --zone GB"),
        (
            {"carbon": CarbonFacts("GB", newest_at=NOW - timedelta(days=1))},
            Subject.CARBON,
            Level.DEGRADED,
            "carbon now --zone GB",
        ),
        ({"units": UnitFacts(False, {}, {})}, Subject.UNITS, Level.NOTE, "gpuenergyd restore"),
        ({"units": UnitFacts(True, {}, {})}, Subject.UNITS, Level.NOTE, "gpuenergyd install"),
        (
            {
                "carbon": CarbonFacts("GB", newest_at=NOW, is_fetched=True),
                "units": UnitFacts(True, {_CORE: "active", _FETCHER: "inactive"}, {_CORE: "enabled"}),
            },
            Subject.UNITS,
            Level.DEGRADED,
            "systemctl start gpuenergyd-carbon.service",
        ),
        (
            {
                "carbon": CarbonFacts("GB", newest_at=NOW, is_fetched=True),
                "units": UnitFacts(True, {_CORE: "active"}, {_CORE: "enabled"}),
            },
            Subject.UNITS,
            Level.DEGRADED,
            "gpuenergyd install",
        ),
        ({"units": replace(UNITS, rivals=("zeusd.service",))}, Subject.UNITS, Level.DEGRADED, "disable --now zeusd"),
        (
            {"units": replace(UNITS, active_states={"gpuenergyd.service": "failed"})},
            Subject.UNITS,
            Level.DEGRADED,
            "reset-failed gpuenergyd.service",
        ),
        (
            {"units": replace(UNITS, enabled_states={"gpuenergyd.service": "disabled"})},
            Subject.UNITS,
            Level.NOTE,
            "systemctl enable",
        ),
    ],
    ids=str,
)
def test_each_problem_is_reported_with_its_fix(
    changes: dict[str, Any], subject: Subject, level: Level, fix: str
) -> None:
    found = about(replace(WELL, **changes), subject)

    assert [d.level for d in found] == [level]
    assert found[0].fix is not None
    assert fix in found[0].fix
