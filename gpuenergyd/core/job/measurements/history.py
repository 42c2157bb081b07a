"""Limited history of a job's measured iterations, and queries on it, such as the iterations under one plan."""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from gpuenergyd.core.job.issued_plans import Purposes
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, TRIALS, PlanPurpose


@dataclass(slots=True)
class KeptIterations:
    """A job's observations, oldest first; at most `max_kept`."""

    max_kept: int
    kept: list[IterationObservation] = field(default_factory=list)

    def add(self, observation: IterationObservation, purposes: Purposes) -> None:
        """Add an iteration; drop another one if there are too many."""
        self.kept.append(observation)
        if len(self.kept) > self.max_kept:
            del self.kept[self._most_dispensable(purposes)]

    def _most_dispensable(self, purposes: Purposes) -> int:
        """Return the index of the observation to drop: from the older half, a tuned one, else one at full speed.

        The newer half stays because the guard evaluates a plan by its newest iterations, however many iterations ran at
        full speed before.
        """
        older = [purposes.get(o.plan_id) for o in self.kept[: max(1, self.max_kept // 2)]]
        needed = {*TRIALS, PlanPurpose.BASELINE}
        tuned = (i for i, purpose in enumerate(older) if purpose not in needed)
        at_full_speed = (i for i, purpose in enumerate(older) if purpose is PlanPurpose.BASELINE)
        return next(tuned, next(at_full_speed, 0))

    def at_full_speed(self, purposes: Purposes, *, since: int = 0) -> list[IterationObservation]:
        """Return the regular full-speed iterations without the first of each block, while clocks are still rising."""
        found = []
        plan_id_before: str | None = BASELINE_PLAN_ID
        for o in self.kept:
            is_first_of_block = o.plan_id != plan_id_before
            plan_id_before = o.plan_id
            is_at_full_speed = purposes.get(o.plan_id) is PlanPurpose.BASELINE
            if o.is_regular and o.iteration_index >= since and not is_first_of_block and is_at_full_speed:
                found.append(o)
        return found

    def regular_under(self, plan_id: str, *, since: int = 0) -> list[IterationObservation]:
        return [o for o in self.kept if o.is_regular and o.plan_id == plan_id and o.iteration_index >= since]

    def typical(self, figure: Callable[[IterationObservation], float | None]) -> float:
        """Return the median of a figure over the regular iterations that have it; 0 if none has."""
        known = [value for o in self.kept if o.is_regular and (value := figure(o)) is not None]
        return median(known) if known else 0.0
