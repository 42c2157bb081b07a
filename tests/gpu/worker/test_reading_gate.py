"""Values of a driver that reports success, but that cannot be right: unknown, counted, and booked nowhere."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.host.energy_scope import EnergyScope
from gpuenergyd.core.measurement.telemetry import ClockHistory
from gpuenergyd.daemon.gpus.inventory import Gpu
from gpuenergyd.daemon.gpus.switches import switch_calibration
from gpuenergyd.gpu.device import EnergyReading, GpuDetails, GpuIdentity, GpuReading
from gpuenergyd.gpu.link.messages import GpuSample
from gpuenergyd.gpu.plausible import max_power_w, plausible
from gpuenergyd.gpu.worker.reading_gate import ReadingGate
from gpuenergyd.gpu.worker.threads.sampler import Sampler
from gpuenergyd.store.records import RollupRecord
from tests.support.examples import examples
from tests.support.measured_tables import SHARED

CASES = SHARED / "cases" / "daemon" / "readings.json"
GPU = "GPU-0"
IDENTITY = GpuIdentity(GPU, 0, "A100", (1410, 1395, 210), is_simulated=False, max_power_limit_w=400.0)
NAN, INFINITE = float("nan"), float("inf")
GOOD = GpuReading(
    GPU, 1, power_w=54.0, total_energy_j=1000.0, sm_clock_mhz=1410, temperature_celsius=40.0, is_clock_limited=False
)


class Driver:
    """A driver whose next readings the test sets; a reading takes no time."""

    def __init__(self, reading: GpuReading = GOOD) -> None:
        self.reading = reading
        self.details_now = GpuDetails()

    def read(self, gpu_uuid: str) -> GpuReading:
        assert gpu_uuid == GPU
        return self.reading

    def read_energy(self, gpu_uuid: str) -> EnergyReading:
        return EnergyReading(self.reading.read_mono_ns, 0, self.read(gpu_uuid).total_energy_j)

    def details(self, gpu_uuid: str) -> GpuDetails:
        assert gpu_uuid == GPU
        return self.details_now


def gate_of(driver: Driver, identity: GpuIdentity = IDENTITY) -> ReadingGate:
    return ReadingGate(driver, [identity])  # type: ignore[arg-type]  # the rest of the driver is not called


@pytest.mark.fault(55)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("power_w", 3_700_000.0), ("power_w", 601.0), ("power_w", -1.0), ("power_w", NAN), ("power_w", INFINITE),
        ("power_w", "54"), ("total_energy_j", NAN), ("total_energy_j", -5.0), ("total_energy_j", INFINITE),
        ("sm_clock_mhz", 99_999), ("sm_clock_mhz", -1), ("temperature_celsius", 1000.0),
        ("temperature_celsius", -274.0), ("temperature_celsius", NAN),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_right_is_unknown_counted_and_named(field: str, value: Any) -> None:
    driver = Driver()
    gate = gate_of(driver)
    assert gate.read(GPU) == GOOD

    driver.reading = replace(GOOD, **{field: value})
    reading = gate.read(GPU)

    (refused,) = reading.refused
    assert getattr(reading, field) is None
    assert replace(reading, refused=(), **{field: getattr(GOOD, field)}) == GOOD
    assert (refused.name, refused.num) == (field, 1)
    assert ", not within " in refused.reason
    driver.reading = GOOD
    assert gate.read(GPU) == GOOD


@pytest.mark.parametrize("power_w", [0.0, 400.0, 599.0])
def test_power_may_exceed_the_maximal_limit_by_half_for_a_moment(power_w: float) -> None:
    reading = replace(GOOD, power_w=power_w)

    assert gate_of(Driver(reading)).read(GPU) == reading


def test_what_was_refused_between_two_complete_readings_is_counted_with_the_second() -> None:
    driver = Driver(replace(GOOD, total_energy_j=NAN))
    gate = gate_of(driver)
    assert [gate.read_energy(GPU).total_energy_j for _ in range(3)] == [None, None, None]

    (refused,) = gate.read(GPU).refused

    assert refused.num == 4
    assert refused.reason.startswith("nan J")


@pytest.mark.parametrize(
    ("limit_w", "default_w", "expected_w"),
    [
        (700.0, 700.0, 700.0),
        (None, 250.0, 500.0),
        (4_294_967.295, 250.0, 500.0),
        (NAN, None, 5_000.0),
        (0.0, 0.0, 5_000.0),
        (None, None, 5_000.0),
    ],
)
def test_a_maximal_limit_that_cannot_be_right_is_not_relied_on(
    limit_w: float | None, default_w: float | None, expected_w: float
) -> None:
    assert max_power_w(replace(IDENTITY, max_power_limit_w=limit_w, default_power_limit_w=default_w)) == expected_w


def test_the_limit_of_a_gpu_does_not_bound_the_energy_of_its_module() -> None:
    assert max_power_w(replace(IDENTITY, energy_scope=EnergyScope.MODULE)) == 5_000.0


def test_settings_and_properties_that_cannot_be_right_are_unknown() -> None:
    driver = Driver()
    driver.details_now = GpuDetails(power_limit_w=NAN, min_power_limit_w=100.0, memory_clock_mhz=-1, is_persistent=True)

    assert gate_of(driver).details(GPU) == GpuDetails(min_power_limit_w=100.0, is_persistent=True)
    assert plausible(replace(IDENTITY, default_power_limit_w=INFINITE)) == IDENTITY


# The way of a reading into the books


class Books:
    """A sampler behind the gate and the daemon's record of the GPU, in virtual time."""

    def __init__(self, max_limit_w: float) -> None:
        self.driver = Driver()
        identity = replace(IDENTITY, max_power_limit_w=max_limit_w)
        self.num_resets = 0
        self.sampler = Sampler(
            gate_of(self.driver, identity),
            [GPU],
            period_s=0.1,
            on_samples=lambda _: None,
            on_settled=lambda _: None,
            on_health=lambda *_: None,
            on_counter_reset=self._count_reset,
        )
        self.gpu = Gpu(identity, ClockHistory(1410), switch_calibration(identity))
        self.samples: list[GpuSample] = []
        self.booked_j = 0.0

    def _count_reset(self, _: str) -> None:
        self.num_resets += 1

    def read(self, at_s: float, *, power_w: float | None = None, counter_j: float | None = None) -> None:
        """Have the GPU read at an instant."""
        self.driver.reading = replace(GOOD, read_mono_ns=round(at_s * 1e9), power_w=power_w, total_energy_j=counter_j)
        sample = self.sampler._read(self.sampler._gpus[GPU])
        assert sample is not None
        # As if each value were an update: the sampler's own dating leaves some out.
        edge_ns = None if sample.total_energy_j is None else sample.read_mono_ns
        sample = replace(sample, energy_edge_mono_ns=edge_ns)
        self.samples.append(sample)
        for record in self.gpu.record_sample(sample):
            if isinstance(record, RollupRecord) and record.bucket_s == 1:
                self.booked_j += (record.energy_j or 0.0) + (record.estimated_j or 0.0)

    def close(self, at_s: float) -> None:
        """Let every second be booked."""
        for k in range(1, 40):
            self.read(at_s + 0.1 * k)


