"""Model of a simulated GPU: speed, power, temperature and energy as functions of the SM clock and time.

    v(f) = 1 + (vmax - 1) * max(0, f - knee) / (fmax - knee)    relative voltage, flat below the knee
    T(f) = tm + tc * fmax / f                                   time of an instruction: memory part, compute part
    u(f) = (tc * fmax / f) / T(f)                               activity
    P(f) = static + (uncore + u * c1) * f * v^2                 power while computing; c1 is of the instruction
    P(f) = static + k * f * v^2                                 waiting for a peer: k matches the published power
                                                                at fmax; its dependence on the clock is assumed
    leakage * (temperature - reference)                         added to each

The workload power profile Max-Q lowers the highest clock and the static power of a GPU that computes or waits.
The temperature follows the power with one time constant. Power is linear in temperature, so between two events
(a clock takes effect, an instruction ends) both have closed forms, and the energy of an interval does not depend on
the number of readings in it. A power cap lowers the clock until the power fits, so instructions take longer.
The driver's counters show the state at the last instant of their update grid, not the present state.
"""

import math
from dataclasses import dataclass
from enum import IntEnum

from gpuenergyd_sim.driver.device_parameters import MAX_Q, MODELS, DeviceParameters

_NS_PER_S = 1_000_000_000
_MASK64 = (1 << 64) - 1
_TARGET_NOISE = 0x9E3779B97F4A7C15
_UTILIZATION_NS = 100_000_000
"""Measured on one H200: utilization is renewed every 100 ms."""
NO_LOCK = 0
NOTHING_PENDING = -1


class Activity(IntEnum):
    """The activity of a GPU."""

    IDLE = 0
    BLOCKING = 1
    WORKING = 2


@dataclass(frozen=True, slots=True)
class InstructionWork:
    """The cost of one instruction: times at the maximum clock, and watts per MHz of fully active SMs."""

    memory_time_s: float
    compute_time_s: float
    power_coefficient_w_per_mhz: float


@dataclass(slots=True)
class GpuState:
    """The mutable state of one GPU; the order of the fields is the layout of the world file.

    `locked_mhz` is in force; `pending_mhz` is installed and takes effect at `pending_at_ns`. `work_left_ratio` is the
    remaining part of the running instruction, `work_ended_ns` the instant of its end or 0. The `next_` instruction is
    already launched and begins when the running one ends. The last two instructions ended at `last_ended_ns` and
    `before_last_ended_ns`. Until `stalled_until_ns`, a driver call holds up the instructions. `shown_` values are those
    of the driver's counters. A part-time sensor measures `sampled_energy_j`; when its present window began, the true
    energy was `window_energy_j`. `power_profiles` is the mask of requested power profiles.
    """

    updated_ns: int = 0
    locked_mhz: int = NO_LOCK
    pending_mhz: int = NOTHING_PENDING
    pending_at_ns: int = 0
    is_working: int = 0
    is_occupied: int = 0
    shown_energy_at_ns: int = 0
    shown_power_at_ns: int = 0
    random_state: int = 0
    num_clock_sets: int = 0
    work_ended_ns: int = 0
    num_works_ended: int = 0
    last_ended_ns: int = 0
    before_last_ended_ns: int = 0
    has_next_work: int = 0
    stalled_until_ns: int = 0
    power_profiles: int = 0
    energy_j: float = 0.0
    celsius: float = 0.0
    power_limit_w: float = 0.0
    work_memory_s: float = 0.0
    work_compute_s: float = 0.0
    work_w_per_mhz: float = 0.0
    work_left_ratio: float = 0.0
    shown_energy_j: float = 0.0
    shown_power_w: float = 0.0
    next_memory_s: float = 0.0
    next_compute_s: float = 0.0
    next_w_per_mhz: float = 0.0
    sampled_energy_j: float = 0.0
    window_energy_j: float = 0.0

    @property
    def has_work(self) -> bool:
        """Whether an instruction is running, even if a driver call holds it up."""
        return bool(self.is_working) and self.work_left_ratio > 0

    @property
    def activity(self) -> Activity:
        if self.has_work and self.stalled_until_ns <= self.updated_ns:
            return Activity.WORKING
        return Activity.BLOCKING if self.is_occupied else Activity.IDLE


def voltage_ratio(model: DeviceParameters, sm_clock_mhz: float) -> float:
    """Return the voltage relative to its value below the knee."""
    above = max(0.0, sm_clock_mhz - model.knee_sm_clock_mhz)
    span = model.max_sm_clock_mhz - model.knee_sm_clock_mhz
    return 1.0 + (model.max_voltage_ratio - 1.0) * above / span


def instruction_time_s(model: DeviceParameters, work: InstructionWork, sm_clock_mhz: float) -> float:
    return work.memory_time_s + work.compute_time_s * model.max_sm_clock_mhz / sm_clock_mhz


