"""The profiling procedure: the next clocks to measure, and the end of profiling, decided from the view alone.

One design point runs per iteration, in the design's order. Once a balanced block of points is measured, the expected
loss of a plan made from the current fit is evaluated regularly; profiling ends when it is small. A point whose
iteration was disturbed, or had a clock that contradicts its neighbours, is measured again. Slow clocks cost time: how
much of it, and when, is limited by the job's time account, into which each point is fitted (`affordable.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd.core.pipeline.switching import SwitchLatency
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.profiling.design import design_points, kinds_of_ranks, wait_levels

MAX_ATTEMPTS = 3
"""Attempts per design point to get an undisturbed iteration."""
MAX_POINTS = 15
"""Limit on distinct design points; measurements beyond these hardly improve a fit."""
GOOD_REGRET_RATIO = 0.004
"""Expected relative loss of energy below which profiling ends."""
HELD_LATENCY_RATIO = 0.4
"""Latency of a clock change, as a share of the shortest instruction, from which clocks are held while profiling."""
_IN_FLIGHT = 3
"""Iterations between issuing a plan and its measurement, and hence between evaluations."""


class NoProfilingStep(StrEnum):
    """Reasons for not running a further step."""

    DONE = "done"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class ProfilingStep:
    """One attempt of a design point; both are counted from 0."""

    number: int
    attempt: int


@dataclass(frozen=True, slots=True)
class FitQuality:
    """Quality of the current fit: clocks of a class to measure again, and whether planning from it loses little."""

    doubtful: frozenset[tuple[InstructionClass, int]]
    is_good: Callable[[], bool]
    """Return whether the expected loss is at most `GOOD_REGRET_RATIO`; slow in large pipelines."""


class Design:
    """The profiling design of a job, and its progress."""

    def __init__(self, view: JobView, levels_mhz: Sequence[Sequence[int]], *, after: str = "") -> None:
        """Begin or continue a design; `after` names the reason for which the job is profiled again, if it is."""
        self._view = view
        self._after = after
        self._levels_mhz = levels_mhz
        self._num_levels = min(len(own) for own in levels_mhz)
        kinds_of_rank = kinds_of_ranks(view.schedule)
        self.wait_levels_mhz = [
            {kind: wait_levels(gpu.supported_sm_clocks_mhz, self._num_levels, kind) for kind in kinds if kind.is_wait}
            for gpu, kinds in zip(view.gpus, kinds_of_rank, strict=True)
        ]
        self.points = design_points(kinds_of_rank, self._num_levels, seed=_seed(view))[:MAX_POINTS]
        self._issued = {plan.plan_id for plan in view.issued_plans}
        self._measured_plans = {o.plan_id for o in view.observations}
        self._regular = {o.plan_id for o in view.observations if o.is_regular and o.energy_j is not None}

    def plan_id(self, step: ProfilingStep) -> str:
        """Return the plan id of a step."""
        name = f"profile-{step.number + 1}.{step.attempt + 1}"
        return self._view.plan_id(f"{name}-after-{self._after}" if self._after else name)

    def reason(self, step: ProfilingStep) -> str:
        """Return the reason shown for a step's plan."""
        again = f", attempt {step.attempt + 1}" if step.attempt else ""
        return f"profiling, point {step.number + 1} of up to {len(self.points)}{again}"

    def next_step(self, evaluate: Callable[[], FitQuality]) -> ProfilingStep | NoProfilingStep:
        """Return the next step; `evaluate` is slow and only called when profiling may end.

        How good the fit is does not matter where nothing is left to measure.
        """
        num_issued = self._num_issued()
        measured = [n for n in range(num_issued) if self._attempts(n) & self._regular]
        block = min(self._num_levels, len(self.points))
        is_due = (len(measured) - block) % _IN_FLIGHT == 0 or self._is_last_measured()
        if len(measured) >= block and is_due:
            quality = evaluate()
            repetition = self._repetition(quality, num_issued)
            if repetition is not None:
                return repetition
            following = self._next_point(num_issued, measured)
            is_done = following is NoProfilingStep.DONE or quality.is_good()
            return NoProfilingStep.DONE if is_done else following
        return self._next_point(num_issued, measured)

    def _next_point(self, num_issued: int, measured: Sequence[int]) -> ProfilingStep | NoProfilingStep:
        """Return the next point of the design, then attempts of those without an undisturbed iteration."""
        if num_issued < len(self.points):
            return ProfilingStep(num_issued, 0)
        if not self._is_last_measured():
            return NoProfilingStep.WAIT
        for number in range(num_issued):
            attempt = len(self._attempts(number) & self._issued)
            if number not in measured and attempt < MAX_ATTEMPTS:
                return ProfilingStep(number, attempt)
        return NoProfilingStep.DONE

    def _num_issued(self) -> int:
        numbers = range(len(self.points))
        return next((n for n in numbers if self.plan_id(ProfilingStep(n, 0)) not in self._issued), len(self.points))

    def _attempts(self, number: int) -> set[str]:
        return {self.plan_id(ProfilingStep(number, attempt)) for attempt in range(MAX_ATTEMPTS)}

    def _is_last_measured(self) -> bool:
        last = self._view.issued_plans[-1] if self._view.issued_plans else None
        return last is None or last.plan_id in self._measured_plans

    def _repetition(self, quality: FitQuality, num_issued: int) -> ProfilingStep | None:
        """Return a step that measures a doubtful clock again; None without one that has attempts left."""
        for key, clock_mhz in sorted(quality.doubtful, key=str):
            levels = list(self.wait_levels_mhz[key.pp_rank].get(key.kind, self._levels_mhz[key.pp_rank]))
            if clock_mhz not in levels:
                continue
            level = levels.index(clock_mhz)
            for number in range(num_issued):
                attempt = len(self._attempts(number) & self._issued)
                runs_clock = self.points[number].levels[key.pp_rank].get(key.kind) == level
                is_pending = bool((self._attempts(number) & self._issued) - self._measured_plans)
                if runs_clock and not is_pending and attempt < MAX_ATTEMPTS:
                    return ProfilingStep(number, attempt)
        return None


def _seed(view: JobView) -> str:
    """Return the seed of the design, which a restarted policy host must draw alike.

    Ranks of a data-parallel loop, whose jobs have one name, draw the same: slow in the same iterations, they hardly
    wait for each other, which would look like communication that low clocks make longer.
    """
    return view.job_id.rpartition("-")[0] if view.num_dp_ranks > 1 else view.job_id


def held_ranks(view: JobView) -> frozenset[int]:
    """Return the ranks whose clocks take effect too late to change with every instruction."""
    shortest_s: dict[int, float] = {}
    for key, time_s in _typical_times_s(view).items():
        shortest_s[key.pp_rank] = min(time_s, shortest_s.get(key.pp_rank, time_s))
    return frozenset(
        rank
        for rank, gpu in enumerate(view.gpus)
        if rank in shortest_s and _typical_latency_s(gpu.switch_latency) > HELD_LATENCY_RATIO * shortest_s[rank]
    )


def _typical_times_s(view: JobView) -> dict[InstructionClass, float]:
    """Return the median time of one instruction of each class."""
    times_s: dict[InstructionClass, list[float]] = {}
    for observation in view.observations:
        for sample in observation.instruction_samples if observation.is_regular else ():
            times_s.setdefault(sample.instruction_class, []).append(sample.time_s)
    return {key: median(own) for key, own in times_s.items()}


def _typical_latency_s(latency: SwitchLatency) -> float:
    raise_s = latency.raise_s if latency.typical_raise_s is None else latency.typical_raise_s
    return max(raise_s, latency.lower_s)
