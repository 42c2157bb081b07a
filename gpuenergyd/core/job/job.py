"""State machine of one job: handles one event at a time and returns commands; pure, without I/O and without a clock.

Theory of operation. Ranks join a job; it warms up and runs `baseline_iterations` at full speed, the baseline of all
savings and slowdowns. After that, the policy is asked for a plan after each iteration that all ranks have reported and
that was matched with the GPUs' samples. A new plan gets the next epoch, and a first iteration late enough for every
rank to receive the plan before it:

    iteration     i            i+1             i+2             i+3
    rank          runs   posts i, runs   posts i+1, gets P    follows P
    daemon               observes i, asks policy, decides P

A policy that answers with a new plan each time thus tries one plan per iteration. Short blocks at full speed between
tuned iterations keep the baseline current and measure the saving. The guard is independent of the policy: if a tuned
plan is slower than the target, the job returns to full speed and measures its baseline again (`recovery`). Each fault
doubles the wait until the next attempt; a plan that lasts long enough clears the faults.

Each event has one transition: a function of the job's state and the event, in the folder `transitions`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpuenergyd.core.job.messages import (
    ControlLost,
    Event,
    GpuViewChanged,
    IterationObserved,
    MergedIterationObserved,
    OperatorOrdered,
    OrdersRefused,
    PastJobsFound,
    PlanDecided,
    PolicyFailed,
    PowerCutChanged,
    PowerTargetChanged,
    RankChangedMicrobatches,
    RankJoined,
    RankLost,
    RankReleased,
    RankReported,
    ReplicaBlockBegins,
    StageMemoryChanged,
    StragglerChanged,
    TargetChanged,
    TrialPermissionChanged,
)
from gpuenergyd.core.job.state import Commands, JobState
from gpuenergyd.core.job.transitions import iterations, plans, ranks, targets

TRANSITIONS: Mapping[type[Event], Callable[[JobState, Any], Commands]] = {
    RankJoined: ranks.joined,
    RankChangedMicrobatches: ranks.microbatches_changed,
    GpuViewChanged: ranks.gpu_view_changed,
    StageMemoryChanged: ranks.stage_memory_changed,
    RankReleased: ranks.released,
    RankLost: ranks.lost,
    RankReported: iterations.reported,
    IterationObserved: iterations.observed,
    MergedIterationObserved: iterations.merged_observed,
    OrdersRefused: iterations.orders_refused,
    PlanDecided: plans.decided,
    PolicyFailed: plans.policy_failed,
    PastJobsFound: plans.past_jobs_found,
    ControlLost: plans.control_lost,
    TrialPermissionChanged: plans.trial_permission_changed,
    ReplicaBlockBegins: plans.replica_block_begins,
    TargetChanged: targets.changed,
    StragglerChanged: targets.straggler_changed,
    PowerTargetChanged: targets.power_target_changed,
    PowerCutChanged: targets.power_cut_changed,
    OperatorOrdered: targets.operator_ordered,
}
"""The transition of each event."""


@dataclass(slots=True)
class Job(JobState):
    """One training run on one pipeline; the only owner of its state, used only from the event loop."""

    def handle(self, event: Event) -> Commands:
        """Handle one event and return the commands to execute, in order.

        Raises:
            JobError: the event contradicts the job; its state is unchanged.
        """
        if not self.is_ended:
            return TRANSITIONS[type(event)](self, event)
        # An ended job still records iterations whose measurement arrives late.
        return (iterations.recorded(self, event),) if isinstance(event, IterationObserved) else ()
