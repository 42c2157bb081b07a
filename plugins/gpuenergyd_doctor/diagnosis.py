"""Diagnosis of a host from collected facts: problems and suggested fixes.

Level `degraded` marks what does not work or does harm, `note` what could be better.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from gpuenergyd.count_text import count_text
from gpuenergyd_doctor.facts import GpuFacts, HistoryFacts, HostFacts, SocketState

_MIN_FREE_BYTES = 128 * 2**20
"""Minimum free space: the reserve of the history database."""
_FUTURE = timedelta(minutes=5)
_OLD_INTENSITY = timedelta(hours=6)
_UNIT = "gpuenergyd.service"
_FETCHER_UNIT = "gpuenergyd-carbon.service"
_NO_GPU_FIX = "check that the host has a GPU and that `nvidia-smi` lists it"


class Subject(StrEnum):
    """Checked component; a component comes after those that it depends on."""

    SETTINGS = "settings"
    DRIVER = "driver"
    PERMISSIONS = "permissions"
    PERSISTENCE_MODE = "persistence mode"
    CLOCKS = "clocks"
    SOCKET = "socket"
    DAEMON = "daemon"
    DATABASE = "database"
    DISK = "disk"
    TIME = "time"
    CARBON = "carbon source"
    UNITS = "units"


class Level(StrEnum):
    """Severity of a diagnosis."""

    FINE = "fine"
    NOTE = "note"
    DEGRADED = "degraded"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Result of one check; it has a fix unless the level is fine."""

    subject: Subject
    level: Level
    detail: str
    fix: str | None = None


def diagnose(facts: HostFacts) -> tuple[Diagnosis, ...]:
    """Return the results of all checks in the order of `Subject`."""
    found = [
        *_settings(facts), *_driver(facts), *_permissions(facts), *_persistence_mode(facts), *_clocks(facts),
        *_socket(facts), *_daemon(facts), *_database(facts), *_disk(facts), *_time(facts), *_carbon(facts),
        *_units(facts),
    ]  # fmt: skip
    return tuple(found)


def _settings(facts: HostFacts) -> Iterator[Diagnosis]:
    if facts.settings_trouble is None:
        yield _fine(Subject.SETTINGS, "valid")
    else:
        fix = "correct the setting; the daemon does not start with it"
        yield Diagnosis(Subject.SETTINGS, Level.DEGRADED, facts.settings_trouble, fix)


def _driver(facts: HostFacts) -> Iterator[Diagnosis]:
    driver = facts.driver
    if driver.trouble is not None:
        problem, _, remedy = driver.trouble.partition("; ")
        yield Diagnosis(Subject.DRIVER, Level.DEGRADED, problem, remedy or "see the output of `nvidia-smi`")
        return
    if not driver.gpus:
        fix = f"for the cause see `journalctl -u {_UNIT}`" if not facts.daemon.has_worker else _NO_GPU_FIX
        yield Diagnosis(Subject.DRIVER, Level.DEGRADED, f"{driver.kind}: no GPU found", fix)
        return
    names = ", ".join(gpu.name for gpu in driver.gpus)
    yield _fine(Subject.DRIVER, f"{driver.kind}: {count_text(len(driver.gpus), 'GPU')}: {names}")


def _permissions(facts: HostFacts) -> Iterator[Diagnosis]:
    daemon, caller = facts.daemon, facts.caller
    if daemon.socket_state is SocketState.ANSWERS:
        if daemon.mode_note is not None:
            problem, _, remedy = daemon.mode_note.partition("; ")
            yield Diagnosis(Subject.PERMISSIONS, Level.NOTE, problem, remedy)
            return
        if daemon.is_observing:
            yield _fine(Subject.PERMISSIONS, "the daemon only observes (setting mode = 'observe')")
            return
        if not daemon.has_worker:
            yield Diagnosis(
                Subject.PERMISSIONS,
                Level.DEGRADED,
                "the daemon can neither read nor change a GPU: its GPU worker is not running",
                f"for the cause see `journalctl -u {_UNIT}`, or the output of `gpuenergyd serve`",
            )
            return
        for what in daemon.uncontrolled_gpus:
            yield Diagnosis(
                Subject.PERMISSIONS,
                Level.DEGRADED,
                f"the daemon may not change {what}",
                "run the GPU worker with CAP_SYS_ADMIN: as root, by its unit, or in a container with that capability;"
                " or permit it single programs that lock clocks: driver = 'command'",
            )
        if not daemon.uncontrolled_gpus:
            yield _fine(Subject.PERMISSIONS, "the daemon may change all GPUs")
    elif caller.may_change_gpus:
        yield _fine(Subject.PERMISSIONS, f"a daemon run by {caller.user} may change GPUs")
    else:
        yield Diagnosis(
            Subject.PERMISSIONS,
            Level.NOTE,
            f"a daemon run by {caller.user} can measure GPUs but not change them",
            "start the daemon as root or by its unit, which gives the GPU worker CAP_SYS_ADMIN; or permit it single"
            " programs that lock clocks: driver = 'command'",
        )


