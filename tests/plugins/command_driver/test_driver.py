"""The command driver: programs of an administrator that fail, lie, hang or die are found out and rolled back."""

import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuenergyd.errors import DriverError, GpuError, GpuPermissionError, GpuUnsupportedError
from gpuenergyd.gpu.drivers.opening import open_driver
from gpuenergyd_command_driver import locks
from gpuenergyd_command_driver.driver import CommandHost, read_commands
from gpuenergyd_sim.driver.host import SimulatedHost
from tests.support.fake_amd.package import install_fake_amd
from tests.support.gpu_commands import GpuCommands
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(shutil.which("timeout") is None, reason="needs coreutils")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SimulatedHost]:
    """One simulated A100 in real time, held by this process."""
    made = SimulatedHost.create(tmp_path / "world", ["a100-sxm"], seed=7)
    made.attach_process(made.identities()[0].gpu_uuid, os.getpid())
    yield made
    made.close()


@pytest.fixture
def commands(tmp_path: Path, world: SimulatedHost) -> GpuCommands:
    """Commands that work, until a test says otherwise."""
    return GpuCommands.create(tmp_path / "commands", world.path)


@pytest.fixture
def gpu_uuid(world: SimulatedHost) -> str:
    return world.identities()[0].gpu_uuid


@pytest.fixture
def host(commands: GpuCommands) -> Iterator[CommandHost]:
    made = open_driver("command", commands.path)
    assert isinstance(made, CommandHost)
    yield made
    made.close()


def hurried(commands: GpuCommands, world: SimulatedHost) -> CommandHost:
    """Return a host whose commands may take as long as these do, and not much longer."""
    return CommandHost.open(GpuCommands.create(commands.folder, world.path, timeout_s=5.0).path)


def test_commands_lock_reset_and_limit(world: SimulatedHost, host: CommandHost, gpu_uuid: str) -> None:
    host.lock_sm_clock(gpu_uuid, 1200)
    assert world.locked_sm_clock_mhz(gpu_uuid) == 1200
    host.reset_sm_clock(gpu_uuid)
    assert world.locked_sm_clock_mhz(gpu_uuid) is None
    host.set_power_limit(gpu_uuid, 250.0)
    assert host.power_limit_w(gpu_uuid) == 250.0
    assert host.identities() == world.identities()
    assert host.read(gpu_uuid).total_energy_j is not None
    assert host.observe_only_reasons() == {}


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        ("fails", "failed with exit code 1: .*gpu-command: no permission for GPU-.*; rolled back"),
        ("fails after setting", "failed with exit code 3"),
        ("dies after setting", "did not end within"),
        ("lies", "succeeded without effect: 1410 MHz, not at most 1200; rolled back"),
    ],
)
def test_a_lock_that_goes_wrong_is_named_and_leaves_no_lock(
    world: SimulatedHost, host: CommandHost, commands: GpuCommands, gpu_uuid: str, behaviour: str, text: str
) -> None:
    commands.let("lock", behaviour)

    with pytest.raises(DriverError, match=text):
        host.lock_sm_clock(gpu_uuid, 1200)

    assert world.locked_sm_clock_mhz(gpu_uuid) is None


@pytest.mark.parametrize("behaviour", ["hangs", "hangs after setting"])
def test_a_lock_that_hangs_is_ended_and_leaves_no_lock(
    world: SimulatedHost, commands: GpuCommands, gpu_uuid: str, behaviour: str
) -> None:
    host = hurried(commands, world)
    commands.let("lock", behaviour)

    with pytest.raises(DriverError, match=r"command lock of GPU-.* did not end within 5 s: .*gpu-command"):
        host.lock_sm_clock(gpu_uuid, 1200)

    assert world.locked_sm_clock_mhz(gpu_uuid) is None
    host.close()


def test_a_roll_back_that_fails_too_is_reported(host: CommandHost, commands: GpuCommands, gpu_uuid: str) -> None:
    commands.let("lock", "fails after setting")
    commands.let("reset", "fails")

    with pytest.raises(DriverError, match=r"exit code 3.*rolling it back failed, too: .*no permission"):
        host.lock_sm_clock(gpu_uuid, 1200)


