"""Foreign hands on a GPU under a running job: seen in status, metrics and history, and left as their owner set them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.client.connection import HttpConnection
from gpuenergyd.gpu.drivers.simulated import SimulatedHost
from gpuenergyd.store import open_history
from tests.support.daemon_process import DaemonProcess, training
from tests.support.fake_nvml.control import FakeNvmlControl
from tests.support.waiting import wait_until


@pytest.fixture
def daemon(tmp_path: Path, fake_nvml_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonProcess]:
    """A daemon with the NVML driver, not started."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_nvml_library))
    monkeypatch.setenv("GPUENERGYD_FAKE_NVML_WORLD", str(tmp_path / "world"))
    made = DaemonProcess(tmp_path, overrides={"driver": "nvml"})
    yield made
    if made.process is not None and made.process.poll() is None:
        made.stop()


def metrics(daemon: DaemonProcess) -> str:
    connection = HttpConnection(str(daemon.socket_path))
    try:
        return connection.request("GET", "/v1/metrics", None, limit_s=10)[1].decode()
    finally:
        connection.close()


def test_each_foreign_change_under_a_job_is_seen_recorded_and_left_alone(daemon: DaemonProcess) -> None:
    with FakeNvmlControl(daemon.world_path) as control:
        control.set_privileged(True)
        control.set_power_profiles(0, 2)
        daemon.start()
        foreign = SimulatedHost.open(daemon.world_path)
        gpu = foreign.identities()[0].gpu_uuid

        def knobs() -> dict[str, Any]:
            own: dict[str, Any] = daemon.status()["gpus"][0]
            return own

        with training(daemon, arguments=("--policy", "uniform")) as job:
            wait_until(daemon.is_lowered, 120, log=lambda: daemon.log)
            assert knobs()["power_limit_owner"] is None
            assert knobs()["requested_power_profiles"] == [2]

            foreign.set_power_limit(gpu, 300.0)
            control.set_persistence(0, is_on=False)
            control.set_power_profiles(0, 2, 20)
            wait_until(lambda: knobs()["requested_power_profiles"] == [2, 20], 30)
            wait_until(lambda: knobs()["power_limit_owner"] == "another program", 30)
            wait_until(lambda: knobs()["is_persistent"] is False, 30)

            text = metrics(daemon)
            assert f'gpuenergyd_gpu_power_limit_watts{{gpu_uuid="{gpu}",index="0"' in text
            limit = next(line for line in text.splitlines() if line.startswith("gpuenergyd_gpu_enforced_power_limit"))
            assert limit.endswith(" 300.0")
            assert knobs()["enforced_power_profiles"] == [2]
            assert job.finish() == 0
        wait_until(lambda: daemon.job() is None, 60)
        wait_until(daemon.is_as_found, 60)
        assert daemon.stop() == 0

        assert foreign.power_limit_w(gpu) == 300.0
        foreign.close()
    with open_history(daemon.database_path) as history:
        (summary,) = history.job_summaries()
        events = [event for event in history.control_events(summary.job_id) if event.action == "knob"]
    seen = {(event.reason, event.before, event.after) for event in events if event.gpu_uuid == gpu}
    assert ("power_limit_w changed by another program", "480", "300") in seen
    assert ("is_persistent changed by another program", "on", "off") in seen
    assert ("requested_power_profiles changed by another program", "2", "2,20") in seen
    limits = [event for event in events if event.reason.startswith("power_limit_w")]
    assert len(limits) == 1  # the limit is not fought
