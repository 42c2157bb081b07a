"""Operators' orders in the daemon: who may give them, what is audited, and what a later daemon still knows."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from gpuenergyd.core.job.messages import Command
from gpuenergyd.daemon.gpus.access import AccessRules
from gpuenergyd.daemon.jobs.operators import Operators, OrderFile
from gpuenergyd.daemon.runtime.actions import Actions
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.daemon.runtime.user_rates import UserRates
from gpuenergyd.errors import AccessError, GpuEnergyError, GpuNotFoundError, JobError, UsageError
from gpuenergyd.store.records import ControlEventRecord
from gpuenergyd.wire.messages import RankRelease
from gpuenergyd.wire.operator_messages import JobPatch, JobPatched, decode_job_patch
from tests.support.job_stage import ME, Stage, plan, play, registration, settle
from tests.support.led_pipeline import LedPipeline

RULES = AccessRules()


class Host:
    """A daemon's jobs, and the operators who change them."""

    def __init__(self, folder: Path, stage: Stage) -> None:
        self.stage = stage
        self.operators = Operators(stage.jobs, stage.policy.check, OrderFile(folder / "orders.json"))

    async def change(self, job_id: str, patch: JobPatch, peer: PeerCredentials = ME) -> JobPatched:
        """Change a job as a process of some user."""
        return await self.operators.change(job_id, patch, peer, RULES)


async def test_a_paused_job_is_restored_and_each_order_is_audited(tmp_path: Path) -> None:
    host = Host(tmp_path, Stage(plan("tuned-1", 1200)))
    job_id = host.stage.join()
    await host.stage.iterate(times=3)
    answer = await host.change(job_id, JobPatch(max_slowdown_ratio=0.25, priority=2, is_paused=True))
    await settle()
    await host.stage.jobs.close("test over")

    assert answer.changes == ("max_slowdown_ratio 0 -> 0.25", "priority 0 -> 2", "is_paused no -> yes")
    assert (answer.phase, answer.is_paused, answer.max_slowdown_ratio) == ("paused", True, 0.25)
    assert [call for call, _ in host.stage.worker.calls][:2] == ["lease", "restore"]
    audited = [r for r in host.stage.history.records if isinstance(r, ControlEventRecord) and r.action == "order"]
    assert [(one.before, one.after) for one in audited] == [
        ("max_slowdown_ratio 0", "max_slowdown_ratio 0.25"),
        ("priority 0", "priority 2"),
        ("is_paused no", "is_paused yes"),
    ]
    assert {one.actor for one in audited} == {str(ME)}


async def test_changes_by_the_user_of_a_job_are_limited_per_hour_and_those_of_administrators_are_not(
    tmp_path: Path,
) -> None:
    host = Host(tmp_path, Stage(plan("tuned-1", 1200)))
    host.stage.jobs.rates = UserRates(1 / 3600, capacity=2)
    user = PeerCredentials(ME.pid, 4242, 4242)
    administrator = PeerCredentials(ME.pid, 0, 0)
    pidfds = [os.pidfd_open(ME.pid) for _ in range(2)]
    job_id, _ = (host.stage.jobs.register(registration(r), user, pidfds[r]).job_id for r in range(2))
    await host.change(job_id, JobPatch(max_slowdown_ratio=0.1), user)
    with pytest.raises(JobError, match="uid 4242 has started or changed"):
        await host.change(job_id, JobPatch(max_slowdown_ratio=0.2), user)
    by_administrator = await host.change(job_id, JobPatch(priority=3), administrator)
    await host.stage.jobs.close("test over")

    assert by_administrator.changes == ("priority 0 -> 3",)


async def test_the_next_question_goes_to_the_ordered_policy(tmp_path: Path) -> None:
    host = Host(tmp_path, Stage(plan("tuned-1", 1200), plan("tuned-2", 900)))
    job_id = host.stage.join()
    await host.stage.iterate(times=3)
    await host.change(job_id, JobPatch(policy="scripted:eta=1"))
    await host.stage.iterate(plan_epoch=1, times=2)
    await host.stage.jobs.close("test over")

    assert host.stage.policy.asked[0] == "scripted"
    assert host.stage.policy.asked[-1] == "scripted:eta=1"
    assert host.stage.policy.views[-1].generation == 1