@pytest.mark.parametrize(
    ("behaviour", "text"), [("fails", "no permission"), ("lies", "succeeded without effect: it still runs at 1200 MHz")]
)
def test_a_reset_that_goes_wrong_is_an_error_and_works_later(
    world: SimulatedHost, host: CommandHost, commands: GpuCommands, gpu_uuid: str, behaviour: str, text: str
) -> None:
    host.lock_sm_clock(gpu_uuid, 1200)
    commands.let("reset", behaviour)
    with pytest.raises(DriverError, match=text):
        host.reset_sm_clock(gpu_uuid)
    commands.let("reset", "works")

    host.reset_sm_clock(gpu_uuid)

    assert world.locked_sm_clock_mhz(gpu_uuid) is None


@pytest.mark.parametrize("behaviour", ["fails", "lies", "fails after setting", "dies after setting"])
def test_a_limit_that_goes_wrong_leaves_the_limit_from_before(
    host: CommandHost, commands: GpuCommands, gpu_uuid: str, behaviour: str
) -> None:
    before_w = host.power_limit_w(gpu_uuid)
    commands.let("limit", behaviour)

    with pytest.raises(DriverError):
        host.set_power_limit(gpu_uuid, 200.0)
    commands.let("limit", "works")

    after_w = host.power_limit_w(gpu_uuid)
    if behaviour == "fails after setting":
        assert after_w in {before_w, 200.0}  # the roll-back fails in the same way, after setting
    host.set_power_limit(gpu_uuid, before_w)
    assert host.power_limit_w(gpu_uuid) == before_w


def test_values_out_of_range_run_no_command(host: CommandHost, commands: GpuCommands, gpu_uuid: str) -> None:
    for name in ("lock", "limit"):
        commands.let(name, "fails")

    with pytest.raises(GpuUnsupportedError, match="1201 MHz"):
        host.lock_sm_clock(gpu_uuid, 1201)
    with pytest.raises(GpuUnsupportedError, match="out of range"):
        host.set_power_limit(gpu_uuid, 5000.0)


