"""A replica follows the target of the training's first one: as far as it was heard, and at full speed in silence."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest.mock import patch

import pytest

from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.policy_api.policy import BaselineView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.daemon.jobs import training_budget
from gpuenergyd.daemon.jobs.training_budget import TrainingTarget, share_budget
from gpuenergyd.daemon.ports import IterationWatcher
from gpuenergyd.wire.messages import BudgetShare, TrainingBudget
from gpuenergyd_across_hosts.host.pipeline_leader import PipelineLeader
from tests.support.led_pipeline import LedPipeline

BASELINE = BaselineView(2.0, None, 9)


@dataclass
class Notified:
    """A carbon service that keeps what it is notified of."""

    excess_s: float = 0.0
    followed: list[tuple[PerformanceTarget | None, str]] = field(default_factory=list)
    charged_s: list[float] = field(default_factory=list)

    def follow(self, runner: PipelineLeader, target: PerformanceTarget | None, reason: str = "") -> None:
        if target is not None:
            runner.job.target = target
        self.followed.append((target, reason))

    def charge_others(self, _runner: PipelineLeader, excess_s: float) -> None:
        self.charged_s.append(excess_s)

    def plan_excess_s(self, _runner: PipelineLeader) -> float:
        return self.excess_s


@dataclass
class Clock:
    """The clock of the daemon."""

    now_s: float = 100.0

    def monotonic(self) -> float:
        """Return the present instant."""
        return self.now_s


@pytest.fixture
def clock() -> Iterator[Clock]:
    own = Clock()
    with patch.object(training_budget, "time", own):
        yield own


def replica(*, has_service: bool = True) -> tuple[TrainingTarget, Notified, PipelineLeader]:
    leader, notified = LedPipeline().leader, Notified()
    leader.job.baseline = BASELINE
    return TrainingTarget(leader, cast("IterationWatcher", notified) if has_service else None), notified, leader


def heard(ratio: float | None, *, is_decided: bool = True, age_s: float = 0.0) -> TrainingBudget:
    return TrainingBudget(False, ratio, is_decided, age_s)


def test_the_ratio_of_the_first_replica_holds_on_the_own_baseline() -> None:
    target, notified, leader = replica()

    for ratio in (0.1, 0.1, 0.0):
        target.handle(heard(ratio))

    assert [own for own, _ in notified.followed] == [
        PerformanceTarget(0.0, permitted_time_s=2.2),
        PerformanceTarget(0.0),
    ]
    assert notified.followed[0][1] == "target of the training, decided by its first replica's host: 10 % slower"
    leader.job.baseline = BaselineView(4.0, None, 9)
    target.handle(heard(0.1))
    assert notified.followed[-1][0] == PerformanceTarget(0.0, permitted_time_s=4.4)


def test_a_replica_that_heard_nothing_decides_for_itself() -> None:
    target, notified, _ = replica()

    target.handle(None)
    target.handle(heard(None))

    assert notified.followed == []


def test_full_speed_while_the_first_replica_is_silent(clock: Clock) -> None:
    target, notified, _ = replica()
    target.handle(heard(0.1))
    clock.now_s += 9.0
    target.check_time_limit()
    assert len(notified.followed) == 1

    clock.now_s += 2.0
    target.check_time_limit()

    assert notified.followed[-1] == (
        PerformanceTarget(0.0),
        "full speed: the training's first replica, which decides for all, is silent",
    )
    target.handle(heard(0.1, age_s=30.0))
    assert len(notified.followed) == 2, "its message is read again and again"
    target.handle(heard(0.1))
    assert notified.followed[-1][0] == PerformanceTarget(0.0, permitted_time_s=2.2)


def test_a_first_replica_without_a_carbon_service_has_the_registered_slowdown() -> None:
    target, notified, leader = replica()
    plain, _, _ = replica(has_service=False)

    target.handle(heard(0.3, is_decided=False))
    plain.handle(heard(0.3, is_decided=False))

    assert notified.followed == [
        (leader.description.target, "constant slowdown: the host of the training's first replica decides no targets")
    ]


def test_a_host_without_a_carbon_service_follows_too() -> None:
    target, _, leader = replica(has_service=False)
    events: list[Any] = []
    with patch.object(PipelineLeader, "handle", lambda _self, event: events.append(event)):
        share = target.handle(heard(0.1))

    assert [event.target for event in events] == [PerformanceTarget(0.0, permitted_time_s=2.2)]
    assert share == BudgetShare(leader.description.target.max_slowdown_ratio)


def test_the_first_replica_permits_nothing_before_its_baseline_and_is_charged_with_the_others() -> None:
    target, notified, leader = replica()
    notified.excess_s = 0.25
    leader.job.baseline = None
    before = target.handle(TrainingBudget(True, excess_s=1.5))
    leader.job.baseline = BASELINE
    leader.job.description = replace(leader.job.description, target=PerformanceTarget(0.03))
    without_plan = target.share()
    leader.job.phase = JobPhase.TUNED
    notified.follow(leader, PerformanceTarget(0.0, permitted_time_s=2.1))
    after = target.handle(TrainingBudget(True, excess_s=2.0))

    assert before == BudgetShare(0.0, is_decided=True, excess_s=0.25)
    assert without_plan.permitted_slowdown_ratio == 0.03
    assert after == BudgetShare(0.05, is_decided=True, excess_s=0.25)
    assert notified.charged_s == [1.5, 2.0]


def test_replicas_of_one_daemon_share_the_first_one_s_budget_and_the_next_one_takes_over() -> None:
    (first, first_notified, _), (second, second_notified, _) = replica(), replica()
    second_notified.excess_s = 0.5

    share_budget([first, second])
    share_budget([second])

    assert first_notified.charged_s == [0.5]
    assert [own for own, _ in second_notified.followed] == [PerformanceTarget(0.0), None]
    second.handle(TrainingBudget(True))
    share_budget([first, second])
    assert len(first_notified.charged_s) == 1, "they exchange it through the store"
