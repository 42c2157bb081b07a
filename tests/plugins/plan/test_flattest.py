"""`gpuenergyd plan --flattest`: the swing in figures and lines, and one line for each option that contradicts it."""

import re
from pathlib import Path

import pytest

from gpuenergyd.errors import GpuEnergyError
from gpuenergyd_plan.command import plan
from tests.plugins.plan.invocation import output_of, plan_figures, write_table

COMMON = ("--microbatches", "4", "--blocking-power-w", "60")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Write a profile of four unequal stages."""
    return write_table(tmp_path, clock_step_mhz=200)


def test_the_swing_of_every_plan_is_reported_and_the_flattest_has_no_more(table: Path) -> None:
    usual = plan_figures(table, *COMMON)
    flattest = plan_figures(table, *COMMON, "--flattest")

    assert usual["swing"]["planned"] == usual["swing"]["least_energy"] == flattest["swing"]["least_energy"]
    assert usual["swing"]["band_energy_against_least_energy_ratio"] == 0
    planned = flattest["swing"]["planned"]
    assert planned["trough_w"] <= planned["mean_w"] <= planned["peak_w"]
    assert planned["band_rms_w"] ** 2 == pytest.approx(planned["band_energy_w2"])
    assert planned["band_energy_w2"] <= usual["swing"]["planned"]["band_energy_w2"]
    assert planned["mean_w"] == pytest.approx(flattest["energy_j"] / flattest["iteration_time_s"])
    assert flattest["iteration_time_s"] <= usual["iteration_time_s"] * (1 + 1e-9)
    assert flattest["energy_j"] <= usual["energy_j"] * 1.002001


def test_people_read_how_much_power_swings(table: Path) -> None:
    printed = " ".join(output_of(plan, table, *COMMON, "--flattest").split())

    assert re.search(
        r"power of all GPUs is between [\d.]+ W \(full speed [\d.]+ W\) and [\d.]+ W \(full speed", printed
    )
    assert re.search(r"it swings by [\d.]+ W RMS from 0.1 to 20 Hz \(full speed [\d.]+ W\)", printed)


def test_the_swing_is_not_reported_where_clocks_come_late(table: Path) -> None:
    assert "swing" not in plan_figures(table, *COMMON, "--switch-latency-s", "0.001")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--power-cap-w", "1200"), "--power-cap-w: not together with --flattest"),
        (("--straggler-time-s", "9"), "--straggler-time-s: not together with --flattest"),
        (("--max-switches", "3"), "--max-switches: not together with --flattest"),
        (("--switch-latency-s", "0.01"), "--switch-latency-s: not together with --flattest"),
        (("--policy", "uniform"), "--flattest: only policy bubble-aware"),
    ],
)
def test_what_cannot_be_flattened_is_one_line(table: Path, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(GpuEnergyError, match=message) as error:
        output_of(plan, table, *COMMON, "--flattest", *options)

    assert "\n" not in str(error.value)


def test_the_figures_of_a_cap(table: Path) -> None:
    figures = plan_figures(table, *COMMON, "--power-cap-w", "1200")

    assert figures["power_cap_w"] == 1200.0
    assert figures["window_s"] == 0.0
    assert figures["mean_power_w"] <= figures["peak_power_w"] <= 1200.0 < figures["full_speed_peak_power_w"]
    assert figures["mean_power_w"] == pytest.approx(figures["energy_j"] / figures["iteration_time_s"])
    assert figures["baseline_time_s"] <= figures["time_bound_s"] <= figures["iteration_time_s"]
    assert figures["slowdown_ratio"] <= figures["single_clock_slowdown_ratio"]
    assert figures["slowdown_ratio"] <= figures["equal_limits_slowdown_ratio"]


def test_without_a_cap_there_are_no_figures_of_power(table: Path) -> None:
    assert "power_cap_w" not in plan_figures(table, *COMMON)


def test_a_window_permits_more_than_an_instant(table: Path) -> None:
    instant = plan_figures(table, *COMMON, "--power-cap-w", "1200")
    windowed = plan_figures(table, *COMMON, "--power-cap-w", "1200", "--window-s", "0.1")

    assert windowed["iteration_time_s"] <= instant["iteration_time_s"]
    assert windowed["peak_power_w"] <= 1200.0


def test_people_read_the_power_the_bound_and_the_usual_ways(table: Path) -> None:
    printed = " ".join(output_of(plan, table, *COMMON, "--power-cap-w", "1200").split())

    assert re.search(r"power at any instant: at most [\d.]+ W under a cap of 1200 W \(full speed [\d.]+ W\)", printed)
    assert re.search(r"no plan of this order under the cap is faster than [\d.]+ s \(this one \+[\d.]+ %\)", printed)
    assert re.search(r"one locked clock for all GPUs would take \+[\d.]+ %, equal power limits would take", printed)
    windowed = " ".join(output_of(plan, table, *COMMON, "--power-cap-w", "1200", "--window-s", "0.1").split())
    assert "power in any 0.1 s: at most" in windowed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--power-cap-w", "100"), "power cap 100 W cannot be met: .* needs [0-9.]+ W"),
        (("--power-cap-w", "0"), "--power-cap-w 0.0: must be a finite number > 0 W"),
        (("--power-cap-w", "-5"), "--power-cap-w -5.0: must be a finite number > 0 W"),
        (("--power-cap-w", "nan"), "--power-cap-w nan: must be a finite number > 0 W"),
        (("--power-cap-w", "900", "--window-s", "inf"), "--window-s inf: must be a finite number > 0 s"),
        (("--window-s", "0.1"), "--window-s 0.1: only together with --power-cap-w"),
        (("--power-cap-w", "900", "--max-slowdown", "0.1"), "--max-slowdown: not together with --power-cap-w"),
        (("--power-cap-w", "900", "--target-s", "9"), "--target-s: not together with --power-cap-w"),
        (("--power-cap-w", "900", "--straggler-time-s", "9"), "--straggler-time-s: not together with --power-cap-w"),
        (("--power-cap-w", "900", "--frontier"), "--frontier: not planned under a power cap"),
        (("--power-cap-w", "900", "--max-switches", "3"), "--max-switches: not planned under a power cap"),
        (("--power-cap-w", "900", "--extra-inflight", "1"), "--extra-inflight: not planned under a power cap"),
        (("--power-cap-w", "900", "--policy", "uniform"), "--power-cap-w 900: only policy bubble-aware plans under"),
    ],
)
def test_what_cannot_be_planned_is_one_line(table: Path, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(GpuEnergyError, match=message) as error:
        output_of(plan, table, *COMMON, *options)

    assert "\n" not in str(error.value)
