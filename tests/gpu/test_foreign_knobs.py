"""Foreign hands on a GPU under a running job: seen in status, metrics and history, and left as their owner set them."""

from typing import Any

import pytest

from gpuenergyd.client.connection import HttpConnection
from gpuenergyd.store import open_history
from gpuenergyd_sim.driver.host import SimulatedHost
from tests.support.daemon_process import DaemonProcess, training
from tests.support.fake_nvml.control import FakeNvmlControl
from tests.support.waiting import LIMIT_S, wait_until


def metrics(daemon: DaemonProcess) -> str:
    connection = HttpConnection(str(daemon.socket_path))
    try:
        return connection.request("GET", "/v1/metrics", None, limit_s=LIMIT_S)[1].decode()
    finally:
        connection.close()


def test_each_foreign_change_under_a_job_is_seen_recorded_and_left_alone(daemon: DaemonProcess) -> None:
    with FakeNvmlControl(daemon.world_path) as control:
        control.set_privileged(True)
        control.set_power_profiles(0, 2)
        control.set_power_smoothing(0, is_on=False, profile=0, floors_w=(0, 0))
        daemon.start()
        foreign = SimulatedHost.open(daemon.world_path)
        gpu = foreign.identities()[0].gpu_uuid

        def knobs() -> dict[str, Any]:
            own: dict[str, Any] = daemon.status()["gpus"][0]
            return own

        with training(daemon, arguments=("--policy", "uniform")) as job:
            wait_until(daemon.is_lowered, log=lambda: daemon.log)
            assert knobs()["power_limit_owner"] is None
            wait_until(lambda: knobs()["requested_power_profiles"] == [2], log=lambda: daemon.log)

            wait_until(lambda: knobs()["memory_clock_mhz"] is not None)
            memory_mhz, sm_mhz = knobs()["memory_clock_mhz"], knobs()["application_sm_clock_mhz"]
            foreign.set_power_limit(gpu, 300.0)
            control.set_persistence(0, is_on=False)
            control.set_power_profiles(0, 2, 20)
            control.set_power_smoothing(0, is_on=True, profile=3, floors_w=(210, 180))
            control.lock_memory_clock(0, 810)
            control.set_application_clock(0, 1200)
            control.set_mig(1, is_on=True)
            wait_until(lambda: knobs()["requested_power_profiles"] == [2, 20])
            wait_until(lambda: knobs()["power_limit_owner"] == "another program")
            wait_until(lambda: knobs()["is_persistent"] is False)
            wait_until(lambda: knobs()["memory_clock_mhz"] == 810)
            wait_until(lambda: knobs()["application_sm_clock_mhz"] == 1200)
            wait_until(lambda: knobs()["is_power_smoothing_on"] is True)
            wait_until(lambda: daemon.status()["gpus"][1]["is_mig_enabled"] is True)
            seen_now = knobs()
            assert (seen_now["power_smoothing_profile"], seen_now["power_floor_w"]) == (3, 210.0)
            assert seen_now["secondary_power_floor_w"] == 180.0
            assert seen_now["max_memory_clock_mhz"] > 810

            text = metrics(daemon)
            assert f'gpuenergyd_gpu_power_limit_watts{{gpu_uuid="{gpu}",index="0"' in text
            limit = next(line for line in text.splitlines() if line.startswith("gpuenergyd_gpu_enforced_power_limit"))
            assert limit.endswith(" 300.0")
            for name, value in (
                ("memory_clock_hertz", 810e6),
                ("application_sm_clock_hertz", 1200e6),
                ("power_floor_watts", 210.0),
                ("power_smoothing_on", 1.0),
                ("persistence_mode", 0.0),
            ):
                line = next(line for line in text.splitlines() if line.startswith(f"gpuenergyd_gpu_{name}{{"))
                assert float(line.rsplit(" ", 1)[1]) == value
            profiles = [x for x in text.splitlines() if x.startswith(f'gpuenergyd_gpu_power_profile{{gpu_uuid="{gpu}"')]
            assert [x.partition("profile=")[2] for x in profiles] == [
                '"2",state="requested"} 1.0',
                '"20",state="requested"} 1.0',
                '"2",state="enforced"} 1.0',
            ]
            mig = [x for x in text.splitlines() if x.startswith("gpuenergyd_gpu_mig_enabled{")]
            assert [x.rsplit(" ", 1)[1] for x in mig[:2]] == ["0.0", "1.0"]
            assert knobs()["enforced_power_profiles"] == [2]
            assert job.finish() == 0
        wait_until(lambda: daemon.job() is None)
        wait_until(daemon.is_as_found)
        assert daemon.stop() == 0

        assert foreign.power_limit_w(gpu) == 300.0
        foreign.close()
    with open_history(daemon.database_path) as history:
        (summary,) = history.job_summaries()
        events = [event for event in history.control_events(summary.job_id) if event.action == "knob"]
    seen = {
        (event.reason.partition(", perhaps ")[0], event.before, event.after)
        for event in events
        if event.gpu_uuid == gpu
    }
    assert ("power_limit_w changed by another program", "480", "300") in seen
    assert ("is_persistent changed by another program", "on", "off") in seen
    assert ("requested_power_profiles changed by another program", "2", "2,20") in seen
    assert ("is_power_smoothing_on changed by another program", "off", "on") in seen
    assert ("power_floor_w changed by another program", "0", "210") in seen
    assert ("memory_clock_mhz changed by another program", str(memory_mhz), "810") in seen
    assert ("application_sm_clock_mhz changed by another program", str(sm_mhz), "1200") in seen
    assert any(e.reason.startswith("is_mig_enabled changed by another program") for e in events if e.gpu_uuid != gpu)
    changes = [event.reason.partition(" ")[0] for event in events if event.gpu_uuid == gpu]
    assert sorted(changes) == sorted(set(changes))  # each is seen once: nothing is fought


