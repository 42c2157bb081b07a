"""Paces that a client reports for replicas elsewhere change the target of its own job only, at once."""

import math

import pytest

from gpuenergyd.core.job.messages import TargetChanged
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.errors import ProtocolError
from gpuenergyd.wire.messages import PaceReport
from tests.support.job_stage import ME, Stage, plan

PREPARED = 0.995
"""The pace that is followed at first, relative to that of the first reading: its plan was prepared."""


async def test_a_slow_replica_elsewhere_sets_the_pace_and_the_policy_is_asked_at_once() -> None:
    stage = Stage(plan("tuned-1", 1200))
    stage.join()
    assert stage.jobs.handle_pace(PaceReport(stage.tokens[0], None), ME) is not None
    await stage.iterate(times=3)
    own = stage.jobs.handle_pace(PaceReport(stage.tokens[0], None), ME)
    assert own is not None
    assert own.own_time_s is not None
    slow_s = 3 * own.own_time_s
    num_asked = len(stage.policy.views)
    replies = [stage.jobs.handle_pace(PaceReport(stage.tokens[0], slow_s), ME) for _ in range(2)]
    await stage.iterate(times=1)

    followed_s = PREPARED * slow_s
    assert [reply.straggler_time_s for reply in replies if reply] == [None, followed_s]
    assert len(stage.policy.views) > num_asked
    assert stage.policy.views[-1].target.straggler_time_s == followed_s
    (event,) = stage.events("straggler")
    assert (event.before, event.after) == ("own pace", f"{followed_s:.4g} s per iteration")
    assert "a replica elsewhere" in event.reason

    gone = stage.jobs.handle_pace(PaceReport(stage.tokens[0], None), ME)
    assert gone is not None
    assert gone.straggler_time_s is None


async def test_a_repeated_pace_is_not_a_second_reading() -> None:
    stage = Stage(plan("tuned-1", 1200))
    stage.join()
    stage.jobs.handle_pace(PaceReport(stage.tokens[0], None), ME)
    await stage.iterate(times=3)
    reported = [PaceReport(stage.tokens[0], 1.0, is_news=is_news) for is_news in (True, False, False, True)]
    replies = [stage.jobs.handle_pace(report, ME) for report in reported]

    assert [reply.straggler_time_s for reply in replies if reply] == [None, None, None, PREPARED]


async def test_a_pace_reply_holds_the_number_of_readings_and_the_overhead() -> None:
    stage = Stage(plan("tuned-1", 1200))
    stage.join()
    first = stage.jobs.handle_pace(PaceReport(stage.tokens[0], None), ME)
    await stage.iterate(times=3)
    second = stage.jobs.handle_pace(PaceReport(stage.tokens[0], None, least_other_overhead_s=0.0), ME)
    (runner,) = stage.jobs

    assert first is not None
    assert (first.own_time_s, first.num_readings, first.overhead_s) == (None, 0, None)
    assert second is not None
    assert second.num_readings > 0
    assert second.overhead_s is not None
    assert stage.jobs.replicas.least_overhead_s(runner) == 0.0


async def test_straggler_pace_and_target_change_independently() -> None:
    stage = Stage(plan("tuned-1", 1200))
    stage.join()
    stage.jobs.handle_pace(PaceReport(stage.tokens[0], None), ME)
    await stage.iterate(times=3)
    for _ in range(2):
        stage.jobs.handle_pace(PaceReport(stage.tokens[0], 1.0), ME)
    (runner,) = stage.jobs
    runner.handle(TargetChanged(PerformanceTarget(0.1, permitted_time_s=0.5)))
    both = runner.job.target
    stage.jobs.handle_pace(PaceReport(stage.tokens[0], None), ME)

    assert (both.permitted_time_s, both.straggler_time_s) == (0.5, PREPARED)
    assert (runner.job.target.permitted_time_s, runner.job.target.straggler_time_s) == (0.5, None)


@pytest.mark.parametrize("time_s", [-1.0, math.nan, math.inf, 1e9])
async def test_an_invalid_time_is_refused_with_its_value(time_s: float) -> None:
    stage = Stage(plan("tuned-1", 1200))
    stage.join()
    with pytest.raises(ProtocolError, match="slowest_other_time_s"):
        stage.jobs.handle_pace(PaceReport(stage.tokens[0], time_s), ME)
    with pytest.raises(ProtocolError, match="age_s"):
        stage.jobs.handle_pace(PaceReport(stage.tokens[0], 1.0, time_s), ME)


async def test_a_pace_report_needs_the_job_token() -> None:
    stage = Stage(plan("tuned-1", 1200))
    stage.join()
    assert stage.jobs.handle_pace(PaceReport("00" * 16, 1.0), ME) is None
