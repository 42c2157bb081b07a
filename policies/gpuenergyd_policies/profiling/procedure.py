"""What to try next while profiling, and when to stop: decided from the view alone.

One design point runs per iteration, in the design's order. When a balanced block of them is known, each further
iteration asks whether a plan from what is known now may be expected to lose little; then profiling ends. A point
whose iteration was disturbed, as a whole or in one clock that its neighbours contradict, is tried again. Slow clocks
cost time, so points stop, too, when the time that they are estimated to lose has used up a budget.

A job that is profiled again has been slow once already. Then a point has to wait until so many iterations at full speed
lie between it and the one before that the mean of them all stays inside the budget for slowdown.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.profiling.design import design_points, kinds_of_ranks, lost_ratio

MAX_ATTEMPTS = 3
"""How often a design point is tried until an iteration of it was regular."""
MAX_POINTS = 15
"""Distinct design points at most: what they do not tell, twice as many would not either."""
GOOD_REGRET_RATIO = 0.004
"""Predicted loss of energy below which profiling ends."""
LOST_ITERATIONS = 10.0
"""Budget of profiling: how many iterations at full speed would fit into the time lost by slow clocks."""
SLOWDOWN_RATIO = 0.01
"""Mean slowdown that profiling again may cause: the core's default budget for plans."""
_IN_FLIGHT = 3
"""Iterations between issuing a plan and knowing what it showed: evaluations are due this far apart."""


class Ready(StrEnum):
    """Answers other than a further step."""

    ENOUGH = "enough"
    NOT_YET = "not yet"


@dataclass(frozen=True, slots=True)
class Step:
    """Try a design point for the n-th time; both count from 0."""

    number: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What has been learned so far: expected loss of planning now, and clocks of a class to measure again."""

    regret_ratio: float
    doubtful: frozenset[tuple[InstructionClass, int]]


class Design:
    """The design of one job, and how far it has come."""

    def __init__(self, view: JobView, levels_mhz: Sequence[Sequence[int]]) -> None:
        self._view = view
        self._levels_mhz = levels_mhz
        self._num_levels = min(len(own) for own in levels_mhz)
        # The seed is a part of the job that restarts with it.
        self.points = design_points(kinds_of_ranks(view.schedule), self._num_levels, seed=view.job_id)[:MAX_POINTS]
        self._issued = {plan.plan_id for plan in view.issued_plans}
        self._seen = {o.plan_id for o in view.observations}
        self._regular = {o.plan_id for o in view.observations if o.is_regular and o.energy_j is not None}

    def plan_id(self, step: Step) -> str:
        """Return the id of the plan that takes a step."""
        return self._view.plan_id(f"profile-{step.number + 1}.{step.attempt + 1}")

    def reason(self, step: Step) -> str:
        """Return what to say of it."""
        again = f", attempt {step.attempt + 1}" if step.attempt else ""
        return f"profiling, point {step.number + 1} of at most {len(self.points)}{again}"

    def next_step(self, knowledge: Callable[[], Knowledge]) -> Step | Ready:
        """Return what to try next; `knowledge` is only called when it may end profiling, as it takes a while."""
        num_issued = self._num_issued()
        if not self._is_paid_for(num_issued):
            return Ready.NOT_YET
        begun = range(num_issued)
        known = [n for n in begun if self._attempts(n) & self._regular]
        is_all_seen = self._is_last_seen()
        block = min(self._num_levels, len(self.points))
        is_due = len(known) >= block and ((len(known) - block) % _IN_FLIGHT == 0 or is_all_seen)
        if is_due:
            learned = knowledge()
            again = self._to_measure_again(learned, num_issued)
            if again is not None:
                return again
            if learned.regret_ratio <= GOOD_REGRET_RATIO:
                return Ready.ENOUGH
        if num_issued < len(self.points) and (num_issued < block or self._is_affordable(num_issued)):
            return Step(num_issued, 0)
        if not is_all_seen:
            return Ready.NOT_YET
        for number in begun:
            attempt = len(self._attempts(number) & self._issued)
            if number not in known and attempt < MAX_ATTEMPTS:
                return Step(number, attempt)
        return Ready.ENOUGH

    def _num_issued(self) -> int:
        numbers = range(len(self.points))
        return next((n for n in numbers if self.plan_id(Step(n, 0)) not in self._issued), len(self.points))

    def _attempts(self, number: int) -> set[str]:
        return {self.plan_id(Step(number, attempt)) for attempt in range(MAX_ATTEMPTS)}

    def _is_last_seen(self) -> bool:
        last = self._view.issued_plans[-1] if self._view.issued_plans else None
        return last is None or last.plan_id in self._seen

    def _to_measure_again(self, learned: Knowledge, num_issued: int) -> Step | None:
        """Return a step that measures a doubtful clock again, None when there is none or it has been tried enough."""
        for key, clock_mhz in sorted(learned.doubtful, key=str):
            levels = list(self._levels_mhz[key.pp_rank])
            if clock_mhz not in levels:
                continue
            level = levels.index(clock_mhz)
            for number in range(num_issued):
                attempt = len(self._attempts(number) & self._issued)
                is_there = self.points[number].levels[key.pp_rank].get(key.kind) == level
                is_awaited = bool((self._attempts(number) & self._issued) - self._seen)
                if is_there and not is_awaited and attempt < MAX_ATTEMPTS:
                    return Step(number, attempt)
        return None

    def _is_paid_for(self, number: int) -> bool:
        """Return whether another point, such as the next one, leaves the mean slowdown of profiling again in budget."""
        view = self._view
        if not view.generation or not view.observations:
            return True
        profiling = self._profiling_ids()
        if profiling & self._issued - self._seen:
            return False
        # Back to the last point, or to what was forgotten: a slow plan.
        num_at_full_speed, index = 0, view.observations[-1].iteration_index
        for observation in reversed(view.observations):
            if observation.plan_id in profiling or observation.iteration_index < index - num_at_full_speed:
                break
            num_at_full_speed += 1
        point = self.points[min(number, len(self.points) - 1)]
        return lost_ratio(point, self._levels_mhz, self._busy_s()) <= SLOWDOWN_RATIO * num_at_full_speed

    def _profiling_ids(self) -> set[str]:
        return {plan_id for n in range(len(self.points)) for plan_id in self._attempts(n)}

    def _is_affordable(self, number: int) -> bool:
        """Return whether a further point stays inside the budget."""
        busy_s = self._busy_s()
        lost = sum(lost_ratio(self.points[n], self._levels_mhz, busy_s) for n in range(number + 1))
        return lost <= LOST_ITERATIONS

    def _busy_s(self) -> dict[InstructionClass, float]:
        """Return what each class takes in an iteration of the un-tuned job."""
        profiling = self._profiling_ids()
        sums: dict[InstructionClass, list[float]] = {}
        for observation in self._view.observations:
            if observation.is_regular and observation.plan_id not in profiling:
                for sample in observation.instruction_samples:
                    sums.setdefault(sample.instruction_class, []).append(sample.time_s * sample.count)
        return {key: median(times_s) for key, times_s in sums.items()}
