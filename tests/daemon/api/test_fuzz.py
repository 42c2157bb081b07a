"""Thousands of mutated messages to the jobs: each is accepted or refused in one line, and no clock changes.

`make fuzz` sends more of them than the suite: FUZZ_MESSAGES message bodies and as many clock requests.
test_socket_fuzz.py does the same over a real daemon's sockets.
"""

import asyncio
import json
import os
import random
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from gpuenergyd.core.clock_request import ClockRequest, TimedClock
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.errors import GpuEnergyError, ProtocolError
from gpuenergyd.wire import MAX_CONTROL_MESSAGE_BYTES
from gpuenergyd.wire.clock_request import RankClockRequest, decode_clock_request
from gpuenergyd.wire.daemon_codec import decode
from gpuenergyd.wire.messages import IterationReport, RankRegistration, RankRelease
from tests.support.clock_requests import encode_clock_request
from tests.support.job_stage import ME, Stage, plan, registration, report, settle
from tests.support.mutations import mutated

NUM_MESSAGES = int(os.environ.get("FUZZ_MESSAGES", "20000"))


def offer(jobs: Jobs, kind: int, body: bytes) -> str | None:
    """Handle a body like the server does; return the error of a refusal."""
    try:
        hand_over(jobs, kind, body)
    except GpuEnergyError as error:
        return str(error)
    return None


def hand_over(jobs: Jobs, kind: int, body: bytes) -> None:
    """Decode a body and pass it to the jobs."""
    match kind:
        case 0:
            registered = decode(body, RankRegistration, max_bytes=MAX_CONTROL_MESSAGE_BYTES)
            pidfd = os.pidfd_open(ME.pid)
            try:
                jobs.register(registered, ME, pidfd)
            except BaseException:
                os.close(pidfd)
                raise
        case 1:
            jobs.handle_report(decode(body, IterationReport, max_bytes=MAX_CONTROL_MESSAGE_BYTES), ME)
        case _:
            jobs.release(decode(body, RankRelease, max_bytes=MAX_CONTROL_MESSAGE_BYTES), ME)


@pytest.mark.fault(32)
@pytest.mark.parametrize("seed", [1, 2])
def test_no_mutated_message_breaks_the_jobs_or_changes_a_clock(seed: int) -> None:
    rng = random.Random(seed)
    stage = Stage(plan("tuned-1", 1200))
    refusals: set[str] = set()
    num_descriptors = num_open_descriptors()

    async def scenario() -> None:
        for number in range(NUM_MESSAGES // 2):
            kind = rng.choice((0, 1, 1, 1, 2))
            token = rng.choice([*stage.tokens, "00" * 16])
            body = json.dumps(
                asdict(registration(rng.randrange(2)))
                if kind == 0
                else asdict(report(token, rng.randrange(2), number, rng.randrange(2)))
                if kind == 1
                else {"rank_token": token}
            ).encode()
            refusal = offer(stage.jobs, kind, mutated(body, rng))
            if refusal is not None:
                refusals.add(refusal)
            if number % 50 == 0:
                await settle()
        await settle()
        await stage.jobs.close("test over")

    asyncio.run(scenario())

    assert len({refusal[:40] for refusal in refusals}) > 20
    assert not [refusal for refusal in refusals if "\n" in refusal]
    assert stage.worker.requested_clocks == []
    assert num_open_descriptors() == num_descriptors


@pytest.mark.fault(47)
def test_mutated_clock_request_reaches_the_worker_only_with_supported_clocks_of_a_known_rank() -> None:
    rng = random.Random(3)
    stage = Stage(plan("tuned-1", 1200))

    async def scenario() -> None:
        stage.join()
        await stage.iterate(times=3)
        for sequence in range(1, NUM_MESSAGES):
            now_ns = time.monotonic_ns()
            later = [TimedClock(clock, now_ns + 1000 * k) for k, clock in enumerate((1410, 900, 1200)[: sequence % 4])]
            request = ClockRequest(1200, now_ns, tuple(later), 1)
            record = bytearray(
                encode_clock_request(RankClockRequest(bytes.fromhex(stage.tokens[0]), sequence, request))
            )
            for _ in range(rng.choice((1, 2, 8))):
                record[rng.randrange(len(record))] = rng.randrange(256)
            try:
                decoded = decode_clock_request(bytes(record[: rng.choice((64, 64, 64, 56, 48, 47, 0))]))
            except ProtocolError:
                continue
            stage.jobs.clock_requests.admit(decoded, ME)
        await stage.jobs.close("test over")

    asyncio.run(scenario())

    assert stage.jobs.clock_requests.num_hostile > 1000
    assert {uuid for uuid, _, _ in stage.worker.requested_clocks} <= {"GPU-0"}
    assert {clock for _, now, later in stage.worker.requested_clocks for clock in (now, later)} <= {0, 900, 1200, 1410}
    assert {clock for timetable in stage.worker.timetables for clock in timetable} == {900, 1200, 1410}


def num_open_descriptors() -> int:
    """Return the number of open file descriptors of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
