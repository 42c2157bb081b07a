"""Swings in the daemon: measured from readings of all GPUs, and ramps of jobs limited by ceilings that are restored."""

import math
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.errors import UsageError
from gpuenergyd_power.state import swing_fields
from tests.plugins.power.test_service import Host, on_host
from tests.support.daemon_process import running_daemon, training
from tests.support.job_stage import play
from tests.support.waiting import wait_until


@on_host()
async def test_the_swing_of_all_gpus_is_measured_while_all_are_known(host: Host) -> None:
    assert swing_fields(host.power.swings.meter) is None
    for k in range(300):
        host.sample(300 + 100 * math.sin(2 * math.pi * 0.05 * k), 300.0, 50.0)
    state = swing_fields(host.power.swings.meter)
    assert state is not None
    assert state["swing_rms_w"] == pytest.approx(100 / math.sqrt(2), rel=0.1)
    assert (state["peak_w"], state["trough_w"]) == pytest.approx((750, 550), rel=0.02)
    assert state["highest_hz"] == 5.0
    host.sample(300.0, None, 50.0)
    assert swing_fields(host.power.swings.meter) is None


def test_a_job_begins_at_the_lowest_clock_and_rises_within_its_ramp(tmp_path: Path) -> None:
    async def scenario() -> None:
        host = Host(tmp_path, power_ramp_w_per_s=300.0)
        host.stage.join()
        host.sample(55.0, 55.0, 50.0, seconds=3.0)
        await host.check()
        assert (
            host.power.swings.ceilings["GPU-0"].sm_clock_mhz
            == host.stage.gpus["GPU-0"].identity.supported_sm_clocks_mhz[-1]
        )
        assert "GPU-2" not in host.power.swings.ceilings, "a GPU without a job is left alone"
        assert host.is_cut()
        await host.stage.iterate(times=1)
        host.sample(150.0, 150.0, 50.0, seconds=1.5)
        lower = host.power.swings.ceilings["GPU-0"].sm_clock_mhz
        host.sample(200.0, 200.0, 50.0, seconds=1.0)
        higher = host.power.swings.ceilings["GPU-0"].sm_clock_mhz
        assert lower is not None
        assert higher is not None
        assert lower < higher
        host.sample(250.0, 250.0, 50.0, seconds=30.0)
        await host.check()
        assert host.power.swings.ceilings == {}
        assert not host.is_cut()
        assert [event.after for event in host.stage.events("power-ramp")] == ["resting", "rising", "free"]
        host.sample(60.0, 60.0, 50.0, seconds=5.0)
        assert [event.after for event in host.stage.events("power-ramp")][-1] == "resting"
        await host.stage.jobs.close("the test is over")
        host.sample(60.0, 60.0, 50.0)
        await host.check()
        assert host.power.swings.ceilings == {}

    play(scenario)


def test_without_the_setting_and_in_mode_observe_nothing_is_limited(tmp_path: Path) -> None:
    async def scenario() -> None:
        for given in ({}, {"mode": "observe", "power_ramp_w_per_s": 300.0}):
            host = Host(tmp_path, **given)
            host.stage.join()
            host.sample(55.0, 55.0, 50.0, seconds=3.0)
            assert host.power.swings.ceilings == {}
            assert not host.power.swings.is_limiting
            await host.check()
            assert ("power_ramp_w_per_s = 300" in (host.power.trouble or "")) is bool(given)
            await host.stage.jobs.close("the test is over")

    play(scenario)


@pytest.mark.parametrize("value", [0.0, -5.0, math.nan, math.inf])
def test_an_impossible_ramp_is_refused(tmp_path: Path, value: float) -> None:
    with pytest.raises(UsageError, match="power-ramp-w-per-s"):
        Host(tmp_path, power_ramp_w_per_s=value)


@pytest.mark.thorough
def test_a_real_job_begins_at_low_clocks_rises_and_leaves_all_as_found(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "policy": "uniform",
        "warmup_iterations": 1,
        "baseline_iterations": 3,
        "power_ramp_w_per_s": 1000.0,
    }
    with running_daemon(tmp_path, **given) as daemon:
        with training(daemon):
            wait_until(daemon.is_lowered)
            daemon.wait_for_phase("tuned")
        wait_until(daemon.is_as_found)
