"""Diagnosis: complete messages and thresholds."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from gpuenergyd_doctor.diagnosis import Diagnosis, Level, Subject, diagnose
from gpuenergyd_doctor.facts import (
    CallerFacts,
    CarbonFacts,
    DiskFacts,
    DriverFacts,
    HistoryFacts,
    HostFacts,
    JournalFacts,
    SocketState,
    UnitFacts,
)
from tests.plugins.doctor.test_diagnosis import ABSENT, DAEMON, GPU, NOW, WELL

CORE, FETCHER = "gpuenergyd.service", "gpuenergyd-carbon.service"
SECOND = timedelta(seconds=1)


def output(subject: Subject, facts: HostFacts = WELL, **changes: Any) -> list[Diagnosis]:
    """Return all that is said of a subject on a host that is well but for some facts."""
    return [one for one in diagnose(replace(facts, **changes)) if one.subject is subject]


def details(subject: Subject, **changes: Any) -> list[tuple[Level, str]]:
    return [(one.level, one.detail) for one in output(subject, **changes)]


def test_messages_of_a_healthy_host() -> None:
    assert [(one.subject, one.detail) for one in diagnose(WELL)] == [
        (Subject.SETTINGS, "valid"),
        (Subject.DRIVER, "nvml: 1 GPU: A100 GPU-a"),
        (Subject.PERMISSIONS, "the daemon may change all GPUs"),
        (Subject.PERSISTENCE_MODE, "on"),
        (Subject.CLOCKS, "no GPU is left changed; A100 GPU-a: 81 SM clocks that can be set"),
        (Subject.SOCKET, "a daemon answers on /run/gpuenergyd/gpuenergyd.sock"),
        *[(one.subject, one.detail) for one in output(Subject.DAEMON)],
        (Subject.DATABASE, "/h is readable"),
        (Subject.DISK, "1024.0 GiB free in /"),
        (Subject.TIME, "the clock is synchronised"),
        (Subject.CARBON, "zone GB: values up to 2026-03-01 12:00 UTC"),
        (Subject.UNITS, "gpuenergyd.service active"),
    ]


def test_a_driver_error_is_reported_with_its_remedy() -> None:
    (one,) = output(Subject.DRIVER, driver=DriverFacts("nvml", trouble="no driver; load it; now"))

    assert (one.detail, one.fix) == ("no driver", "load it; now")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"daemon": replace(DAEMON, is_observing=True, uncontrolled_gpus=("GPU-a",))},
            [(Level.FINE, "the daemon only observes (setting mode = 'observe')")],
        ),
        (
            {"daemon": replace(DAEMON, is_observing=True, mode_note="no mode is set; set one")},
            [(Level.NOTE, "no mode is set")],
        ),
        (
            {"daemon": replace(DAEMON, uncontrolled_gpus=("GPU-a", "GPU-b"))},
            [(Level.DEGRADED, "the daemon may not change GPU-a"), (Level.DEGRADED, "the daemon may not change GPU-b")],
        ),
        (
            {"daemon": ABSENT, "caller": CallerFacts("root", may_change_gpus=True)},
            [(Level.FINE, "a daemon run by root may change GPUs")],
        ),
        ({"daemon": ABSENT}, [(Level.NOTE, "a daemon run by alice can measure GPUs but not change them")]),
        (
            {"daemon": replace(ABSENT, is_observing=True)},
            [(Level.NOTE, "a daemon run by alice can measure GPUs but not change them")],
        ),
    ],
)
def test_messages_about_permissions(changes: dict[str, Any], expected: list[tuple[Level, str]]) -> None:
    assert details(Subject.PERMISSIONS, **changes) == expected


def gpus(*persistent: bool | None) -> DriverFacts:
    return DriverFacts("nvml", tuple(replace(GPU, name=f"g{k}", is_persistent=p) for k, p in enumerate(persistent)))


def test_persistence_mode_is_on_off_or_not_reported() -> None:
    assert details(Subject.PERSISTENCE_MODE, driver=gpus(None, None)) == [(Level.FINE, "not reported by any GPU")]
    assert details(Subject.PERSISTENCE_MODE, driver=gpus(None, True)) == [(Level.FINE, "on")]
    off = details(Subject.PERSISTENCE_MODE, driver=gpus(True, False, None))
    assert off == [(Level.NOTE, "off on g1: without clients the driver resets clocks and starts slowly")]


def test_gpus_that_cannot_be_tuned_are_named_and_the_others_are_counted() -> None:
    old = replace(GPU, name="old", observe_only_reason="no locked clocks")

    found = output(Subject.CLOCKS, driver=DriverFacts("nvml", (GPU, old)))
    assert [one.detail for one in found] == [
        "old cannot be tuned: no locked clocks",
        "no GPU is left changed; A100 GPU-a: 81 SM clocks that can be set",
    ]
    assert found[0].fix == "install a newer driver"
    assert len(output(Subject.CLOCKS, driver=DriverFacts("nvml", (old,)))) == 1
    assert details(Subject.CLOCKS, driver=DriverFacts("nvml")) == [(Level.FINE, "no GPU is left changed")]


def test_sm_clocks_known_to_the_daemon_only_are_not_reported_as_missing() -> None:
    unknown = replace(GPU, num_clocks=None)

    assert details(Subject.CLOCKS, driver=DriverFacts("simulated", (unknown,))) == [
        (Level.FINE, "no GPU is left changed; A100 GPU-a: its SM clocks are known to the daemon only")
    ]


def test_without_a_gpu_worker_no_check_of_the_gpus_passes() -> None:
    facts = replace(WELL, daemon=replace(WELL.daemon, has_worker=False), driver=DriverFacts("simulated"))

    found = {one.subject: one for one in diagnose(facts)}
    assert (found[Subject.DRIVER].level, found[Subject.DRIVER].detail) == (Level.DEGRADED, "simulated: no GPU found")
    assert found[Subject.PERMISSIONS].level is Level.DEGRADED
    assert "its GPU worker is not running" in found[Subject.PERMISSIONS].detail
    assert found[Subject.CLOCKS].level is Level.NOTE
    assert found[Subject.CLOCKS].detail.startswith("cannot check whether GPUs are left slowed down")


def test_a_journal_is_reported_only_if_gpus_were_left_changed() -> None:
    assert details(Subject.CLOCKS, journal=JournalFacts("/j")) == details(Subject.CLOCKS)
    assert details(Subject.CLOCKS, journal=JournalFacts("/j", ("a", "b"))) == [
        (Level.DEGRADED, "a daemon that is no longer running left a, b changed")
    ]
    both = JournalFacts("/j", ("a",), damage="torn", unreadable="no right")
    assert details(Subject.CLOCKS, journal=both) == [(Level.DEGRADED, "torn")]
    assert details(Subject.CLOCKS, journal=JournalFacts("/j", ("a",), unreadable="no right")) == [
        (Level.NOTE, "cannot check whether GPUs are left slowed down: no right")
    ]


def test_a_denied_socket_of_an_unknown_group_has_a_fix() -> None:
    (one,) = output(Subject.SOCKET, daemon=replace(DAEMON, socket_state=SocketState.DENIED, socket_group=None))

    assert one.fix == "`usermod -aG the socket's group alice`, then log in again"
    assert one.detail == "alice may not connect to /run/gpuenergyd/gpuenergyd.sock"


@pytest.mark.parametrize(
    ("trouble", "fix"),
    [
        ("of a newer version", "install that version again"),
        ("of an older version", "start the daemon; it upgrades the database"),
        ("not a history", "set another file in database_url"),
        ("Permission denied", "run this command as root or as the daemon's user"),
        ("permission denied", "run this command as root or as the daemon's user"),
        ("unable to open database file", "run this command as root or as the daemon's user"),
        ("malformed", "start the daemon; it moves the damaged database"),
    ],
)
def test_each_database_problem_has_its_own_fix(trouble: str, fix: str) -> None:
    (one,) = output(Subject.DATABASE, history=HistoryFacts("/h", True, trouble))

    assert one.fix is not None
    assert one.fix.startswith(fix)


def test_a_missing_database_is_fine_and_unknown_facts_are_not_reported() -> None:
    assert details(Subject.DATABASE, history=HistoryFacts("/h", is_there=False)) == [
        (Level.FINE, "no database yet at /h; the daemon creates it")
    ]
    assert output(Subject.DATABASE, history=None) == []
    assert output(Subject.DISK, disk=None) == []
    aside = details(Subject.DATABASE, history=HistoryFacts("/h", True, set_aside=("/a", "/b")))
    assert [level for level, _ in aside] == [Level.FINE, Level.NOTE, Level.NOTE]


def test_room_for_the_reserve_of_128_mib_is_enough() -> None:
    enough = DiskFacts("/", 128 * 1024 * 1024, is_read_only=False)

    assert details(Subject.DISK, disk=enough) == [(Level.FINE, "0.1 GiB free in /")]
    assert details(Subject.DISK, disk=replace(enough, free_bytes=enough.free_bytes - 1)) == [
        (Level.DEGRADED, "only 0.1 GiB free in /")
    ]


def test_records_more_than_five_minutes_in_the_future_mean_a_wrong_clock() -> None:
    ahead = HistoryFacts("/h", True, last_record_at=NOW + timedelta(minutes=5))

    assert details(Subject.TIME, history=ahead) == [(Level.FINE, "the clock is synchronised")]
    late = replace(ahead, last_record_at=NOW + timedelta(minutes=5, seconds=1))
    assert details(Subject.TIME, history=late) == [
        (Level.DEGRADED, "the clock is at 2026-03-01 12:00 UTC, but the database has records up to 2026-03-01 12:05")
    ]


def test_unknown_clock_synchronisation_is_reported_as_such() -> None:
    fine = [(Level.FINE, "synchronisation is not reported on this host")]

    assert details(Subject.TIME, is_time_synchronised=None) == fine
    assert details(Subject.TIME, is_time_synchronised=None, history=None) == fine


def test_an_intensity_is_old_after_six_hours() -> None:
    edge = CarbonFacts("GB", newest_at=NOW - timedelta(hours=6))

    assert details(Subject.CARBON, carbon=edge) == [(Level.FINE, "zone GB: values up to 2026-03-01 06:00 UTC")]
    old = replace(edge, newest_at=NOW - timedelta(hours=6) - SECOND)
    assert details(Subject.CARBON, carbon=old) == [
        (Level.DEGRADED, "zone GB: the newest value is from 2026-03-01 05:59 UTC")
    ]
    assert details(Subject.CARBON, carbon=CarbonFacts("GB")) == [(Level.DEGRADED, "zone GB: no values")]
    assert details(Subject.CARBON, carbon=None) == [(Level.FINE, "none configured; targets use a constant slowdown")]


def units(active: dict[str, str], enabled: dict[str, str] | None = None) -> UnitFacts:
    return UnitFacts(True, active, {CORE: "enabled"} if enabled is None else enabled)


def test_each_failed_unit_is_named() -> None:
    found = details(Subject.UNITS, units=units({CORE: "failed", "a.service": "failed", "b.service": "active"}))

    assert found == [(Level.DEGRADED, "a.service has failed"), (Level.DEGRADED, "gpuenergyd.service has failed")]


def test_healthy_units_are_listed() -> None:
    assert details(Subject.UNITS, units=units({CORE: "active", "b.service": "inactive"})) == [
        (Level.FINE, "b.service inactive, gpuenergyd.service active")
    ]


FETCHED = CarbonFacts("GB", newest_at=NOW, is_fetched=True)


@pytest.mark.parametrize(
    ("active", "carbon", "is_missed"),
    [
        ({CORE: "active", FETCHER: "inactive"}, FETCHED, True),
        ({CORE: "active"}, FETCHED, True),
        ({CORE: "active", FETCHER: "active"}, FETCHED, False),
        ({CORE: "active", FETCHER: "activating"}, FETCHED, False),
        ({CORE: "inactive"}, FETCHED, False),  # nobody wants to know now
        ({CORE: "active"}, replace(FETCHED, is_fetched=False), False),
        ({CORE: "active"}, None, False),
    ],
)
def test_a_missing_fetcher_is_reported_only_if_it_is_required(
    active: dict[str, str], carbon: CarbonFacts | None, *, is_missed: bool
) -> None:
    found = details(Subject.UNITS, units=units(active), carbon=carbon)

    assert any("intensities of zone GB are not fetched" in detail for _, detail in found) is is_missed
    assert not is_missed or [level for level, _ in found] == [Level.DEGRADED]


def test_a_unit_that_nothing_starts_at_boot_is_noted() -> None:
    disabled = units({CORE: "active"}, {CORE: "disabled"})

    assert [level for level, _ in details(Subject.UNITS, units=disabled)] == [Level.NOTE]
    by_socket = units({CORE: "active"}, {CORE: "disabled", "gpuenergyd.socket": "enabled"})
    assert [level for level, _ in details(Subject.UNITS, units=by_socket)] == [Level.FINE]
    assert [level for level, _ in details(Subject.UNITS, units=units({CORE: "active"}, {CORE: "static"}))] == [
        Level.FINE
    ]


def test_a_rival_service_is_reported_in_addition() -> None:
    found = details(Subject.UNITS, units=replace(units({CORE: "active"}), rivals=("a", "b")))

    assert [level for level, _ in found] == [Level.DEGRADED, Level.DEGRADED, Level.FINE]
