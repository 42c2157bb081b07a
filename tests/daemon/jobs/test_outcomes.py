"""Messages to the user when a job is joined and when it ends, and the outcome that the history keeps."""

import asyncio
import logging
import os
from dataclasses import replace

import pytest

from gpuenergyd.core.pipeline.plan import SavingAdvice, baseline_plan
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.daemon.registration import option_source
from gpuenergyd.store.records import SLOWDOWN_ADVICE, ControlEventRecord, JobEndRecord
from gpuenergyd.wire.messages import RankRegistration, RankRelease
from tests.support.job_stage import ME, Stage, registration, settle

LOOP = replace(registration(0), num_pp_ranks=1, num_microbatches=1, order=(("F", 0, 0),), schedule_name="loop")

DEFAULTS = "policy scripted (the daemon's default), permitted slowdown 0 % (the daemon's default);"
GIVEN = "policy scripted (from the environment), permitted slowdown 5 % (set by the program);"
WAITING = "saves energy at the same speed while stages wait for each other"
NOTHING = (
    "nothing can be saved at the same speed: one instruction per iteration, so no waiting time to use, and no slowdown"
    " permitted; permit some with --max-slowdown"
)


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (registration(0), f"{DEFAULTS} {WAITING}"),
        (
            replace(registration(0), policy="scripted", max_slowdown_ratio=0.05, from_environment=("policy",)),
            f"{GIVEN} {WAITING}, and more by running up to 5 % slower",
        ),
        (LOOP, f"{DEFAULTS} {NOTHING}"),
    ],
)
async def test_joining_names_the_options_their_origin_and_what_to_expect(rank: RankRegistration, message: str) -> None:
    stage = Stage()
    assert stage.jobs.register(rank, ME, os.pidfd_open(ME.pid)).message == message


def test_an_option_comes_from_the_program_the_environment_or_the_daemon() -> None:
    given = replace(registration(0), policy="uniform")

    assert option_source(given, "policy") == "argument"
    assert option_source(replace(given, from_environment=("policy",)), "policy") == "environment"
    assert option_source(given, "max_slowdown_ratio") == "daemon"


async def test_the_outcome_is_sent_to_the_trainer_and_recorded() -> None:
    stage = Stage(PolicyFailure("RuntimeError: no idea"))
    reason = "policy scripted failed: RuntimeError: no idea"
    await stage.begin(times=3)
    released = stage.jobs.release(RankRelease(stage.tokens[0]), ME)
    await settle()
    late = stage.jobs.release(RankRelease(stage.tokens[1]), ME)
    await settle()

    assert released is not None
    assert late is not None
    line = f"{reason}; cost so far: 0.0 s (0.00 %), the client's own not measured"
    assert released.message == late.message == line
    (ended,) = [r for r in stage.history.records if isinstance(r, JobEndRecord)]
    assert (ended.outcome, ended.outcome_reason) == ("at_full_speed", reason)
    assert [(job.job_id, job.line) for job in stage.jobs.ended] == [(ended.job_id, line)]


async def test_advice_on_the_slowdown_is_in_the_status_the_log_the_last_message_and_the_history(
    caplog: pytest.LogCaptureFixture,
) -> None:
    advice = SavingAdvice(0.02, 0.061, 0.05, 0.072, is_measured=True)
    stage = Stage(*[replace(baseline_plan(reason="nothing to save"), advice=(advice,))] * 9)
    text = "at 2 % slower this job would use 6.1 % less energy (5.0-7.2 %, measured): --max-slowdown 0.02"
    runner = await stage.begin(times=4)
    assert runner.outcome().advice == text
    with caplog.at_level(logging.INFO, logger="gpuenergyd"):
        released = stage.jobs.release(RankRelease(stage.tokens[0]), ME)
        await settle()

    assert released is not None
    assert f"; {text}; cost so far: " in released.message
    assert any(f"ended: {released.message}" in record.getMessage() for record in caplog.records)
    (ended,) = [r for r in stage.history.records if isinstance(r, JobEndRecord)]
    assert text not in ended.outcome_reason
    recorded = [r for r in stage.history.records if isinstance(r, ControlEventRecord)]
    assert [r.reason for r in recorded if r.action == SLOWDOWN_ADVICE] == [text]


async def test_a_job_that_a_stopping_daemon_ends_has_an_outcome() -> None:
    stage = Stage()
    await stage.begin()
    await stage.jobs.close("the daemon stops")
    await asyncio.sleep(0)

    (ended,) = [r for r in stage.history.records if isinstance(r, JobEndRecord)]
    assert ended.end_reason.endswith("the daemon stops")
    assert (ended.outcome, ended.outcome_reason) == (
        "too_early",
        "ended while measuring the baseline, after 1 iteration",
    )
