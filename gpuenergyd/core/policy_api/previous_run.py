"""Previous runs of a job: the iterations from which a run made its tuned plan, kept for the next run.

Iterations are kept instead of fitted curves, so that policies with other fits can use them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import ClockPlan

PREVIOUS_PROFILE, PREVIOUS_FULL_SPEED = "previous-profile", "previous-full-speed"
"""Plan ids of a previous run's iterations, in place of the original ids of that run."""
MAX_PROFILE_ITERATIONS = 48
MAX_FULL_SPEED_ITERATIONS = 12
PROVEN_ITERATIONS = 8
"""Regular iterations of one tuned plan after which its run is kept for the next one."""


@dataclass(frozen=True, slots=True)
class PreviousRun:
    """Iterations of an earlier run of the same job on the same GPU models."""

    job_id: str
    full_speed: tuple[IterationObservation, ...]
    profile: tuple[IterationObservation, ...]
    figures: tuple[tuple[str, float], ...] = ()
    """Figures of its last tuned plan."""
    order_refusal: str = ""
    """Why the job must not run another order of instructions; kept apart from the iterations, which may be deleted."""
    is_of_this_run: bool = False
    """Whether these are iterations of the current run before the job changed: used at any pace, and never stored."""

    def figure(self, name: str) -> float | None:
        """Return the figure with this name; None if there is none."""
        return dict(self.figures).get(name)


def summarize_run(
    job_id: str,
    full_speed: Sequence[IterationObservation],
    profile: Iterable[IterationObservation],
    plan: ClockPlan,
) -> PreviousRun | None:
    """Return the record of a run for the next one; None if the run did not profile."""
    kept = [o for o in profile if o.is_regular and o.energy_j is not None][-MAX_PROFILE_ITERATIONS:]
    if not kept:
        return None
    timed = [o for o in full_speed if o.is_timed]
    return PreviousRun(
        job_id=job_id,
        full_speed=tuple(replace(o, plan_id=PREVIOUS_FULL_SPEED) for o in timed[:MAX_FULL_SPEED_ITERATIONS]),
        profile=tuple(replace(o, plan_id=PREVIOUS_PROFILE) for o in kept),
        figures=plan.figures,
    )
