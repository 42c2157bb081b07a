"""Collects the facts that `gpuenergyd doctor` diagnoses, without creating, locking or changing anything."""

import contextlib
import ctypes
import grp
import json
import os
import pwd
import subprocess
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from gpuenergyd.core.host.energy_scope import EnergyScope
from gpuenergyd.daemon.settings import COMMAND, FETCHER_UNIT_DIR, NVML, SIMULATED, Settings, load_settings
from gpuenergyd.errors import CarbonSourceError, GpuEnergyError, JournalError, StoreError, UsageError
from gpuenergyd.gpu.device import GpuDriver, GpuIdentity, HasSettings
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

T = TypeVar("T")

_DRIVER_TIMEOUT_S = 10.0
_SYSTEMCTL_TIMEOUT_S = 5.0
_CAP_SYS_ADMIN = 1 << 21
_TIMEX_BYTES = 1024
"""At least the size of `struct timex`; a zeroed struct reads the clock state and sets nothing."""
_CLOCK_UNSYNCHRONISED = 5
_CONFLICTING_UNITS = ("zeusd.service", "geopm.service")
_UNITS = ("gpuenergyd.service", "gpuenergyd-gpu.service", "gpuenergyd-carbon.service", "gpuenergyd-restore.service")


def collect_host_facts(config: Path | None, socket: str | None) -> HostFacts:
    """Return the facts about this host, its daemon and the calling user."""
    settings: Settings | None = None
    settings_trouble: str | None = None
    try:
        settings = load_settings(config)
    except UsageError as error:
        settings_trouble = str(error)
    status, daemon = _daemon(_socket_path(socket, settings))
    now = datetime.now(tz=UTC)
    history = _history(settings, status)
    return HostFacts(
        now=now,
        driver=_driver(settings, status),
        caller=_caller(settings),
        daemon=daemon,
        units=_units(),
        is_time_synchronised=_is_time_synchronised(),
        settings_trouble=settings_trouble,
        journal=None if settings is None or status is not None else _journal(settings.journal_path),
        history=history,
        disk=None if history is None else _disk(Path(history.path).parent),
        carbon=None if settings is None else _carbon(settings, status),
    )


def _socket_path(socket: str | None, settings: Settings | None) -> str:
    from gpuenergyd.client.environment import find_socket_path  # noqa: PLC0415  start fast

    found = find_socket_path(socket)
    is_named = socket is not None or bool(os.environ.get("GPUENERGYD_SOCKET"))
    if not is_named and settings is not None and (_exists(settings.socket_path) or not _exists(Path(found))):
        return str(settings.socket_path)
    return found


def _daemon(path: str) -> tuple[dict[str, Any] | None, DaemonFacts]:
    from gpuenergyd.client.connection import HttpConnection  # noqa: PLC0415

    group = None
    with contextlib.suppress(OSError, KeyError):
        group = grp.getgrgid(Path(path).stat().st_gid).gr_name
    connection = HttpConnection(path)
    try:
        code, body = connection.request("GET", "/v1/status", limit_s=10.0)
        status = json.loads(body)
    except (FileNotFoundError, NotADirectoryError):
        return None, DaemonFacts(path, SocketState.ABSENT)
    except PermissionError:
        return None, DaemonFacts(path, SocketState.DENIED, group)
    except ConnectionRefusedError:
        return None, DaemonFacts(path, SocketState.STALE, group)
    except (OSError, ValueError, GpuEnergyError) as error:
        return None, DaemonFacts(path, SocketState.SILENT, group, detail=str(error) or type(error).__name__)
    finally:
        connection.close()
    if code != 200 or not isinstance(status, dict):
        return None, DaemonFacts(path, SocketState.SILENT, group, detail=f"/v1/status returned HTTP {code}")
    return status, DaemonFacts(
        path,
        SocketState.ANSWERS,
        group,
        is_observing=status.get("mode") == "observe",
        mode_note=status.get("mode_note"),
        has_worker=bool(status.get("worker", {}).get("is_alive", True)),
        degraded_reasons=tuple(status.get("degraded_reasons", ())),
        uncontrolled_gpus=tuple(g["gpu_uuid"] for g in status.get("gpus", ()) if g["state"] == "observe_only"),
        late_plans=status.get("policy_host", {}).get("trouble"),
    )


