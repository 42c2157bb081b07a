"""Command driver: reads GPUs through another driver, and changes them with programs that an administrator provides.

It is for sites where the GPU worker has no privileges but may run a few permitted programs, for instance by sudo rules.
The commands file is TOML; each command is a list of arguments, run without a shell, in which `{gpu_uuid}`, `{index}`,
`{sm_clock_mhz}` and `{power_limit_w}` are replaced:

    lock = ["/usr/bin/sudo", "-n", "/usr/local/sbin/gpu-lock", "{gpu_uuid}", "{sm_clock_mhz}"]
    reset = ["/usr/bin/sudo", "-n", "/usr/local/sbin/gpu-reset", "{gpu_uuid}"]
    limit = ["/usr/bin/sudo", "-n", "/usr/local/sbin/gpu-limit", "{gpu_uuid}", "{power_limit_w}"]
    timeout_s = 5.0

Theory of operation. Commands are not trusted. Each runs under `timeout` in its own session, so that it ends even if
this process is killed. It inherits a file lock for its GPU: a process that restores the GPU afterwards waits until a
running command has ended, and so is the last to change the GPU. The effect is read back. A clock lock that fails, hangs
or has no effect is rolled back by `reset`, a power limit by setting the previous one. A reset without effect is an
error: the restore journal keeps its entry, and the restore is repeated. An idle GPU does not show the effect, so its
entry stays in the journal as unconfirmed until the GPU has been seen above the lock.
"""

import os
import shutil
import stat
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gpuenergyd.errors import DriverError, GpuEnergyError, GpuPermissionError, GpuUnsupportedError, UsageError
from gpuenergyd.gpu.device import (
    SAME_CLOCK_MHZ,
    EnergyReading,
    GpuController,
    GpuDetails,
    GpuIdentity,
    GpuReading,
    HasErrorEvents,
    missing_capabilities,
)
from gpuenergyd.gpu.drivers.opening import DRIVERS, installed_drivers, open_driver
from gpuenergyd_command_driver.locks import held_lock

_OWN_NAME = "command"
_COMMANDS = ("lock", "reset", "limit")
_MAX_TIMEOUT_S = 60.0
_KILL_AFTER_S = 1.0
_RETURN_LIMIT_S = 2.0
"""Extra time, after the limit of `timeout`, for the process to be reaped."""
_VERIFY_LIMIT_S = 2.0
"""Time in which a change must show; clocks take up to about a second to settle."""
_VERIFY_PAUSE_S = 0.005
_TIMED_OUT = frozenset({124, 137, -9})
_SAME_LIMIT_W = 1.0
_MAX_ERROR_CHARS = 300


@dataclass(frozen=True, slots=True)
class Commands:
    """The content of a commands file; an empty command is not available."""

    lock: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()
    limit: tuple[str, ...] = ()
    timeout_s: float = 5.0
    reader: str = "nvml"
    world: str | None = None
    """Path of the file that the reading driver needs; for `simulated`, the file that describes the simulated GPUs."""


def read_commands(path: Path) -> Commands:
    """Return the commands in a file, after checking that nobody else could have written it or its programs.

    Raises:
        DriverError: the file or a program is missing or can be written by others, or a value is invalid.
    """
    try:
        _require_trusted(path, str(path))
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DriverError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except tomllib.TOMLDecodeError as error:
        raise DriverError(f"{path}: {error}") from None
    valid = (*_COMMANDS, "timeout_s", "reader", "world")
    for key in content:
        if key not in valid:
            raise DriverError(f"{path}: unknown key {key!r}; valid: {', '.join(valid)}")
    commands = {name: _command(path, name, content[name]) for name in _COMMANDS if name in content}
    if bool(commands.get("lock")) != bool(commands.get("reset")):
        raise DriverError(f"{path}: give lock and reset together: a lock that cannot be removed is never set")
    timeout_s = content.get("timeout_s", 5.0)
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise DriverError(f"{path}: timeout_s {timeout_s!r}: must be above 0 and at most {_MAX_TIMEOUT_S:g} s")
    reader, world = content.get("reader", "nvml"), content.get("world")
    if reader not in DRIVERS:
        readers = sorted({*DRIVERS, *installed_drivers()} - {_OWN_NAME})
        if reader not in readers:
            raise DriverError(f"{path}: reader {reader!r}; valid: {', '.join(readers)}")
    if world is not None and not isinstance(world, str):
        raise DriverError(f"{path}: world {world!r}: must be a path")
    lock, reset, limit = (commands.get(name, ()) for name in _COMMANDS)
    return Commands(lock, reset, limit, float(timeout_s), reader, world)


