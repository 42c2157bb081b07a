"""What is wrong with a host, and the fix: judged from facts that somebody else has looked up.

A diagnosis is degraded where something does not work or would hurt, and a note where it could be better. Nothing here
looks at the host.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from gpuenergyd.core.host.facts import HistoryFacts, HostFacts, SocketState

_NO_ROOM_BYTES = 128 * 2**20
"""Below this the history cannot even keep its reserve."""
_FUTURE = timedelta(minutes=5)
_OLD_INTENSITY = timedelta(hours=6)
_UNIT = "gpuenergyd.service"
_FETCHER_UNIT = "gpuenergyd-carbon.service"


class Subject(StrEnum):
    """What is looked at, in the order in which things depend on each other."""

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
    """How bad it is."""

    FINE = "fine"
    NOTE = "note"
    DEGRADED = "degraded"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One thing that was looked at; whatever is not fine comes with its fix."""

    subject: Subject
    level: Level
    detail: str
    fix: str | None = None


def diagnose(facts: HostFacts) -> tuple[Diagnosis, ...]:
    """Return what there is to say, in the order of `Subject`."""
    found = [
        *_settings(facts),
        *_driver(facts),
        *_permissions(facts),
        *_persistence_mode(facts),
        *_clocks(facts),
        *_socket(facts),
        *_daemon(facts),
        *_database(facts),
        *_disk(facts),
        *_time(facts),
        *_carbon(facts),
        *_units(facts),
    ]
    return tuple(found)


def _settings(facts: HostFacts) -> Iterator[Diagnosis]:
    if facts.settings_trouble is None:
        yield _fine(Subject.SETTINGS, "they can be read")
    else:
        fix = "correct it; the daemon does not start before"
        yield Diagnosis(Subject.SETTINGS, Level.DEGRADED, facts.settings_trouble, fix)


def _driver(facts: HostFacts) -> Iterator[Diagnosis]:
    driver = facts.driver
    if driver.trouble is not None:
        problem, _, remedy = driver.trouble.partition("; ")
        yield Diagnosis(Subject.DRIVER, Level.DEGRADED, problem, remedy or "`nvidia-smi` tells more")
        return
    names = ", ".join(gpu.name for gpu in driver.gpus)
    yield _fine(Subject.DRIVER, f"{driver.kind}: {len(driver.gpus)} GPUs: {names}")


def _permissions(facts: HostFacts) -> Iterator[Diagnosis]:
    daemon, caller = facts.daemon, facts.caller
    if daemon.socket_state is SocketState.ANSWERS:
        if daemon.is_observing:
            yield _fine(Subject.PERMISSIONS, "the daemon only observes, as its settings say (mode = 'observe')")
            return
        for what in daemon.uncontrolled_gpus:
            yield Diagnosis(
                Subject.PERMISSIONS,
                Level.DEGRADED,
                f"the daemon may not change {what}",
                "give the GPU worker CAP_SYS_ADMIN: run it as root or by its unit; in a container --cap-add SYS_ADMIN",
            )
        if not daemon.uncontrolled_gpus:
            yield _fine(Subject.PERMISSIONS, "the daemon may change every GPU")
    elif caller.may_change_gpus:
        yield _fine(Subject.PERMISSIONS, f"a daemon of {caller.user} could change GPUs")
    else:
        yield Diagnosis(
            Subject.PERMISSIONS,
            Level.NOTE,
            f"a daemon of {caller.user} could measure and not change any GPU",
            "start it as root or by its unit, which gives the GPU worker CAP_SYS_ADMIN",
        )


def _persistence_mode(facts: HostFacts) -> Iterator[Diagnosis]:
    off = [gpu.name for gpu in facts.driver.gpus if gpu.is_persistent is False]
    for name in off:
        yield Diagnosis(
            Subject.PERSISTENCE_MODE,
            Level.NOTE,
            f"off on {name}: without a client the driver forgets clocks and starts slowly",
            "`systemctl enable --now nvidia-persistenced`, or `nvidia-smi -pm 1`",
        )
    if not off:
        known = any(gpu.is_persistent is not None for gpu in facts.driver.gpus)
        yield _fine(Subject.PERSISTENCE_MODE, "on" if known else "no GPU here tells")


