"""Counters that cost much CPU time are read about once a second, and their updates are dated all the same."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from gpuenergyd.errors import DriverError
from gpuenergyd.gpu.device import EnergyReading
from tests.support.costly_counters import PERIOD_NS, CostlyHost, Levels, Trace
from tests.support.measured_tables import DATA

S = 1_000_000_000
SETTLED_NS, END_NS = 20 * S, 50 * S
STEADY, WAITING, STEPS = [(0.065, 690.0)], [(0.063, 690.0), (0.03, 126.0)], [(1.0, 720.0), (1.0, 127.0)]
IDLE = [(1.0, 126.0)]
OBSERVATION_LIMIT_NS, SENT_NS = 1_300_000_000, 100_000_000
"""How long the daemon waits for the energy of an iteration, and samples for being sent."""
TRACES = DATA / "gpu" / "h200"


def host_of(*programs: Sequence[tuple[float, float]], seed: int = 0, until_ns: int = END_NS) -> CostlyHost:
    """Return GPUs that repeat programs."""
    levels = [Levels(own, until_ns=until_ns + 5 * S, seed=seed + k) for k, own in enumerate(programs)]
    return CostlyHost(levels, until_ns, seed)


def dated(host: CostlyHost, gpu: int) -> dict[int, float]:
    own = [sample for sample in host.samples if sample.gpu_uuid == str(gpu)]
    return {s.energy_edge_mono_ns: s.total_energy_j or 0.0 for s in own if s.energy_edge_mono_ns is not None}


def misdated(host: CostlyHost, gpu: int, near_ns: int = PERIOD_NS // 10) -> list[int]:
    """Return the updates that were dated further from the counter's than a tenth of a period, or as given."""
    source = host.sources[gpu]
    return [
        at_ns
        for at_ns, energy_j in dated(host, gpu).items()
        if not source.counted_j(at_ns - near_ns) < energy_j == source.counted_j(at_ns + near_ns)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_energy_readings_take_a_hundredth_of_a_core_and_date_each_update_they_show(seed: int) -> None:
    host = host_of(STEADY, WAITING, STEPS, IDLE, seed=seed).run()

    for gpu in range(4):
        assert host.thread.counter(str(gpu)).period_ns == pytest.approx(PERIOD_NS, rel=0.001)
        assert host.cpu_ratio_between(gpu, SETTLED_NS, END_NS) < 0.012
        edges = [at_ns for at_ns in dated(host, gpu) if SETTLED_NS < at_ns < END_NS]
        assert max(after - before for before, after in pairwise(edges)) < 1.5 * S
        assert misdated(host, gpu, PERIOD_NS // 4) == []
        assert [at_ns for at_ns in misdated(host, gpu) if at_ns > SETTLED_NS] == []


def test_energy_of_an_iteration_is_known_before_the_daemon_stops_waiting_for_it() -> None:
    host = host_of(STEADY, WAITING, STEPS, IDLE).run()

    for gpu in range(4):
        newest = [
            (s.read_mono_ns, s.energy_edge_mono_ns or 0)
            for s in host.samples
            if s.gpu_uuid == str(gpu) and s.read_mono_ns > SETTLED_NS
        ]
        gaps_ns = [
            read_ns - before_ns for (_, before_ns), (read_ns, edge_ns) in pairwise(newest) if edge_ns > before_ns
        ]
        assert max(gaps_ns) < OBSERVATION_LIMIT_NS - SENT_NS


def test_a_counter_that_costs_nothing_is_read_with_all_other_values() -> None:
    host = host_of(STEADY, until_ns=10 * S)
    host.cpu_ratio = 0.0
    host.run()

    assert not host.thread._gpus["0"].counter.is_read_apart
    assert sum(at_ns > 5 * S for _, at_ns, _ in host.energy_calls) > 50


@pytest.mark.parametrize("period_ms", [2, 10, 20, 40])
def test_a_costly_counter_that_moves_often_is_read_once_a_second_and_dated(period_ms: int) -> None:
    own = Levels(WAITING, until_ns=END_NS + 5 * S, seed=1)
    own.period_ns = period_ms * 1e6
    host = CostlyHost([own], END_NS, 1).run()

    assert host.cpu_ratio_between(0, SETTLED_NS, END_NS) < 0.012
    true_j = own.true_j(END_NS - 5 * S) - own.true_j(SETTLED_NS)
    assert host.counter(0).energy_j(SETTLED_NS, END_NS - 5 * S) == pytest.approx(true_j, rel=0.005)


class Shifted(Levels):
    """A counter whose updates are a third of a period later from an instant on: the driver was loaded anew."""

    from_ns = 25 * S

    def counted_j(self, at_ns: int) -> float:
        """Return the energy at the last update."""
        return super().counted_j(at_ns if at_ns < self.from_ns else at_ns - PERIOD_NS // 3)


def test_a_grid_that_is_no_longer_where_it_was_is_learned_anew() -> None:
    host = CostlyHost([Shifted(IDLE, until_ns=80 * S, seed=3)], 75 * S, seed=3).run()

    assert not [at_ns for at_ns in misdated(host, 0) if not 24 * S < at_ns < 57 * S]
    assert max(dated(host, 0)) > 73 * S


class Restarted(Levels):
    """A counter that begins anew, perhaps after a while in which there is no driver."""

    absent_ns = 0

    def counted_j(self, at_ns: int) -> float:
        """Return the energy at the last update since then."""
        if 25 * S - self.absent_ns <= at_ns < 25 * S:
            raise DriverError("the driver is not loaded")
        return super().counted_j(at_ns) - (0.0 if at_ns < 25 * S else super().counted_j(25 * S))


@pytest.mark.fault(16)
@pytest.mark.parametrize(("cpu_ratio", "absent_ns"), [(1.0, 0), (1.0, 2 * S), (0.0, 2 * S)])
def test_a_counter_that_begins_anew_is_reported_once_and_learned_anew(cpu_ratio: float, absent_ns: int) -> None:
    own = Restarted(STEADY, until_ns=END_NS, seed=1)
    own.absent_ns = absent_ns
    host = CostlyHost([own], 40 * S, seed=1, cpu_ratio=cpu_ratio).run()

    assert host.num_resets == 1
    assert host.counter(0).energy_j(20 * S, 30 * S) is None
    assert host.counter(0).energy_j(30 * S, 38 * S) == pytest.approx(8 * 690.0, rel=0.02)


class WithoutCounter(CostlyHost):
    """A driver that stops to report energy."""

    def read_energy(self, gpu_uuid: str) -> EnergyReading:
        """Report no energy after a while."""
        reading = super().read_energy(gpu_uuid)
        if reading.read_mono_ns < 15 * S:
            return reading
        return EnergyReading(reading.read_mono_ns, reading.took_ns, None, reading.cpu_ns)


def test_energy_that_is_no_longer_reported_is_unknown_and_not_zero() -> None:
    host = WithoutCounter([Levels(STEADY, until_ns=END_NS, seed=1)], 30 * S, seed=1).run()

    late = [sample for sample in host.samples if sample.read_mono_ns > 20 * S]
    assert {(sample.total_energy_j, sample.energy_edge_mono_ns) for sample in late} == {(None, None)}
    assert sum(at_ns > 20 * S for _, at_ns, _ in host.energy_calls) <= 2


class BusyHost(CostlyHost):
    """A host on which every fifth call and wake-up is held up by tens of milliseconds."""

    def read_energy(self, gpu_uuid: str) -> EnergyReading:
        """Read by a call that is often held up."""
        called_ns, reading = self.now_ns, super().read_energy(gpu_uuid)
        self.now_ns += self._held_up_ns()
        took_ns = self.now_ns - called_ns
        return EnergyReading(called_ns + took_ns // 2, took_ns, reading.total_energy_j, reading.cpu_ns)

    def wait(self, pause_s: float) -> None:
        """Sleep, often much too long."""
        super().wait(pause_s)
        self.now_ns += self._held_up_ns()

    def _held_up_ns(self) -> int:
        return self._draw.randrange(40_000_000) if self._draw.random() < 1 / 5 else 0


@pytest.mark.parametrize("seed", range(4))
def test_calls_that_are_held_up_on_a_busy_host_take_no_update_for_another(seed: int) -> None:
    host = BusyHost([Levels(STEADY, until_ns=70 * S, seed=seed)], 60 * S, seed).run()

    assert len(dated(host, 0)) > 20
    assert misdated(host, 0, PERIOD_NS // 4) == []


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("name", "span_s"), [("load_steps", 5), ("idle_after_work", 3)])
def test_a_recorded_gpu_has_the_energy_that_its_counter_shows(name: str, span_s: int, seed: int) -> None:
    """Within 0.5 % over five seconds in each span; the shorter record allows for three.

    Each record begins with a step of power, of which nothing is known before: spans begin after the first update.
    """
    path = TRACES / f"{name}.csv"
    if not path.exists():
        pytest.skip(f"the recorded trace {path} is not on this machine")
    trace = Trace(path, begin_ns=25 * S)
    host = CostlyHost([trace], trace.end_ns + 2 * S, seed).run()

    counter, updates = host.counter(0), trace.updates[2:]
    spans = [(a, b) for a in updates for b in updates if span_s * S <= b[0] - a[0] < (span_s + 0.2) * S]
    errors = [
        abs((counter.energy_j(begin_ns, end_ns) or 0.0) / (end_j - begin_j) - 1.0)
        for (begin_ns, begin_j), (end_ns, end_j) in spans
    ]
    assert len(errors) > 9
    assert max(errors) < 0.005
