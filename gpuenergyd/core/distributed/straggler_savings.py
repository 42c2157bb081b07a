"""What following a straggler's pace saves, measured: iterations that waited for it against some that followed it.

Both lasted as long as the straggler made them, so their energies compare as they are; nothing is scaled or modelled.
Waiting iterations ran the plan that the replica follows by itself, which is what it would run all the while; full speed
where it has none.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import PlanPurpose

_WAITING_KEPT, _FOLLOWING_KEPT = 8, 64
_LIKE_RATIO = 0.03
"""Iterations whose times differ by less were made that long by the same straggler."""
_MIN_OF_EACH = 2
_PACE_OF = 3
_Figure = tuple[float, float]
"""Time and energy of an iteration."""


@dataclass(frozen=True, slots=True)
class StragglerSaving:
    """Median energy of an iteration of either kind."""

    waiting_energy_j: float
    following_energy_j: float

    @property
    def saving_ratio(self) -> float:
        """Share of the energy of a waiting iteration that is saved."""
        return 1 - self.following_energy_j / self.waiting_energy_j


@dataclass(slots=True)
class StragglerSavingEstimator:
    """Of one replica; what it has measured outlives the straggler, until there is more to measure it by."""

    saving: StragglerSaving | None = None
    """What following saves at the pace that was waited for last; None before there were two iterations of each."""

    _waiting: dict[PlanPurpose, deque[_Figure]] = field(default_factory=dict)
    _following: deque[_Figure] = field(default_factory=lambda: deque(maxlen=_FOLLOWING_KEPT))

    def note(
        self, observation: IterationObservation, purpose: PlanPurpose | None, *, is_plan_for_straggler: bool
    ) -> None:
        """Take an iteration, with what it waited; one without energy, or in which clocks were tried, tells nothing.

        A wait may look like a pause in which something else ran; those are told apart by how long they took.
        """
        energy_j = observation.energy_j
        if energy_j is None or purpose is None or purpose is PlanPurpose.PROFILE:
            return
        figure = (observation.iteration_time_s, energy_j)
        if is_plan_for_straggler:
            self._following.append(figure)
        elif observation.waited_s:
            self._waiting.setdefault(purpose, deque(maxlen=_WAITING_KEPT)).append(figure)
        self.saving = self._against(PlanPurpose.TUNED) or self._against(PlanPurpose.BASELINE) or self.saving

    def _against(self, purpose: PlanPurpose) -> StragglerSaving | None:
        waiting = self._waiting.get(purpose)
        if not waiting:
            return None
        pace_s = median(time_s for time_s, _ in list(waiting)[-_PACE_OF:])
        following_j, waiting_j = _like(pace_s, self._following), _like(pace_s, waiting)
        if min(len(following_j), len(waiting_j)) < _MIN_OF_EACH:
            return None
        return StragglerSaving(median(waiting_j), median(following_j))


def _like(pace_s: float, figures: deque[_Figure]) -> list[float]:
    return [energy_j for time_s, energy_j in figures if abs(time_s / pace_s - 1) <= _LIKE_RATIO]
