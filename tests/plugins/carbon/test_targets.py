"""Carbon targets: decisions, budgets that no reply can exceed, and savings."""

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuenergyd.core.carbon.intensity import HOUR, EmissionFactor, IntensityBasis, SampleStatus, SignalKind
from gpuenergyd.core.job.description import JobLength
from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.messages import Event, JobPhase, TrialPermissionChanged
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.job.time_account import AccountRules
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.policy_api.policy import ClockPolicy
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.core.policy_api.target_policy import TargetDecision
from gpuenergyd.daemon.ports import RunningJob
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.daemon.processes.target_queries import TargetQuery, TargetReply, answer_target
from gpuenergyd.daemon.settings import load_settings
from gpuenergyd.report.carbon import slowdown_ratio
from gpuenergyd.store import open_history
from gpuenergyd.store.records import IntensityRecord, IterationRecord, JobRecord, Record, TargetRecord
from gpuenergyd_carbon.feed import CarbonFeed
from gpuenergyd_carbon.policy.target import CarbonTarget
from gpuenergyd_carbon.rules.grid_clock import GridClock
from gpuenergyd_carbon.targets import CarbonTargets
from gpuenergyd_other_policies.envelope import Envelope
from gpuenergyd_other_policies.uniform import Uniform
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from tests.policies.bubble_aware.test_control_loop import training
from tests.support.examples import examples
from tests.support.job_stage import FakeHistory
from tests.support.remembered_plans import RememberedBubbleAware
from tests.support.stored_history import write_records

FIRST_AT = datetime(2024, 1, 1, tzinfo=UTC)
HISTORY_DAYS = 9
BUDGET = 0.05
INTENSITY = IntensityRecord(
    "XX", "made-up", SignalKind.AVERAGE, EmissionFactor.LIFECYCLE, SampleStatus.MEASURED,
    FIRST_AT, FIRST_AT + HOUR, FIRST_AT, 200.0, FIRST_AT,
)  # fmt: skip


class Kept(FakeHistory):
    """A history that keeps its records in memory."""

    def targets(self) -> list[TargetRecord]:
        return [record for record in self.records if isinstance(record, TargetRecord)]


@dataclass
class Following:
    """A virtual training under the real targets; answers come from `lies`, else from the real target policy."""

    run: VirtualTraining
    policy: ClockPolicy
    lies: Sequence[PerformanceTarget | None] | None = None
    num_asked: int = 0
    reasons: list[str] = field(default_factory=list)
    """The reason why profiling was refused."""

    @property
    def job(self) -> Job:
        """The job's state."""
        return self.run.job

    @property
    def job_id(self) -> str:
        return self.run.job.description.job_id

    @property
    def pids(self) -> dict[int, int]:
        """Return this process as the only rank."""
        return {0: os.getpid()}

    carbon_zones: frozenset[str] = frozenset()

    def handle(self, event: Event) -> None:
        if isinstance(event, TrialPermissionChanged) and event.refusal is not None:
            self.reasons.append(event.refusal)
        self.run.feed(event)

    async def next_target(self, job_id: str, query: TargetQuery) -> TargetReply | PolicyFailure:
        """Return a scripted reply, or that of the real target policy."""
        del job_id
        self.num_asked += 1
        if self.lies is None:
            return answer_target(CarbonTarget(), query, self.policy, self.run.job.view())
        lie = self.lies[(self.num_asked - 1) % len(self.lies)]
        if lie is None:
            return PolicyFailure("it was killed")
        return TargetReply(TargetDecision(lie, "a lie", IntensityBasis.LIVE, 1.0), ())


