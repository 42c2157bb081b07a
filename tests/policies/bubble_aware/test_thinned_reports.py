"""A job whose ranks time only some iterations is planned, charged and credited like one that times all."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.client.thinning import NEW_ITERATIONS, STRIDES
from gpuenergyd.core.job.messages import Event, JobPhase, RankReported
from gpuenergyd.core.measurement.telemetry import RankIteration
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.full_speed import FullSpeed
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import a100_stages
from tests.support.examples import examples

NUM_ITERATIONS = 160


@dataclass
class ThinnedTraining(VirtualTraining):
    """Reports the instructions of iterations that are new, and later with a stride of each rank's own."""

    strides: tuple[int, ...] = ()
    num_untimed: int = 0
    _first_of_epoch: dict[int, int] = field(default_factory=dict)

    def feed(self, event: Event) -> None:
        """Leave out the instructions of most iterations."""
        super().feed(RankReported(self._thinned(event.report)) if isinstance(event, RankReported) else event)

    def _thinned(self, report: RankIteration) -> RankIteration:
        index = report.iteration_index
        first = self._first_of_epoch.setdefault(report.plan_epoch, index)
        if index < first + NEW_ITERATIONS or index % self.strides[report.pp_rank] == 0:
            return report
        self.num_untimed += 1
        return replace(report, instructions=(), is_in_order=True)


def trained(weights: tuple[float, ...], seed: int, strides: tuple[int, ...], after_s: float | None) -> ThinnedTraining:
    training = ThinnedTraining(
        one_forward_one_backward(len(weights), 4),
        a100_stages(weights, scale=0.2),
        BubbleAware(),
        max_slowdown_ratio=0.02,
        noise_ratio=0.003,
        energy_noise_ratio=0.003,
        after_last_s=None if after_s is None else (after_s,) * len(weights),
        seed=seed,
        strides=strides,
    )
    training.run(NUM_ITERATIONS)
    return training


@pytest.mark.thorough
@given(
    st.sampled_from([(1.0,), (1.0, 0.8), (0.8, 1.0, 0.9)]),
    st.integers(0, 1000),
    st.lists(st.sampled_from(STRIDES[1:]), min_size=3, max_size=3),
    st.sampled_from([None, 0.01]),
)
@settings(max_examples=examples(20), deadline=None)
def test_account_and_saving_agree_with_and_without_the_times_of_all_iterations(
    weights: tuple[float, ...], seed: int, strides: list[int], after_s: float | None
) -> None:
    whole = trained(weights, seed, (1,) * len(weights), after_s)
    thinned = trained(weights, seed, tuple(strides[: len(weights)]), after_s)

    assert thinned.num_untimed
    assert not whole.num_untimed
    assert {training.job.phase for training in (whole, thinned)} == {JobPhase.TUNED}
    assert thinned.job.num_iterations == whole.job.num_iterations
    num_regular = [sum(training.job.knowledge.num_iterations_for.values()) for training in (whole, thinned)]
    assert num_regular[1] == pytest.approx(num_regular[0], abs=8)
    accounts = [training.job.account for training in (whole, thinned)]
    assert accounts[0] is not None
    assert accounts[1] is not None
    assert accounts[1].num_iterations == accounts[0].num_iterations
    assert accounts[1].cost_s <= accounts[1].income_s
    assert accounts[1].cost_s == pytest.approx(accounts[0].cost_s, abs=0.005 * accounts[0].time_s)
    savings = [training.job.knowledge.saving() for training in (whole, thinned)]
    assert all(saving is not None for saving in savings)
    for name in ("saving_ratio", "slowdown_ratio"):
        all_timed, some_timed = (getattr(saving, name) for saving in savings)
        scatter = all_timed.high - all_timed.low + some_timed.high - some_timed.low
        assert some_timed.estimate == pytest.approx(all_timed.estimate, abs=max(0.005, scatter))


def test_a_policy_sees_untimed_iterations_under_tuned_plans_only() -> None:
    at_full_speed = ThinnedTraining(
        one_forward_one_backward(2, 4), a100_stages((1.0, 0.8)), FullSpeed(), strides=(4, 16)
    )
    at_full_speed.run(60)
    tuned = trained((1.0, 0.8), 1, (16, 16), None)

    for training in (at_full_speed, tuned):
        view, kept = training.job.view(), training.job.knowledge.iterations.kept
        assert view is not None
        plans = {plan.plan_id for plan in view.issued_plans if plan.purpose is PlanPurpose.TUNED}
        untimed = [own for own in kept if not own.is_timed]
        assert len(untimed) > 20
        assert [own for own in kept if own.is_timed or own.plan_id in plans] == list(view.observations)
        assert all(own.energy_j and not own.instruction_samples for own in untimed)
        assert not any(rank.time_at for own in untimed for rank in own.ranks)
