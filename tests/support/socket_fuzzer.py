"""Fuzzes a daemon's sockets with mutated messages over many connections and checks that each reply is well-formed.

    python -m tests.support.socket_fuzzer '{"socket_path": ..., "num_messages": ..., ...}'    # see `Settings`

Most messages keep HTTP's framing, so that several can be pipelined on one connection and each must be answered; their
paths, parameters and bodies are corrupted. Others are corrupted anywhere, each on its own connection. In between come
corrupted clock requests, and valid messages so that jobs start, run and end. Prints the result as JSON; a malformed
reply ends the program with an error that shows it.
"""

import contextlib
import json
import os
import random
import re
import selectors
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import quote_from_bytes

from gpuenergyd.core.clock_request import ClockRequest, TimedClock
from gpuenergyd.wire.clock_request import RankClockRequest
from tests.support.clock_requests import encode_clock_request
from tests.support.mutations import mutated
from tests.support.registration import one_stage_registration
from tests.support.waiting import LIMIT_S

NUM_CONNECTIONS = 16
RAW_RATIO = 0.1
MAX_RAW_OPEN = 64
HALF_CLOSED_RATIO = 0.2
GOOD_RATIO = 0.15
AHEAD = 8
MICROBATCHES = 4
ANSWER_LIMIT_S = LIMIT_S
KNOWN_STATUSES = frozenset({200, 400, 403, 404, 405, 408, 409, 413, 414, 417, 429, 431, 500, 501, 503, 505})
FAILURES = frozenset({500})
PATHS = (
    b"/v1/status", b"/v1/metrics", b"/v1/openapi.json", b"/v1/jobs/nobody-0a1b2c", b"/discover", b"/time",
    b"/auth/whoami", b"/gpu/get_power?gpu_ids=0,1", b"/gpu/get_power_limit?gpu_ids=0", b"/gpu/get_cumulative_energy",
    b"/gpu/get_power_limit_constraints", b"/gpu/get_persistence_mode?gpu_ids=1",
)  # fmt: skip
CHANGES = (
    b"/gpu/set_power_limit?gpu_ids=0&power_limit_mw=300000&block=true",
    b"/gpu/set_gpu_locked_clocks?gpu_ids=0&min_clock_mhz=900&max_clock_mhz=900&block=true",
    b"/gpu/set_persistence_mode?gpu_ids=0&enabled=true&block=false",
    b"/gpu/reset_gpu_locked_clocks?gpu_ids=0,1&block=true",
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run."""

    socket_path: str
    clock_socket_path: str
    gpu_uuids: tuple[str, ...]
    num_messages: int
    """Number of corrupted messages."""
    seed: int
    uid: int | None = None
    """User id to run as."""
    asks_for_changes: bool = False
    """Also request leases and clocks, as a user without permission."""


@dataclass(slots=True)
class Connection:
    """A connection and its number of outstanding replies."""

    socket: socket.socket
    num_outstanding: int = 0
    is_framed: bool = True
    received: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class Fuzzer:
    """Counts of messages sent and replies received."""

    settings: Settings
    rng: random.Random
    tokens: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    refusals: set[str] = field(default_factory=set)
    num_sent: int = 0
    num_mutated: int = 0
    num_raw: int = 0
    num_raw_open: int = 0
    num_raw_answered: int = 0
    num_records: int = 0
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def run(self) -> None:
        """Send everything and wait for every reply."""
        for _ in range(NUM_CONNECTIONS):
            self.open()
        clocks = self.clock_socket()
        while self.selector.get_map():
            ready = self.selector.select(ANSWER_LIMIT_S)
            assert ready, f"no answer within {ANSWER_LIMIT_S} s"
            for key, _ in ready:
                connection: Connection = key.data
                is_open = self.read(connection)
                if not connection.is_framed:
                    self.num_raw_open -= not is_open
                elif not is_open:
                    self.open()
                elif connection.num_outstanding == 0:
                    self.send_more(connection)
            clocks = self.send_record(clocks)
        clocks.close()

    def open(self) -> None:
        """Open a connection and send its first messages."""
        self.send_more(self.connected(is_framed=True))

    def connected(self, *, is_framed: bool) -> Connection:
        connection = Connection(socket.socket(socket.AF_UNIX), is_framed=is_framed)
        connection.socket.connect(self.settings.socket_path)
        self.selector.register(connection.socket, selectors.EVENT_READ, connection)
        return connection

    def send_more(self, connection: Connection) -> None:
        """Send the next messages, or close the connection if there are none."""
        if self.num_mutated >= self.settings.num_messages:
            self.close(connection)
            return
        if self.num_raw < RAW_RATIO * self.num_sent and self.num_raw_open < MAX_RAW_OPEN:
            self.send_raw()
        connection.num_outstanding = AHEAD
        self.num_sent += AHEAD
        connection.socket.sendall(b"".join(self.framed() for _ in range(AHEAD)))

    def send_raw(self) -> None:
        """Send a message corrupted anywhere: the daemon replies, or closes the connection if the message never ends."""
        self.num_raw += 1
        self.num_raw_open += 1
        self.num_mutated += 1
        self.num_sent += 1
        connection = self.connected(is_framed=False)
        method, path, body = self.request()
        head = b"%s %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (method, path, len(body))
        with contextlib.suppress(OSError):  # already closed by the daemon
            connection.socket.sendall(mutated(head + body, self.rng))
            if self.rng.random() < HALF_CLOSED_RATIO:
                connection.socket.shutdown(socket.SHUT_WR)

    def close(self, connection: Connection) -> None:
        self.selector.unregister(connection.socket)
        connection.socket.close()

    # --- messages ---

    def request(self) -> tuple[bytes, bytes, bytes]:
        """Return method, path and body of a valid request."""
        if self.rng.random() < 0.25:
            return b"GET", self.rng.choice(PATHS), b""
        if self.settings.asks_for_changes and self.rng.random() < 0.4:
            if self.rng.random() < 0.5:
                return b"POST", self.rng.choice(CHANGES), b""
            asked = {"gpu": self.rng.choice(("0", *self.settings.gpu_uuids)), "sm_clock_mhz": 900, "is_dry_run": False}
            return b"POST", self.rng.choice((b"/v1/leases", b"/v1/leases/release")), json.dumps(asked).encode()
        token = self.rng.choice([*self.tokens[-8:], "00" * 16])
        messages: dict[bytes, dict[str, object]] = {
            b"/v1/ranks": self.registration(),
            b"/v1/iterations": self.report(token),
            b"/v1/pace": {"rank_token": token, "slowest_other_time_s": 0.2, "age_s": 0.1},
            b"/v1/release": {"rank_token": token},
        }
        path = self.rng.choices(tuple(messages), (2, 6, 1, 1))[0]
        return b"POST", path, json.dumps(messages[path]).encode()

    def framed(self) -> bytes:
        """Return a request, usually with corrupted path, parameters or body, and with correct framing."""
        method, path, body = self.request()
        is_good = self.rng.random() < GOOD_RATIO
        self.num_mutated += not is_good
        if body and not is_good:
            body = mutated(body, self.rng)
        elif not is_good:
            path = b"/" + quote_from_bytes(mutated(path, self.rng)[1:2000], safe="/?&=,%:.-_").encode()
        return b"%s %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (method, path, len(body)) + body

    def registration(self) -> dict[str, object]:
        """Return a rank that joins its own job or one with two ranks."""
        number = self.rng.randrange(1000)
        return one_stage_registration(
            self.rng.choice(self.settings.gpu_uuids),
            f"fuzz-{number % 4}",
            pp_rank=number % 2,
            num_pp_ranks=self.rng.choice((1, 2)),
            num_microbatches=MICROBATCHES,
            order=[["FB"[k % 2], k // 2, 0] for k in range(2 * MICROBATCHES)],
        )

    def report(self, token: str) -> dict[str, object]:
        """Return an iteration that has just ended."""
        end_ns = time.monotonic_ns()
        step_ns = 10_000_000
        begin_ns = end_ns - 2 * MICROBATCHES * step_ns
        rows = [
            ["FB"[k % 2], k // 2, 0, begin_ns + k * step_ns, begin_ns + (k + 1) * step_ns]
            for k in range(2 * MICROBATCHES)
        ]
        return {
            "rank_token": token,
            "iteration_index": self.num_sent,
            "plan_epoch": 0,
            "begin_mono_ns": begin_ns,
            "end_mono_ns": end_ns,
            "next_begin_mono_ns": end_ns,
            "instructions": rows,
        }

    def clock_socket(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(self.settings.clock_socket_path)
        connection.setblocking(False)
        return connection

    def send_record(self, connection: socket.socket) -> socket.socket:
        """Send a corrupted clock request; return the socket to use next, since the daemon closes hostile ones."""
        token = bytes.fromhex(self.rng.choice([*self.tokens[-8:], "00" * 16]))
        now_ns = time.monotonic_ns()
        request = ClockRequest(1200, now_ns, (TimedClock(1410, 0),), 1)
        record = bytearray(encode_clock_request(RankClockRequest(token, self.num_records + 1, request)))
        for _ in range(self.rng.choice((1, 2, 8))):
            record[self.rng.randrange(len(record))] = self.rng.randrange(256)
        try:
            connection.send(bytes(record[: self.rng.choice((48, 48, 48, 47, 1))]))
            self.num_records += 1
        except BlockingIOError:
            pass
        except OSError:
            connection.close()
            return self.clock_socket()
        return connection

    # --- replies ---

    def read(self, connection: Connection) -> bool:
        """Read replies; return whether the connection is still open."""
        try:
            data = connection.socket.recv(1 << 18)
        except ConnectionResetError:
            data = b""
        connection.received += data
        while (length := answer_length(connection.received, is_last=not data)) is not None:
            self.check(bytes(connection.received[:length]))
            del connection.received[:length]
            connection.num_outstanding -= connection.is_framed
            if not connection.is_framed:
                self.num_raw_answered += 1
                self.close(connection)
                return False
        if data:
            return True
        assert not connection.received, f"half an answer: {bytes(connection.received[:300])!r}"
        assert connection.num_outstanding <= 0, f"{connection.num_outstanding} requests were not answered"
        self.close(connection)
        return False

    def check(self, answer: bytes) -> None:
        head, _, body = answer.partition(b"\r\n\r\n")
        # The reply repeats the HTTP version of the request, which may be corrupted.
        assert re.match(rb"HTTP/\d\.\d \d{3} ", head), f"no HTTP: {answer[:200]!r}"
        status = int(head[9:12])
        assert status in KNOWN_STATUSES - FAILURES, f"status {status}: {answer[:500]!r}"
        assert b"Traceback" not in answer, answer[:500]
        self.statuses[status] += 1
        if b"application/json" not in head:
            return
        value = json.loads(body)
        if status >= 400:
            text = value.get("error") or next(iter(value["errors"].values()))
            assert "\n" not in text, text
            self.refusals.add(text[:40])
        elif isinstance(value, dict) and "rank_token" in value:
            self.tokens.append(value["rank_token"])


def answer_length(received: bytearray, *, is_last: bool) -> int | None:
    """Return the length of the first reply, None while incomplete; without Content-Length it extends to the end."""
    head, separator, _ = received.partition(b"\r\n\r\n")
    if not separator:
        return None
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    if not lengths:
        return len(received) if is_last and received else None
    length = len(head) + 4 + int(lengths[0].partition(b":")[2])
    return length if len(received) >= length else None


def main() -> int:
    settings = Settings(**json.loads(sys.argv[1]))
    if settings.uid is not None:
        os.setgroups([])
        os.setgid(settings.uid)
        os.setuid(settings.uid)
    fuzzer = Fuzzer(settings, random.Random(settings.seed))
    begun_s = time.monotonic()
    fuzzer.run()
    outcome = {
        "num_sent": fuzzer.num_sent,
        "num_mutated": fuzzer.num_mutated,
        "num_raw": fuzzer.num_raw,
        "num_raw_answered": fuzzer.num_raw_answered,
        "num_records": fuzzer.num_records,
        "num_answers": fuzzer.statuses.total(),
        "num_registered": len(fuzzer.tokens),
        "statuses": dict(sorted(fuzzer.statuses.items())),
        "num_kinds_of_refusal": len(fuzzer.refusals),
        "elapsed_s": round(time.monotonic() - begun_s, 1),
    }
    sys.stdout.write(json.dumps(outcome) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