def _persistence_mode(facts: HostFacts) -> Iterator[Diagnosis]:
    off = [gpu.name for gpu in facts.driver.gpus if gpu.is_persistent is False]
    for name in off:
        yield Diagnosis(
            Subject.PERSISTENCE_MODE,
            Level.NOTE,
            f"off on {name}: without clients the driver resets clocks and starts slowly",
            "`systemctl enable --now nvidia-persistenced`, or `nvidia-smi -pm 1`",
        )
    if not off:
        known = any(gpu.is_persistent is not None for gpu in facts.driver.gpus)
        yield _fine(Subject.PERSISTENCE_MODE, "on" if known else "not reported by any GPU")


def _clocks(facts: HostFacts) -> Iterator[Diagnosis]:
    tunable = [gpu for gpu in facts.driver.gpus if gpu.observe_only_reason is None]
    for gpu in facts.driver.gpus:
        if gpu.observe_only_reason is not None:
            fix = "disable MIG to allow tuning" if "MIG" in gpu.observe_only_reason else "install a newer driver"
            yield Diagnosis(
                Subject.CLOCKS, Level.DEGRADED, f"{gpu.name} cannot be tuned: {gpu.observe_only_reason}", fix
            )
    journal = facts.journal
    if journal is not None and journal.damage is not None:
        yield Diagnosis(
            Subject.CLOCKS, Level.DEGRADED, journal.damage, "`gpuenergyd restore --all` resets the clocks of every GPU"
        )
    elif journal is not None and journal.unreadable is not None:
        yield Diagnosis(
            Subject.CLOCKS,
            Level.NOTE,
            f"cannot check whether GPUs are left slowed down: {journal.unreadable}",
            "run this command as root",
        )
    elif journal is not None and journal.gpu_uuids:
        yield Diagnosis(
            Subject.CLOCKS,
            Level.DEGRADED,
            f"a daemon that is no longer running left {', '.join(journal.gpu_uuids)} changed",
            f"`gpuenergyd restore --journal {journal.path}`, or start the daemon",
        )
    elif not facts.daemon.has_worker:
        yield Diagnosis(
            Subject.CLOCKS,
            Level.NOTE,
            "cannot check whether GPUs are left slowed down: the GPU worker is not running",
            "the next GPU worker restores every GPU that the last one changed",
        )
    elif facts.driver.gpus and tunable:
        yield _fine(Subject.CLOCKS, f"no GPU is left changed; {', '.join(map(_clocks_text, tunable))}")
    elif not facts.driver.gpus:
        yield _fine(Subject.CLOCKS, "no GPU is left changed")


def _clocks_text(gpu: GpuFacts) -> str:
    if gpu.num_clocks is None:
        return f"{gpu.name}: its SM clocks are known to the daemon only"
    return f"{gpu.name}: {gpu.num_clocks or 'no'} SM clocks that can be set"