def _command(path: Path, name: str, value: Any) -> tuple[str, ...]:
    if not (isinstance(value, list) and value and all(isinstance(part, str) and part for part in value)):
        raise DriverError(f"{path}: {name} {value!r}: must be a list of arguments, the program first")
    program = Path(value[0])
    if not program.is_absolute():
        raise DriverError(f"{path}: {name}: {value[0]!r} must be an absolute path")
    for part in value:  # with sudo, the actual program is an argument
        if part.startswith("/") and (part == value[0] or Path(part).is_file()):
            try:
                _require_trusted(Path(part), f"{path}: {name}: {part}")
            except OSError as error:
                raise DriverError(f"{path}: {name}: {part}: {error.strerror}") from None
    if not os.access(program, os.X_OK):
        raise DriverError(f"{path}: {name}: {program} is not executable")
    return tuple(value)


def _require_trusted(path: Path, where: str) -> None:
    """Check that a file belongs to root or this user, and that nobody else can write it.

    Raises:
        DriverError: the file is not trusted.
        OSError: there is no such file.
    """
    status = path.stat()
    if status.st_uid not in {0, os.geteuid()}:
        raise DriverError(f"{where}: refused: it belongs to uid {status.st_uid}, not to root or uid {os.geteuid()}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DriverError(f"{where}: refused: it can be written by others; run `chmod go-w {path}`")


class CommandHost:
    """The GPUs of this host, read by another driver and changed by commands."""

    def __init__(self, commands: Commands, reader: GpuController) -> None:
        self._commands = commands
        self._reader = reader
        self._locked_mhz: dict[str, int] = {}
        timeout = shutil.which("timeout")
        if timeout is None:
            raise DriverError("the command driver needs the program `timeout` of coreutils")
        self._timeout = timeout

    @classmethod
    def open(cls, path: Path | None) -> Self:
        """Open the reading driver that a commands file names.

        Raises:
            UsageError: there is no path.
            DriverError: the file is refused, or the driver cannot be opened.
        """
        if path is None:
            raise UsageError("the command driver needs its commands file: --world PATH")
        commands = read_commands(path)
        reader = open_driver(commands.reader, None if commands.world is None else Path(commands.world))
        if not isinstance(reader, GpuController):
            raise DriverError(f"{path}: reader {commands.reader!r} lacks {', '.join(missing_capabilities(reader))}")
        return cls(commands, reader)

    # Reading

    def identities(self) -> tuple[GpuIdentity, ...]:
        return self._reader.identities()

    def observe_only_reasons(self) -> Mapping[str, str]:
        """Return the GPUs that must not be controlled with the reasons: all GPUs if there is no command."""
        reasons = dict(self._reader.observe_only_reasons())
        if not (self._commands.lock or self._commands.limit):
            for identity in self.identities():
                reasons.setdefault(identity.gpu_uuid, "the commands file has neither lock and reset nor limit")
        return reasons

    def read(self, gpu_uuid: str) -> GpuReading:
        return self._reader.read(gpu_uuid)

    def read_energy(self, gpu_uuid: str) -> EnergyReading:
        return self._reader.read_energy(gpu_uuid)

    def details(self, gpu_uuid: str) -> GpuDetails:
        return self._reader.details(gpu_uuid)

    def process_ids(self, gpu_uuid: str) -> tuple[int, ...]:
        return self._reader.process_ids(gpu_uuid)

    def await_xid(self, timeout_s: float) -> tuple[str, int] | None:
        if isinstance(self._reader, HasErrorEvents):
            return self._reader.await_xid(timeout_s)
        time.sleep(timeout_s)
        return None

    def power_limit_w(self, gpu_uuid: str) -> float:
        return self._reader.power_limit_w(gpu_uuid)

    def requested_power_profiles(self, gpu_uuid: str) -> frozenset[int]:
        return self._reader.requested_power_profiles(gpu_uuid)

    def release(self, gpu_uuids: Collection[str]) -> None:
        self._reader.release(gpu_uuids)

    def reopen(self, gpu_uuids: Collection[str]) -> tuple[GpuIdentity, ...]:
        return self._reader.reopen(gpu_uuids)

    def close(self) -> None:
        self._reader.close()

    # Controlling

    def recall_lock(self, gpu_uuid: str, sm_clock_mhz: int) -> None:
        self._locked_mhz.setdefault(gpu_uuid, sm_clock_mhz)

    def lock_sm_clock(self, gpu_uuid: str, sm_clock_mhz: int) -> None:
        """Lock the SM clock; a command that fails or has no effect is rolled back.

        Raises:
            GpuPermissionError, GpuUnsupportedError, DriverError: it failed, and so the lock was removed if possible.
        """
        clocks = self._identity(gpu_uuid).supported_sm_clocks_mhz
        if sm_clock_mhz not in clocks:
            raise GpuUnsupportedError(f"{sm_clock_mhz} MHz is not a supported SM clock of {gpu_uuid}")
        self._require_command("lock", gpu_uuid)
        before_mhz = self._locked_mhz.get(gpu_uuid)
        try:
            self._run("lock", gpu_uuid, sm_clock_mhz=sm_clock_mhz)
            self._locked_mhz[gpu_uuid] = max(sm_clock_mhz, before_mhz or 0)
            read_mhz = self._await_clock(gpu_uuid, lambda clock_mhz: clock_mhz <= sm_clock_mhz + SAME_CLOCK_MHZ)
            if read_mhz is not None:
                raise DriverError(
                    f"command lock of {gpu_uuid} succeeded without effect: {read_mhz} MHz, not at most {sm_clock_mhz}"
                )
            if before_mhz is not None and before_mhz < sm_clock_mhz - SAME_CLOCK_MHZ:
                self._require_raised("lock", gpu_uuid, before_mhz)
            self._locked_mhz[gpu_uuid] = sm_clock_mhz
        except GpuEnergyError as error:
            raise self._rolled_back(error, lambda: self._run("reset", gpu_uuid)) from None

    def reset_sm_clock(self, gpu_uuid: str) -> None:
        """Remove the clock lock.

        Raises:
            GpuPermissionError, DriverError: the command failed, or a busy GPU still runs at the locked clock.
        """
        locked_mhz = self._locked_mhz.get(gpu_uuid)
        self._run("reset", gpu_uuid)
        top_mhz = self._identity(gpu_uuid).supported_sm_clocks_mhz[0]
        if locked_mhz is None or locked_mhz >= top_mhz - SAME_CLOCK_MHZ:
            self._locked_mhz.pop(gpu_uuid, None)
        elif self._require_raised("reset", gpu_uuid, locked_mhz):
            del self._locked_mhz[gpu_uuid]

    def _require_raised(self, name: str, gpu_uuid: str, locked_mhz: int) -> bool:
        """Wait for a busy GPU to leave a clock; return whether it runs above it, False for an idle GPU.

        Raises:
            DriverError: it stays at that clock, and the driver names no other reason for it.
        """
        if not self._is_busy(gpu_uuid):
            return False
        until_mono_s = time.monotonic() + _VERIFY_LIMIT_S
        while True:
            reading = self.read(gpu_uuid)
            clock_mhz = reading.sm_clock_mhz
            if clock_mhz is None or abs(clock_mhz - locked_mhz) > SAME_CLOCK_MHZ:
                return clock_mhz is not None and clock_mhz > locked_mhz
            if reading.is_clock_limited or reading.is_power_capped:
                return False
            if time.monotonic() > until_mono_s:
                raise DriverError(
                    f"command {name} of {gpu_uuid} succeeded without effect: it still runs at {clock_mhz} MHz"
                )
            time.sleep(_VERIFY_PAUSE_S)

    def set_power_limit(self, gpu_uuid: str, power_limit_w: float) -> None:
        """Set the power limit; a command that fails or has no effect is rolled back.

        Raises:
            GpuPermissionError, GpuUnsupportedError, DriverError: it failed, and the old limit was set if possible.
        """
        details = self.details(gpu_uuid)
        low_w, high_w = details.min_power_limit_w, details.max_power_limit_w
        if low_w is not None and high_w is not None and not low_w <= power_limit_w <= high_w:
            raise GpuUnsupportedError(
                f"power limit {power_limit_w:g} W of {gpu_uuid} is out of range ({low_w:g}-{high_w:g} W)"
            )
        self._require_command("limit", gpu_uuid)
        before_w = self.power_limit_w(gpu_uuid)
        try:
            self._run("limit", gpu_uuid, power_limit_w=power_limit_w)
            self._require_limit(gpu_uuid, power_limit_w)
        except GpuEnergyError as error:

            def roll_back() -> None:
                if abs(self.power_limit_w(gpu_uuid) - before_w) > _SAME_LIMIT_W:
                    self._run("limit", gpu_uuid, power_limit_w=before_w)
                    self._require_limit(gpu_uuid, before_w)

            raise self._rolled_back(error, roll_back) from None

    def request_power_profile(self, gpu_uuid: str, power_profile: int) -> None:
        """Add a workload power profile through the reading driver, which may not need privileges for it."""
        self._reader.request_power_profile(gpu_uuid, power_profile)

    def clear_power_profile(self, gpu_uuid: str, power_profile: int) -> None:
        self._reader.clear_power_profile(gpu_uuid, power_profile)

    def _require_limit(self, gpu_uuid: str, power_limit_w: float) -> None:
        read_w = self.power_limit_w(gpu_uuid)
        if abs(read_w - power_limit_w) > _SAME_LIMIT_W:
            raise DriverError(
                f"command limit of {gpu_uuid} succeeded without effect: {read_w:g} W, not {power_limit_w:g} W"
            )

    @staticmethod
    def _rolled_back(error: GpuEnergyError, roll_back: Callable[[], None]) -> GpuEnergyError:
        """Roll a change back; return the error, extended by the result of the rollback."""
        try:
            roll_back()
        except GpuEnergyError as second:
            return DriverError(f"{error}; rolling it back failed, too: {second}")
        return type(error)(f"{error}; rolled back")

    def _identity(self, gpu_uuid: str) -> GpuIdentity:
        for identity in self.identities():
            if identity.gpu_uuid == gpu_uuid:
                return identity
        raise GpuUnsupportedError(f"no GPU {gpu_uuid!r}")

    def _is_busy(self, gpu_uuid: str) -> bool:
        """Return whether a process computes on a GPU; an idle GPU may run at any clock."""
        try:
            return bool(self.process_ids(gpu_uuid))
        except GpuEnergyError:
            return False

    def _await_clock(self, gpu_uuid: str, is_right: Callable[[int], bool]) -> int | None:
        """Wait until the clock read back is right; return None then or if it is unknown, else the last wrong clock."""
        until_mono_s = time.monotonic() + _VERIFY_LIMIT_S
        while True:
            clock_mhz = self.read(gpu_uuid).sm_clock_mhz
            if clock_mhz is None or is_right(clock_mhz):
                return None
            if time.monotonic() > until_mono_s:
                return clock_mhz
            time.sleep(_VERIFY_PAUSE_S)

    # Commands

    def _run(self, name: str, gpu_uuid: str, **values: float) -> None:
        """Run a command for one GPU.

        Raises:
            GpuPermissionError: there is no such command.
            DriverError: it failed, or did not end in time.
        """
        template = self._require_command(name, gpu_uuid)
        texts = {"gpu_uuid": gpu_uuid, "index": str(self._identity(gpu_uuid).index)}
        texts |= {key: f"{value:.10g}" for key, value in values.items()}
        arguments = [_replaced(part, texts) for part in template]
        timeout_s = self._commands.timeout_s
        limit_s = timeout_s + _KILL_AFTER_S + _RETURN_LIMIT_S
        with held_lock(gpu_uuid, limit_s) as lock_fd, tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [self._timeout, f"--kill-after={_KILL_AFTER_S:g}", f"{timeout_s:g}", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(lock_fd,),
                start_new_session=True,
                env={"PATH": os.defpath, "LC_ALL": "C"},
                cwd="/",
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                code = -9
            errors.seek(0)
            lines = errors.read(_MAX_ERROR_CHARS).decode(errors="replace").split()
        if code in _TIMED_OUT:
            raise DriverError(f"command {name} of {gpu_uuid} did not end within {timeout_s:g} s: {arguments[0]}")
        if code != 0:
            why = f": {' '.join(lines)}" if lines else ""
            raise DriverError(f"command {name} of {gpu_uuid} failed with exit code {code}: {arguments[0]}{why}")

    def _require_command(self, name: str, gpu_uuid: str) -> tuple[str, ...]:
        template: tuple[str, ...] = getattr(self._commands, name)
        if not template:
            raise GpuPermissionError(f"{gpu_uuid} cannot be changed: the commands file has no command {name}")
        return template


def _replaced(part: str, texts: Mapping[str, str]) -> str:
    for key, text in texts.items():
        part = part.replace("{" + key + "}", text)
    return part
