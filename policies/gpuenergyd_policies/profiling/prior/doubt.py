"""Doubt: what past jobs say is followed only as far as it costs little if they are wrong.

Past jobs may come from a broken sensor, another GPU under the same name, or somebody's imported file, and a belief that
rests on them is sure of itself before the job has measured anything. So the plan is also judged by the belief without
them: if that one expects it to be late by more than a limit in too many draws, its times are raised towards that belief
until the limit holds. Past jobs that agree with the prior are trusted further than others, and those that the job's own
times below full speed have confirmed need no limit. Powers are believed to be higher than without past jobs by one
standard deviation at most: a plan that lowers no clock, since that is said to save nothing, would never learn that it
does.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.profile import InstructionProfile, PipelineProfile
from gpuenergyd_policies.profiling.prior.job_curves import FittedCurves
from gpuenergyd_policies.profiling.prior.risk import NUM_DRAWS, late_ratios

MAX_DOUBTED_LATE_RATIO = 0.01
"""Lateness that is limited: the slowdown that the guard tolerates."""
MAX_DOUBTED_POWER_SIGMAS = 1.0
DOUBTED_LATE_SHARE, AGREEING_LATE_SHARE = 0.2, 0.5
"""Share of draws from that belief that may be later: without a past job that agrees with all known, and with one."""
SHARES = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0)
"""Shares of the way to the belief without past jobs that are tried, in this order."""


def within_doubt(
    graph: DependencyGraph,
    profile: PipelineProfile,
    doubted: FittedCurves,
    *,
    late_share: float,
    deadline_s: float,
    random: np.random.Generator,
    shares: Sequence[float] = SHARES,
) -> PipelineProfile:
    """Return the profile with times raised as little as keeps its plan within the limit, or by the last share.

    `late_share` of the draws may be later than the limit.
    """
    if late_share >= 1:
        return profile
    draws_s = doubted.drawn_times_s(NUM_DRAWS, random)
    without, found = doubted.profile(), profile
    for share in shares:
        found = towards(profile, without, share)
        late = late_ratios(graph, found, doubted, draws_s, deadline_s)
        if float(np.mean(np.array(late) > MAX_DOUBTED_LATE_RATIO)) <= late_share:
            break
    return found


def late_share_of(fitted: FittedCurves) -> float:
    """Return the share of draws from the belief without past jobs that may be late, for one that rests on them."""
    if not fitted.has_agreeing_relatives:
        return DOUBTED_LATE_SHARE
    return 1.0 if fitted.has_lower_clocks else AGREEING_LATE_SHARE


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