def driver_in_use(config: Path | None, socket: str | None) -> tuple[str, Path | None, str]:
    """Return name and file of the driver that the daemon uses, or would use, and the path of the daemon's socket."""
    settings = load_settings(config)
    path = _socket_path(socket, settings)
    return *_driver_and_file(settings, _daemon(path)[0]), path


def _driver_and_file(settings: Settings | None, status: dict[str, Any] | None) -> tuple[str, Path | None]:
    configured = settings.driver if settings is not None else NVML
    kind = str(status["driver"] if status is not None else configured)
    world = settings.driver_path if settings is not None else None
    if status is not None and (of_daemon := status.get("files", {}).get("world_path")):
        world = Path(of_daemon)
    return kind, world


def _driver(settings: Settings | None, status: dict[str, Any] | None) -> DriverFacts:
    kind, world = _driver_and_file(settings, status)
    if kind == SIMULATED and world is None:
        gpus = status.get("gpus", ()) if status is not None else ()
        return DriverFacts(kind, tuple(GpuFacts(f"{g['model_name']} {g['gpu_uuid']}", None, None, None) for g in gpus))
    try:
        gpus_found = _run_with_timeout(_DRIVER_TIMEOUT_S, lambda: _gpus(kind, world))
    except GpuEnergyError as error:
        return DriverFacts(kind, trouble=str(error))
    if gpus_found is None:
        timeout = f"the driver did not respond within {_DRIVER_TIMEOUT_S:g} s; check `dmesg | grep Xid`, then reboot"
        return DriverFacts(kind, trouble=timeout)
    return DriverFacts(kind, gpus_found)


def _gpus(kind: str, world: Path | None) -> tuple[GpuFacts, ...]:
    from gpuenergyd.gpu.drivers.opening import open_driver  # noqa: PLC0415  start fast

    host = open_driver(kind, world)
    try:
        return tuple(_gpu(host, gpu) for gpu in host.identities())
    finally:
        host.close()


def _gpu(host: GpuDriver, gpu: GpuIdentity) -> GpuFacts:
    """Return what is known of a GPU; one that fails hides no other."""
    reason, is_persistent = host.observe_only_reasons().get(gpu.gpu_uuid), None
    try:
        is_persistent = host.details(gpu.gpu_uuid).is_persistent if isinstance(host, HasSettings) else None
    except GpuEnergyError as error:
        reason = reason or str(error)
    scope = " (energy of its module: GPU, processor, memory)" if gpu.energy_scope is EnergyScope.MODULE else ""
    return GpuFacts(f"{gpu.model_name} {gpu.gpu_uuid}{scope}", len(gpu.supported_sm_clocks_mhz), reason, is_persistent)


def _caller(settings: Settings | None) -> CallerFacts:
    uid = os.geteuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = f"uid {uid}"
    needs_no_privilege = settings is not None and settings.driver in {SIMULATED, COMMAND}
    effective = 0
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
    return CallerFacts(user, may_change_gpus=needs_no_privilege or bool(effective & _CAP_SYS_ADMIN))


def _journal(path: Path) -> JournalFacts:
    from gpuenergyd.gpu.restore.journal import DamagedJournalError, Journal  # noqa: PLC0415

    try:
        journal = Journal(path)
        content = journal.read()
    except DamagedJournalError as error:
        return JournalFacts(str(path), damage=str(error))
    except JournalError as error:
        return JournalFacts(str(path), unreadable=str(error))
    is_of_this_boot = journal.is_of_this_boot(content)
    if is_of_this_boot and content.is_incomplete:
        return JournalFacts(str(path), damage=f"the journal {path} lacks GPUs of a damaged one")
    entries = content.entries if is_of_this_boot else ()
    return JournalFacts(str(path), tuple(sorted({entry.gpu_uuid for entry in entries})))