@dataclass
class Site:
    """Everything around the job, in virtual time."""

    following: Following
    targets: CarbonTargets
    feed: CarbonFeed
    kept: Kept
    hour_s: float
    _num_seen: int = 0

    def run_hours(self, num_hours: float) -> None:
        """Continue training; decide targets after each iteration."""
        asyncio.run(self._run_hours(num_hours))

    async def _run_hours(self, num_hours: float) -> None:
        run = self.following.run
        until_s = run.now_s + num_hours * self.hour_s
        while run.now_s < until_s:
            run.run(1)
            observation = run.job.observations[-1] if run.job.observations else None
            if observation is not None and observation.iteration_index >= self._num_seen:
                self._num_seen = observation.iteration_index + 1
                begun_at = at(run.now_s - 2 * observation.iteration_time_s)
                purpose = run.job.knowledge.plans.purpose_of(observation.plan_id)
                self.targets.iteration_done(self.following, observation, purpose, begun_at)
            await self._look()

    async def _look(self) -> None:
        await self.feed.read()
        await self.targets.decide([self.following], None)


def at(now_s: float) -> datetime:
    """Return the host time of a virtual instant."""
    return FIRST_AT + timedelta(seconds=now_s)


def site(
    folder: Path,
    policy: ClockPolicy,
    values: Sequence[float],
    *,
    hour_s: float = 30.0,
    lies: Sequence[PerformanceTarget | None] | None = None,
    budget: float = BUDGET,
    pipeline: Mapping[str, object] | None = None,
    length: JobLength | None = None,
    price: str | None = None,
    **overrides: Any,
) -> Site:
    """Return a job on a trace, `HISTORY_DAYS` of which have passed."""
    path = folder / "XX_made-up_2024.csv"
    rows = [f"{FIRST_AT + k * HOUR:%Y-%m-%dT%H:%M:%SZ},{value:.3f}" for k, value in enumerate(values)]
    path.write_text(f"timestamp_utc,{price or 'carbon_intensity_g_per_kwh'}\n" + "\n".join(rows) + "\n")
    followed = {"carbon_signal": str(path)} if price is None else {"carbon_signal": "price", "carbon_price_path": path}
    config = folder / "config.toml"
    config.touch()
    known = load_settings(
        config,
        driver="simulated",
        world_path=folder / "world",
        runtime_dir=folder,
        state_dir=folder,
        target="carbon",
        carbon_replay_from=FIRST_AT + timedelta(days=HISTORY_DAYS),
        carbon_replay_hour_s=hour_s,
        **followed,
        **overrides,
    )
    run = training(policy, max_slowdown_ratio=budget, **(pipeline or {}))
    if length is not None:
        run.job.description = replace(run.job.description, length=length)
    following, kept = Following(run, policy, lies), Kept()
    grid = GridClock(at(run.now_s), FIRST_AT + timedelta(days=HISTORY_DAYS), hour_s)
    feed = CarbonFeed(known, grid, kept, lambda: at(run.now_s))
    targets = CarbonTargets(known, grid, feed, following.next_target, kept, lambda: at(run.now_s))
    return Site(following, targets, feed, kept, hour_s)


def tuned_time_by_intensity(here: Site, values: Sequence[float]) -> tuple[float, float]:
    """Return the mean iteration times in the dirtiest and the cleanest third of the hours."""
    job = here.targets.accounts.get_or_create(here.following)
    hours = sorted(
        (values[round((hour_at - FIRST_AT) / HOUR)], slot.time_s / slot.num_iterations)
        for hour_at, slot in job.slots.items()
        if slot.num_iterations >= 5
    )
    third = len(hours) // 3
    mean = [sum(time_s for _, time_s in part) / third for part in (hours[-third:], hours[:third])]
    return mean[0], mean[1]


@pytest.mark.thorough
def test_a_job_is_slower_in_dirty_hours_within_its_budget_and_shows_both_savings(tmp_path: Path) -> None:
    values = ([450.0] * 3 + [90.0] * 3) * 4 * (HISTORY_DAYS + 2)
    here = site(tmp_path, RememberedBubbleAware(), values, hour_s=25.0, carbon_window_h=12.0)

    here.run_hours(12)
    while not here.targets.status(here.following)["target"]["num_windows"]:
        here.run_hours(0.01)

    dirty_s, clean_s = tuned_time_by_intensity(here, values)
    status = here.targets.status(here.following)
    assert dirty_s > clean_s * 1.01
    assert status["target"]["slowdown_so_far_ratio"] <= BUDGET
    assert status["target"]["slowdown_so_far_ratio"] > 0.5 * BUDGET
    assert status["carbon"]["saved_by_frontier_g"] > 0
    assert status["carbon"]["saved_by_timing_g"] > 0
    assert status["carbon"]["saved_by_plan_g"] > 0
    assert here.following.job.faults.num_faults == 0
    permitted = {round(record.permitted_time_s or 0.0, 4) for record in here.kept.targets()}
    assert len(permitted) > 3
    assert here.kept.targets()[0].frontier is not None
    assert here.kept.targets()[-1].frontier is None  # points are stored when they change


