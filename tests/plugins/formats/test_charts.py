"""Charts draw measurements at the right position; missing measurements are gaps."""

import re
import xml.etree.ElementTree as ET
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.graph import InstructionKind, combined_chunk_index
from gpuenergyd.core.pipeline.megatron_orders import COMBINED
from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, PlanPurpose
from gpuenergyd.quantities.energy_use import EnergyUse
from gpuenergyd.report.groups import Group
from gpuenergyd.report.timelines import ClockScale, ObservedIteration
from gpuenergyd.store import IterationRow, PlanRecord
from gpuenergyd.store.records import RollupRecord
from gpuenergyd_formats.charts.axes import Axis, elapsed_step, elapsed_text, energy_step, energy_tick, round_step
from gpuenergyd_formats.charts.carbon_intensity import IntensityStep, TargetStep, intensity_svg
from gpuenergyd_formats.charts.daily_energy import days_svg
from gpuenergyd_formats.charts.power import power_svg
from gpuenergyd_formats.charts.time_energy import plane_svg
from gpuenergyd_formats.charts.timeline import timelines_svg
from tests.support.sample_history import TUNED

AT = datetime(2026, 3, 1, tzinfo=UTC)


def iterations(*, with_energy: bool = True) -> list[IterationRow]:
    """Return baseline iterations of 0.5 s and 100 J, tuned ones of 0.52 s and 80 J."""
    return [
        IterationRow(index, AT, time_s, energy_j if with_energy else None, plan_id, purpose, True)
        for index, (plan_id, purpose, time_s, energy_j) in enumerate(
            [(BASELINE_PLAN_ID, PlanPurpose.BASELINE, 0.5, 100.0)] * 3
            + [("tuned-1", PlanPurpose.TUNED, 0.52, 80.0)] * 3
        )
    ]


def rollup(second: int, gpu: int, power_w: float | None) -> RollupRecord:
    return RollupRecord(1, f"GPU-{gpu}", AT + timedelta(seconds=second), "j1", power_w, power_w, power_w, None, 10)


def test_less_energy_is_lower_and_more_time_further_right() -> None:
    svg = ET.fromstring(plane_svg(iterations(), PlanRecord("j1", 1, TUNED, AT, 3), allowed_time_s=0.5))

    dots = {dot.attrib["class"]: dot for dot in svg.iter("circle")}
    assert set(dots) == {"baseline", "tuned"}
    assert float(dots["tuned"].attrib["cx"]) > float(dots["baseline"].attrib["cx"])
    assert float(dots["tuned"].attrib["cy"]) > float(dots["baseline"].attrib["cy"])
    assert dots["tuned"].findtext("title") == "tuned-1: 520.0 ms, 80.0 J, median of 3"
    lines = {line.attrib["class"]: line for line in svg.iter("line")}
    assert float(lines["allowed"].attrib["x1"]) == float(dots["baseline"].attrib["cx"])
    assert lines["bound"].findtext("title") == "lower bound (fitted model): 80.0 J"


def test_the_frontier_is_drawn_to_one_point_beyond_the_measured_and_allowed_times() -> None:
    points = tuple((0.48 + 0.02 * k, 100.0 - 5.0 * k) for k in range(8))

    svg = ET.fromstring(plane_svg(iterations(), None, allowed_time_s=0.55, frontier=points[::-1]))
    drawn = {path.attrib["class"]: path.attrib["d"] for path in svg.iter("path")}

    places = [float(x) for x in re.findall(r"[ML]([\d.]+) ", drawn["frontier"])]
    assert len(places) == 5  # 0.48 and 0.56 beside 0.50 .. 0.54
    assert places == sorted(places)
    assert drawn["pareto"].count("H") == 1
    assert "frontier" not in plane_svg(iterations(), None, allowed_time_s=0.55)


@pytest.mark.parametrize(
    ("step_s", "rounded"), [(0.03, 0.05), (0.6, 1.0), (7.0, 10.0), (40.0, 60.0), (4000.0, 7200.0), (3e5, 432_000.0)]
)
def test_time_ticks_are_whole_seconds_minutes_hours_or_days(step_s: float, rounded: float) -> None:
    assert elapsed_step(step_s) == pytest.approx(rounded)


