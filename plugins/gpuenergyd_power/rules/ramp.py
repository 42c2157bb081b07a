"""Limits, by ceilings on clocks, how fast the power of a host's jobs rises and, if their end is known, falls.

Theory of operation. No reaction is fast enough for power that returns at once. So while a job rests, before its first
iteration, in a stall or during a checkpoint, its GPUs may only run at their lowest clock. When work returns, their
power rises only a little, and from then on the clock is raised in steps. The power added by a step is bounded by the
present power times the relative step times an elasticity: dynamic power grows with f * v^2, and the voltage v is flat
at low clocks and grows at most in proportion to f at high ones. A step is taken when the permitted ramp covers this
bound, so that power rises more slowly than permitted, never faster. A job of known length is lowered in the same way
before its end.

Clocks cannot prevent one case: power falls at once when work ends unannounced.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gpuenergyd.core.clock_request import Ceiling
from gpuenergyd_power.rules.backstop import GpuPower

_SAME_RATIO = 1e-9


class RampStage(StrEnum):
    """Stage of a job's ramp, which determines the clocks that its GPUs may run at."""

    RESTING = "resting"
    """Lowest clock, because there is no work."""
    RISING = "rising"
    FREE = "free"
    ENDING = "ending"
    """The job ends soon, and its clocks are lowered."""


@dataclass(frozen=True, slots=True)
class RampJob:
    """What is known about a job now."""

    job_id: str
    gpu_uuids: tuple[str, ...]
    num_iterations: int
    """Number of iterations that the job has reported."""
    iteration_time_s: float | None = None
    left_s: float | None = None
    """Time until its last iteration ends at the present pace; None if unknown."""


@dataclass(frozen=True, slots=True)
class RampRules:
    """Parameters of when a job rests, and how much power a higher clock may add."""

    rest_s: float = 2.0
    """Time without work after which a job rests; at least two iterations."""
    rest_ratio: float = 0.45
    """A job that reports no iteration rests when its mean power is below this share of its working power: waiting GPUs
    draw less than that, and a working pipeline never draws so little over two iterations."""
    detection_s: float = 0.5
    detected_ratio: float = 1.1
    detected_w: float = 5.0
    """Work has returned if the mean power over the detection time exceeds the resting power by this ratio plus these
    watts per GPU, or else when the job reports its first iteration."""
    hold_s: float = 1.0
    """Time from the return of work until clocks rise, since the return itself is a step in power."""
    settle_s: float = 1.0
    """Time from the start of a rest until clocks and sensors have settled."""
    low_clock_ratio: float = 0.6
    """Share of the highest clock up to which the voltage is assumed to be constant."""
    low_elasticity: float = 1.2
    high_elasticity: float = 3.0
    """Relative rise of power per relative rise of the clock: below `low_clock_ratio` and above it."""
    most_credit_s: float = 0.25
    """Time for which the permitted ramp may be saved up for a larger step."""
    working_s: float = 30.0
    """Time constant of the averaging of a working job's power."""
    pace_while_ending: float = 0.8
    """Assumed upper bound of the speed while a job is lowered; if it is slower, it waits at low clocks at the end."""


@dataclass(slots=True)
class JobRamp:
    """The ramp of one job."""

    stage: RampStage
    ratio: float
    """Permitted clock as a share of the highest clock."""
    num_iterations: int
    since_s: float
    credit_w: float = 0.0
    reported_s: float = -math.inf
    """Monotonic time of the last reported iteration."""
    highest_w: float = 0.0
    """Highest mean power since clocks began to rise."""
    idle_since_s: float | None = None
    """Since when the job has had no work while its clocks rise; None while it works."""
    working_w: float | None = None
    """Mean power of the job while it works; None until measured."""
    rest_w: float = math.inf
    history: deque[tuple[float, float]] = field(default_factory=deque)

    def mean_w(self, now_s: float, length_s: float) -> float | None:
        """Return the mean power over the last `length_s` seconds; None unless readings span most of that time."""
        powers_w = [power_w for at_s, power_w in self.history if at_s > now_s - length_s]
        is_spanned = bool(self.history) and self.history[0][0] <= now_s - 0.8 * length_s
        return math.fsum(powers_w) / len(powers_w) if powers_w and is_spanned else None


