"""The table of decisions: the first condition that holds decides, and keeping a plan is easy to follow."""

import sys
from pathlib import Path
from types import FrameType

from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.core.policy_api.testing import SimulatedJob
from gpuenergyd_policies.bubble_aware.decisions import DECISIONS, Situation, decide
from gpuenergyd_policies.bubble_aware.policy import BubbleAware

_MOST_FILES = 8
"""That a reader follows until a plan is kept."""


def _plan_and_files(policy: BubbleAware, view: JobView) -> tuple[ClockPlan, set[str]]:
    """Return the next plan, and the files of the policies that were run for it."""
    files = set()

    def record(frame: FrameType, _event: str, _arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if "gpuenergyd_policies" in path.parts:
            files.add(path.name)

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        plan = policy.next_plan(view)
    finally:
        sys.setprofile(before)
    return plan, files


def test_keeping_a_plan_reaches_few_files() -> None:
    job, policy = SimulatedJob(one_forward_one_backward(2, 4)), BubbleAware()
    plan = job.run_policy(policy, 1)
    num_kept = 0
    for _ in range(12):
        previous, (plan, files) = plan, _plan_and_files(policy, job.view())
        if plan.plan_id == previous.plan_id:
            num_kept += 1
            assert len(files) <= _MOST_FILES, sorted(files)
        job.run(plan)

    assert num_kept >= 6


def test_the_first_condition_that_holds_decides_and_the_last_always_does() -> None:
    job = SimulatedJob(one_forward_one_backward(2, 4))
    job.run_policy(BubbleAware(), 5)
    view = job.view()

    now = Situation(view)
    first = next(decision for decision in DECISIONS if decision.holds(now))

    assert DECISIONS[-1].holds(now)
    assert decide(view).plan_id == first.plan(now).plan_id
    assert len({decision.when for decision in DECISIONS}) == len(DECISIONS)