@pytest.mark.parametrize(
    ("time_s", "text"),
    [(0.0, "0"), (0.25, "250 ms"), (45.0, "45 s"), (90.0, "1 min 30 s"), (21_600.0, "6 h"), (259_200.0, "3 d")],
)
def test_tick_labels_of_elapsed_time(time_s: float, text: str) -> None:
    assert elapsed_text(time_s) == text


def test_large_energies_have_ticks_that_are_round_in_kilowatt_hours() -> None:
    axis = Axis(0.0, 90e6, at_low=0.0, at_high=1.0, text=energy_tick, num_ticks=4, step=energy_step)

    assert [axis.text(tick) for tick in axis.ticks()] == ["0", "10 kWh", "20 kWh"]


def test_without_measured_energy_there_is_no_time_energy_chart() -> None:
    assert plane_svg(iterations(with_energy=False), None, allowed_time_s=None) == ""
    assert plane_svg(iterations()[:3], None, allowed_time_s=None) == ""


def test_a_second_in_which_a_gpu_was_not_measured_is_a_gap() -> None:
    whole = [rollup(second, gpu, 100.0) for second in range(6) for gpu in range(2)]
    torn = [r for r in whole if not (r.gpu_uuid == "GPU-1" and r.started_at == AT + timedelta(seconds=3))]

    def strokes(rollups: list[RollupRecord]) -> int:
        path = re.search(r'class="line" d="([^"]*)"', power_svg(rollups, num_gpus=2))
        assert path
        return path[1].count("M")

    assert strokes(whole) == 1
    assert strokes(torn) == 2


def test_a_long_history_is_thinned_without_losing_its_mean() -> None:
    rollups = [rollup(second, 0, 100.0 + second % 2) for second in range(5000)]

    svg = power_svg(rollups, num_gpus=1)

    path = re.search(r'class="line" d="([^"]*)"', svg)
    assert path
    assert path[1].count("H") <= 500
    heights = [float(y) for y in re.findall(r"L[\d.]+ ([\d.]+)", path[1])]
    assert max(heights) - min(heights) < 0.5


def test_a_single_sample_draws_no_power_chart() -> None:
    assert power_svg([rollup(0, 0, 1.0)], num_gpus=1) == ""
    assert power_svg([], num_gpus=1) == ""


@given(st.floats(1e-6, 1e9))
def test_a_step_is_round_and_just_large_enough(step: float) -> None:
    rounded = round_step(step)

    assert step <= rounded <= 2.5 * step * (1 + 1e-9)
    assert f"{rounded:.6e}"[0] in "125"


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_lie_within_their_axis(low: float, width: float) -> None:
    axis = Axis(low, low + width, at_low=0.0, at_high=100.0, text=str)

    assert all(-1e-3 <= axis.place(tick) <= 100.001 for tick in axis.ticks())
    assert len(axis.ticks()) <= 7


def test_faster_clocks_are_brighter() -> None:
    scale = ClockScale(900, 1410)

    def brightness(colour: str) -> float:
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    shades = [brightness(scale.fill(clock)) for clock in range(900, 1411, 15)]
    assert shades == sorted(shades)
    assert scale.fill(None) == "url(#unknown)"


def day(name: str, *, jobs_j: float | None, idle_j: float | None, missing_s: float = 0.0) -> Group:
    return Group(
        {"group": name},
        by_jobs=EnergyUse(energy_j=jobs_j, measured_s=3600.0),
        idle=EnergyUse(energy_j=idle_j, estimated_j=idle_j, missing_s=missing_s),
    )


def test_bars_of_a_day_are_stacked_to_its_total_energy() -> None:
    svg = ET.fromstring(
        days_svg([day("2026-03-01", jobs_j=3e6, idle_j=None), day("2026-03-02", jobs_j=1e6, idle_j=1e6)])
    )

    one, other = ([float(bar.attrib["height"]) for bar in group.iter("rect")] for group in svg.iter("g"))
    assert len(one) == 1
    assert len(other) == 3
    assert sum(other) == pytest.approx(one[0], abs=0.2)
    tops = [float(bar.attrib["y"]) for bar in list(svg.iter("g"))[1].iter("rect")]
    assert tops == sorted(tops, reverse=True)