def _socket(facts: HostFacts) -> Iterator[Diagnosis]:
    daemon = facts.daemon
    match daemon.socket_state:
        case SocketState.ANSWERS:
            yield _fine(Subject.SOCKET, f"a daemon answers on {daemon.socket_path}")
        case SocketState.DENIED:
            group = daemon.socket_group or "the socket's group"
            fix = f"`usermod -aG {group} {facts.caller.user}`, then log in again"
            detail = f"{facts.caller.user} may not connect to {daemon.socket_path}"
            yield Diagnosis(Subject.SOCKET, Level.DEGRADED, detail, fix)
        case SocketState.SILENT:
            yield Diagnosis(
                Subject.SOCKET,
                Level.DEGRADED,
                f"{daemon.socket_path} accepts connections but does not answer: {daemon.detail}",
                f"`systemctl restart {_UNIT}`; for the cause see `journalctl -u {_UNIT}`",
            )
        case SocketState.STALE:
            detail = f"no process listens on {daemon.socket_path}: the daemon has died"
            yield Diagnosis(Subject.SOCKET, Level.DEGRADED, detail, "start the daemon; it replaces the stale socket")
        case SocketState.ABSENT:
            fix = f"`systemctl start {_UNIT}`, or `gpuenergyd serve`"
            yield Diagnosis(Subject.SOCKET, Level.NOTE, f"no daemon runs at {daemon.socket_path}", fix)


def _daemon(facts: HostFacts) -> Iterator[Diagnosis]:
    daemon = facts.daemon
    if daemon.socket_state is not SocketState.ANSWERS:
        return
    for reason in daemon.degraded_reasons:
        fix = f"for the cause see `journalctl -u {_UNIT}`; for the current state `gpuenergyd status`"
        yield Diagnosis(Subject.DAEMON, Level.DEGRADED, reason, fix)
    if daemon.late_plans is not None:
        problem, _, fix = daemon.late_plans.partition("; ")
        yield Diagnosis(Subject.DAEMON, Level.NOTE, f"policy host: {problem}", fix)
    if not daemon.degraded_reasons and daemon.late_plans is None:
        yield _fine(Subject.DAEMON, "healthy")


def _database(facts: HostFacts) -> Iterator[Diagnosis]:
    history = facts.history
    if history is None:
        return
    if history.trouble is not None:
        yield Diagnosis(Subject.DATABASE, Level.DEGRADED, history.trouble, _database_fix(history))
    elif not history.is_there:
        yield _fine(Subject.DATABASE, f"no database yet at {history.path}; the daemon creates it")
    else:
        yield _fine(Subject.DATABASE, f"{history.path} is readable")
    for kept in history.set_aside:
        yield Diagnosis(
            Subject.DATABASE,
            Level.NOTE,
            f"a damaged database was moved to {kept}",
            f"recover data with `sqlite3 {kept} .recover`; remove the file when it is not needed",
        )


def _database_fix(history: HistoryFacts) -> str:
    assert history.trouble is not None
    if "newer" in history.trouble:
        return "install that version again, or move the file away; GPU control works without it"
    if "older" in history.trouble:
        return "start the daemon; it upgrades the database"
    if "not a history" in history.trouble:
        return "set another file in database_url; this one belongs to another program and is not changed"
    if "ermission" in history.trouble or "unable to open" in history.trouble:
        return "run this command as root or as the daemon's user"
    return "start the daemon; it moves the damaged database away and creates a new one"


def _disk(facts: HostFacts) -> Iterator[Diagnosis]:
    disk = facts.disk
    if disk is None:
        return
    room = f"{disk.free_bytes / 2**30:.1f} GiB free in {disk.folder}"
    if disk.is_read_only:
        fix = f"remount the file system of {disk.folder} with `mount -o remount,rw`"
        yield Diagnosis(Subject.DISK, Level.DEGRADED, f"{disk.folder} is read-only; nothing can be recorded", fix)
    elif disk.free_bytes < _MIN_FREE_BYTES:
        fix = "free disk space; until then only jobs and control events are recorded"
        yield Diagnosis(Subject.DISK, Level.DEGRADED, f"only {room}", fix)
    else:
        yield _fine(Subject.DISK, room)