@pytest.mark.parametrize(
    ("patch", "error", "text"),
    [
        (JobPatch(policy="nope"), UsageError, "no policy 'nope'; installed: scripted"),
        (JobPatch(policy="scripted:broken=1"), UsageError, "policy 'scripted:broken=1': UsageError: no such option"),
        (JobPatch(policy="scripted:eta"), UsageError, "must be NAME=VALUE"),
        (JobPatch(max_slowdown_ratio=5), UsageError, "max_slowdown_ratio 5: must be a ratio from 0 to 1"),
        (JobPatch(max_slowdown_ratio=float("nan")), UsageError, "max_slowdown_ratio nan"),
        (JobPatch(max_slowdown_ratio=-0.1), UsageError, "max_slowdown_ratio -0.1"),
        (JobPatch(priority=10), UsageError, "priority 10: must be 0, the highest, to 9"),
        (JobPatch(priority=-1), UsageError, "priority -1"),
    ],
)
async def test_a_refused_order_leaves_the_job_as_it_was(
    tmp_path: Path, patch: JobPatch, error: type[GpuEnergyError], text: str
) -> None:
    host = Host(tmp_path, Stage(plan("tuned-1", 1200)))
    job_id = host.stage.join()
    (runner,) = host.stage.jobs
    before = runner.job.description
    with pytest.raises(error, match=text):
        await host.change(job_id, patch)
    assert runner.job.description == before


async def test_a_stranger_changes_nothing_and_the_user_of_a_job_all_but_its_priority(tmp_path: Path) -> None:
    host = Host(tmp_path, Stage(plan("tuned-1", 1200)))
    user, stranger = PeerCredentials(1, 4711, 4711), PeerCredentials(1, 4712, 4712)
    job_id = host.stage.join()
    (runner,) = host.stage.jobs
    runner.owner = replace(runner.owner, uid=user.uid)
    with pytest.raises(AccessError, match="may not change job"):
        await host.change(job_id, JobPatch(is_paused=True), stranger)
    with pytest.raises(AccessError, match="priority"):
        await host.change(job_id, JobPatch(priority=1), user)
    answer = await host.change(job_id, JobPatch(max_slowdown_ratio=0.1), user)
    assert answer.changes == ("max_slowdown_ratio 0 -> 0.1",)
    with pytest.raises(GpuNotFoundError, match="no job 'other'; running: "):
        await host.change("other", JobPatch(is_paused=True), user)


async def test_orders_hold_when_the_program_registers_with_the_next_daemon_and_end_with_the_job(tmp_path: Path) -> None:
    first, second, third = (Stage(plan("tuned-1", 1200)) for _ in range(3))
    host = Host(tmp_path, first)
    await host.change(first.join(), JobPatch(max_slowdown_ratio=0.25, is_paused=True))
    host.operators.is_stopping = True
    await first.jobs.close("the daemon was stopped")

    host = Host(tmp_path, second)
    second.join()
    (runner,) = second.jobs
    assert (runner.job.description.target.max_slowdown_ratio, runner.job.is_paused) == (0.25, True)
    await second.iterate(times=4)
    assert second.phase == "paused"
    second.jobs.release(RankRelease(second.tokens[0]), ME)
    await asyncio.gather(*(each.finish(5.0) for each in second.jobs))
    await second.jobs.close("test over")

    Host(tmp_path, third)
    third.join()
    (runner,) = third.jobs
    assert not runner.job.is_paused


async def test_an_order_that_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    host = Host(tmp_path / "missing", Stage(plan("tuned-1", 1200)))
    job_id = host.stage.join()
    with pytest.raises(GpuEnergyError, match="the order cannot be stored"):
        await host.change(job_id, JobPatch(is_paused=True))
    (runner,) = host.stage.jobs
    assert not runner.job.is_paused


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'[{"key": [1, "a"], "orders": {}}]', b"\xff"])
def test_a_damaged_file_of_orders_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "orders.json"
    path.write_bytes(content)

    assert OrderFile(path).of((1, "gpt", "run", 0)).policy is None


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{}", "nothing to change: give one of policy"),
        (b'{"slowdown": 0.1}', "unknown key 'slowdown'; valid: policy, max_slowdown_ratio"),
        (b'{"is_released": true, "priority": 1}', "cannot be combined"),
        (b'{"priority": "high"}', "malformed JobPatch"),
        (b"[]", "malformed JobPatch"),
        (b'{"policy": 1e999}', "malformed JobPatch"),
    ],
)
def test_a_malformed_order_is_refused_in_one_line(body: bytes, text: str) -> None:
    with pytest.raises(GpuEnergyError, match=text):
        decode_job_patch(body)


def commands_taken(actions: Actions) -> list[object]:
    """Return the type of command that each action takes; that of its key if the action is a lambda."""
    return [get_type_hints(action).get("command", command) for command, action in actions.items()]


def test_every_command_of_a_job_has_an_action() -> None:
    async def scenario() -> None:
        stage = Stage()
        stage.join()
        (runner,) = stage.jobs

        assert runner.actions.keys() == set(get_args(Command))
        assert commands_taken(runner.actions) == list(runner.actions)

    play(scenario)


def test_every_command_of_a_pipeline_has_an_action() -> None:
    actions = LedPipeline().leader.actions

    assert actions.keys() == set(get_args(Command))
    assert commands_taken(actions) == list(actions)