@dataclass(slots=True)
class RampLimiter:
    """Determines the ceilings of all jobs of a host from readings of power and from reported iterations."""

    ramp_w_per_s: float
    """Largest permitted rise of the host's mean power per second."""
    rules: RampRules = field(default_factory=RampRules)
    ceilings: dict[str, Ceiling] = field(default_factory=dict)
    jobs: dict[str, JobRamp] = field(default_factory=dict)
    _seen_s: float | None = None

    def observe(self, now_s: float, readings: Mapping[str, GpuPower], jobs: Sequence[RampJob]) -> bool:
        """Update all jobs from new readings; return whether the ceilings have changed.

        Args:
            now_s: monotonic instant of the readings.
            readings: all GPUs of the host.
            jobs: jobs that have not ended.
        """
        elapsed_s = 0.0 if self._seen_s is None else min(1.0, max(0.0, now_s - self._seen_s))
        self._seen_s = now_s
        self.jobs = {job.job_id: self.jobs.get(job.job_id) or self._begun(now_s, job, readings) for job in jobs}
        for job in jobs:
            self._follow(now_s, job, readings)
        moving = [j for j in jobs if self.jobs[j.job_id].stage in {RampStage.RISING, RampStage.ENDING}]
        for job in moving:
            self._move(now_s, job, readings, self.ramp_w_per_s * elapsed_s / len(moving))
        before = self.ceilings
        self.ceilings = {
            uuid: Ceiling(mhz)
            for job in jobs
            for uuid in job.gpu_uuids
            if (mhz := _ceiling_mhz(readings.get(uuid), self.jobs[job.job_id])) is not None
        }
        return self.ceilings != before

    # --- inside ---

    @staticmethod
    def _begun(now_s: float, job: RampJob, readings: Mapping[str, GpuPower]) -> JobRamp:
        """Return the ramp of a newly seen job, which has not begun, or was running before this daemon started."""
        if job.num_iterations:
            return JobRamp(RampStage.FREE, 1.0, job.num_iterations, now_s)
        return JobRamp(RampStage.RESTING, _lowest_ratio(job, readings), 0, now_s)

    def _follow(self, now_s: float, job: RampJob, readings: Mapping[str, GpuPower]) -> None:
        """Record the readings of a job, and change its stage if necessary."""
        ramp, rules = self.jobs[job.job_id], self.rules
        powers_w = [readings[uuid].power_w if uuid in readings else None for uuid in job.gpu_uuids]
        known_w = [power_w for power_w in powers_w if power_w is not None]
        rest_s = max(rules.rest_s, 2 * (job.iteration_time_s or 0.0))
        if len(known_w) == len(powers_w):
            ramp.history.append((now_s, sum(known_w)))
        while ramp.history and ramp.history[0][0] < now_s - rest_s:
            ramp.history.popleft()
        if job.num_iterations > ramp.num_iterations:
            ramp.reported_s = now_s
        match ramp.stage:
            case RampStage.FREE:
                self._follow_free(now_s, job, ramp, readings, rest_s)
            case RampStage.RESTING if self._has_work(now_s, job, ramp):
                self._rise(now_s, ramp)
            case RampStage.RISING:
                self._follow_rising(now_s, job, ramp, readings, rest_s)
            case RampStage.ENDING if job.left_s is None:  # It goes on.
                self._rise(now_s, ramp)
        ramp.num_iterations = job.num_iterations

    def _follow_free(
        self, now_s: float, job: RampJob, ramp: JobRamp, readings: Mapping[str, GpuPower], rest_s: float
    ) -> None:
        mean_w = ramp.mean_w(now_s, rest_s) if now_s - ramp.since_s >= rest_s else None
        if mean_w is None:
            return
        working_w = ramp.working_w if ramp.working_w is not None else mean_w
        if mean_w < self.rules.rest_ratio * working_w and now_s - ramp.reported_s >= rest_s:
            self._rest(now_s, job, ramp, readings)
            return
        elapsed_s = now_s - ramp.history[-2][0] if len(ramp.history) > 1 else 0.0
        ramp.working_w = working_w + min(1.0, elapsed_s / self.rules.working_s) * (mean_w - working_w)
        if job.left_s is not None and job.left_s <= self.rules.pace_while_ending * self._end_s(mean_w):
            ramp.stage, ramp.since_s, ramp.credit_w = RampStage.ENDING, now_s, 0.0

    def _follow_rising(
        self, now_s: float, job: RampJob, ramp: JobRamp, readings: Mapping[str, GpuPower], rest_s: float
    ) -> None:
        """Keep the clocks of a job whose work has stopped again, and let it rest after a while."""
        mean_w = ramp.mean_w(now_s, self.rules.detection_s)
        if mean_w is None:
            return
        ramp.highest_w = max(ramp.highest_w, mean_w)
        least_w = self.rules.rest_ratio * ramp.highest_w
        if math.isfinite(ramp.rest_w):
            least_w = max(least_w, self._detected_w(job, ramp))
        if mean_w >= least_w:
            ramp.idle_since_s = None
            return
        ramp.idle_since_s = now_s if ramp.idle_since_s is None else ramp.idle_since_s
        if now_s - ramp.idle_since_s >= rest_s <= now_s - ramp.reported_s:
            self._rest(now_s, job, ramp, readings)

    @staticmethod
    def _rise(now_s: float, ramp: JobRamp) -> None:
        ramp.stage, ramp.since_s, ramp.credit_w = RampStage.RISING, now_s, 0.0
        ramp.highest_w, ramp.idle_since_s = 0.0, None

    @staticmethod
    def _rest(now_s: float, job: RampJob, ramp: JobRamp, readings: Mapping[str, GpuPower]) -> None:
        ramp.stage, ramp.since_s, ramp.rest_w = RampStage.RESTING, now_s, math.inf
        ramp.ratio = _lowest_ratio(job, readings)

    def _detected_w(self, job: RampJob, ramp: JobRamp) -> float:
        """Return the power at the lowest clock above which a job is working."""
        return ramp.rest_w * self.rules.detected_ratio + self.rules.detected_w * len(job.gpu_uuids)

    def _has_work(self, now_s: float, job: RampJob, ramp: JobRamp) -> bool:
        """Return whether work has returned: an iteration was reported, or power rose at the lowest clock."""
        if job.num_iterations > ramp.num_iterations:
            return True
        mean_w = ramp.mean_w(now_s, self.rules.detection_s)
        if mean_w is None or now_s - ramp.since_s < self.rules.settle_s:
            return False
        detected_w = self._detected_w(job, ramp)
        ramp.rest_w = min(ramp.rest_w, mean_w)
        return mean_w > detected_w

    def _end_s(self, power_w: float) -> float:
        """Return how long it takes to lower this power to that at the lowest clock."""
        low, rules = self.rules.low_clock_ratio, self.rules
        return power_w * (rules.high_elasticity * (1 - low) + rules.low_elasticity * low) / self.ramp_w_per_s

    def _move(self, now_s: float, job: RampJob, readings: Mapping[str, GpuPower], paid_w: float) -> None:
        """Raise or lower the clocks of a job by as many steps as the permitted ramp covers."""
        ramp, rules = self.jobs[job.job_id], self.rules
        is_rising = ramp.stage is RampStage.RISING
        short_w, long_w = (
            ramp.mean_w(now_s, length_s) for length_s in (rules.detection_s, max(1.0, job.iteration_time_s or 0.0))
        )
        power_w = max(short_w or 0.0, long_w or 0.0)
        is_held = now_s - ramp.since_s < rules.hold_s or ramp.idle_since_s is not None
        if power_w <= 0 or (is_rising and is_held):
            return  # Without a reading, no step is known to be small enough.
        ramp.credit_w += paid_w
        while (following := _next_ratio(job, readings, ramp.ratio, is_rising=is_rising)) is not None:
            low, high = sorted((ramp.ratio, following))
            elasticity = rules.low_elasticity if high <= rules.low_clock_ratio else rules.high_elasticity
            cost_w = elasticity * power_w * (high - low) / low
            if cost_w > ramp.credit_w:
                ramp.credit_w = min(ramp.credit_w, max(cost_w, self.ramp_w_per_s * rules.most_credit_s))
                return
            ramp.credit_w -= cost_w
            ramp.ratio = following
            power_w += cost_w if is_rising else -min(0.5 * power_w, cost_w)
        if is_rising:
            ramp.stage, ramp.ratio, ramp.since_s = RampStage.FREE, 1.0, now_s
            ramp.working_w = ramp.highest_w