@pytest.mark.parametrize(
    "pipeline",
    [
        {"noise_ratio": 0.01},
        {"slow_factor_when_tuned": 1.015},  # every plan is slower than predicted
        {"slowdown_of": lambda _rank, iteration: 1.012 if iteration > 60 else 1.0},  # full speed itself becomes slower
    ],
    ids=["noise", "lying plans", "drift"],
)
def test_a_job_of_known_length_never_exceeds_its_permitted_time(tmp_path: Path, pipeline: Mapping[str, object]) -> None:
    values = ([450.0] * 3 + [90.0] * 3) * 4 * (HISTORY_DAYS + 2)
    length = JobLength(hours=9 * 25.0 / 3600.0)
    here = site(tmp_path, Uniform(), values, hour_s=25.0, pipeline=pipeline, length=length)

    here.run_hours(4)
    before = here.targets.status(here.following)
    while not here.targets.status(here.following)["target"]["is_length_reached"]:
        here.run_hours(0.1)
    after = []
    for _ in range(30):
        after.append(here.targets.status(here.following)["target"]["slowdown_so_far_ratio"])
        here.run_hours(0.02)

    assert before["target"]["num_iterations_left"] > 0
    assert "registered length: " in before["target"]["length_basis"]
    assert max(after) <= BUDGET
    assert after[0] > 0.4 * BUDGET
    assert here.targets.status(here.following)["carbon"]["saved_by_timing_g"] > 0


def test_profiling_again_waits_until_the_budget_allows_it(tmp_path: Path) -> None:
    values = ([450.0] * 3 + [90.0] * 3) * 4 * (HISTORY_DAYS + 2)
    length = JobLength(hours=10 * 25.0 / 3600.0)
    # `envelope` measures slow clocks one after the other, which the budget cannot pay again and again.
    rich = {"rules": JobRules(account=AccountRules(first_income_s=60.0))}  # the slowdown budget is what pauses it
    here = site(tmp_path, Envelope(), values, hour_s=25.0, length=length, pipeline=rich)
    job = here.following.job

    here.run_hours(4)
    while not here.targets.status(here.following)["target"]["is_length_reached"]:
        if job.phase is JobPhase.TUNED:  # simulates a changed job
            job.knowledge.begin_anew(lambda seen: job.knowledge.plans.purpose_of(seen.plan_id) is PlanPurpose.BASELINE)
        here.run_hours(0.1)

    status = here.targets.status(here.following)["target"]
    assert status["slowdown_so_far_ratio"] <= BUDGET
    assert any("trials paused" in reason for reason in here.following.reasons)


def test_an_unknown_length_is_reported_with_its_assumption_and_a_deadline_ends_slowdown(tmp_path: Path) -> None:
    here = site(tmp_path, Uniform(), [200.0] * 24 * 12)
    here.run_hours(2)
    unknown = here.targets.status(here.following)["target"]
    run = here.following.run
    deadline_at = at(run.now_s + here.hour_s)
    run.job.description = replace(run.job.description, length=JobLength(deadline_at=deadline_at))
    here.run_hours(2)
    late = here.targets.status(here.following)["target"]

    assert "unknown length" in unknown["length_basis"]
    assert "72 h" in unknown["length_basis"]
    assert unknown["deadline_at"] is None
    assert late["deadline_at"] == deadline_at
    assert "deadline passed" in late["reason"]
    assert run.job.target == PerformanceTarget(0.0)


