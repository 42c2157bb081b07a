"""Iterations from which a job's saving is computed: blocks at full speed, and the tuned iterations next to them.

They are kept longer than other iterations and without their instructions, because in a long job the blocks at full
speed are far apart and a confidence interval needs many of them.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from gpuenergyd.core.job.issued_plans import Purposes
from gpuenergyd.core.job.measurements.brackets import REACH
from gpuenergyd.core.job.measurements.savings import MeasuredSaving, measured_saving
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, PlanPurpose

_MOST_KEPT = 1024
"""About forty brackets."""


@dataclass(slots=True)
class ComparedIterations:
    """The iterations that brackets consist of, oldest first.

    Each run, at full speed or under plans, contributes its first iterations, because they follow the run before, and
    its last ones, once another run follows.
    """

    _kept: list[tuple[IterationObservation, bool]] = field(default_factory=list)
    """Each iteration, and whether it ran under a plan."""
    _newest: deque[IterationObservation] = field(default_factory=lambda: deque(maxlen=REACH))
    """Iterations of the present run that are not kept yet."""
    _num_first: int = 0
    """Number of iterations of the present run that are kept."""
    _is_tuned: bool | None = None
    """Whether the present run is under plans; None before the first run."""
    _plan_id: str | None = BASELINE_PLAN_ID

    def add(self, observation: IterationObservation, purposes: Purposes) -> None:
        """Add an iteration, unless it was disturbed, ran at another replica's pace or under an experiment."""
        is_first_of_plan = observation.plan_id != self._plan_id
        self._plan_id = observation.plan_id
        purpose = purposes.get(observation.plan_id)
        is_tuned = purpose is PlanPurpose.TUNED
        if not observation.is_own or observation.waited_s or not (is_tuned or purpose is PlanPurpose.BASELINE):
            return
        if not is_tuned and is_first_of_plan:  # clocks are still rising
            return
        if is_tuned is not self._is_tuned:
            self._kept += [(own, not is_tuned) for own in self._newest]
            self._newest.clear()
            self._is_tuned, self._num_first = is_tuned, 0
        light = replace(observation, instruction_samples=())
        if self._num_first < REACH:
            self._num_first += 1
            self._kept.append((light, is_tuned))
        else:
            self._newest.append(light)
        del self._kept[: max(0, len(self._kept) - _MOST_KEPT)]

    def keep(self, is_kept: Callable[[IterationObservation], bool]) -> None:
        """Drop all iterations except those for which `is_kept` is true."""
        self._kept = [(own, is_tuned) for own, is_tuned in self._kept if is_kept(own)]
        newest = [own for own in self._newest if is_kept(own)]
        self._newest.clear()
        self._newest.extend(newest)

    def restore(self, observations: Iterable[IterationObservation], purposes: Purposes) -> None:
        """Start with these iterations, which are in order."""
        for observation in observations:
            self.add(observation, purposes)

    def saving(self, *, until: int | None = None) -> MeasuredSaving | None:
        """Return the measured saving of the iterations before `until`; None while there are too few."""
        everything = [*self._kept, *((own, self._is_tuned is True) for own in self._newest)]
        counted = [(own, is_tuned) for own, is_tuned in everything if until is None or own.iteration_index < until]
        return measured_saving(
            [own for own, is_tuned in counted if not is_tuned], [own for own, is_tuned in counted if is_tuned]
        )
