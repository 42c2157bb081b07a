"""What `gpuenergyd doctor --measure` measured on one GPU of a model, and what that means for this host."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from gpuenergyd.core.host.energy_scope import EnergyScope

_LATE_READING_S = 0.045
"""Readings at least this old do not show when a clock changed, since a change takes about as long."""
_ALIKE_RATIO = 1.3
"""Changes of the clock further apart than that of the power's renewals come from the load, not from late readings."""
_CAPPED_RATIO = 0.1

IDLE, IN_USE, WAITING, LOADED = "idle", "in use", "waiting", "loaded"
ENERGY = "energy"
"""Name of the calls that read the energy counter; a GPU without one has none."""


@dataclass(frozen=True, slots=True)
class TimedCall:
    """Time of one kind of reading; `cpu_s` is the mean CPU time of the calling thread."""

    name: str
    num_calls: int
    median_s: float
    late_s: float
    """Time that one call in a hundred exceeds."""
    cpu_s: float


@dataclass(frozen=True, slots=True)
class StateMeans:
    """Mean readings of a GPU that is idle, used by others, runs a kernel that only waits, or has a full load."""

    name: str
    power_w: float | None
    sm_clock_mhz: float | None
    """Mean of the readings."""
    power_capped_ratio: float | None
    """Part of the readings that were at the power limit."""


@dataclass(frozen=True, slots=True)
class MeasuredGpu:
    """Measurements of one GPU, taken as those of its model with this driver version."""

    model_name: str
    driver_version: str | None
    is_simulated: bool
    measured_at: datetime
    max_sm_clock_mhz: int | None
    power_limit_w: float | None
    calls: tuple[TimedCall, ...]
    counter_period_s: float | None
    """Time between two updates of the energy counter; None if it could not be determined."""
    is_counter_read_apart: bool
    """Whether energy is so expensive to read that it is read only about once a second, at predicted updates."""
    power_refresh_s: float | None
    """Time between two new values of the power; None if the power hardly changed."""
    clock_refresh_s: float | None
    """Time between two new values of the SM clock that a quarter are below; None if the clock hardly changed."""
    worker_cpu_ratio: float
    """Part of a core that the GPU worker needs to read this GPU."""
    states: tuple[StateMeans, ...]
    run_ahead_s: float | None = None
    """How far the host runs ahead of the GPU in a training loop without synchronization."""
    step_s: float | None = None
    """Iteration time of that loop."""
    not_measured: tuple[str, ...] = ()
    """The measurements that are missing, each with the reason."""
    energy_scope: EnergyScope = EnergyScope.GPU
    """Whose powers these are."""

    def state(self, name: str) -> StateMeans | None:
        """Return the mean readings in a state; None if it was not measured."""
        return next((state for state in self.states if state.name == name), None)

    @property
    def waiting_power_w(self) -> float | None:
        """Power while a kernel only waits; None if it was not measured."""
        waiting = self.state(WAITING)
        return None if waiting is None else waiting.power_w


def meanings(gpu: MeasuredGpu) -> tuple[str, ...]:
    """Return what the measurements mean for this host, in sentences."""
    return (*_meanings_of_readings(gpu), *_meanings_of_states(gpu), *(f"not measured: {w}" for w in gpu.not_measured))


def _meanings_of_readings(gpu: MeasuredGpu) -> Iterator[str]:
    age_s, power_age_s = gpu.clock_refresh_s, gpu.power_refresh_s
    late = "a switch latency is known after about 50 changes of its kind"
    if age_s is not None and (power_age_s is None or age_s <= _ALIKE_RATIO * power_age_s):
        known = late if age_s >= _LATE_READING_S else "a switch latency is known after a dozen changes of its kind"
        yield f"clocks are read up to {1e3 * age_s:.0f} ms late: {known}"
    elif power_age_s is not None and power_age_s >= _LATE_READING_S:
        yield (
            f"power is renewed every {1e3 * power_age_s:.0f} ms; clocks hardly changed, and are taken to be as late:"
            f" {late}"
        )
    else:
        yield "clocks hardly changed: how late they are read did not show"
    energy = next((call for call in gpu.calls if call.name == ENERGY), None)
    if gpu.is_counter_read_apart and energy is not None:
        yield (
            f"an energy reading uses {1e3 * energy.cpu_s:.1f} ms of CPU time: the counter is read about once a second,"
            " and energies of single iterations shorter than that are estimated"
        )
    if gpu.counter_period_s is not None:
        yield f"the energy counter moves every {1e3 * gpu.counter_period_s:.1f} ms"
    elif energy is None:
        yield "the GPU has no energy counter: energies of iterations are unknown, and plans that need them are not made"
    else:
        yield "the energy counter's period could not be learned: energies of short iterations are inexact or unknown"
    yield f"readings by the daemon take {100 * gpu.worker_cpu_ratio:.1f} % of a core for each such GPU"


def _meanings_of_states(gpu: MeasuredGpu) -> Iterator[str]:
    loaded, waiting_w = gpu.state(LOADED), gpu.waiting_power_w
    if loaded is not None and loaded.sm_clock_mhz is not None and (loaded.power_capped_ratio or 0.0) > _CAPPED_RATIO:
        yield (
            f"a full load is at its power limit {100 * (loaded.power_capped_ratio or 0.0):.0f} % of the time and"
            f" runs at {loaded.sm_clock_mhz:.0f} MHz on average: clocks above that save little time"
        )
    if gpu.energy_scope is EnergyScope.MODULE:
        yield "powers are the module's: GPU, processor and memory"
    elif waiting_w is not None and gpu.power_limit_w:
        share = waiting_w / gpu.power_limit_w
        yield f"a GPU that waits draws {waiting_w:.0f} W, {100 * share:.0f} % of its power limit"
    if gpu.run_ahead_s is not None and gpu.step_s:
        yield (
            f"a training loop runs {1e3 * gpu.run_ahead_s:.0f} ms ahead of the GPU"
            f" ({gpu.run_ahead_s / gpu.step_s:.1f} iterations)"
        )
