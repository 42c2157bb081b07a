import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd_sim.driver.device_model import (
    NO_LOCK,
    NOTHING_PENDING,
    GpuState,
    InstructionWork,
    advance,
    blocking_power_w,
    capped_sm_clock_mhz,
    instruction_time_s,
    working_power_w,
)
from gpuenergyd_sim.driver.device_parameters import A40, A100_PCIE, A100_SXM, MODELS, V100_SXM2, DeviceParameters
from tests.support.measured_tables import DATA

PROFILES = DATA


def _state(**changes: float) -> GpuState:
    values: dict[str, float] = dict.fromkeys((f.name for f in dataclasses.fields(GpuState)), 0)
    values |= {"pending_mhz": NOTHING_PENDING, "celsius": 65.0, "power_limit_w": 480.0, **changes}
    return GpuState(**values)  # type: ignore[arg-type]  # numbers of both kinds


@pytest.mark.parametrize("model", [A100_PCIE, A100_SXM, A40])
def test_blocking_power_at_the_maximum_clock_is_the_published_constant(model: DeviceParameters) -> None:
    published = {A100_PCIE.key: 83.64, A100_SXM.key: 83.64, A40.key: 70.38}

    assert blocking_power_w(model, model.max_sm_clock_mhz) == pytest.approx(published[model.key], rel=1e-9)


def test_v100_context_power_follows_the_measured_points() -> None:
    """Without activity the V100 fit must reproduce the measured power of an idle context below the knee."""
    idle_context = InstructionWork(1.0, 0.0, 0.0)

    assert working_power_w(V100_SXM2, idle_context, 405) == pytest.approx(46.9, rel=0.02)
    assert working_power_w(V100_SXM2, idle_context, 945) == pytest.approx(51.5, rel=0.02)
    assert working_power_w(V100_SXM2, idle_context, 1380) == pytest.approx(63.8, rel=0.02)


def test_compute_part_stretches_with_the_clock_and_memory_part_does_not() -> None:
    work = InstructionWork(memory_time_s=0.01, compute_time_s=0.04, power_coefficient_w_per_mhz=0.25)

    assert instruction_time_s(A100_SXM, work, 1410) == pytest.approx(0.05)
    assert instruction_time_s(A100_SXM, work, 705) == pytest.approx(0.09)


def test_power_cap_lowers_the_clock_to_where_the_power_settles() -> None:
    hot = InstructionWork(0.0, 1.0, 0.069)

    clock = capped_sm_clock_mhz(V100_SXM2, hot, 1380, 150.0)

    assert working_power_w(V100_SXM2, hot, clock) == pytest.approx(0.98 * 150.0, abs=0.1)
    assert clock == pytest.approx(1158, rel=0.03)  # measured mean under that cap


def test_power_cap_does_not_affect_work_below_it() -> None:
    assert capped_sm_clock_mhz(A100_SXM, InstructionWork(0.05, 0.01, 0.25), 1410, 480.0) == 1410


def test_lowest_energy_clock_is_at_the_knee() -> None:
    """The energy minimum of a compute-bound A100 instruction is where the voltage begins to rise."""
    work = InstructionWork(0.0, 0.05, 0.0449)

    cheapest = min(
        A100_PCIE.supported_sm_clocks_mhz,
        key=lambda f: working_power_w(A100_PCIE, work, f) * instruction_time_s(A100_PCIE, work, f),
    )

    assert abs(cheapest - A100_PCIE.knee_sm_clock_mhz) <= 15


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_supported_clocks_descend_from_the_maximum_to_the_minimum(model: DeviceParameters) -> None:
    clocks = model.supported_sm_clocks_mhz

    assert list(clocks) == sorted(set(clocks), reverse=True)
    assert clocks[0] == model.max_sm_clock_mhz
    assert clocks[-1] == model.min_sm_clock_mhz


@given(
    looks_ns=st.lists(st.integers(1, 2_000_000_000), max_size=30),
    locked=st.sampled_from([NO_LOCK, 900, 1200]),
    pending_after_ns=st.integers(0, 1_000_000_000),
)
def test_energy_and_progress_do_not_depend_on_the_number_of_readings(
    looks_ns: list[int], locked: int, pending_after_ns: int
) -> None:
    work = {"is_working": 1, "is_occupied": 1, "work_memory_s": 0.3, "work_compute_s": 0.7, "work_w_per_mhz": 0.25}
    changing = {"locked_mhz": locked, "pending_mhz": 1005, "pending_at_ns": pending_after_ns}
    once = _state(work_left_ratio=1.0, **work, **changing)
    often = dataclasses.replace(once)

    advance(A100_SXM, once, 2_000_000_000)
    for look_ns in [*sorted(looks_ns), 2_000_000_000]:
        advance(A100_SXM, often, look_ns)

    assert often.energy_j == pytest.approx(once.energy_j, rel=1e-6)
    assert often.work_left_ratio == pytest.approx(once.work_left_ratio, abs=1e-6)
    assert often.celsius == pytest.approx(once.celsius, abs=1e-3)
    assert often.shown_energy_j == pytest.approx(once.shown_energy_j, abs=0.002)
    assert often.locked_mhz == 1005


def test_temperature_settles_at_the_thermal_resistance_times_power() -> None:
    state = _state(is_occupied=1, celsius=90.0)

    advance(A100_SXM, state, 400_000_000_000)

    power_w = blocking_power_w(A100_SXM, 1410) + A100_SXM.leakage_w_per_k * (state.celsius - A100_SXM.warm_celsius)
    assert state.celsius == pytest.approx(A100_SXM.ambient_celsius + A100_SXM.thermal_k_per_w * power_w, abs=0.01)