@pytest.mark.thorough
def test_a_job_without_a_pipeline_frontier_uses_its_uniform_clock_curve(tmp_path: Path) -> None:
    values = ([100.0] * 6 + [600.0] * 6) * 2 * (HISTORY_DAYS + 2)
    here = site(tmp_path, Uniform(), values, carbon_window_h=24.0)

    here.run_hours(16)

    dirty_s, clean_s = tuned_time_by_intensity(here, values)
    assert dirty_s > clean_s * 1.01
    assert here.targets.status(here.following)["target"]["num_frontier_points"] >= 3


def test_a_price_signal_uses_the_same_budget_and_claims_no_emissions(tmp_path: Path) -> None:
    values = ([40.0] * 4 + [160.0] * 4) * 3 * (HISTORY_DAYS + 2)
    length = JobLength(hours=12 * 25.0 / 3600.0)
    here = site(tmp_path, Uniform(), values, hour_s=25.0, price="price_eur_per_mwh", length=length)

    here.run_hours(8)
    while not here.targets.status(here.following)["target"]["is_length_reached"]:
        here.run_hours(0.1)

    dear_s, cheap_s = tuned_time_by_intensity(here, values)
    status = here.targets.status(here.following)
    assert dear_s > cheap_s * 1.01
    assert status["target"]["slowdown_so_far_ratio"] <= BUDGET
    assert {record.unit for record in here.kept.targets()} == {"price_eur_per_mwh"}
    assert status["carbon"]["tuned_carbon_g"] is None


