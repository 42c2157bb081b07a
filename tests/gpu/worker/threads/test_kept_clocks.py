"""Clocks that the driver keeps for 100 ms: latencies are found all the same, and no kept clock looks like a change."""

import csv
import random

import pytest

from gpuenergyd.gpu.device import GpuReading
from gpuenergyd.gpu.worker.threads.clock_age import ClockAge
from tests.support.kept_clocks import CALL_NS, CLOCKS_MHZ, KeptClocks, Program, switching_host
from tests.support.measured_tables import DATA
from tests.support.thorough import thorough

MS = 1_000_000
INTERVALS_MS = ((60.0, 400.0), (200.0, 200.0), (500.0, 500.0))
"""Shortest and longest time between two switches."""
TRACES = DATA / "gpu" / "h200"


def age_ns(host: KeptClocks) -> int:
    return host.thread._gpus["0"].effect.age.age_ns


def errors_s(host: KeptClocks, program: Program) -> list[float]:
    """Return by how much the typical latency to each clock, of raises and reductions, is wrong."""
    targets = host.gpu.switching.latency.targets
    return [t.typical_s - (program.latency_ms[t.sm_clock_mhz] * MS + CALL_NS) / 1e9 for t in targets]


def num_false_brackets(host: KeptClocks) -> int:
    """Return how many effects are not within the bounds that the worker reported."""
    effective_ns = {change.returned_ns: change.effective_ns for change in host.changes}
    return sum(
        not (r.unseen_until_mono_ns or r.returned_mono_ns) <= effective_ns[r.returned_mono_ns] <= r.effective_mono_ns
        for r in host.reports
        if r.effective_mono_ns is not None
    )


def wrong_ms(host: KeptClocks) -> float:
    """Return for how long after a call the recorded clock is not the true one, as a mean of the later changes."""
    looked_ns = [
        change.called_ns + k * 2 * MS for change in host.changes[len(host.changes) // 2 : -1] for k in range(100)
    ]
    is_wrong = [host.gpu.clocks.clocks_between(at, at + 1)[0][0] != host.true_clock_mhz(at) for at in looked_ns]
    return 200 * sum(is_wrong) / len(is_wrong)


@pytest.mark.parametrize(
    ("seed", "every_ms"),
    [
        *((seed, every_ms) for seed, every_ms in enumerate(INTERVALS_MS, start=1)),
        *thorough(*((seed, every_ms) for seed in range(4, 11) for every_ms in INTERVALS_MS)),
    ],
)
def test_latencies_are_found_within_10_ms_by_a_thousand_switches_none_of_which_looks_foreign_or_failed(
    seed: int, every_ms: tuple[float, float]
) -> None:
    """Switches at regular instants are in step with the refreshes, unless the readings see to it that they are not."""
    draw = random.Random(seed)
    latency_ms = {clock: draw.uniform(5.0, 60.0) for clock in CLOCKS_MHZ}
    program = Program(latency_ms, 1000, every_ms, seed=seed, num_clocks=4)

    host = switching_host(program)

    assert age_ns(host) == pytest.approx(100 * MS, abs=6 * MS)
    errors = errors_s(host, program)
    assert len(errors) == 6
    assert max(map(abs, errors)) <= 0.010
    assert (host.num_foreign, num_false_brackets(host)) == (0, 0)
    assert [report.error for report in host.reports] == [None] * 1000
    assert wrong_ms(host) < 10.0


def test_clocks_that_are_read_as_they_are_contradict_the_age_that_power_suggests() -> None:
    program = Program(dict(zip(CLOCKS_MHZ, (60.0, 40.0, 5.0, 12.0, 25.0), strict=True)), 500, seed=3)

    host = switching_host(program, keep_ns=0)

    assert age_ns(host) == 0
    assert max(map(abs, errors_s(host, program))) <= 0.004
    assert wrong_ms(host) < 4.0


def test_equal_switches_that_show_after_equal_times_contradict_it_too() -> None:
    """Two clocks at intervals longer than the age, so that no change follows another within it."""
    program = Program(dict.fromkeys(CLOCKS_MHZ, 30.0), 300, (120.0, 170.0), num_clocks=2)

    assert age_ns(switching_host(program, keep_ns=0)) == 0
    assert age_ns(switching_host(program)) > 0


def reading(at_ms: float, power_w: float, clock_mhz: int = 1980) -> GpuReading:
    return GpuReading("0", round(at_ms * MS), power_w=power_w, sm_clock_mhz=clock_mhz)


def learned_age_ms(readings: list[GpuReading]) -> float:
    age = ClockAge()
    for own in readings:
        age.observe(own)
    return age.age_ns / MS


def test_a_recorded_gpu_keeps_values_for_100_ms() -> None:
    path = TRACES / "load_steps.csv"
    if not path.exists():
        pytest.skip(f"the recorded trace {path} is not on this machine")
    with path.open() as file:
        rows = list(csv.DictReader(file))

    age_ms = learned_age_ms([reading(float(row["time_ms"]), float(row["power_instant_w"])) for row in rows])

    assert age_ms == pytest.approx(100.0, abs=5.0)


@pytest.mark.parametrize("pattern_ms", [(3.0,), (70.0, 20.0), (120.0, 55.0), (5000.0,)])
def test_power_that_changes_as_a_program_does_suggests_no_age(pattern_ms: tuple[float, ...]) -> None:
    at_ms, ends_ms = 0.0, list[float]()
    while at_ms < 4000.0:
        at_ms += pattern_ms[len(ends_ms) % len(pattern_ms)]
        ends_ms.append(at_ms)

    assert learned_age_ms([reading(2.0 * k, sum(end <= 2.0 * k for end in ends_ms)) for k in range(2000)]) == 0.0