def _time(facts: HostFacts) -> Iterator[Diagnosis]:
    newest = facts.history.last_record_at if facts.history is not None else None
    if newest is not None and newest > facts.now + _FUTURE:
        detail = f"the clock is at {facts.now:%F %H:%M} UTC, but the database has records up to {newest:%F %H:%M}"
        yield Diagnosis(Subject.TIME, Level.DEGRADED, detail, "set the clock: `timedatectl set-ntp true`")
    elif facts.is_time_synchronised is False:
        detail = "the clock is not synchronised; records and carbon intensities may not match"
        level = Level.NOTE if facts.carbon is None else Level.DEGRADED
        yield Diagnosis(Subject.TIME, level, detail, "`timedatectl set-ntp true`, or install chrony")
    else:
        known = facts.is_time_synchronised is not None
        yield _fine(
            Subject.TIME, "the clock is synchronised" if known else "synchronisation is not reported on this host"
        )


def _carbon(facts: HostFacts) -> Iterator[Diagnosis]:
    carbon = facts.carbon
    if carbon is None:
        yield _fine(Subject.CARBON, "none configured; targets use a constant slowdown")
    elif carbon.trouble is not None:
        fix = f"test the source with `gpuenergyd carbon now --zone {carbon.zone}`; meanwhile the slowdown is constant"
        yield Diagnosis(Subject.CARBON, Level.DEGRADED, f"zone {carbon.zone}: {carbon.trouble}", fix)
    elif carbon.newest_at is None or carbon.newest_at < facts.now - _OLD_INTENSITY:
        age = f"the newest value is from {carbon.newest_at:%F %H:%M} UTC" if carbon.newest_at else "no values"
        fix = f"see the source's current values with `gpuenergyd carbon now --zone {carbon.zone}`"
        yield Diagnosis(Subject.CARBON, Level.DEGRADED, f"zone {carbon.zone}: {age}", fix)
    else:
        yield _fine(Subject.CARBON, f"zone {carbon.zone}: values up to {carbon.newest_at:%F %H:%M} UTC")


def _units(facts: HostFacts) -> Iterator[Diagnosis]:
    units = facts.units
    if not units.is_managed:
        yield Diagnosis(
            Subject.UNITS,
            Level.NOTE,
            "no systemd: a crashed daemon is not restarted, and GPUs are not restored after a crash of all processes",
            "run `gpuenergyd restore` after every end of the daemon, for instance as the last step of a supervisor",
        )
        return
    for rival in units.rivals:
        yield Diagnosis(
            Subject.UNITS,
            Level.DEGRADED,
            f"{rival} is active and sets clocks of the same GPUs",
            f"`systemctl disable --now {rival}`",
        )
    failed = sorted(unit for unit, state in units.active_states.items() if state == "failed")
    for unit in failed:
        fix = (
            f"for the cause see `journalctl -u {unit}`; then `systemctl reset-failed {unit} && systemctl start {unit}`"
        )
        yield Diagnosis(Subject.UNITS, Level.DEGRADED, f"{unit} has failed", fix)
    carbon, fetcher = facts.carbon, units.active_states.get(_FETCHER_UNIT, "not installed")
    is_unfetched = carbon is not None and carbon.is_fetched and fetcher in {"inactive", "not installed"}
    if carbon is not None and is_unfetched and units.active_states.get(_UNIT) == "active":
        fix = "`gpuenergyd install`" if fetcher == "not installed" else f"`systemctl start {_FETCHER_UNIT}`"
        detail = f"{_FETCHER_UNIT} is {fetcher}: intensities of zone {carbon.zone} are not fetched"
        yield Diagnosis(Subject.UNITS, Level.DEGRADED, detail, fix)
    if _UNIT not in units.active_states:
        yield Diagnosis(
            Subject.UNITS,
            Level.NOTE,
            "no unit is installed; the daemon has to be started manually",
            "`gpuenergyd install`",
        )
    elif units.enabled_states.get(_UNIT) == "disabled" and "enabled" not in units.enabled_states.values():
        fix = f"`systemctl enable --now {_UNIT}`"
        yield Diagnosis(Subject.UNITS, Level.NOTE, f"{_UNIT} is installed but does not start at boot", fix)
    elif not failed and not is_unfetched:
        states = ", ".join(f"{unit} {state}" for unit, state in sorted(units.active_states.items()))
        yield _fine(Subject.UNITS, states)


def _fine(subject: Subject, detail: str) -> Diagnosis:
    return Diagnosis(subject, Level.FINE, detail)
