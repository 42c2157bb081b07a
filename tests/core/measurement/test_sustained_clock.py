"""What GPUs at their power limits sustain, and which changes of full speed it explains."""

import csv
from dataclasses import replace

import pytest

from gpuenergyd.core.job.guard import what_changed
from gpuenergyd.core.job.measurements.savings import baseline_view
from gpuenergyd.core.measurement.observation import (
    CapReadings,
    ClockShare,
    InstructionSample,
    IterationObservation,
    RankEnergy,
    TimeAtClock,
)
from gpuenergyd.core.measurement.stages import stage_clocks
from gpuenergyd.core.measurement.sustained_clock import moved_clocks, sustained_clocks, sustained_text
from gpuenergyd.core.measurement.telemetry import ClockHistory
from gpuenergyd.core.pipeline.graph import InstructionKind
from tests.support.measured_tables import DATA

F, D = InstructionKind.F, InstructionKind.D
TOP_MHZ = 1980
PRODUCTS = DATA / "gpu" / "h200" / "power_capped_products.csv"


def observation(index: int, clock_mhz: float, *, cycles: float = 1.0, num_capped: int = 8) -> IterationObservation:
    """Return an iteration of one rank that is busy 80 % of the time, at a clock that its power limit holds."""
    time_s = cycles * 1500 / clock_mhz
    times = (TimeAtClock(None, TOP_MHZ, 0.2 * time_s), TimeAtClock(F, TOP_MHZ, 0.8 * time_s))
    sample = InstructionSample(0, F, (ClockShare(TOP_MHZ, 0.8 * time_s),), 1)
    rank = RankEnergy(0, time_s, 700.0 * time_s, times, cap=CapReadings(10, num_capped, clock_mhz))
    return IterationObservation(index, "baseline", time_s, (sample,), (rank,))


def test_the_sustained_clock_is_the_mean_of_what_was_read_at_the_limit() -> None:
    found = sustained_clocks([observation(0, 1400), observation(1, 1500), observation(2, 9.0, num_capped=0)])

    assert found[0].sm_clock_mhz == 1450
    assert found[0].capped_ratio == pytest.approx(16 / 30)
    assert found[0].num_kinds == 1


def test_busy_is_the_known_time_of_work_in_regular_iterations() -> None:
    first = observation(0, 1500)
    (rank,) = first.ranks
    times = (TimeAtClock(D, TOP_MHZ, 0.3), TimeAtClock(F, TOP_MHZ, 0.2), TimeAtClock(F, TOP_MHZ, 0.2, chunk_index=1))
    second = replace(rank, pp_rank=1, time_at=times)
    unknown = replace(rank, pp_rank=2, time_at=())
    untimed = replace(first, ranks=(replace(second, time_at=()),))

    found = sustained_clocks(
        [replace(first, ranks=(rank, second, unknown)), untimed, replace(observation(2, 1000), is_regular=False)]
    )

    assert [found[r].busy_ratio for r in range(3)] == pytest.approx([0.8, 0.4, 1.0])
    assert [found[r].num_kinds for r in range(3)] == [1, 2, 1]
    assert found[0].sm_clock_mhz == 1500


def test_a_limit_that_holds_while_the_gpu_computes_holds_all_its_work() -> None:
    (whole,) = sustained_clocks([observation(0, 1450)]).values()
    (part,) = sustained_clocks([observation(0, 1450, num_capped=5)]).values()

    assert whole.holds_all_work
    assert not part.holds_all_work
    assert str(whole) == "at its power limit 80 % of the time; sustains 1,450 MHz"


@pytest.mark.parametrize(("num_capped", "num_found"), [(0, 0), (3, 0), (4, 1)])
def test_a_few_readings_at_the_limit_are_chance(num_capped: int, num_found: int) -> None:
    assert len(sustained_clocks([observation(0, 1450, num_capped=num_capped)])) == num_found


def test_several_stages_are_summarized() -> None:
    first = observation(0, 1450)
    second = replace(first.ranks[0], pp_rank=1, cap=CapReadings(10, 6, 1500.0))

    text = sustained_text(sustained_clocks([replace(first, ranks=(*first.ranks, second))]))

    assert text == "2 stages at the power limit 60 to 80 % of the time; they sustain 1,450 to 1,500 MHz"
    assert sustained_text({}) == ""


@pytest.mark.skipif(not PRODUCTS.exists(), reason="needs the recorded traces")
def test_a_recorded_card_at_its_limit_is_recognized() -> None:
    clocks = ClockHistory(TOP_MHZ)
    with PRODUCTS.open() as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "random"]
    for k, row in enumerate(rows):
        clocks.record_reading(k, int(row["sm_mhz"]), is_power_capped=int(row["reasons"]) & 4 > 0)

    seen = replace(observation(0, 1500), ranks=(RankEnergy(0, 1.0, None, (), cap=clocks.cap_between(0, len(rows))),))
    (found,) = sustained_clocks([seen]).values()

    assert found.holds_all_work
    assert found.sm_clock_mhz == pytest.approx(1474, abs=1)


def test_readings_belong_to_the_interval_they_were_made_in_until_they_are_forgotten() -> None:
    clocks = ClockHistory(TOP_MHZ)
    for at, (mhz, is_capped) in enumerate([(1400, True), (1980, False), (1500, True)]):
        clocks.record_reading(at, mhz, is_power_capped=is_capped)

    assert clocks.cap_between(0, 2) == CapReadings(2, 1, 1400.0)
    assert clocks.cap_between(3, 9) is None
    clocks.forget_before(2)
    assert clocks.cap_between(0, 9) == CapReadings(1, 1, 1500.0)


def test_a_stage_is_as_slow_as_its_slowest_gpu_at_the_limit() -> None:
    gpus = [ClockHistory(TOP_MHZ) for _ in range(3)]
    for gpu, mhz in zip(gpus, (1980, 1500, 1400), strict=True):
        gpu.record_reading(0, mhz, is_power_capped=mhz < TOP_MHZ)

    assert stage_clocks(gpus).cap_between(0, 1) == CapReadings(1, 1, 1400.0)
    assert stage_clocks(gpus[:1] * 2).cap_between(0, 1) == CapReadings(1, 0, 0.0)


def test_a_limit_that_moves_the_clock_is_no_change_of_the_job() -> None:
    before = [observation(k, 1500) for k in range(8)]
    cooler = [observation(k, 1450) for k in range(20, 28)]
    other_work = [observation(k, 1450, cycles=1.08) for k in range(20, 28)]
    lower_limit = [observation(k, 1350) for k in range(20, 28)]

    assert moved_clocks(before, cooler).ratios[0] == pytest.approx(1450 / 1500)
    assert what_changed(before, cooler, at_least_ratio=0.02) is None
    for changed in (other_work, lower_limit):
        assert what_changed(before, changed, at_least_ratio=0.02)


def test_the_baseline_is_the_mean_over_the_clocks_that_a_limit_moves_to() -> None:
    before, later = [observation(k, 1500) for k in range(8)], [observation(k, 1450) for k in range(20, 29)]
    other_work = [observation(k, 1450, cycles=1.08) for k in range(20, 29)]

    assert baseline_view([*before, *later[:7]]).iteration_time_s == 1.0
    assert baseline_view([*before, *other_work[:7]]).iteration_time_s > 1.1