@pytest.mark.parametrize(
    ("difference_mhz", "is_planned_again"),
    [
        pytest.param(90, True, id="higher", marks=pytest.mark.thorough),
        pytest.param(-90, True, id="lower", marks=pytest.mark.thorough),
        pytest.param(-90, False, id="lower, to the end"),
    ],
)
def test_a_foreign_clock_lock_is_seen_planned_inside_and_stands_at_the_end(
    daemon: DaemonProcess, difference_mhz: int, *, is_planned_again: bool
) -> None:
    with FakeNvmlControl(daemon.world_path) as control:
        control.set_privileged(True)
        daemon.start()
        foreign = SimulatedHost.open(daemon.world_path)
        gpu = foreign.identities()[3].gpu_uuid
        with training(daemon, arguments=("--policy", "uniform")) as job:

            def lock_in_effect_mhz() -> int:
                own = daemon.status()["gpus"][3]
                lock_mhz = foreign.locked_sm_clock_mhz(gpu) or 1410
                return lock_mhz if own["sm_clock_mhz"] == own["requested_sm_clock_mhz"] == lock_mhz else 1410

            in_effect_mhz = [1410]

            def is_lowered() -> bool:
                in_effect_mhz.append(lock_in_effect_mhz())
                return in_effect_mhz[-1] <= 1410 - 90

            wait_until(is_lowered, log=lambda: daemon.log)
            sm_clock_mhz = in_effect_mhz[-1] + difference_mhz

            def is_seen() -> bool:
                """Set the lock again where it is gone, as DCGM does with its targets, until it has been seen."""
                if daemon.status()["gpus"][3]["foreign_sm_clock_mhz"] == sm_clock_mhz:
                    return True
                if foreign.locked_sm_clock_mhz(gpu) != sm_clock_mhz and lock_in_effect_mhz() < 1410:
                    foreign.lock_sm_clock(gpu, sm_clock_mhz)
                return False

            wait_until(is_seen, log=lambda: daemon.log)
            assert "another program" in daemon.status()["gpus"][3]["state_reason"]
            line = next(
                x for x in metrics(daemon).splitlines() if x.startswith("gpuenergyd_gpu_foreign_sm_clock_hertz")
            )
            assert float(line.rsplit(" ", 1)[1]) == sm_clock_mhz * 1e6

            locks: set[int | None] = set()

            def is_planned_inside() -> bool:
                locks.add(lock_mhz := foreign.locked_sm_clock_mhz(gpu))
                return lock_mhz is not None and lock_mhz < sm_clock_mhz

            if is_planned_again:
                wait_until(is_planned_inside, log=lambda: daemon.log)
                assert all(lock is not None and lock <= sm_clock_mhz for lock in locks)
            assert job.finish() == 0
        wait_until(lambda: daemon.job() is None)
        assert daemon.stop() == 0

        assert daemon.locks_mhz() == [None, None, None, sm_clock_mhz]
        foreign.close()
    with open_history(daemon.database_path) as history:
        (summary,) = history.job_summaries()
        events = [event for event in history.control_events(summary.job_id) if event.action == "knob"]
    found = [
        event.after for event in events if event.reason.startswith("foreign_sm_clock_mhz changed by another program")
    ]
    assert found == [str(sm_clock_mhz)]  # seen once, and not fought
