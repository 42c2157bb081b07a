"""Limit on the trust in past jobs: a plan made from them must cost little if they are wrong.

Past jobs may come from a broken sensor, another GPU under the same name, or somebody's imported file, and a belief that
rests on them is sure of itself before the job has measured anything. So the plan is also judged by the belief without
them: if that one expects it to be late by more than a limit in too many draws, its times are raised towards that belief
until the limit holds. The limit is wider for past jobs that the daemon measured on this job's GPUs, whose times only a
program of the same user can have reported wrong, and there is none for those that agree with the job's own times below
full speed. Powers are believed to be higher than without past jobs by one standard deviation at most: a plan that
lowers no clock, since that is said to save nothing, would never learn that it does.
"""

from dataclasses import dataclass, replace

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.profile import InstructionProfile, PipelineProfile
from gpuenergyd_policies.learning.job_curves import FittedCurves
from gpuenergyd_policies.learning.risk import NUM_DRAWS, caution_within_risk, late_ratios


@dataclass(frozen=True, slots=True)
class Limit:
    """How late a plan may be by the belief without past jobs."""

    late_ratio: float
    share: float
    """Of the draws from that belief, which may be later."""


DOUBTED = Limit(0.01, 0.2)
"""The slowdown that the guard tolerates, in all but one of five draws."""
MEASURED_HERE = Limit(0.04, 0.5)
"""Honest past jobs were expected to be up to 3 % late in half of the draws; it bounds what wrong times can cost."""
MAX_DOUBTED_POWER_SIGMAS = 1.0
SHARES = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0)
"""Shares of the way to the belief without past jobs that are tried, in this order."""


def within_doubt(
    graph: DependencyGraph,
    profile: PipelineProfile,
    doubted: FittedCurves,
    *,
    limit: Limit | None,
    deadline_s: float,
    random: np.random.Generator,
) -> PipelineProfile:
    """Return the profile with times raised as little as keeps its plan within the limit.

    At most they are raised to those of the belief without past jobs, with the caution of a plan that rests on it alone.
    """
    if limit is None:
        return profile
    draws_s = doubted.drawn_times_s(NUM_DRAWS, random)
    without = doubted.profile()
    for share in SHARES:
        found = towards(profile, without, share)
        late = late_ratios(graph, found, doubted, draws_s, deadline_s)
        if float(np.mean(np.array(late) > limit.late_ratio)) <= limit.share:
            return found
    caution = caution_within_risk(graph, doubted, deadline_s=deadline_s, random=random)
    return towards(profile, doubted.profile(caution_sigmas=caution.sigmas), 1.0)


def limit_of(fitted: FittedCurves) -> Limit | None:
    """Return the limit for a belief that rests on past jobs; None if the job's own times have confirmed them."""
    if fitted.has_agreeing_relatives and fitted.has_lower_clocks:
        return None
    return MEASURED_HERE if fitted.has_trusted_relatives else DOUBTED


def powers_within_doubt(fitted: FittedCurves, doubted: FittedCurves) -> FittedCurves:
    """Return the belief with powers limited by the one without past jobs."""
    most = doubted.power.mean + MAX_DOUBTED_POWER_SIGMAS * doubted.power.sigma
    return replace(fitted, power=replace(fitted.power, mean=np.minimum(fitted.power.mean, most)))


def towards(profile: PipelineProfile, without: PipelineProfile, share: float) -> PipelineProfile:
    """Return the profile with times raised by a share of what they are shorter than in the other one."""
    classes = {}
    for key, own in profile.classes.items():
        options = tuple(
            replace(a, time_s=a.time_s + share * max(0.0, b.time_s - a.time_s))
            for a, b in zip(own.options, without[key].options, strict=True)
        )
        classes[key] = InstructionProfile(options)
    return PipelineProfile(classes, profile.blocking_power_w)
