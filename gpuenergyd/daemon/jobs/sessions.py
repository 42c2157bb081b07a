"""Registered training processes: each is identified by its token and watched for gaps in its reports until it ends.

Programs do other work between iterations, or within one, without marking it as a pause: generation with another model,
a checkpoint, evaluation of a submodule. During that, the rank would stay at the clock that its plan requested last,
which may be the low clock of a wait. So when a report is late, the rank is raised to full speed.
"""

import asyncio
import hmac
import logging
import os
import select
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from gpuenergyd.daemon.jobs.runner import JobRunner
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.daemon.runtime.process_end import ProcessEnd, process_end
from gpuenergyd.wire.messages import JobFigures

log = logging.getLogger(__name__)


_LATE_RATIO = 1.5
"""The next report or clock request is late after this multiple of the usual iteration time."""
_MARGIN_S = 0.1
"""Allowance for the time that reports wait in the client's and the daemon's loops."""
_ITERATIONS_KEPT = 8
_MIN_KNOWN = 2
"""Iterations needed before the usual iteration time is known."""
_NS_PER_S = 1e9


@dataclass(slots=True)
class GapWatch:
    """Calls `raise_clock` in each pause of one rank, and in each gap without its reports and clock requests.

    Iterations of a few milliseconds are reported together, ten times a second: then requests show that there is no gap.
    """

    raise_clock: Callable[[], None]
    _times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_ITERATIONS_KEPT))
    _timer: asyncio.TimerHandle | None = None

    @property
    def limit_s(self) -> float | None:
        """Time without a sign of the rank after which it is in a gap; None while too few iterations are known.

        The usual time is the second longest of those kept, since the longest may contain a gap.
        """
        if len(self._times_s) < _MIN_KNOWN:
            return None
        return _LATE_RATIO * sorted(self._times_s)[-2] + _MARGIN_S

    def reported(self, begin_ns: int, next_begin_ns: int) -> None:
        """Handle a report: the next iteration has begun, or a pause if `next_begin_ns` is 0."""
        if next_begin_ns:
            self._times_s.append((next_begin_ns - begin_ns) / _NS_PER_S)
            self._wait()
        else:  # the client has also requested full speed, but its request may have been dropped
            self._gap_found()

    def requested(self) -> None:
        """Handle a clock request of the rank, which may lower the clock again within a gap."""
        self._wait()

    def stop(self) -> None:
        """Stop waiting for the rank."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _wait(self) -> None:
        self.stop()
        if (limit_s := self.limit_s) is not None:
            self._timer = asyncio.get_running_loop().call_later(limit_s, self._gap_found)

    def _gap_found(self) -> None:
        self.stop()
        self.raise_clock()


@dataclass(slots=True)
class RankSession:
    """The session of one registered training process."""

    token: bytes
    runner: JobRunner
    pp_rank: int
    gpu_uuid: str
    peer: PeerCredentials
    pidfd: int
    supported_sm_clocks_mhz: frozenset[int]
    last_sequence: int = 0
    stage_rank: int = 0
    gaps: GapWatch = field(init=False)
    captured: str = ""
    """How clocks were set in the newest iteration if it replayed a CUDA graph; else empty."""
    figures: JobFigures | None = None
    """The figures of its job that the rank was sent last."""

    def new_figures(self, now_mono_ns: int) -> JobFigures | None:
        """Return the job's figures to send; None if the rank was sent them already."""
        figures = self.runner.recorder.figures.at(now_mono_ns)
        if figures is self.figures:
            return None
        self.figures = figures
        return figures

    @property
    def rank_index(self) -> int:
        """Number of the rank among all ranks of its job."""
        return self.runner.job.description.rank_index(self.pp_rank, self.stage_rank)

    @property
    def rank_name(self) -> str:
        return self.runner.job.description.rank_name(self.pp_rank, self.stage_rank)


@dataclass(slots=True)
class RankSessions:
    """All sessions, owned by the event loop.

    `on_end` is called when a process has ended without leaving its job, `on_gap` when its next report is late.
    """

    on_end: Callable[[RankSession, ProcessEnd], None]
    on_gap: Callable[[RankSession], None]
    _by_token: dict[bytes, RankSession] = field(default_factory=dict)
    _by_job: dict[str, list[RankSession]] = field(default_factory=dict)
    _num_of_user: Counter[int] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[RankSession]:
        return iter(list(self._by_token.values()))

    def add(self, session: RankSession) -> None:
        """Add a session, which owns its pidfd from now on."""
        self._by_token[session.token] = session
        of_job = self._by_job.setdefault(session.runner.job_id, [])
        of_job.append(session)
        of_job.sort(key=lambda member: member.rank_index)
        self._num_of_user[session.peer.uid] += 1
        session.gaps = GapWatch(partial(self.on_gap, session))
        runner = session.runner
        runner.leases.pidfds[session.rank_index] = session.pidfd
        runner.pids[session.rank_index] = session.peer.pid
        asyncio.get_running_loop().add_reader(session.pidfd, self._ended, session)

    def remove(self, session: RankSession) -> None:
        """Remove a session and close its pidfd."""
        if self._by_token.pop(session.token, None) is not None:
            self._num_of_user[session.peer.uid] -= 1
            job_id = session.runner.job_id
            self._by_job[job_id].remove(session)
            if not self._by_job[job_id]:
                del self._by_job[job_id]
            session.gaps.stop()
            session.runner.leases.pidfds.pop(session.rank_index, None)
            session.runner.pids.pop(session.rank_index, None)
            asyncio.get_running_loop().remove_reader(session.pidfd)
            os.close(session.pidfd)

    def of_job(self, job_id: str) -> tuple[RankSession, ...]:
        return tuple(self._by_job.get(job_id, ()))

    def num_of_user(self, uid: int) -> int:
        """Return the number of registered processes of a user."""
        return self._num_of_user[uid]

    def of_token(self, token: bytes, peer: PeerCredentials) -> RankSession | None:
        """Return the session of a token if it belongs to the sender; None otherwise."""
        session = self._by_token.get(token)
        if session is None or not hmac.compare_digest(session.token, token) or session.peer.uid != peer.uid:
            return None
        return session

    def of_hex_token(self, rank_token: str, peer: PeerCredentials) -> RankSession | None:
        """Return the session of a hexadecimal token, the form used in messages, if it belongs to the sender."""
        try:
            token = bytes.fromhex(rank_token)
        except ValueError:
            return None
        return self.of_token(token, peer)

    def _ended(self, session: RankSession) -> None:
        """Handle the ends of a job's processes, those that may have caused the others' ends first."""
        ended = select.poll()
        ranks = {member.pidfd: member for member in self.of_job(session.runner.job_id)}
        for pidfd in ranks:
            ended.register(pidfd, select.POLLIN)
        ends = [(ranks[pidfd], process_end(ranks[pidfd].peer.pid, pidfd)) for pidfd, _ in ended.poll(0)]
        for member, end in sorted(ends, key=lambda each: not each[1].is_cause):
            if member.token in self._by_token:  # the end of one may have ended the job
                self._end(member, end)

    def _end(self, session: RankSession, end: ProcessEnd) -> None:
        what = f"{'failed' if end.is_failure else 'ended without leaving the job'}: its process {end.text}"
        log.info(
            "job %s: %s %s (%s)",
            session.runner.job_id,
            session.rank_name,
            what if end.text else "ended without leaving the job",
            session.peer,
        )
        self.remove(session)
        self.on_end(session, end)
