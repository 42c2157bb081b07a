"""A host with two tensor-parallel ranks of one stage of a pipeline across hosts, and what a refused message leaves."""

import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gpuenergyd.core.job.messages import IterationObserved
from gpuenergyd.core.measurement.observation import ClockShare, InstructionSample, IterationObservation, RankEnergy
from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.wire.messages import RankRegistration
from gpuenergyd_across_hosts.host.pipeline_member import PipelineMembers
from gpuenergyd_across_hosts.messages.pipeline_messages import MemberPlace, MemberQuery, MemberReply
from tests.support.job_stage import ME, Stage, registration

KINDS = (InstructionKind.F, InstructionKind.B)


class HostOfSiblings:
    """A host with two tensor-parallel ranks of one stage."""

    def __init__(self) -> None:
        self.stage = Stage()
        self.members = self.stage.jobs.pipelines = PipelineMembers(self.stage.jobs)

    def join(self, tp_rank: int, **changes: Any) -> str:
        """Register a rank, and return its token."""
        base = registration(0)
        fields = {name: getattr(base, name) for name in base.__dataclass_fields__}
        fields |= {
            "run_key": f"0.{tp_rank},run",
            "num_pp_ranks": 1,
            "gpu_uuid": f"GPU-{tp_rank}",
            "is_pipeline_member": True,
        }
        registered = self.stage.jobs.register(RankRegistration(**(fields | changes)), ME, os.pidfd_open(ME.pid))
        return registered.rank_token

    def ask(self, token: str, tp_rank: int, *, run: str = "run", num_pp_ranks: int = 1, **changes: Any) -> MemberReply:
        place = MemberPlace(run, 0, 0, num_pp_ranks, tp_rank, 2)
        fields: dict[str, Any] = {"place": place} | changes
        reply = self.members.state(MemberQuery(token, **fields), ME)
        assert reply is not None
        return reply

    def observe(self, token: str, index: int, forward_s: float, plan_id: str = "baseline") -> None:
        """Have a rank's job observe an iteration."""
        session = self.stage.jobs.sessions.of_hex_token(token, ME)
        assert session is not None
        samples = tuple(InstructionSample(0, kind, (ClockShare(1410, forward_s),), 2) for kind in KINDS)
        energy = RankEnergy(0, 1.0, 100.0, ())
        session.runner.handle(IterationObserved(IterationObservation(index, plan_id, 1.0, samples, (energy,)), 1, ()))


@asynccontextmanager
async def running_host() -> AsyncIterator[HostOfSiblings]:
    """A host in the event loop of the test."""
    host = HostOfSiblings()
    yield host
    await host.stage.jobs.close("the test has ended")


def refused(host: HostOfSiblings, act: Callable[[], object], problem: str, caplog: pytest.LogCaptureFixture) -> None:
    """Check that a message is refused again and again, and recorded once in log and history, and in the status."""
    (runner, *_) = host.stage.jobs
    with caplog.at_level(logging.WARNING, logger="gpuenergyd"):
        for _ in range(3):
            with pytest.raises(GpuEnergyError, match=problem):
                act()
    lines = [record.getMessage() for record in caplog.records if "message refused" in record.getMessage()]
    assert len(lines) == 1
    reasons = [event.reason for event in host.stage.events("refusal")]
    assert len(reasons) == 1
    fields = host.members.refusals.status_fields(runner.job_id)
    assert fields is not None
    assert (fields["reason"], fields["num_messages"]) == (reasons[0], 3)
    assert reasons[0] in lines[0]


def run_at_once(coroutine: Any, *, may_wait: bool = False) -> object:
    """Run a coroutine until it waits or ends, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    assert may_wait, "it waits"
    coroutine.close()
    return None
