"""Measured saving from following a straggler's pace: following iterations compared with waiting ones.

Both kinds last as long as the straggler's iterations, so their energies are comparable without a model. Following
iterations may be longer by the slowdown that the user permits, which costs them energy. Waiting iterations run
the replica's own tuned plan, or full speed if it has none.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import TRIALS, PlanPurpose

_WAITING_KEPT, _FOLLOWING_KEPT = 8, 64
_SAME_PACE_RATIO = 0.03
"""Maximum relative difference of iteration times at one straggler pace."""
_MIN_OF_EACH = 2
_PACE_ITERATIONS = 3
"""The straggler's pace is the median time of this number of latest waiting iterations."""
_TimeAndEnergy = tuple[float, float]
"""Iteration time in s and energy in J."""


@dataclass(frozen=True, slots=True)
class StragglerSaving:
    """Median energy of waiting and of following iterations."""

    waiting_energy_j: float
    following_energy_j: float

    @property
    def saving_ratio(self) -> float:
        """Saved share of the energy of a waiting iteration."""
        return 1 - self.following_energy_j / self.waiting_energy_j


@dataclass(slots=True)
class StragglerSavingEstimator:
    """Estimator for one replica; the last estimate remains after the straggler has recovered."""

    saving: StragglerSaving | None = None
    """Saving at the most recent pace; None until there are two iterations of each kind."""

    _waiting: dict[PlanPurpose, deque[_TimeAndEnergy]] = field(default_factory=dict)
    _following: deque[_TimeAndEnergy] = field(default_factory=lambda: deque(maxlen=_FOLLOWING_KEPT))

    def add(
        self,
        observation: IterationObservation,
        purpose: PlanPurpose | None,
        *,
        is_plan_for_straggler: bool,
        permitted_ratio: float = 0.0,
    ) -> None:
        """Add an iteration; those without energy and those of trials are ignored.

        A wait may look like a pause for other work, whose iterations differ in time. `permitted_ratio` is the slowdown
        beyond the straggler's pace that following iterations may have.
        """
        energy_j = observation.energy_j
        if energy_j is None or purpose is None or purpose in TRIALS:
            return
        figure = (observation.iteration_time_s, energy_j)
        if is_plan_for_straggler:
            self._following.append(figure)
        elif observation.waited_s:
            self._waiting.setdefault(purpose, deque(maxlen=_WAITING_KEPT)).append(figure)
        purposes = (PlanPurpose.TUNED, PlanPurpose.BASELINE)
        found = (self._compared_with(purpose, permitted_ratio) for purpose in purposes)
        self.saving = next((saving for saving in found if saving is not None), self.saving)

    def _compared_with(self, purpose: PlanPurpose, permitted_ratio: float) -> StragglerSaving | None:
        waiting = self._waiting.get(purpose)
        if not waiting:
            return None
        pace_s = median(time_s for time_s, _ in list(waiting)[-_PACE_ITERATIONS:])
        following_j = _energies_at_pace(pace_s, self._following, longer_ratio=permitted_ratio)
        waiting_j = _energies_at_pace(pace_s, waiting)
        if min(len(following_j), len(waiting_j)) < _MIN_OF_EACH:
            return None
        return StragglerSaving(median(waiting_j), median(following_j))


def _energies_at_pace(pace_s: float, figures: deque[_TimeAndEnergy], *, longer_ratio: float = 0.0) -> list[float]:
    most = longer_ratio + _SAME_PACE_RATIO
    return [energy_j for time_s, energy_j in figures if -_SAME_PACE_RATIO <= time_s / pace_s - 1 <= most]