def working_power_w(model: DeviceParameters, work: InstructionWork, sm_clock_mhz: float) -> float:
    """Return the power of an instruction at a clock, at the model's warm temperature."""
    time_s = instruction_time_s(model, work, sm_clock_mhz)
    compute_s = work.compute_time_s * model.max_sm_clock_mhz / sm_clock_mhz
    per_mhz = model.uncore_w_per_mhz + (compute_s / time_s) * work.power_coefficient_w_per_mhz
    return model.static_power_w + per_mhz * sm_clock_mhz * voltage_ratio(model, sm_clock_mhz) ** 2


def blocking_power_w(model: DeviceParameters, sm_clock_mhz: float) -> float:
    """Return the power while waiting for a peer at a clock, at the model's warm temperature."""
    at_max = model.max_sm_clock_mhz * model.max_voltage_ratio**2
    share = sm_clock_mhz * voltage_ratio(model, sm_clock_mhz) ** 2 / at_max
    return model.static_power_w + (model.blocking_power_w - model.static_power_w) * share


def waiting_powers() -> dict[str, tuple[tuple[int, float], ...]]:
    """Return the power while waiting at each supported clock, by the key of the GPU model."""
    return {
        key: tuple((mhz, blocking_power_w(model, mhz)) for mhz in model.supported_sm_clocks_mhz)
        for key, model in MODELS.items()
    }


def capped_sm_clock_mhz(
    model: DeviceParameters, work: InstructionWork, sm_clock_mhz: float, power_limit_w: float
) -> float:
    """Return the clock that the power cap allows: the requested one, or the highest with power below the cap.

    The cap controller alternates between neighboring clocks, so the mean need not be a supported clock.
    """
    allowed_w = power_limit_w * model.cap_settles_at_ratio
    if working_power_w(model, work, sm_clock_mhz) <= allowed_w:
        return sm_clock_mhz
    low, high = model.min_sm_clock_mhz, sm_clock_mhz
    for _ in range(30):
        middle = (low + high) / 2
        if working_power_w(model, work, middle) <= allowed_w:
            low = middle
        else:
            high = middle
    return low


def effective_sm_clock_mhz(model: DeviceParameters, state: GpuState) -> float:
    ceiling = _ceiling_mhz(model, state)
    match state.activity:
        case Activity.WORKING:
            return _capped_mhz(model, state)
        case Activity.BLOCKING:
            return ceiling
        case Activity.IDLE:
            return min(model.idle_sm_clock_mhz, ceiling)


def _ceiling_mhz(model: DeviceParameters, state: GpuState) -> float:
    """Return the clock that the lock and the workload power profile allow."""
    return _below_profile_mhz(model, state, state.locked_mhz)


def _below_profile_mhz(model: DeviceParameters, state: GpuState, locked_mhz: int) -> float:
    ceiling = float(locked_mhz) if locked_mhz != NO_LOCK else model.max_sm_clock_mhz
    return min(ceiling, model.max_q_clock_ratio * model.max_sm_clock_mhz) if _is_max_q(state) else ceiling


def _is_max_q(state: GpuState) -> bool:
    return bool(state.power_profiles >> MAX_Q & 1)


def _profile_saves_w(model: DeviceParameters, state: GpuState) -> float:
    """Return the power that the workload power profile saves at the same clock."""
    return (1.0 - model.max_q_static_ratio) * model.static_power_w if _is_max_q(state) else 0.0


def _capped_mhz(model: DeviceParameters, state: GpuState) -> float:
    limit_w = state.power_limit_w + _profile_saves_w(model, state) / model.cap_settles_at_ratio
    return capped_sm_clock_mhz(model, _work(state), _ceiling_mhz(model, state), limit_w)


def reported_sm_clock_mhz(model: DeviceParameters, state: GpuState) -> float:
    """Return the clock that the driver reports, which may be a new clock shortly before it takes effect."""
    is_early = state.pending_mhz != NOTHING_PENDING and (
        state.pending_at_ns - state.updated_ns <= model.reported_early_s * _NS_PER_S
    )
    if not is_early or state.activity is Activity.IDLE:
        return effective_sm_clock_mhz(model, state)
    return _below_profile_mhz(model, state, state.pending_mhz)


def is_power_capped(model: DeviceParameters, state: GpuState) -> bool:
    """Return whether the power cap keeps the clock below the lock."""
    return state.activity is Activity.WORKING and effective_sm_clock_mhz(model, state) < _ceiling_mhz(model, state)


def has_worked_lately(state: GpuState) -> bool:
    """Return whether an instruction ran in the window that the driver's utilization is of."""
    is_recent = state.updated_ns - state.last_ended_ns <= _UTILIZATION_NS
    return state.has_work or (state.last_ended_ns > 0 and is_recent)


