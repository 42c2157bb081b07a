"""The time account: what counts as income and as cost, and that no policy can make a job spend more than it has."""

import math
import random
import re
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.job.issued_plans import ITERATIONS_AHEAD
from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.messages import PolicyFailed, StragglerChanged
from gpuenergyd.core.job.rules import JobRules, member_rules
from gpuenergyd.core.job.time_account import AccountRules, TimeAccount
from gpuenergyd.core.pipeline.plan import PlanPurpose, baseline_plan
from gpuenergyd.core.policy_api.target import PerformanceTarget
from tests.support.job_run import APPLIED, CLOCKS, TRIAL, JobRun, joined, plan


def account_with(*times_s: float, explained_from: int = 1000, until: int = 1000, **values: float) -> TimeAccount:
    """Return an account after iterations, of which some ran under a plan that can explain half a second."""
    account = TimeAccount()
    for index, time_s in enumerate(times_s):
        explained_s = 0.5 if explained_from <= index < until else 0.0
        account.add(index, time_s, is_regular=True, explained_s=explained_s, **values)
    return account


# --- income and cost ---


def test_income_is_a_second_a_share_of_the_time_and_what_is_permitted() -> None:
    assert account_with(*[2.0] * 100).income_s == pytest.approx(1.0 + 0.005 * 200.0)
    permitted = account_with(*[2.0] * 100, permitted_ratio=0.02)
    assert permitted.income_s == pytest.approx(2.0 + 0.02 * 200.0)
    assert TimeAccount(AccountRules(0.01, 3.0)).income_s == 3.0


def test_iterations_at_full_speed_cost_nothing_however_they_scatter() -> None:
    account = account_with(1.0, 1.1, 0.9, 5.0, 1.0)

    assert (account.cost_s, account.cost_ratio) == (0.0, 0.0)


def test_an_iteration_under_a_plan_is_compared_with_full_speed_before_and_after_it() -> None:
    times_s = [1.0, 1.0, 1.0, 1.02, 1.02, 1.01, 1.01, 1.01]

    assert account_with(*times_s[:5], explained_from=3, until=5).cost_s == pytest.approx(0.04)
    # Full speed has drifted by a percent meanwhile: half of that was there already.
    assert account_with(*times_s, explained_from=3, until=5).cost_s == pytest.approx(0.03, abs=1e-3)


def test_noise_of_both_signs_cancels() -> None:
    account = account_with(*[1.0] * 4, *[1.01, 0.99] * 10, explained_from=4, until=24, sigma_s=0.01)

    assert account.cost_s == pytest.approx(0.0, abs=1e-9)


def test_a_stall_costs_at_most_what_the_plan_can_explain() -> None:
    account = account_with(*[1.0] * 4, 30.0, explained_from=4, until=5, sigma_s=0.01)

    assert account.cost_s == pytest.approx(0.53)


def test_a_disturbed_iteration_costs_what_others_under_its_plan_do() -> None:
    account = account_with(*[1.0] * 4, *[1.01] * 4, explained_from=4, until=8)

    account.add(8, 20.0, is_regular=False, explained_s=0.5)

    assert account.cost_s == pytest.approx(5 * 0.01)


@pytest.mark.parametrize(("ratio", "under_plan", "cost_s"), [(0.7, 0.8, 0.2), (1.4, 1.45, 0.1)])
def test_iterations_before_a_change_of_the_job_are_compared_with_full_speed_before_it(
    ratio: float, under_plan: float, cost_s: float
) -> None:
    times_s = [*[1.0] * 4, *[1.0] * 10, under_plan, under_plan, *[ratio] * 3]

    assert account_with(*times_s, explained_from=4, until=16).cost_s == pytest.approx(cost_s)


def test_the_pace_that_others_set_costs_nothing() -> None:
    account = account_with(*[1.0] * 4)
    for index in range(4, 8):
        account.add(index, 1.2, is_regular=True, explained_s=0.5, given_pace_s=1.19)

    assert account.cost_s == pytest.approx(4 * 0.01)


def test_the_clients_own_cost_is_added_where_it_is_measured() -> None:
    account = account_with(*[1.0] * 4)
    assert account.client_cost_s is None

    account.add_client_cost(0, 0.002)
    account.add_client_cost(1, 0.003)
    account.add_client_cost(1, 0.003)  # by another replica

    assert account.client_cost_s == account.cost_s == pytest.approx(0.005)


def test_an_iteration_is_counted_once_whichever_replica_reports_it_first() -> None:
    account = TimeAccount()
    for index in range(4):
        account.add(index, 1.0, is_regular=True)
    account.plan_sent("other", 4, 0.5)
    for _ in range(2):
        account.add(4, 1.3, is_regular=True)  # at full speed, and slow because of the other one's plan

    assert account.num_iterations == 5
    assert account.cost_s == pytest.approx(0.3)


