"""Dating the updates of energy counters, for any period and any duration of a read."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.gpu.worker.threads.counter_edges import EnergyEdges
from tests.support.examples import examples


def _follow(
    *, period_ns: int, phase_ns: int, tick_ns: int, until_ns: int, lateness: list[int]
) -> tuple[EnergyEdges, list[tuple[int, float]], int]:
    """Read a counter of 100 W as the sampler does; return the dated updates and the number of readings."""
    edges = EnergyEdges()
    output: list[tuple[int, float]] = []
    now_ns, next_tick_ns, reads = 1, tick_ns, 0
    while now_ns < until_ns:
        shown_ns = phase_ns + (now_ns - phase_ns) // period_ns * period_ns
        edges.observe(now_ns, round(100.0 * (shown_ns + 10**12) / 1e9, 3))
        reads += 1
        if edges.edge_mono_ns is not None and edges.edge_energy_j is not None:
            output.append((edges.edge_mono_ns, edges.edge_energy_j))
        while next_tick_ns <= now_ns:
            next_tick_ns += tick_ns
        wanted = edges.next_read_ns or next_tick_ns
        now_ns = max(now_ns + 50_000, min(next_tick_ns, wanted)) + lateness[reads % len(lateness)]
    return edges, output, reads


@settings(max_examples=examples(60), deadline=None)
@given(
    period_ms=st.sampled_from([50, 100, 101, 130, 200]),
    phase_ns=st.integers(0, 49_000_000),
    lateness=st.lists(st.integers(0, 300_000), min_size=1, max_size=7),
)
def test_each_value_is_dated_to_its_update_within_two_milliseconds(
    period_ms: int, phase_ns: int, lateness: list[int]
) -> None:
    _, output, _ = _follow(
        period_ns=period_ms * 1_000_000, phase_ns=phase_ns, tick_ns=20_000_000, until_ns=6 * 10**9, lateness=lateness
    )

    assert len({edge for edge, _ in output}) >= 12
    for edge_ns, energy_j in output:
        true_ns = round(energy_j / 100.0 * 1e9) - 10**12
        assert abs(edge_ns - true_ns) < 2_000_000


@settings(max_examples=examples(30), deadline=None)
@given(phase_ns=st.integers(0, 19_000_000), lateness=st.lists(st.integers(0, 300_000), min_size=1, max_size=5))
def test_fast_counter_is_dated_to_its_update_too(phase_ns: int, lateness: list[int]) -> None:
    """A wrong date costs a whole step of energy, so it must never be off by one."""
    _, output, _ = _follow(
        period_ns=20_000_000, phase_ns=phase_ns, tick_ns=25_000_000, until_ns=3_000_000_000, lateness=lateness
    )

    for edge_ns, energy_j in output:
        true_ns = round(energy_j / 100.0 * 1e9) - 10**12
        assert abs(edge_ns - true_ns) < 3_000_000


@settings(max_examples=examples(60), deadline=None)
@given(
    phase_ns=st.integers(0, 99_000_000),
    tick_ms=st.sampled_from([20, 100]),
    lateness=st.lists(st.one_of(st.integers(0, 300_000), st.integers(0, 40_000_000)), min_size=5, max_size=60),
)
def test_late_readings_on_a_busy_host_do_not_misdate_updates(phase_ns: int, tick_ms: int, lateness: list[int]) -> None:
    """Some readings are tens of milliseconds late, also while learning; most updates are still dated correctly."""
    quiet = [100_000] * 200
    _, output, _ = _follow(
        period_ns=10**8, phase_ns=phase_ns, tick_ns=tick_ms * 10**6, until_ns=20 * 10**9, lateness=lateness + quiet
    )

    errors_ns = sorted(abs(edge - (round(energy / 100.0 * 1e9) - 10**12)) for edge, energy in dict(output).items())
    assert errors_ns[int(0.9 * len(errors_ns))] < 4_000_000


@pytest.mark.parametrize(("phase_ms", "most_looks"), [(50, 80), (99, 180)])
def test_extra_readings_are_only_as_frequent_as_dating_needs(phase_ms: int, most_looks: int) -> None:
    """Ten readings a second of a counter with that period: in the middle of its steps, and right at its updates."""
    _, output, reads = _follow(
        period_ns=10**8, phase_ns=phase_ms * 10**6, tick_ns=10**8, until_ns=20 * 10**9, lateness=[100_000]
    )
    edges = sorted({edge for edge, _ in output})

    assert reads - 200 - 500 < most_looks  # ticks and learning
    assert max(b - a for a, b in pairwise(edges)) <= 610_000_000  # two rounds of looks at most


def _follow_slowly(*, period_ns: int, took_ns: int, tick_ns: int, seed: int) -> list[tuple[int, float]]:
    """Read a counter of 100 W by calls that take time and look at it at some instant; return the dated updates."""
    rng = random.Random(seed)
    phase_ns = rng.randrange(period_ns)
    edges, output, now_ns, next_tick_ns = EnergyEdges(), [(0, 0.0)], 1, tick_ns
    while now_ns < 6_000_000_000:
        seen_ns = now_ns + rng.randint(0, took_ns)
        shown_ns = phase_ns + (seen_ns - phase_ns) // period_ns * period_ns
        edges.observe(now_ns + took_ns // 2, round(100.0 * (shown_ns + 10**12) / 1e9, 3), took_ns=took_ns)
        if edges.edge_mono_ns is not None and edges.edge_energy_j is not None and edges.edge_mono_ns > output[-1][0]:
            output.append((edges.edge_mono_ns, edges.edge_energy_j))
        now_ns += took_ns
        while next_tick_ns <= now_ns:
            next_tick_ns += tick_ns
        wanted = edges.next_read_ns or next_tick_ns
        now_ns = max(now_ns + 50_000, min(next_tick_ns, wanted)) + rng.randint(0, 200_000)
    return output[1:]


@pytest.mark.parametrize("took_ms", [0.1, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("period_ms", [1, 2, 5, 10, 20, 50, 100])
@pytest.mark.parametrize("tick_ms", [20, 100])
def test_energy_between_updates_is_right_however_slow_reads_and_however_fast_the_counter(
    took_ms: float, period_ms: int, tick_ms: int
) -> None:
    for seed in range(8):
        edges = _follow_slowly(
            period_ns=period_ms * 1_000_000, took_ns=round(took_ms * 1e6), tick_ns=tick_ms * 1_000_000, seed=seed
        )
        later = [edge for edge in edges if edge[0] > 1_500_000_000]
        (begin_ns, begin_j), (end_ns, end_j) = later[0], later[-1]

        assert begin_ns < 3_000_000_000
        assert max(b - a for (a, _), (b, _) in pairwise(later)) <= 1_100_000_000
        assert end_j - begin_j == pytest.approx(100.0 * (end_ns - begin_ns) / 1e9, rel=0.005)
        # Updates of a slow counter are dated to a few milliseconds, a fast one is off by half a period at most.
        limit_s = 0.012 if period_ms > 20 else (period_ms + took_ms + 1) / 1000
        for (a_ns, a_j), (b_ns, b_j) in pairwise(later[:: max(1, len(later) // 4)]):
            assert abs(b_j - a_j - 100.0 * (b_ns - a_ns) / 1e9) < 100.0 * limit_s


def test_a_counter_that_slows_down_is_learned_anew() -> None:
    edges = EnergyEdges()
    was_fast = []
    for k in range(1200):
        edges.observe(k * 1_000_000, 500.0 + k if k < 40 else 540.0 + k // 50)
        was_fast.append(edges.is_fast)

    assert was_fast[39]
    assert not was_fast[-1]
    assert edges.period_ns == pytest.approx(50_000_000, rel=0.05)


def _learned_after_s(edges: EnergyEdges, *, from_ns: int, tick_ns: int) -> float:
    """Read a counter with a period of 50 ms as often as it asks for, until its period is known."""
    now_ns = from_ns
    while not edges.period_ns:
        now_ns = min(edges.next_read_ns or now_ns + tick_ns, now_ns + tick_ns)
        edges.observe(now_ns, now_ns // 50_000_000)
        assert now_ns < from_ns + 60 * 10**9
    return (now_ns - from_ns) / 1e9


def test_a_counter_that_waited_for_another_one_is_learned_soon() -> None:
    edges = EnergyEdges()
    edges.observe(1, 0.0)
    edges.postpone_learning(2)
    assert not edges.is_learning

    assert _learned_after_s(edges, from_ns=2, tick_ns=100_000_000) < 3.0


def test_a_counter_that_a_busy_host_read_too_rarely_is_learned_soon_after() -> None:
    edges = EnergyEdges()
    for k in range(100):
        edges.observe(1 + k * 30_000_000, float(1 + k * 30_000_000 // 50_000_000))
    assert not edges.period_ns

    assert _learned_after_s(edges, from_ns=3_000_000_001, tick_ns=100_000_000) < 3.5


@pytest.mark.fault(16)
def test_decreasing_counter_restarts_the_tracking() -> None:
    edges = EnergyEdges()
    for k in range(800):
        edges.observe(k * 2_000_000, 500.0 + k // 50)
    assert edges.edge_energy_j is not None

    edges.observe(1_601_000_000, 3.0)

    assert edges.edge_mono_ns is None
    assert edges.edge_energy_j is None


@pytest.mark.parametrize("energy_j", [None, 42.0])
def test_missing_or_constant_counter_needs_no_extra_readings(energy_j: float | None) -> None:
    edges = EnergyEdges()
    for k in range(1000):
        edges.observe(k * 2_000_000, energy_j)

    assert edges.next_read_ns == 0
    assert edges.edge_mono_ns is None