def _clocks(facts: HostFacts) -> Iterator[Diagnosis]:
    tunable = [f"{gpu.num_clocks} of {gpu.name}" for gpu in facts.driver.gpus if gpu.observe_only_reason is None]
    for gpu in facts.driver.gpus:
        if gpu.observe_only_reason is not None:
            fix = "turn MIG off to have it tuned" if "MIG" in gpu.observe_only_reason else "install a newer driver"
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
            f"not known whether any GPU was left slowed down: {journal.unreadable}",
            "ask again as root",
        )
    elif journal is not None and journal.gpu_uuids:
        yield Diagnosis(
            Subject.CLOCKS,
            Level.DEGRADED,
            f"a daemon that is gone has left {', '.join(journal.gpu_uuids)} changed",
            f"`gpuenergyd restore --journal {journal.path}`, or start the daemon",
        )
    elif tunable or not facts.driver.gpus:
        yield _fine(Subject.CLOCKS, f"nothing was left changed; clocks to choose from: {', '.join(tunable) or 'none'}")


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
                f"{daemon.socket_path} takes connections and does not answer: {daemon.detail}",
                f"`systemctl restart {_UNIT}`; its log says more: `journalctl -u {_UNIT}`",
            )
        case SocketState.STALE:
            detail = f"nobody listens on {daemon.socket_path}: a daemon has died"
            yield Diagnosis(Subject.SOCKET, Level.DEGRADED, detail, "start the daemon: it replaces a stale socket")
        case SocketState.ABSENT:
            fix = f"`systemctl start {_UNIT}`, or `gpuenergyd serve`"
            yield Diagnosis(Subject.SOCKET, Level.NOTE, f"no daemon runs at {daemon.socket_path}", fix)


def _daemon(facts: HostFacts) -> Iterator[Diagnosis]:
    daemon = facts.daemon
    if daemon.socket_state is not SocketState.ANSWERS:
        return
    for reason in daemon.degraded_reasons:
        fix = f"`journalctl -u {_UNIT}` says since when and why; `gpuenergyd status` shows when it is over"
        yield Diagnosis(Subject.DAEMON, Level.DEGRADED, reason, fix)
    if not daemon.degraded_reasons:
        yield _fine(Subject.DAEMON, "it has nothing to complain of")


def _database(facts: HostFacts) -> Iterator[Diagnosis]:
    history = facts.history
    if history is None:
        return
    if history.trouble is not None:
        yield Diagnosis(Subject.DATABASE, Level.DEGRADED, history.trouble, _database_fix(history))
    elif not history.is_there:
        yield _fine(Subject.DATABASE, f"no history yet at {history.path}: the first daemon makes it")
    else:
        yield _fine(Subject.DATABASE, f"{history.path} can be read")
    for kept in history.set_aside:
        yield Diagnosis(
            Subject.DATABASE,
            Level.NOTE,
            f"a damaged history was set aside as {kept}",
            f"`sqlite3 {kept} .recover` shows what can be saved; remove it when it is not needed",
        )


def _database_fix(history: HistoryFacts) -> str:
    assert history.trouble is not None
    if "newer" in history.trouble:
        return "install that version again, or move the file away; GPUs are controlled without it"
    if "older" in history.trouble:
        return "start the daemon: it upgrades the file"
    if "not a history" in history.trouble:
        return "name another file in database_url: this one belongs to another program and is left alone"
    if "ermission" in history.trouble or "unable to open" in history.trouble:
        return "ask again as root or as the daemon's user"
    return "start the daemon: it sets a damaged file aside, names it, and begins a new one"


def _disk(facts: HostFacts) -> Iterator[Diagnosis]:
    disk = facts.disk
    if disk is None:
        return
    room = f"{disk.free_bytes / 2**30:.1f} GiB free in {disk.folder}"
    if disk.is_read_only:
        fix = f"mount it for writing: `mount -o remount,rw` on the file system of {disk.folder}"
        yield Diagnosis(Subject.DISK, Level.DEGRADED, f"{disk.folder} is read-only: nothing can be recorded", fix)
    elif disk.free_bytes < _NO_ROOM_BYTES:
        fix = "make room: until then the history keeps jobs and control events and sheds readings"
        yield Diagnosis(Subject.DISK, Level.DEGRADED, f"only {room}", fix)
    else:
        yield _fine(Subject.DISK, room)


