"""Epilogues: the time that each rank needs after its last instruction, and plans that leave room for it."""

from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest

from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.pipeline.graph import (
    Instruction,
    InstructionClass,
    InstructionKind,
    Schedule,
    one_forward_one_backward,
)
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.observed_pipeline import contradiction, observed_pipeline
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import A100Work, a100_stages

F, I, W = InstructionKind.F, InstructionKind.I, InstructionKind.W  # noqa: E741  torch's own name
NUM_MICROBATCHES = 4
SCHEDULE = Schedule(
    "split",
    NUM_MICROBATCHES,
    tuple(tuple(Instruction(r, kind, m) for kind in (F, I, W) for m in range(NUM_MICROBATCHES)) for r in range(2)),
)
"""All forwards, all input gradients, all weight gradients: the ranks end independently of each other."""


def training(after_last_s: tuple[float, float]) -> VirtualTraining:
    """Rank 1 has three times the weight gradients of rank 0 and ends last at full speed."""
    work = {
        (rank, kind): A100Work(0.02 * scale, 0.06 * scale, 0.25)
        for rank in range(2)
        for kind, scale in ((F, 1.0), (I, 1.0), (W, 3.0 if rank else 1.0))
    }
    return VirtualTraining(
        SCHEDULE, work, BubbleAware(), after_last_s=after_last_s, noise_ratio=0.001, energy_noise_ratio=0.005, seed=4
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("after_last_s", "needed_saving"), [((0.15, 0.0), 0.06), ((0.5, 0.0), None), ((0.0, 0.3), 0.06)]
)
def test_an_epilogue_makes_no_iteration_longer(after_last_s: tuple[float, float], needed_saving: float | None) -> None:
    """With an epilogue of 0.15 s rank 0 still has slack; with 0.5 s it sets the pace, and nothing can be saved."""
    run = training(after_last_s)
    run.run(96)

    baseline, plan_id = run.job.baseline, run.job.current_plan.plan_id
    assert run.job.phase is JobPhase.TUNED
    assert baseline is not None
    assert baseline.energy_j is not None
    tuned = [(time_s, energy_j) for time_s, energy_j, own_id in run.history if own_id == plan_id][2:]
    assert len(tuned) > 5
    assert median(time_s for time_s, _ in tuned) < 1.005 * baseline.iteration_time_s
    if needed_saving is not None:
        assert 1 - median(energy_j for _, energy_j in tuned) / baseline.energy_j > needed_saving


@pytest.fixture(scope="module")
def view() -> JobView:
    """Return a view after a dozen iterations: an epilogue of 0.15 s on rank 0, after 0.64 s of work."""
    run = training((0.15, 0.0))
    run.run(16)
    found = run.job.view()
    assert found is not None
    return found


def profile() -> PipelineProfile:
    def one(time_s: float) -> InstructionProfile:
        return InstructionProfile((ClockOption(1410, time_s, 10.0),))

    return PipelineProfile(
        {InstructionClass(r, kind): one(0.24 if (r, kind) == (1, W) else 0.08) for r in range(2) for kind in (F, I, W)},
        80.0,
    )


def epilogues_s(view: JobView) -> list[float]:
    graph = observed_pipeline(view, profile()).graph
    return [graph.epilogues_s[2 * 6 - 1], graph.epilogues_s[-1]]


def test_a_rank_that_finishes_early_keeps_time_for_its_epilogue(view: JobView) -> None:
    observed = observed_pipeline(view, profile())

    # rank 1: 0.08 + 0.001 s of waiting and 1.6 s of work; iterations of 1.6 s, as it begins again at once
    assert observed.bias_s == pytest.approx(view.baseline.iteration_time_s - 1.681, abs=1e-6)
    assert epilogues_s(view) == [pytest.approx(0.15 - observed.bias_s, abs=0.002), 0.0]


def test_an_epilogue_never_exceeds_the_slack_at_full_speed(view: JobView) -> None:
    """Rank 0 ends 0.559 s before rank 1 at full speed, so that no longer epilogue can be hidden."""
    longer = replace(view, observations=tuple(replace(o, turnarounds_s=(5.0, 5.0)) for o in view.observations))

    assert epilogues_s(longer) == [pytest.approx(0.559, abs=0.002), 0.0]


def test_the_shortest_turnarounds_count_except_those_at_straggler_pace(view: JobView) -> None:
    *others, first = view.observations
    assert len(others) > 10
    waiting = [replace(o, turnarounds_s=(0.4, 0.0)) for o in others]
    once = (replace(first, turnarounds_s=(0.1, 0.0)), replace(first, turnarounds_s=(0.1, 0.0)), *waiting)
    straggler_pace = (replace(first, turnarounds_s=(0.01, 0.0), is_at_straggler_pace=True), *once)

    bias_s = observed_pipeline(view, profile()).bias_s
    assert epilogues_s(replace(view, observations=straggler_pace))[0] == pytest.approx(0.1 - bias_s, abs=0.001)


def test_without_observations_there_is_no_epilogue(view: JobView) -> None:
    blind = replace(view, observations=tuple(replace(o, turnarounds_s=(), lead_s=None) for o in view.observations))

    assert epilogues_s(blind) == [0.0, 0.0]


def test_a_rank_cannot_work_longer_than_an_iteration_takes_beyond_noise(view: JobView) -> None:
    """Rank 1 works for 1.6 s, which overlaps the begin of rank 0's next iteration."""
    graph = observed_pipeline(view, profile()).graph

    def found(iteration_time_s: float, sigma_s: float) -> str | None:
        baseline = replace(view.baseline, iteration_time_s=iteration_time_s, iteration_sigma_s=sigma_s)
        return contradiction(replace(view, baseline=baseline), graph, profile())

    assert view.baseline.num_iterations == 12
    assert found(1.6, 0.0) is None
    text = found(1.6 / 1.05, 0.03)
    assert text is not None
    assert text.startswith("by the schedule, the measured instructions of rank 1 take 5.0% longer than iterations")
    assert found(1.6 / 1.05, 0.06) is None, "within three standard errors of 12 iterations"


class WaitsAsWork(VirtualTraining):
    """Instructions are recorded from the end of the previous one on, so that waits for other ranks count as work."""

    def _run_pipeline(self) -> tuple[dict[Instruction, tuple[float, float]], float]:
        spans, end_s = super()._run_pipeline()
        ends_s = {instruction: span[1] for instruction, span in spans.items()}
        for before, own in (pair for order in self.running.orders for pair in pairwise(order)):
            spans[own] = ends_s[before], ends_s[own]
        return spans, end_s


def test_a_job_whose_waits_are_recorded_as_work_stays_at_full_speed() -> None:
    run = WaitsAsWork(one_forward_one_backward(4, 8), a100_stages([1.0, 1.1, 0.9, 1.0]), BubbleAware())
    run.run(60)

    view = run.job.view()
    assert view is not None
    assert {plan.purpose for plan in view.issued_plans} == {PlanPurpose.BASELINE}
    assert all("their times seem to include waits for other ranks" in plan.reason for plan in view.issued_plans)
    assert len(view.issued_plans) <= 4, "it was decided again before twice as many iterations had run"
