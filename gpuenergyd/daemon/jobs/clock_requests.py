"""Admission of clock requests: forwards them to the GPU worker, and counts stale and hostile ones."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from gpuenergyd.core.clock_request import ClockRequest
from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd.daemon.jobs.runner import JobRunner
from gpuenergyd.daemon.jobs.sessions import RankSession, RankSessions
from gpuenergyd.daemon.ports import JobServices
from gpuenergyd.daemon.registration import CLOCK_SKEW_NS, OLDEST_INSTANT_NS
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.wire.clock_request import RankClockRequest

_MAX_LATER_NS = 3600 * 1_000_000_000


class Admission(StrEnum):
    """The outcome of a clock request."""

    FORWARDED = "forwarded"
    STALE = "stale"
    """The request is from a plan that is no longer in force: the sender has not received the next one yet."""
    HOSTILE = "hostile"
    """A well-behaved client never sends this."""


@dataclass(slots=True)
class ClockRequests:
    """Forwards clock requests of registered ranks to the GPU worker, and counts those it rejects."""

    services: JobServices
    sessions: RankSessions
    resume: Callable[[JobRunner], None]
    """Leases the GPUs of an idle job again, whose program has gone on: it reports only after an iteration."""
    num_hostile: int = 0
    num_stale: int = 0

    def admit(self, rank_request: RankClockRequest, peer: PeerCredentials) -> Admission:
        """Check a clock request and forward it to the GPU worker."""
        session = self.sessions.of_token(rank_request.token, peer)
        if session is None or not _is_possible(rank_request, session):
            return self.count_hostile()
        request = rank_request.request
        session.last_sequence = rank_request.sequence
        if session.runner.leases.is_suspended:
            self.resume(session.runner)
        if Lever.CLOCKS not in self.services.levers or not session.runner.leases.accept(request.plan_epoch):
            self.num_stale += 1
            return Admission.STALE
        gpu = self.services.gpus[session.gpu_uuid]
        gpu.requested_sm_clock_mhz = request.first_sm_clock_mhz
        self.services.worker.request_clock(session.gpu_uuid, request)
        session.gaps.requested()
        return Admission.FORWARDED

    def request_full_speed(self, session: RankSession) -> None:
        """Request the highest clock for a rank whose next iteration is late; the rank's next request replaces it."""
        plan_epoch, top_mhz = session.runner.delivery.last_epoch, max(session.supported_sm_clocks_mhz, default=0)
        if Lever.CLOCKS in self.services.levers and session.runner.leases.accept(plan_epoch) and top_mhz:
            self.services.gpus[session.gpu_uuid].requested_sm_clock_mhz = top_mhz
            request = ClockRequest(top_mhz, time.monotonic_ns(), plan_epoch=plan_epoch)
            self.services.worker.request_clock(session.gpu_uuid, request)

    def count_hostile(self) -> Admission:
        """Count a request that no well-behaved client sends."""
        self.num_hostile += 1
        return Admission.HOSTILE


def _is_possible(rank_request: RankClockRequest, session: RankSession) -> bool:
    """Return whether a well-behaved client in this session could have sent the request."""
    request = rank_request.request
    now_ns = time.monotonic_ns()
    clocks = {clock for clock in (request.sm_clock_mhz, *(c.sm_clock_mhz for c in request.later)) if clock}
    return (
        0 < (rank_request.sequence - session.last_sequence) % 2**32 < 2**31
        and bool(clocks)
        and clocks <= session.supported_sm_clocks_mhz
        and request.plan_epoch <= session.runner.delivery.last_epoch
        and now_ns - OLDEST_INSTANT_NS < request.sent_mono_ns <= now_ns + CLOCK_SKEW_NS
        and all(later.sm_clock_mhz and later.at_mono_ns <= now_ns + _MAX_LATER_NS for later in request.later)
    )
