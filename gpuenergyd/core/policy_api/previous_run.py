"""What one run of a job leaves for the next: the iterations that its tuned plan was made from, and how that plan ended.

Iterations and not fitted curves: whoever fits better one day starts from the same facts, and a policy that fits
otherwise can use them too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import ClockPlan

PREVIOUS_PROFILE, PREVIOUS_FULL_SPEED = "previous-profile", "previous-full-speed"
"""The plans of remembered iterations: their own belong to another run."""
MAX_PROFILE_ITERATIONS = 48
MAX_FULL_SPEED_ITERATIONS = 12
PROVEN_ITERATIONS = 8
"""Regular iterations of one tuned plan after which what it was made from is worth keeping."""


@dataclass(frozen=True, slots=True)
class PreviousRun:
    """What an earlier run of the same job on the same models of GPU showed."""

    job_id: str
    full_speed: tuple[IterationObservation, ...]
    profile: tuple[IterationObservation, ...]
    figures: tuple[tuple[str, float], ...] = ()
    """Those of its last tuned plan, as its policy named them."""
    is_of_this_run: bool = False
    """Whether it is what the present run itself showed before it changed: believed whatever its pace; never stored."""

    def figure(self, name: str) -> float | None:
        """Return one of the figures, None when there is no such."""
        return dict(self.figures).get(name)


def summarize_run(
    job_id: str,
    full_speed: Sequence[IterationObservation],
    profile: Iterable[IterationObservation],
    plan: ClockPlan,
) -> PreviousRun | None:
    """Return what a run leaves, None when it did not profile."""
    kept = [o for o in profile if o.is_regular and o.energy_j is not None][-MAX_PROFILE_ITERATIONS:]
    if not kept:
        return None
    return PreviousRun(
        job_id=job_id,
        full_speed=tuple(replace(o, plan_id=PREVIOUS_FULL_SPEED) for o in full_speed[:MAX_FULL_SPEED_ITERATIONS]),
        profile=tuple(replace(o, plan_id=PREVIOUS_PROFILE) for o in kept),
        figures=plan.figures,
    )