def remaining_s(model: DeviceParameters, state: GpuState) -> float:
    """Return the remaining time of the running instruction at the present clock; 0 without one."""
    if not state.has_work:
        return 0.0
    stalled_s = max(0, state.stalled_until_ns - state.updated_ns) / _NS_PER_S
    return stalled_s + state.work_left_ratio * instruction_time_s(model, _work(state), _capped_mhz(model, state))


def launch(model: DeviceParameters, state: GpuState, work: InstructionWork) -> None:
    """Begin an instruction, after the running one if any; its duration varies slightly at random."""
    stretch = max(0.5, 1.0 + model.time_noise_ratio * draw_normal(state))
    state.next_memory_s = work.memory_time_s * stretch
    state.next_compute_s = work.compute_time_s * stretch
    state.next_w_per_mhz = work.power_coefficient_w_per_mhz
    state.has_next_work = 1
    if not state.has_work:
        _begin_next(state)


def _begin_next(state: GpuState) -> None:
    state.work_memory_s, state.work_compute_s = state.next_memory_s, state.next_compute_s
    state.work_w_per_mhz = state.next_w_per_mhz
    state.work_left_ratio = 1.0
    state.work_ended_ns = 0
    state.is_working, state.has_next_work = 1, 0


def advance(model: DeviceParameters, state: GpuState, now_ns: int) -> None:
    """Advance the state to `now_ns`: end instructions, integrate energy and temperature, update the counters."""
    while state.updated_ns < now_ns:
        if state.pending_mhz != NOTHING_PENDING and state.pending_at_ns <= state.updated_ns:
            state.locked_mhz, state.pending_mhz = state.pending_mhz, NOTHING_PENDING
        until_ns = now_ns
        if state.pending_mhz != NOTHING_PENDING:
            until_ns = min(until_ns, state.pending_at_ns)
        if state.stalled_until_ns > state.updated_ns:
            until_ns = min(until_ns, state.stalled_until_ns)
        if model.energy_sampled_ratio < 1.0:
            until_ns = min(until_ns, _next_sampling_ns(model, state))
        activity = state.activity
        clock_mhz = effective_sm_clock_mhz(model, state)
        instruction_s = 0.0
        is_finishing = False
        if activity is Activity.WORKING:
            instruction_s = instruction_time_s(model, _work(state), clock_mhz)
            ends_ns = state.updated_ns + math.ceil(state.work_left_ratio * instruction_s * _NS_PER_S)
            is_finishing = ends_ns <= until_ns
            until_ns = min(until_ns, ends_ns)
        _integrate(model, state, activity, clock_mhz, until_ns)
        if activity is Activity.WORKING:
            passed_s = (until_ns - state.updated_ns) / _NS_PER_S
            state.work_left_ratio = 0.0 if is_finishing else state.work_left_ratio - passed_s / instruction_s
        state.updated_ns = until_ns
        if is_finishing:
            _end_work(state)
    if state.pending_mhz != NOTHING_PENDING and state.pending_at_ns <= state.updated_ns:
        state.locked_mhz, state.pending_mhz = state.pending_mhz, NOTHING_PENDING


def _end_work(state: GpuState) -> None:
    state.num_works_ended += 1
    state.before_last_ended_ns, state.last_ended_ns = state.last_ended_ns, state.updated_ns
    state.work_ended_ns = state.updated_ns
    if state.has_next_work:
        _begin_next(state)


def draw_uniform(state: GpuState) -> float:
    """Return the next number in (0, 1) of the GPU's random sequence (splitmix64)."""
    state.random_state = (state.random_state + 0x9E3779B97F4A7C15) & _MASK64
    return _uniform(state.random_state)


def draw_normal(state: GpuState) -> float:
    """Return the next standard normal number of the GPU's random sequence."""
    radius = math.sqrt(-2.0 * math.log(draw_uniform(state)))
    return radius * math.cos(2.0 * math.pi * draw_uniform(state))


def draw_call_latency_s(model: DeviceParameters, state: GpuState) -> float:
    """Draw the duration of the next call that sets a clock."""
    if draw_uniform(state) < model.call_outlier_ratio:
        span_s = model.call_outlier_max_s - model.call_outlier_min_s
        return model.call_outlier_min_s + span_s * draw_uniform(state)
    return model.call_median_s * math.exp(model.call_sigma * draw_normal(state))


def draw_settle_s(model: DeviceParameters, state: GpuState, target_mhz: int) -> float:
    """Draw the time from the return of a call until its clock takes effect; each target clock has its own mean."""
    if model.settle_tail_ratio and draw_uniform(state) < model.settle_tail_ratio:
        return model.settle_tail_min_s + (model.settle_tail_max_s - model.settle_tail_min_s) * draw_uniform(state)
    mean_s = model.settle_mean_s * math.exp(model.settle_target_spread * _noise(_TARGET_NOISE * (target_mhz + 1)))
    return -mean_s * math.log(draw_uniform(state))