# --- experiments ---


def test_what_is_committed_is_not_left_until_its_iterations_have_run() -> None:
    account = account_with(*[1.0] * 4)
    account.plan_sent("own", 6, 0.5)
    account.commit("own", 6, 7, 0.4)
    account.plan_sent("own", 8, 0.0)
    assert account.left_s == pytest.approx(account.balance_s - 0.4)

    for index in range(4, 7):
        account.add(index, 1.0, is_regular=True)
    assert account.left_s == pytest.approx(account.balance_s - 0.2)

    account.add(7, 1.0, is_regular=True)
    assert account.left_s == account.balance_s


def test_a_plan_that_is_replaced_before_its_end_is_not_paid_to_the_end() -> None:
    account = account_with(*[1.0] * 4)
    account.commit("own", 6, 9, 0.4)

    account.plan_sent("own", 7, 0.0)

    assert account.left_s == pytest.approx(account.balance_s - 0.1)


def test_experiments_of_replicas_in_the_same_iterations_cost_what_the_dearest_does() -> None:
    account = account_with(*[1.0] * 4)
    account.commit("a", 8, 8, 0.4)

    assert account.next_experiment("b", 6) == 8
    assert account.next_experiment("a", 6) == account.next_experiment("b", 9) - 3 == 6
    assert account.left_beside_s("b", 8, 8) == pytest.approx(account.balance_s)
    account.commit("b", 8, 8, 0.3)
    assert account.left_s == pytest.approx(account.balance_s - 0.4)


def test_hosts_that_hear_each_other_commit_their_shares_of_what_is_left_and_silent_ones_have_shares_only() -> None:
    account = account_with(*[1.0] * 100)

    account.hear(2, 0.5)
    assert account.left_s == pytest.approx((1.5 - 0.5) / 2)
    account.hear(2, None)
    assert account.balance_s == pytest.approx(1.5 / 2)


def test_totals_of_a_killed_daemon_continue_the_account() -> None:
    before = account_with(*[1.0] * 4, *[1.1] * 4, explained_from=4, until=8, permitted_ratio=0.01)
    after = TimeAccount()

    after.take_over(before.totals)

    assert (after.income_s, after.cost_s, after.num_iterations) == (before.income_s, before.cost_s, 8)


# --- a job and its account ---


def test_a_member_of_a_pipeline_across_hosts_has_no_account_of_its_own() -> None:
    run = JobRun(member_rules(JobRules())).asked()

    assert run.job.account is None
    assert run.job.view() is not None
    assert run.job.view().affordable_s is None  # type: ignore[union-attr]


def test_a_tuned_plan_that_cannot_be_paid_for_long_is_tried_for_one_iteration_first() -> None:
    run = JobRun(JobRules(proof_iterations=0)).asked()
    slow = plan(clock=1005)  # 0.40 s an iteration in the worst case

    run.decide(slow)

    assert [(one.plan.plan_id, one.apply_at_iteration) for one in run.sent] == [
        ("tuned", APPLIED),
        ("proof", APPLIED + 1),
    ]
    for _ in range(12):  # it costs nothing
        run.pass_one()
        if run.job.control.question.is_open:
            run.decide(slow)
    assert run.job.control.experiments.ends_at is None
    assert run.sent[-1].plan is slow


def test_a_plan_that_costs_more_than_is_earned_is_stopped_and_resumed() -> None:
    rules = JobRules(
        proof_iterations=0, guard=replace(JobRules().guard, budget_ratio=0.05), account=AccountRules(0.005, 0.4)
    )
    run = JobRun(rules).asked()
    times_s: list[float] = []
    own = plan(clock=1395)
    for _ in range(400):
        if run.job.control.question.is_open:
            run.decide(own)
        times_s.append(1.0 if run.is_at_full_speed else 1.01)
        run.pass_one(times_s[-1])

    account = run.job.control.experiments.account
    assert 0.8 * account.income_s < sum(times_s) - len(times_s) <= account.income_s
    reason = next(line.reason for line in run.phases if "until the time account has recovered" in line.reason)
    spent_s, income_s, more_s = (float(number) for number in re.findall(r"[\d.]+", reason))
    assert spent_s < income_s <= spent_s + more_s
    assert run.job.faults.num_faults == 0


# --- no policy can overdraw it ---

_LOWEST_MHZ = 990
_SURPRISE_S = CLOCKS[0] / _LOWEST_MHZ - 1
"""What one iteration of one second costs at most."""


