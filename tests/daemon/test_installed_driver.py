"""A GPU driver of another package: found by its entry point, named in settings, and its gaps shown by `status`."""

from pathlib import Path

import pytest

from gpuenergyd.daemon.processes.launch import worker_command
from gpuenergyd.daemon.settings import Mode, load_settings
from gpuenergyd.errors import UsageError
from gpuenergyd.gpu.drivers.opening import open_driver
from gpuenergyd.report.terminal.status_lines import health_line
from tests.support.fake_amd.package import install_fake_amd


def test_an_installed_driver_is_a_setting_and_reaches_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_amd(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    settings = load_settings(driver="amd", world_path="world")

    assert settings.driver == "amd"
    assert settings.mode is Mode.OBSERVE
    command = worker_command(settings)
    assert "--observe-only" in command
    assert command[command.index("--driver") + 1] == "amd"
    assert command[command.index("--world") + 1] == str(Path("world").absolute())


def test_without_the_package_the_known_drivers_are_named() -> None:
    with pytest.raises(UsageError, match="driver = 'intel'"):
        load_settings(driver="intel")
    with pytest.raises(UsageError, match=r"unknown driver 'intel'; available: .*command, nvml, simulated"):
        open_driver("intel", None)


def test_status_names_what_a_driver_of_another_package_lacks() -> None:
    status = {
        "is_degraded": False,
        "driver": "amd",
        "mode": "control",
        "version": "1",
        "pid": 1,
        "uptime_s": 1.0,
        "worker": {"missing_capabilities": ["error events", "workload power profiles"]},
    }

    assert "amd (without error events, workload power profiles), controls clocks" in health_line(status).plain