def update_phase_ns(gpu_index: int, seed: int, period_ns: int, counter: int) -> int:
    """Return the phase of a counter's update grid; `counter` numbers the counters of one GPU."""
    return int(_uniform((seed * 1_000_003 + gpu_index * 101 + counter) & _MASK64) * period_ns)


def _work(state: GpuState) -> InstructionWork:
    return InstructionWork(state.work_memory_s, state.work_compute_s, state.work_w_per_mhz)


def _integrate(model: DeviceParameters, state: GpuState, activity: Activity, clock_mhz: float, until_ns: int) -> None:
    reference_celsius = model.warm_celsius
    match activity:
        case Activity.WORKING:
            power_w = working_power_w(model, _work(state), clock_mhz) - _profile_saves_w(model, state)
        case Activity.BLOCKING:
            power_w = blocking_power_w(model, clock_mhz) - _profile_saves_w(model, state)
        case Activity.IDLE:
            power_w = model.idle_power_w
            reference_celsius = model.ambient_celsius + model.thermal_k_per_w * power_w
    leakage = model.leakage_w_per_k
    cold_w = power_w - leakage * reference_celsius
    slowing = 1.0 - model.thermal_k_per_w * leakage
    target_celsius = (model.ambient_celsius + model.thermal_k_per_w * cold_w) / slowing
    tau_s = model.thermal_tau_s / slowing
    begin_celsius = state.celsius

    def celsius_after(dt_s: float) -> float:
        return target_celsius + (begin_celsius - target_celsius) * math.exp(-dt_s / tau_s)

    def energy_after(dt_s: float) -> float:
        warming = (begin_celsius - target_celsius) * tau_s * (1.0 - math.exp(-dt_s / tau_s))
        return cold_w * dt_s + leakage * (target_celsius * dt_s + warming)

    edge_ns = last_update_ns(until_ns, model.energy_update_s, state.shown_energy_at_ns)
    if edge_ns > state.updated_ns:
        energy_j = state.energy_j + energy_after((edge_ns - state.updated_ns) / _NS_PER_S)
        if model.energy_sampled_ratio < 1.0:
            state.sampled_energy_j += (energy_j - state.window_energy_j) / model.energy_sampled_ratio
            energy_j = state.sampled_energy_j
        state.shown_energy_j = math.floor(energy_j * 1000.0) / 1000.0
        state.shown_energy_at_ns = edge_ns
    edge_ns = last_update_ns(until_ns, model.power_update_s, state.shown_power_at_ns)
    if edge_ns > state.updated_ns:
        true_w = cold_w + leakage * celsius_after((edge_ns - state.updated_ns) / _NS_PER_S)
        state.shown_power_w = true_w * (1.0 + model.power_noise_ratio * _noise(edge_ns))
        state.shown_power_at_ns = edge_ns
    passed_s = (until_ns - state.updated_ns) / _NS_PER_S
    state.energy_j += energy_after(passed_s)
    state.celsius = celsius_after(passed_s)
    if until_ns == _window_begin_ns(model, state):
        state.window_energy_j = state.energy_j


def _window_begin_ns(model: DeviceParameters, state: GpuState) -> int:
    """Return the instant from which a part-time sensor measures for the next update of the energy counter."""
    period_ns = round(model.energy_update_s * _NS_PER_S)
    return state.shown_energy_at_ns + period_ns - round(model.energy_sampled_ratio * period_ns)


def _next_sampling_ns(model: DeviceParameters, state: GpuState) -> int:
    """Return the next start or end of the part-time sensor's window."""
    begin_ns = _window_begin_ns(model, state)
    return (
        begin_ns if begin_ns > state.updated_ns else state.shown_energy_at_ns + round(model.energy_update_s * _NS_PER_S)
    )


def last_update_ns(now_ns: int, period_s: float, any_update_ns: int) -> int:
    """Return the last instant at or before `now_ns` on the update grid through `any_update_ns`."""
    period_ns = round(period_s * _NS_PER_S)
    return any_update_ns + (now_ns - any_update_ns) // period_ns * period_ns


def _noise(number: int) -> float:
    """Return a standard normal number that depends only on the argument."""
    radius = math.sqrt(-2.0 * math.log(_uniform(number & _MASK64)))
    return radius * math.cos(2.0 * math.pi * _uniform((number + 1) & _MASK64))


def _uniform(value: int) -> float:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    value ^= value >> 31
    return ((value >> 11) + 0.5) / (1 << 53)
