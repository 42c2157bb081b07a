"""The time that a plan is expected to lose to raises that take far longer than their lead.

A raise is requested its late (90th percentile) latency ahead. The rest of the distribution has a long tail on some GPUs
(arXiv 2502.20075): until such a raise takes effect, instructions run at the clock before. Every raise of a plan without
slack adds the mean excess times the share of speed that it is about.
"""

from collections.abc import Sequence
from statistics import mean

from gpuenergyd.core.pipeline.plan import ClockChange
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.switching import SwitchLatency


def expected_late_s(
    changes: Sequence[Sequence[ClockChange]], profile: PipelineProfile, latencies: Sequence[SwitchLatency]
) -> float:
    """Return the expected lateness of an iteration with these changes by rank, as if no rank had slack: at most that."""
    late_s = 0.0
    for pp_rank, (own, latency) in enumerate(zip(changes, latencies, strict=True)):
        if not latency.excess_s:
            continue
        classes = [profile[key] for key in profile.classes if key.pp_rank == pp_rank]
        before_mhz = own[-1].sm_clock_mhz if own else 0
        for change in own:
            if change.sm_clock_mhz > before_mhz:
                speeds = [
                    c.interpolated(change.sm_clock_mhz).time_s / c.interpolated(before_mhz).time_s for c in classes
                ]
                late_s += latency.excess_s * max(0.0, 1 - mean(speeds))
            before_mhz = change.sm_clock_mhz
    return late_s