LIES = st.lists(
    st.one_of(
        st.none(),
        st.builds(PerformanceTarget, max_slowdown_ratio=st.floats(0.0, 5.0)),
        st.builds(PerformanceTarget, max_slowdown_ratio=st.just(0.1), permitted_time_s=st.floats(0.1, 50.0)),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.thorough
@settings(max_examples=examples(4), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LIES, st.floats(0.0, 0.2))
def test_no_policy_reply_can_exceed_the_budget_of_a_window(
    tmp_path: Path, lies: list[PerformanceTarget | None], budget: float
) -> None:
    here = site(tmp_path, Uniform(), [200.0] * 24 * 40, lies=lies, budget=budget, carbon_window_h=24.0, hour_s=60.0)
    here.following.run.run(16)
    job, now_s = here.following.job, here.following.run.now_s
    assert job.baseline is not None
    full_s = job.baseline.iteration_time_s
    regular = replace(job.observations[-1], is_regular=True)
    begin_s = now_s
    while now_s - begin_s < 24 * 60.0 - 1e-6:
        here.following.run.now_s = now_s
        asyncio.run(here._look())
        time_s = min(job.target.iteration_time_s(full_s), 24 * 60.0 - (now_s - begin_s))
        observation = replace(regular, iteration_time_s=time_s)
        here.targets.iteration_done(here.following, observation, PlanPurpose.TUNED, at(now_s))
        now_s += time_s

    account = here.targets.accounts.get_or_create(here.following).account
    assert account.excess_s <= budget * account.full_speed_s + full_s * (1 + budget)


def test_without_a_policy_host_the_slowdown_is_constant(tmp_path: Path) -> None:
    here = site(tmp_path, Uniform(), [200.0] * 24 * 12, lies=[None])

    here.run_hours(4)

    status = here.targets.status(here.following)["target"]
    assert "it was killed" in status["reason"]
    assert here.following.job.target.max_slowdown_ratio in {BUDGET, 0.0}


@pytest.mark.parametrize("values", [[math.nan] * 24 * 12, [0.0] * 24 * 12])
def test_an_uninformative_signal_leads_to_a_constant_slowdown(tmp_path: Path, values: list[float]) -> None:
    here = site(tmp_path, Uniform(), values)

    here.run_hours(3)

    times_s = {record.permitted_time_s for record in here.kept.targets()}
    assert here.following.job.faults.num_faults == 0
    assert len(times_s) <= 3


def test_a_job_too_short_for_profiling_is_refused_it_with_the_reason(tmp_path: Path) -> None:
    here = site(
        tmp_path, Uniform(), [200.0] * 24 * 12, length=JobLength(num_iterations=55), pipeline={"thinking_iterations": 1}
    )
    job = here.following.job

    while not here.targets.status(here.following)["target"]["is_length_reached"]:
        here.run_hours(0.05)

    status = here.targets.status(here.following)["target"]
    assert not any(job.knowledge.plans.purpose_of(seen.plan_id) is PlanPurpose.TRIAL for seen in job.observations)
    assert job.phase is JobPhase.FALLBACK
    assert not job.is_given_up
    assert job.faults.num_faults == 0
    assert "the job is too short" in job.phase_reason
    assert "55 iterations" in job.phase_reason
    assert status["reason"] == status["trial_refusal"]
    assert status["slowdown_so_far_ratio"] == pytest.approx(0.0, abs=1e-6)


def run_until(here: Site, phase: JobPhase) -> None:
    """Continue training until the job is in a phase."""
    while here.following.job.phase is not phase:
        here.run_hours(0.002)


def test_a_refused_job_runs_trials_once_its_length_increases(tmp_path: Path) -> None:
    here = site(tmp_path, Uniform(), [200.0] * 24 * 12, length=JobLength(num_iterations=50), hour_s=600.0)
    job = here.following.job
    run_until(here, JobPhase.FALLBACK)

    job.description = replace(job.description, length=JobLength(num_iterations=1000))
    run_until(here, JobPhase.TUNED)

    assert here.targets.status(here.following)["target"]["trial_refusal"] is None
    assert here.targets.accounts.get_or_create(here.following).num_tried > 0


def test_report_and_account_agree_for_a_job_with_disturbed_iterations(tmp_path: Path) -> None:
    here = site(tmp_path, Uniform(), ([450.0] * 3 + [90.0] * 3) * 4 * (HISTORY_DAYS + 2), hour_s=25.0)
    account, job_id = here.targets.accounts.get_or_create(here.following).account, here.following.job_id
    records: list[Record] = [
        JobRecord(job_id, "gpt", "1", 0, "uniform", "1f1b", "", True, 4, 8, BUDGET, 0, FIRST_AT),
        *(replace(INTENSITY, valid_from=FIRST_AT + k * HOUR, valid_to=FIRST_AT + (k + 1) * HOUR) for k in (0, 1)),
    ]

    class Disturbed(CarbonTargets):
        """Marks some iterations as disturbed, and records all of them like the daemon does."""

        def iteration_done(
            self, runner: RunningJob, observation: IterationObservation, purpose: PlanPurpose | None, begun_at: datetime
        ) -> None:
            seen, own_s = observation, observation.iteration_time_s
            if seen.iteration_index % 9 == 2:  # contains a checkpoint
                seen = replace(seen, is_regular=False, iteration_time_s=3.0 * own_s)
            elif seen.iteration_index % 9 == 5:  # at a straggler's pace
                seen = replace(seen, is_at_straggler_pace=True, iteration_time_s=1.5 * own_s)
            elif seen.iteration_index % 9 == 7:  # disturbed but not slower
                seen = replace(seen, is_regular=False)
            super().iteration_done(runner, seen, purpose, begun_at)
            records.append(
                IterationRecord(
                    job_id, seen.iteration_index, begun_at, seen.iteration_time_s, seen.energy_j, seen.plan_id, purpose,
                    is_regular=seen.is_own,
                )
            )  # fmt: skip

    here.targets.__class__ = Disturbed
    here.run_hours(7)
    write_records(tmp_path / "history.sqlite3", *records, *here.kept.targets())
    with open_history(tmp_path / "history.sqlite3") as history:
        (summary,) = history.job_summaries()
        reported = slowdown_ratio(summary, history.all_iterations(job_id), history.targets(job_id))

    assert len(here.kept.targets()) > 3
    assert account.num_iterations == summary.num_iterations
    assert reported == pytest.approx(account.slowdown_ratio, abs=1e-9)
    assert account.excess_s > 0.01 * account.full_speed_s