def _history(settings: Settings | None, status: dict[str, Any] | None) -> HistoryFacts | None:
    from gpuenergyd.store import open_history  # noqa: PLC0415  start fast

    where = settings.database_url.removeprefix("sqlite:///") if settings is not None else None
    if status is not None:
        where = str(status["store"]["path"])
    if where is None or "://" in where or not where.startswith("/"):
        return None
    path = Path(where)
    try:
        if not path.exists():
            return HistoryFacts(where, is_there=False)
        corrupt_copies = tuple(
            sorted(str(p) for p in path.parent.glob(f"{path.name}.corrupt-*") if not p.name.endswith(("-wal", "-shm")))
        )
        with open_history(path, has_no_writer=status is None) as history:
            newest = history.last_recorded_at()
    except PermissionError as error:
        return HistoryFacts(where, is_there=True, trouble=f"{path}: {error.strerror}")
    except StoreError as error:
        return HistoryFacts(where, is_there=True, trouble=str(error), set_aside=corrupt_copies)
    return HistoryFacts(where, is_there=True, last_record_at=newest, set_aside=corrupt_copies)


def _disk(folder: Path) -> DiskFacts | None:
    for candidate in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            found = os.statvfs(candidate)
            free_bytes = found.f_bavail * found.f_frsize
            return DiskFacts(str(folder), free_bytes, is_read_only=bool(found.f_flag & os.ST_RDONLY))
    return None


def _is_time_synchronised() -> bool | None:
    """Return the kernel's synchronization state, or None where it cannot be read."""
    with contextlib.suppress(OSError, AttributeError):
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
        if state >= 0:
            return bool(state != _CLOCK_UNSYNCHRONISED)
    return None


def _carbon(settings: Settings, status: dict[str, Any] | None) -> CarbonFacts | None:
    from gpuenergyd_carbon.fetched_file import FetchState, read_fetched  # noqa: PLC0415

    zone, is_fetched = settings.carbon_zone, settings.needs_carbon_fetcher
    if zone is None:
        return None
    # Unlike the units, the calling user's settings do not say that the fetcher is a systemd unit.
    of_unit = FETCHER_UNIT_DIR / "carbon.json"
    path = of_unit if _exists(of_unit) and not _exists(settings.carbon_file_path) else settings.carbon_file_path
    if status is not None and (of_daemon := status.get("files", {}).get("carbon_path")):
        path = Path(of_daemon)
    try:
        fetched = read_fetched(path)
    except CarbonSourceError as error:
        return CarbonFacts(zone, trouble=str(error), is_fetched=is_fetched)
    newest = max((sample.valid_to_at for sample in fetched.samples), default=None)
    last = fetched.status
    trouble = f"{last.problem}: {last.message}" if last.state is FetchState.FAILED else None
    return CarbonFacts(zone, trouble=trouble, newest_at=newest, is_fetched=is_fetched)


def _units() -> UnitFacts:
    if not Path("/run/systemd/system").is_dir():
        return UnitFacts(is_managed=False, active_states={}, enabled_states={})
    command = ["systemctl", "show", "--property=Id,LoadState,ActiveState,UnitFileState", *_UNITS, *_CONFLICTING_UNITS]
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=_SYSTEMCTL_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return UnitFacts(is_managed=False, active_states={}, enabled_states={})
    shown: list[dict[str, str]] = [
        {key: value for key, _, value in (line.partition("=") for line in block.splitlines())}
        for block in output.split("\n\n")
    ]
    loaded = [unit for unit in shown if unit.get("LoadState") == "loaded"]
    return UnitFacts(
        is_managed=True,
        active_states={u["Id"]: u["ActiveState"] for u in loaded if u["Id"] in _UNITS},
        enabled_states={u["Id"]: u["UnitFileState"] for u in loaded if u["Id"] in _UNITS},
        rivals=tuple(u["Id"] for u in loaded if u["Id"] in _CONFLICTING_UNITS and u["ActiveState"] == "active"),
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        return True


def _run_with_timeout(timeout_s: float, function: Callable[[], T]) -> T | None:
    """Return the result of `function`, or None if it takes longer: a hanging driver must not block the diagnosis."""
    results: list[T] = []
    errors: list[GpuEnergyError] = []

    def run() -> None:
        try:
            results.append(function())
        except GpuEnergyError as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="driver diagnosis", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    return results[0] if results else None
