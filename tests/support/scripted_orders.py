"""A policy host whose policy `uniform` runs split backwards for a while, then 1F1B at a lower clock."""

from gpuenergyd.core.pipeline.graph import Schedule
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, RankClocks, constant_clock_changes
from gpuenergyd.core.pipeline.reorder import split_in_place
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.daemon.processes.policy_host import main
from gpuenergyd_other_policies.uniform import Uniform

NUM_SPLIT = 6
"""Iterations with split backwards that the leader has to see before it goes back."""
SPLIT, PLAIN = "split", "plain"
DAEMON_PROLOGUE = f"""
import sys
import gpuenergyd.daemon.processes.launch as launch
launch.POLICY_HOST_COMMAND = (sys.executable, "-m", "{__name__}")
"""
"""What makes a daemon start this policy host."""


def next_plan(_policy: Uniform, view: JobView) -> ClockPlan:
    """Return the plan with split backwards, or the one without."""
    num_split = sum(o.plan_id is not None and o.plan_id.startswith(SPLIT) for o in view.observations)
    is_split = num_split < NUM_SPLIT
    schedule = split_in_place(view.schedule) if is_split else view.schedule
    return ClockPlan(
        view.plan_id(SPLIT if is_split else PLAIN),
        PlanPurpose.TUNED,
        _clocks(view, schedule, 1 if is_split else 2),
        orders=schedule.orders if is_split else (),
        reason="scripted",
    )


def _clocks(view: JobView, schedule: Schedule, number: int) -> tuple[RankClocks, ...]:
    """Return one clock for all instructions, the so many-th highest."""
    clocks_mhz = [gpu.supported_sm_clocks_mhz[number] for gpu in view.gpus]
    return tuple(
        RankClocks(rank, (mhz,) * len(order), constant_clock_changes(order, mhz))
        for rank, (order, mhz) in enumerate(zip(schedule.orders, clocks_mhz, strict=True))
    )


if __name__ == "__main__":
    setattr(Uniform, "next_plan", next_plan)  # noqa: B010  this process is the test's own
    main()
