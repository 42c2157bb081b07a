"""The training processes that have registered: known by their tokens, watched by their pidfds."""

import asyncio
import hmac
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gpuenergyd.daemon.jobs.runner import JobRunner
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RankSession:
    """One training process that has registered."""

    token: bytes
    runner: JobRunner
    pp_rank: int
    gpu_uuid: str
    peer: PeerCredentials
    pidfd: int
    supported_sm_clocks_mhz: frozenset[int]
    last_sequence: int = 0


@dataclass(slots=True)
class RankSessions:
    """All of them, owned by the event loop; `on_death` hears of a process that died while it was registered."""

    on_death: Callable[[RankSession], None]
    _by_token: dict[bytes, RankSession] = field(default_factory=dict)

    def __iter__(self) -> Iterator[RankSession]:
        return iter(list(self._by_token.values()))

    def add(self, session: RankSession) -> None:
        """Know a process from now on; its pidfd is ours."""
        self._by_token[session.token] = session
        runner = session.runner
        runner.clocks.pidfds[session.pp_rank] = session.pidfd
        runner.pids[session.pp_rank] = session.peer.pid
        asyncio.get_running_loop().add_reader(session.pidfd, self._died, session)

    def forget(self, session: RankSession) -> None:
        """Know a process no more."""
        if self._by_token.pop(session.token, None) is not None:
            session.runner.clocks.pidfds.pop(session.pp_rank, None)
            session.runner.pids.pop(session.pp_rank, None)
            asyncio.get_running_loop().remove_reader(session.pidfd)
            os.close(session.pidfd)

    def of_job(self, job_id: str) -> tuple[RankSession, ...]:
        """Return the processes of a job, by rank."""
        mine = [s for s in self._by_token.values() if s.runner.job_id == job_id]
        return tuple(sorted(mine, key=lambda s: s.pp_rank))

    def num_of(self, uid: int) -> int:
        """Return how many processes of a user are registered."""
        return sum(s.peer.uid == uid for s in self._by_token.values())

    def of_token(self, token: bytes, peer: PeerCredentials) -> RankSession | None:
        """Return the session of a token that belongs to its sender; None for any other."""
        session = self._by_token.get(token)
        if session is None or not hmac.compare_digest(session.token, token) or session.peer.uid != peer.uid:
            return None
        return session

    def of_text(self, rank_token: str, peer: PeerCredentials) -> RankSession | None:
        """Return the same for a token as messages carry it."""
        try:
            token = bytes.fromhex(rank_token)
        except ValueError:
            return None
        return self.of_token(token, peer)

    def _died(self, session: RankSession) -> None:
        log.info("job %s: rank %d died (%s)", session.runner.job_id, session.pp_rank, session.peer)
        self.forget(session)
        self.on_death(session)
