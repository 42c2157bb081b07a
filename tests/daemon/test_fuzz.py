"""Mutated messages by the thousand: every one is answered well-formed or refused in one line, and no clock changes.

`make fuzz` offers more of them than the suite does: FUZZ_MESSAGES each of message bodies and of clock records.
"""

import asyncio
import json
import os
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from gpuenergyd.daemon.jobs import Jobs
from gpuenergyd.errors import GpuEnergyError, ProtocolError
from gpuenergyd.wire import MAX_CONTROL_MESSAGE_BYTES
from gpuenergyd.wire.clock_record import ClockRecord, decode_record, encode_record
from gpuenergyd.wire.daemon_codec import decode
from gpuenergyd.wire.messages import IterationReport, RankRegistration, RankRelease
from tests.daemon.test_jobs import ME, Stage, plan, registration, report, settle
from tests.support.daemon_process import DaemonProcess, running_daemon

NUM_MESSAGES = int(os.environ.get("FUZZ_MESSAGES", "40000"))
TOKENS = (
    b"null", b"true", b"-1", b"0", b"1e308", b"-1e400", b"NaN", b"9223372036854775808", b"340282366920938463463",
    b'""', b'"\\ud800"', b'"\\u0000"', b"[]", b"{}", b"[[[[[[[[[[]]]]]]]]]]", b'"F"', b"0.5", b",", b":", b"}", b"]",
    b'"',
)  # fmt: skip


def mutated(message: bytes, rng: random.Random) -> bytes:
    """Return a message with a few bytes or values spoilt."""
    body = bytearray(message)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, until = sorted((rng.randrange(len(body) + 1), rng.randrange(len(body) + 1)))
        match rng.randrange(6):
            case 0:
                del body[at : at + rng.randrange(1, 9)]
            case 1:
                body[at:at] = rng.choice(TOKENS)
            case 2:
                body[at : at + rng.randrange(1, 6)] = rng.choice(TOKENS)
            case 3:
                body[at:at] = body[at : min(until, at + 200)]
            case 4 if at < len(body):
                body[at] ^= 1 << rng.randrange(8)
            case _:
                spoil_number(body, rng)
        if not body:
            return b""
    return bytes(body[: MAX_CONTROL_MESSAGE_BYTES + 10])


def spoil_number(body: bytearray, rng: random.Random) -> None:
    """Replace one whole number of a message by another token."""
    digits = [i for i, byte in enumerate(body) if 48 <= byte <= 57]
    if not digits:
        return
    begin = end = rng.choice(digits)
    while begin > 0 and 48 <= body[begin - 1] <= 57:
        begin -= 1
    while end < len(body) and 48 <= body[end] <= 57:
        end += 1
    body[begin:end] = rng.choice(TOKENS)


def offer(jobs: Jobs, kind: int, body: bytes) -> str | None:
    """Do with a body what the server would; return why it was refused."""
    try:
        hand_over(jobs, kind, body)
    except GpuEnergyError as error:
        return str(error)
    return None


def hand_over(jobs: Jobs, kind: int, body: bytes) -> None:
    """Decode a body and give it to the jobs."""
    match kind:
        case 0:
            registered = decode(body, RankRegistration, max_bytes=MAX_CONTROL_MESSAGE_BYTES)
            pidfd = os.pidfd_open(os.getpid())
            try:
                jobs.register(registered, ME, pidfd)
            except BaseException:
                os.close(pidfd)
                raise
        case 1:
            jobs.report(decode(body, IterationReport, max_bytes=MAX_CONTROL_MESSAGE_BYTES), ME)
        case _:
            jobs.release(decode(body, RankRelease, max_bytes=MAX_CONTROL_MESSAGE_BYTES).rank_token, ME)


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
    assert stage.worker.wants == []
    assert num_open_descriptors() == num_descriptors


@pytest.mark.fault(47)
def test_no_mutated_clock_record_reaches_the_worker_unless_it_is_a_supported_wish_of_a_known_rank() -> None:
    rng = random.Random(3)
    stage = Stage(plan("tuned-1", 1200))

    async def scenario() -> None:
        stage.join()
        await stage.iterate(times=3)
        for sequence in range(1, NUM_MESSAGES):
            record = bytearray(
                encode_record(
                    ClockRecord(sequence, bytes.fromhex(stage.tokens[0]), 1, 1200, 1410, 0, time.monotonic_ns())
                )
            )
            for _ in range(rng.choice((1, 2, 8))):
                record[rng.randrange(len(record))] = rng.randrange(256)
            try:
                decoded = decode_record(bytes(record[: rng.choice((48, 48, 48, 47, 0))]))
            except ProtocolError:
                continue
            stage.jobs.take_clock_record(decoded, ME)
        await stage.jobs.close("test over")

    asyncio.run(scenario())

    assert stage.jobs.num_hostile_records > 1000
    assert {uuid for uuid, _, _ in stage.worker.wants} <= {"GPU-0"}
    assert {clock for _, now, later in stage.worker.wants for clock in (now, later)} <= {0, 900, 1200, 1410}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with running_daemon(tmp_path_factory.mktemp("fuzz")) as daemon:
        yield daemon


@pytest.mark.fault(32)
def test_no_mutated_http_request_brings_the_daemon_down(daemon: DaemonProcess) -> None:
    rng = random.Random(4)
    body = json.dumps(asdict(registration(0))).encode()
    requests = [
        b"GET /v1/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"POST /v1/ranks HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body,
        b"GET /v1/jobs/%2e%2e/x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    ]
    num_answered = 0
    before = memory_kib(daemon.pid)
    for _ in range(1000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(0.02)
            client.connect(str(daemon.socket_path))
            client.sendall(mutated(rng.choice(requests), rng))
            try:
                answer = client.recv(65_536)
            except (ConnectionResetError, TimeoutError):  # a message that lacks its end is waited for a while
                continue
        if answer:
            num_answered += 1
            assert answer.startswith(b"HTTP/"), answer[:100]
            assert b"Traceback" not in answer

    assert num_answered > 300
    assert daemon.is_as_found()
    assert daemon.status()["worker"]["num_restarts"] == 0
    assert memory_kib(daemon.pid) < before + 20_000


def num_open_descriptors() -> int:
    """Return how many files this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def memory_kib(pid: int) -> int:
    """Return a process's resident memory."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.partition("VmRSS:")[2].split()[0])