@pytest.mark.parametrize("unit", ["none", "of systemd"])
def test_who_restores_waits_for_a_command_of_a_killed_process(
    world: SimulatedHost,
    commands: GpuCommands,
    gpu_uuid: str,
    unit: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lock that is under way when its process is killed must not come after the reset, in another systemd unit too.

    Units with the same runtime directory have temporary folders of their own.
    """
    environ = dict(os.environ)
    if unit == "of systemd":
        monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        environ |= {"RUNTIME_DIRECTORY": str(tmp_path), "TMPDIR": str(temporary)}
    commands.let("lock", "hangs after setting")
    GpuCommands.create(commands.folder, world.path, timeout_s=5.0)
    program = (
        "import sys; from pathlib import Path; from gpuenergyd_command_driver.driver import CommandHost;"
        "CommandHost.open(Path(sys.argv[1])).lock_sm_clock(sys.argv[2], 900)"
    )
    setter = subprocess.Popen([sys.executable, "-c", program, str(commands.path), gpu_uuid], env=environ)
    wait_until(lambda: world.locked_sm_clock_mhz(gpu_uuid) == 900)
    assert commands.is_running("lock")
    setter.send_signal(signal.SIGKILL)
    setter.wait()

    with_reset = CommandHost.open(commands.path)
    with_reset.reset_sm_clock(gpu_uuid)

    assert not commands.is_running("lock")
    assert world.locked_sm_clock_mhz(gpu_uuid) is None
    with_reset.close()


def test_locks_are_in_no_folder_that_users_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(locks, "_RUN", tmp_path / "run")
    uid = os.getuid()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    of_root = locks.lock_folder()
    monkeypatch.setattr(os, "geteuid", lambda: uid or 4242)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_dir=str(home)))
    without_session = locks.lock_folder()
    (tmp_path / "run" / "user" / str(uid or 4242)).mkdir(parents=True)
    with_session = locks.lock_folder()
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/gpuenergyd-gpu:/run/other")

    name = f"gpuenergyd-commands-{uid or 4242}"
    assert of_root == tmp_path / "run" / "gpuenergyd-commands-0"
    assert without_session == home / ".cache" / name
    assert with_session == tmp_path / "run" / "user" / str(uid or 4242) / name
    assert locks.lock_folder() == Path("/run/gpuenergyd-gpu") / name


def test_a_user_without_a_home_folder_gets_a_line_with_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.setattr(locks, "_RUN", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    monkeypatch.setattr(pwd, "getpwuid", unknown)

    with pytest.raises(
        DriverError, match="uid 4242 has no home folder for the locks of commands; set RUNTIME_DIRECTORY"
    ):
        locks.lock_folder()


@pytest.mark.fault(62)
def test_a_folder_of_locks_that_others_can_use_is_refused_and_no_command_runs(
    host: CommandHost, commands: GpuCommands, gpu_uuid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    folder = tmp_path / f"gpuenergyd-commands-{os.geteuid()}"
    commands.let("lock", "fails")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(DriverError, match=r"gpuenergyd-commands-.*: not a folder; remove it"):
        host.lock_sm_clock(gpu_uuid, 1200)
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o770)

    with pytest.raises(DriverError) as refused:
        host.lock_sm_clock(gpu_uuid, 1200)

    uid = os.geteuid()
    assert str(refused.value).startswith(
        f"{folder}: belongs to uid {uid} and has mode 0770; it must belong to uid {uid} and have mode 0700"
    )


def test_a_missing_command_is_a_missing_permission(tmp_path: Path, world: SimulatedHost, gpu_uuid: str) -> None:
    path = tmp_path / "none.toml"
    path.write_text(f'reader = "simulated"\nworld = "{world.path}"\n')
    host = CommandHost.open(path)

    with pytest.raises(GpuPermissionError, match="the commands file has no command lock"):
        host.lock_sm_clock(gpu_uuid, 1200)
    assert "neither lock and reset nor limit" in host.observe_only_reasons()[gpu_uuid]
    host.close()


def test_a_reader_of_another_package_must_have_all_that_a_driver_may_have(
    tmp_path: Path, world: SimulatedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_amd(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "amd.toml"
    path.write_text(f'reader = "amd"\nworld = "{world.path}"\n')

    with pytest.raises(DriverError, match="reader 'amd' lacks workload power profiles, reading of settings"):
        CommandHost.open(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lock = [", "commands.toml: "),
        ('lock = ["gpu-lock"]', "lock: 'gpu-lock' must be an absolute path"),
        ('lock = "x"', "lock 'x': must be a list of arguments"),
        ('lock = ["/missing/gpu-lock"]', "lock: /missing/gpu-lock: No such file"),
        ('lock = ["/bin/true"]', "give lock and reset together"),
        ('unlock = ["/bin/true"]', "unknown key 'unlock'; valid: lock, reset, limit, timeout_s"),
        ("timeout_s = 600", "timeout_s 600: must be above 0 and at most 60 s"),
        ('reader = "smi"', "reader 'smi'; valid: nvml, simulated"),
        ('lock = ["/etc/passwd"]\nreset = ["/bin/true"]', "/etc/passwd is not executable"),
    ],
)
def test_an_invalid_commands_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "commands.toml"
    path.write_text(text)

    with pytest.raises(GpuError, match=message) as caught:
        read_commands(path)

    assert "\n" not in str(caught.value)


def test_a_program_that_others_can_write_is_refused_by_name(tmp_path: Path) -> None:
    program, path = tmp_path / "gpu-lock", tmp_path / "commands.toml"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o777)
    path.write_text(f'lock = ["/usr/bin/env", "{program}"]\nreset = ["/bin/true"]\n')

    with pytest.raises(DriverError, match="gpu-lock: refused: it can be written by others; run `chmod go-w"):
        read_commands(path)

    program.chmod(0o755)
    path.chmod(0o666)
    with pytest.raises(DriverError, match=r"commands.toml: refused: it can be written by others"):
        read_commands(path)
