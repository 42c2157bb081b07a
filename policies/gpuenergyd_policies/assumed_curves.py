"""Assumed profiles for GPUs whose clocks may not be set: full-speed measurements, extrapolated by published curves.

Measured at full speed are the time of each kind of instruction, and each GPU's energy and waiting time per iteration.
Their dependence on the clock is assumed: part of the time is inversely proportional to the clock,
    t(f) = t(f_max) * ((1 - k) + k * f_max / f)
and power beyond static power is proportional to the square of the voltage, which rises above the knee only. Published
curves of data-centre GPUs vary, and so do the assumptions; the predicted saving is therefore a range.

Sources of the variation (all fits to published training runs): time at 0.75 of the maximum clock is 1.28 to 1.41 times
that at the maximum, so k is 0.8 to 1 for matrix products, and assumed as low as 0.7 otherwise; the knee is at 0.70 to
0.78 of the maximum clock; the voltage at the knee is lower by a factor of 1.21 to 1.38; static power is 32 to 80 W.
Without a published figure, waiting power is assumed as static power plus a tenth of the rest.
"""

from dataclasses import dataclass
from statistics import fmean, median

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd.core.policy_api.policy import GpuView, JobView

LOWEST_CLOCK_RATIO = 0.66
"""Lowest clock of an assumed profile, as a share of the maximum clock: published curves hardly go lower."""
WAITING_SHARE = 0.1
"""Assumed dynamic power while waiting, as a share of dynamic power at work."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """Parameters of one assumed set of time and power curves."""

    compute_share: float
    knee_ratio: float
    max_voltage_ratio: float
    static_power_w: float


LIKELY = Assumption(0.9, 0.75, 1.28, 50.0)
PESSIMISTIC = Assumption(1.0, 0.78, 1.21, 80.0)
OPTIMISTIC = Assumption(0.7, 0.70, 1.38, 32.0)
BASIS = "measured at full speed only; lower clocks assumed from published curves of data-centre GPUs"


class InsufficientMeasurementsError(Exception):
    """Full-speed measurements are missing; the message names them."""


def assumed_profile(view: JobView, assumption: Assumption) -> PipelineProfile:
    """Return the profile of a job under an assumption.

    Raises:
        InsufficientMeasurementsError: an instruction class has no time, or a GPU no energy.
    """
    seen = full_speed_observations(view)
    times_s = _times_at_full_speed_s(seen)
    wanted = {i.instruction_class for order in view.schedule.orders for i in order}
    if wanted - times_s.keys():
        raise InsufficientMeasurementsError("some instructions have not been timed at full speed")
    classes: dict[InstructionClass, InstructionProfile] = {}
    waiting_w = []
    for pp_rank, gpu in enumerate(view.gpus):
        working_w, own_waiting_w = _powers_w(seen, pp_rank, gpu, assumption)
        waiting_w.append(own_waiting_w)
        for key in sorted(wanted):
            if key.pp_rank == pp_rank:
                power_w = own_waiting_w if key.kind.is_wait else working_w
                classes[key] = _curve(gpu, times_s[key], power_w, assumption, is_wait=key.kind.is_wait)
    return PipelineProfile(classes, fmean(waiting_w))


def full_speed_observations(view: JobView) -> list[IterationObservation]:
    """Return the regular iterations at full speed."""
    tuned = {plan.plan_id for plan in view.issued_plans if plan.purpose is not PlanPurpose.BASELINE}
    return [o for o in view.observations if o.is_regular and o.plan_id not in tuned]


def _times_at_full_speed_s(seen: list[IterationObservation]) -> dict[InstructionClass, float]:
    times: dict[InstructionClass, list[float]] = {}
    for observation in seen:
        for sample in observation.instruction_samples:
            times.setdefault(sample.instruction_class, []).append(sample.time_s)
    return {key: median(own) for key, own in times.items()}


def _powers_w(
    seen: list[IterationObservation], pp_rank: int, gpu: GpuView, assumption: Assumption
) -> tuple[float, float]:
    """Return one GPU's power at work and while waiting, at full speed: medians over iterations with energy."""
    working_w, waiting_w = [], []
    for observation in seen:
        for rank in observation.ranks:
            if rank.pp_rank != pp_rank or rank.energy_j is None:
                continue
            waiting_s = sum(share.time_s for share in rank.time_at if share.kind is None or share.kind.is_wait)
            working_s = sum(share.time_s for share in rank.time_at) - waiting_s
            if working_s <= 0:
                continue
            static_w = min(gpu.num_gpus * assumption.static_power_w, 0.5 * rank.energy_j / (working_s + waiting_s))
            # energy = working_w * working_s + own_waiting_w * waiting_s
            if gpu.blocking_power_w is not None:
                own_waiting_w = min(gpu.blocking_power_w, rank.energy_j / (working_s + waiting_s))
            else:
                rest_j = rank.energy_j - static_w * (working_s + waiting_s)
                own_waiting_w = static_w + WAITING_SHARE * rest_j / (working_s + WAITING_SHARE * waiting_s)
            waiting_w.append(own_waiting_w)
            working_w.append((rank.energy_j - own_waiting_w * waiting_s) / working_s)
    if not working_w:
        raise InsufficientMeasurementsError(f"no energy was measured on rank {pp_rank}")
    return median(working_w), median(waiting_w)


def _curve(
    gpu: GpuView, time_s: float, power_w: float, assumption: Assumption, *, is_wait: bool = False
) -> InstructionProfile:
    top_mhz = gpu.supported_sm_clocks_mhz[0]
    static_w = min(gpu.num_gpus * assumption.static_power_w, 0.5 * power_w)
    dynamic_j = (power_w - static_w) * time_s
    options = []
    for clock_mhz in gpu.supported_sm_clocks_mhz:
        if clock_mhz < LOWEST_CLOCK_RATIO * top_mhz:
            break
        ratio = clock_mhz / top_mhz
        share = 0.0 if is_wait else assumption.compute_share
        own_s = time_s * (1 - share + share / ratio)
        above = max(0.0, ratio - assumption.knee_ratio) / (1 - assumption.knee_ratio)
        voltage = (1 + (assumption.max_voltage_ratio - 1) * above) / assumption.max_voltage_ratio
        energy_j = static_w * own_s + dynamic_j * voltage**2 * (ratio if is_wait else 1.0)
        options.append(ClockOption(clock_mhz, own_s, energy_j))
    return InstructionProfile(tuple(options))