def _time(facts: HostFacts) -> Iterator[Diagnosis]:
    newest = facts.history.last_record_at if facts.history is not None else None
    if newest is not None and newest > facts.now + _FUTURE:
        detail = f"the clock stands at {facts.now:%F %H:%M} UTC and the history goes on to {newest:%F %H:%M}"
        yield Diagnosis(Subject.TIME, Level.DEGRADED, detail, "set the clock: `timedatectl set-ntp true`")
    elif facts.is_time_synchronised is False:
        detail = "the clock is not synchronised: hours of the history and of carbon intensities may not match"
        level = Level.NOTE if facts.carbon is None else Level.DEGRADED
        yield Diagnosis(Subject.TIME, level, detail, "`timedatectl set-ntp true`, or install chrony")
    else:
        known = facts.is_time_synchronised is not None
        yield _fine(Subject.TIME, "the clock is synchronised" if known else "nobody here tells whether it is right")


def _carbon(facts: HostFacts) -> Iterator[Diagnosis]:
    carbon = facts.carbon
    if carbon is None:
        yield _fine(Subject.CARBON, "none is configured: targets use a constant slowdown")
    elif carbon.trouble is not None:
        fix = f"test the source: `gpuenergyd carbon now --zone {carbon.zone}`; until it works the slowdown is constant"
        yield Diagnosis(Subject.CARBON, Level.DEGRADED, f"zone {carbon.zone}: {carbon.trouble}", fix)
    elif carbon.newest_at is None or carbon.newest_at < facts.now - _OLD_INTENSITY:
        age = f"the newest value is of {carbon.newest_at:%F %H:%M} UTC" if carbon.newest_at else "no value at all"
        fix = f"`gpuenergyd carbon now --zone {carbon.zone}` shows what the source says now"
        yield Diagnosis(Subject.CARBON, Level.DEGRADED, f"zone {carbon.zone}: {age}", fix)
    else:
        yield _fine(Subject.CARBON, f"zone {carbon.zone}: values up to {carbon.newest_at:%F %H:%M} UTC")


def _units(facts: HostFacts) -> Iterator[Diagnosis]:
    units = facts.units
    if not units.is_managed:
        yield Diagnosis(
            Subject.UNITS,
            Level.NOTE,
            "no systemd here: nobody restarts a daemon that died or restores after a crash of everything",
            "run `gpuenergyd restore` whenever the daemon has ended, as a supervisor's last step",
        )
        return
    for rival in units.rivals:
        yield Diagnosis(
            Subject.UNITS,
            Level.DEGRADED,
            f"{rival} is active and sets the same clocks",
            f"`systemctl disable --now {rival}`",
        )
    failed = sorted(unit for unit, state in units.active_states.items() if state == "failed")
    for unit in failed:
        fix = f"`journalctl -u {unit}` says why; then `systemctl reset-failed {unit} && systemctl start {unit}`"
        yield Diagnosis(Subject.UNITS, Level.DEGRADED, f"{unit} has failed", fix)
    carbon, fetcher = facts.carbon, units.active_states.get(_FETCHER_UNIT, "not installed")
    is_unfetched = carbon is not None and carbon.is_fetched and fetcher in {"inactive", "not installed"}
    if carbon is not None and is_unfetched and units.active_states.get(_UNIT) == "active":
        fix = "`gpuenergyd install`" if fetcher == "not installed" else f"`systemctl start {_FETCHER_UNIT}`"
        detail = f"{_FETCHER_UNIT} is {fetcher}: nobody asks what zone {carbon.zone} emits"
        yield Diagnosis(Subject.UNITS, Level.DEGRADED, detail, fix)
    if _UNIT not in units.active_states:
        yield Diagnosis(
            Subject.UNITS, Level.NOTE, "none is installed: the daemon starts by hand only", "`gpuenergyd install`"
        )
    elif units.enabled_states.get(_UNIT) == "disabled" and "enabled" not in units.enabled_states.values():
        fix = f"`systemctl enable --now {_UNIT}`"
        yield Diagnosis(Subject.UNITS, Level.NOTE, f"{_UNIT} is installed and does not start at boot", fix)
    elif not failed and not is_unfetched:
        states = ", ".join(f"{unit} {state}" for unit, state in sorted(units.active_states.items()))
        yield _fine(Subject.UNITS, states)


def _fine(subject: Subject, detail: str) -> Diagnosis:
    return Diagnosis(subject, Level.FINE, detail)