@dataclass
class _Host:
    """A replica of a training on a host of its own, with a policy that answers with anything."""

    rules: JobRules
    target: PerformanceTarget
    draw: random.Random
    compute_ratio: float
    run: JobRun = field(init=False)

    def __post_init__(self) -> None:
        self.run = JobRun(self.rules, self.target)

    def own_time_s(self) -> float:
        """Return how long the next iteration takes for its own plan, without noise."""
        followed = [one for one in self.run.sent if one.plan_epoch == self.run.epoch]
        ranks = followed[-1].plan.ranks if followed else ()
        slowest = max((CLOCKS[0] / (mhz or CLOCKS[0]) for rank in ranks for mhz in rank.sm_clocks_mhz), default=1.0)
        return 1.0 + self.compute_ratio * (slowest - 1.0)

    def answer(self) -> None:
        """Answer an open question, if at all, with any valid plan, the last one again, or a failure."""
        job, draw = self.run.job, self.draw
        if not job.control.question.is_open or draw.random() < 0.2:
            return
        kind = draw.random()
        if kind < 0.05:
            self.run.feed(PolicyFailed("no idea"))
        elif kind < 0.1:
            self.run.decide(baseline_plan("resting"))
        elif kind < 0.3 and job.current_plan.ranks:
            self.run.decide(job.current_plan)
        else:
            purpose = TRIAL if kind < 0.7 else PlanPurpose.TUNED
            clock = draw.choice([mhz for mhz in CLOCKS if mhz >= _LOWEST_MHZ])
            self.run.decide(plan(f"{purpose}-{clock}-{self.run.index}", purpose, clock))

    def restart(self, *, is_killed: bool) -> None:
        """Continue with a new daemon; after a kill the ranks register again, and only totals are left."""
        before = self.run.job
        self.run.job = Job(before.description, before.rules)
        if is_killed:
            own = before.control.experiments.account
            totals = replace(own.totals, cost_s=own.totals.cost_s + own.spent_or_committed_s - own.cost_s)
            self.run.sent.clear()
            for rank in range(2):
                self.run.feed(joined(rank))
            self.run.job.control.experiments.account.take_over(totals)
        else:
            self.run.job.restore(before.snapshot())

    def hear(self, other: "_Host", *, is_silent: bool) -> None:
        """Read what the other host has spent."""
        spent_s = other.run.job.control.experiments.account.spent_or_committed_s
        self.run.job.control.experiments.account.hear(2, None if is_silent else spent_s)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_hosts=st.sampled_from([1, 2]),
    slowdown_ratio=st.sampled_from([0.0, 0.02]),
    noise_ratio=st.sampled_from([0.0, 0.002, 0.01]),
    compute_ratio=st.sampled_from([1.0, 0.5]),
    events=st.dictionaries(st.integers(15, 190), st.sampled_from(["restart", "kill", "stall", "silence", "straggler"])),
)
def test_no_policy_noise_or_restart_overdraws_the_account(
    seed: int, num_hosts: int, slowdown_ratio: float, noise_ratio: float, compute_ratio: float, events: dict[int, str]
) -> None:
    draw = random.Random(seed)
    rules, target = JobRules(max_faults=1000), PerformanceTarget(slowdown_ratio)
    hosts = [_Host(rules, target, draw, compute_ratio) for _ in range(num_hosts)]
    cost_s, income_s, floor_s, is_silent, left_at = 0.0, rules.account.first_income_s, 1.0, False, -10
    for index in range(200):
        event, stall_s = events.get(index), 0.0
        if event in {"restart", "kill"}:
            draw.choice(hosts).restart(is_killed=event == "kill")
        elif event == "straggler":
            floor_s, left_at = (1.2, -10) if floor_s == 1.0 else (1.0, index)
            for host in hosts:
                host.run.feed(StragglerChanged(1.2 if floor_s > 1.0 else None, "a straggler"))
        stall_s, is_silent = (3.0 if event == "stall" else 0.0), is_silent ^ (event == "silence")
        if num_hosts == 2:
            for own, other in (hosts, hosts[::-1]):
                own.hear(other, is_silent=is_silent)
        own_s = max(host.own_time_s() for host in hosts)
        # A straggler that leaves is a surprise: plans at its pace are followed for some iterations more.
        cost_s += max(0.0, own_s - floor_s) if index > left_at + ITERATIONS_AHEAD + 1 else 0.0
        income_s += max(own_s, floor_s) * rules.account.income_ratio + slowdown_ratio * floor_s
        time_s = max(own_s, floor_s) * (1 + noise_ratio * draw.uniform(-1, 1)) + stall_s
        for host in hosts:
            host.answer()
            host.run.pass_one(time_s)

        # What is measured under noise is known no better than the noise of so many iterations.
        chance_s = 2 * noise_ratio * math.sqrt(index + 1)
        assert cost_s <= income_s + _SURPRISE_S + chance_s, (index, events)
    assert any(host.run.job.control.experiments.account.num_experiments for host in hosts)
