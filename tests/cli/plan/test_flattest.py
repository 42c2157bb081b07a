"""`gpuenergyd plan --flattest`: the swing in figures and lines, and one line for each option that contradicts it."""

import re
from pathlib import Path

import pytest

from gpuenergyd.cli.plan.command import plan
from gpuenergyd.errors import GpuEnergyError
from tests.cli.plan.invocation import output_of, plan_figures, write_table

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
