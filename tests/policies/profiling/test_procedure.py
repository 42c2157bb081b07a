"""The profiling procedure: points in order, repetitions of doubtful and disturbed ones, and the end."""

from dataclasses import replace

import pytest

from gpuenergyd.core.measurement.observation import IterationObservation, RankEnergy
from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.core.policy_api.testing import job_view
from gpuenergyd_policies.profiling.procedure import MAX_ATTEMPTS, Design, FitQuality, NoProfilingStep, ProfilingStep

F = InstructionKind.F
LEVELS = (1410, 1290, 1140, 1005, 900, 780)
POOR_FIT = FitQuality(frozenset(), is_good=lambda: False)
GOOD_FIT = FitQuality(frozenset(), is_good=lambda: True)


def view_of(issued: list[ClockPlan], seen: list[IterationObservation]) -> JobView:
    return job_view(supported_sm_clocks_mhz=LEVELS, observations=seen, issued_plans=issued)


class Run:
    """A job that has run some steps."""

    def __init__(self) -> None:
        self.issued: list[ClockPlan] = []
        self.seen: list[IterationObservation] = []

    @property
    def design(self) -> Design:
        """The design after the steps so far."""
        return Design(view_of(self.issued, self.seen), (LEVELS, LEVELS))

    def add_steps(self, *steps: ProfilingStep, is_regular: bool = True, is_seen: bool = True) -> "Run":
        """Issue the plans of these steps and run an iteration of each."""
        for step in steps:
            plan = ClockPlan(self.design.plan_id(step), PlanPurpose.PROFILE)
            self.issued.append(plan)
            if is_seen:
                energies = tuple(RankEnergy(rank, 1.0, 50.0, ()) for rank in range(2))
                self.seen.append(
                    IterationObservation(len(self.seen), plan.plan_id, 1.0, (), energies, is_regular=is_regular)
                )
        return self

    def next_step(self, quality: FitQuality = POOR_FIT) -> ProfilingStep | NoProfilingStep:
        """Return the next step."""
        return self.design.next_step(lambda: quality)


@pytest.fixture
def block() -> Run:
    """Return a run that has measured one point for each level."""
    return Run().add_steps(*(ProfilingStep(number, 0) for number in range(len(LEVELS))))


def doubt(block: Run) -> tuple[FitQuality, int]:
    """Return knowledge with a doubtful clock of rank 0's forwards, and the point that ran it."""
    level = block.design.points[2].levels[0][F]
    number = next(n for n in range(len(LEVELS)) if block.design.points[n].levels[0].get(F) == level)
    return FitQuality(frozenset({(InstructionClass(0, F), LEVELS[level])}), is_good=lambda: True), number


def test_points_run_in_order_and_are_evaluated_after_a_complete_block() -> None:
    run = Run()
    for number in range(len(LEVELS)):
        assert run.design.next_step(lambda: pytest.fail("asked too early")) == ProfilingStep(number, 0)
        run.add_steps(ProfilingStep(number, 0))


def test_profiling_ends_when_the_expected_loss_is_small(block: Run) -> None:
    assert block.next_step(GOOD_FIT) is NoProfilingStep.DONE
    assert isinstance(block.next_step(POOR_FIT), ProfilingStep)


def test_a_doubtful_clock_is_measured_again_a_limited_number_of_times(block: Run) -> None:
    doubtful, number = doubt(block)
    tried = []
    while isinstance(step := block.next_step(doubtful), ProfilingStep):
        tried.append(step)
        block.add_steps(step)

    assert tried[0] == ProfilingStep(number, 1)
    level = block.design.points[number].levels[0][F]
    assert all(block.design.points[step.number].levels[0][F] == level for step in tried)
    assert sorted(tried, key=str) == sorted(set(tried), key=str)
    assert max(step.attempt for step in tried) == MAX_ATTEMPTS - 1
    assert block.next_step(doubtful) is NoProfilingStep.DONE


def test_a_doubtful_clock_that_is_no_level_is_ignored(block: Run) -> None:
    unknown = FitQuality(frozenset({(InstructionClass(0, F), 1333)}), is_good=lambda: True)

    assert block.next_step(unknown) is NoProfilingStep.DONE


def test_a_disturbed_point_is_retried_a_limited_number_of_times() -> None:
    run = Run()
    num_points = len(run.design.points)
    run.add_steps(ProfilingStep(0, 0), is_regular=False).add_steps(
        *(ProfilingStep(number, 0) for number in range(1, num_points))
    )

    for attempt in range(1, MAX_ATTEMPTS):
        assert run.next_step() == ProfilingStep(0, attempt)
        run.add_steps(ProfilingStep(0, attempt), is_regular=False)

    assert run.next_step() is NoProfilingStep.DONE


def test_profiling_waits_for_the_measurement_of_the_last_point() -> None:
    run = Run()
    last = len(run.design.points) - 1
    run.add_steps(*(ProfilingStep(number, 0) for number in range(last))).add_steps(
        ProfilingStep(last, 0), is_seen=False
    )

    assert run.next_step() is NoProfilingStep.WAIT


def test_the_quality_of_the_fit_is_not_computed_where_nothing_is_left_to_measure() -> None:
    run = Run()
    run.add_steps(*(ProfilingStep(number, 0) for number in range(len(run.design.points))))
    unasked = FitQuality(frozenset(), is_good=lambda: pytest.fail("profiling ends whatever the fit is like"))

    assert run.next_step(unasked) is NoProfilingStep.DONE


def test_ranks_of_one_data_parallel_loop_run_the_same_points() -> None:
    """Slow together, they hardly wait for each other; other jobs draw their own."""

    def points_of(job_id: str, num_dp_ranks: int) -> object:
        return Design(replace(view_of([], []), job_id=job_id, num_dp_ranks=num_dp_ranks), (LEVELS, LEVELS)).points

    assert points_of("gpt-fine-1a2b3c", 2) == points_of("gpt-fine-4d5e6f", 2)
    assert points_of("gpt-fine-1a2b3c", 2) != points_of("bert-1a2b3c", 2)
    assert points_of("gpt-fine-1a2b3c", 1) != points_of("gpt-fine-4d5e6f", 1)