def cases() -> list[Any]:
    """Return sequences that were once booked as read."""
    if not CASES.exists():
        return [pytest.param({}, marks=pytest.mark.skip(f"no {CASES}"))]
    return [pytest.param(case, id=case["name"]) for case in json.loads(CASES.read_text(encoding="utf-8"))]


@pytest.mark.fault(55, 16)
@pytest.mark.parametrize("case", cases())
def test_the_sequences_of_the_cases_book_no_more_than_is_possible(case: dict[str, Any]) -> None:
    books = Books(case["max_limit_w"])
    powers_w, counters_j = case.get("power_w"), case.get("counter_j")
    for k in range(len(powers_w or counters_j or [])):
        at_s = 100.0 + k * case["period_s"]
        books.read(
            at_s,
            power_w=None if powers_w is None else powers_w[k],
            counter_j=None if counters_j is None else counters_j[k],
        )
    books.close(at_s)

    assert 0 < books.booked_j <= case["booked_at_most_j"]
    assert all(s.power_w is None or s.power_w <= 1.5 * case["max_limit_w"] for s in books.samples)
    assert bool(powers_w) == ("power_w" in books.gpu.refused)
    assert "total_energy_j" in books.gpu.refused or powers_w


VALUES = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 1e5) | st.sampled_from([0.0, 5.4e6, 1e9])
STEPS = st.lists(
    st.tuples(
        st.floats(0.02, 2.0), VALUES | st.none(), VALUES | st.none() | st.floats(0, 800).map(lambda w: ("rise", w))
    ),
    min_size=2,
    max_size=40,
)


@settings(max_examples=examples(400))
@given(steps=STEPS)
def test_no_sequence_of_readings_books_more_than_the_maximal_limit_times_the_time(
    steps: list[tuple[float, float | None, Any]],
) -> None:
    books, at_s, counter_j = Books(400.0), 100.0, 1000.0
    for pause_s, power_w, counter in steps:
        at_s += pause_s
        if isinstance(counter, tuple):
            counter_j = counter_j + counter[1] * pause_s if math.isfinite(counter_j) else 0.0
            books.read(at_s, power_w=power_w, counter_j=counter_j)
        else:
            books.read(at_s, power_w=power_w, counter_j=counter)
            counter_j = counter_j if counter is None else counter
    books.close(at_s)

    assert books.booked_j <= 400.0 * (at_s - 100.0) * (1 + 1e-9) + 1e-6


def test_a_gpu_at_its_limit_is_booked_in_full_although_updates_are_dated_inexactly() -> None:
    """Up to 50 ms early or late, as those of a counter that is updated as often as it is read."""
    books = Books(400.0)
    for k in range(600):
        jitter_s = 0.05 * (-1) ** k
        books.gpu.counter.record(round((100.0 + 0.1 * k + jitter_s) * 1e9), 0.1 * k * 398.0)

    booked_j = books.gpu.counter.energy_j(round(105e9), round(155e9))

    assert booked_j == pytest.approx(398.0 * 50.0, rel=2e-3)


def test_a_counter_that_falls_and_returns_doubts_the_lock_once_and_stays_usable() -> None:
    books = Books(400.0)
    for k, counter_j in enumerate([5.4e6, 5.4e6 + 5, 0.0, 5.0, 5.4e6 + 25, 5.4e6 + 30, 5.4e6 + 35]):
        books.read(100.0 + 0.1 * k, counter_j=counter_j)

    assert books.num_resets == 1
    assert books.samples[4].total_energy_j is None
    assert books.gpu.counter.energy_j(round(100.5e9), round(100.6e9)) == pytest.approx(5.0)