def test_a_single_day_is_drawn_at_the_left() -> None:
    svg = ET.fromstring(days_svg([day("2026-03-01", jobs_j=3e6, idle_j=None)]))

    (group,) = svg.iter("g")
    (bar,) = group.iter("rect")
    assert float(bar.attrib["x"]) + float(bar.attrib["width"]) < 300


def test_a_combined_instruction_is_described_by_both_of_its_parts() -> None:
    kinds = [(InstructionKind.F, 0, 0), (InstructionKind.FB, 0, combined_chunk_index(1, 0)), (InstructionKind.B, 1, 1)]
    spans = [ObservedSpan(0, *key, k, k + 1.0, 1410.0) for k, key in enumerate(kinds)]

    svg = timelines_svg([ObservedIteration("one", 3.0, tuple(spans), COMBINED)])

    assert "<title>forward of microbatch 0, stage 0: " in svg
    assert "<title>forward of chunk 1, overlapped with the backward of microbatch 0, chunk 0, stage 0: " in svg
    assert "<title>backward of microbatch 1, chunk 1, stage 0: " in svg


def test_days_with_missing_readings_are_marked_and_days_without_energy_draw_nothing() -> None:
    picture = days_svg([day("2026-03-01", jobs_j=1e6, idle_j=None, missing_s=1800.0)])

    assert ET.fromstring(picture).findtext("text[@class='gap']") == "?"
    assert "no readings for 30 min 0 s of GPU time" in picture
    assert days_svg([]) == days_svg([day("2026-03-01", jobs_j=None, idle_j=None, missing_s=60.0)]) == ""


def test_the_predicted_power_is_drawn_from_the_time_the_plan_was_issued() -> None:
    rollups = [rollup(second, 0, 150.0) for second in range(10)]
    plan = PlanRecord("j1", 1, TUNED, AT + timedelta(seconds=5), 3)  # 80.5 J in 0.5 s: 161 W

    svg = ET.fromstring(power_svg(rollups, num_gpus=1, plans=[plan]))
    drawn = {path.attrib["class"]: path.attrib["d"] for path in svg.iter("path")}

    measured_y, planned_y = (
        float(re.findall(r"M[\d.]+ ([\d.]+)", drawn[name])[0]) for name in ("line", "line planned")
    )
    begin, end = (float(x) for x in re.findall(r"M([\d.]+) [\d.]+H([\d.]+)", drawn["line planned"])[0])
    assert planned_y < measured_y
    assert begin == pytest.approx((78.0 + 984.0) / 2, abs=1)
    assert end == pytest.approx(984.0, abs=1)
    assert "planned" not in power_svg(rollups, num_gpus=1)


def test_intensity_and_target_share_a_time_axis_and_unknown_hours_are_gaps() -> None:
    hours = [AT + timedelta(hours=k) for k in range(6)]
    grid = [IntensityStep(hours[k], hours[k + 1], 100.0 * (k + 1), is_measured=k < 4) for k in (0, 1, 3, 4)]
    targets = [TargetStep(hours[0], None), TargetStep(hours[2], 1.1), TargetStep(hours[3], 1.0)]

    picture = intensity_svg(grid, targets, unit="g/kWh", full_speed_time_s=1.0, end_at=hours[5])
    paths = {path.attrib["class"]: path.attrib["d"] for path in ET.fromstring(picture).iter("path")}

    assert set(paths) == {"line", "line unsure", "line target"}
    assert paths["line"].count("M") == 2
    assert paths["line"].count("L") == 1
    slower = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", paths["line target"])]
    assert slower[1] < slower[0] == slower[2]
    assert intensity_svg([], targets, unit="g/kWh", full_speed_time_s=1.0, end_at=hours[5]) == ""


def test_without_targets_only_the_intensity_is_drawn() -> None:
    grid = [IntensityStep(AT, AT + timedelta(hours=1), 100.0)]

    picture = intensity_svg(grid, [], unit="g/kWh", full_speed_time_s=None, end_at=AT + timedelta(hours=1))

    assert "target</text>" not in picture
    assert 'class="line"' in picture