def _clocks_mhz(job: RampJob, readings: Mapping[str, GpuPower]) -> list[tuple[int, ...]]:
    clocks = [readings[uuid].supported_sm_clocks_mhz for uuid in job.gpu_uuids if uuid in readings]
    return [clocks_mhz for clocks_mhz in clocks if len(clocks_mhz) > 1]


def _lowest_ratio(job: RampJob, readings: Mapping[str, GpuPower]) -> float:
    """Return the lowest clock of a job's GPUs, relative to the highest."""
    return min((clocks_mhz[-1] / clocks_mhz[0] for clocks_mhz in _clocks_mhz(job, readings)), default=1.0)


def _next_ratio(job: RampJob, readings: Mapping[str, GpuPower], ratio: float, *, is_rising: bool) -> float | None:
    """Return the next clock up or down of the GPU with the fewest clocks, relative to its highest; None at the end."""
    clocks_mhz: tuple[int, ...] = min(_clocks_mhz(job, readings), key=len, default=(1,))
    ratios = [mhz / clocks_mhz[0] for mhz in clocks_mhz]
    if is_rising:
        return min((step for step in ratios if step > ratio * (1 + _SAME_RATIO)), default=None)
    return max((step for step in ratios if step < ratio * (1 - _SAME_RATIO)), default=None)


def _ceiling_mhz(reading: GpuPower | None, ramp: JobRamp) -> int | None:
    """Return the highest clock that a ramp permits; None if it is not limited, or if clocks cannot be set."""
    if ramp.stage is RampStage.FREE or reading is None or not (reading.can_change and reading.can_set_clocks):
        return None
    clocks_mhz = reading.supported_sm_clocks_mhz
    if len(clocks_mhz) < 2:
        return None
    return next((mhz for mhz in clocks_mhz if mhz <= ramp.ratio * clocks_mhz[0] * (1 + _SAME_RATIO)), clocks_mhz[-1])
