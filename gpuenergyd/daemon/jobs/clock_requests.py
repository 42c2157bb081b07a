"""Clock records: which wishes of training processes reach the worker, and which are stale or hostile."""

import time
from dataclasses import dataclass
from enum import StrEnum

from gpuenergyd.daemon.jobs.sessions import RankSessions
from gpuenergyd.daemon.ports import JobServices
from gpuenergyd.daemon.registration.validation import CLOCK_SKEW_NS, OLDEST_INSTANT_NS
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.wire.clock_record import ClockRecord

_MAX_LATER_NS = 3600 * 1_000_000_000


class Wish(StrEnum):
    """What became of a clock record."""

    TAKEN = "taken"
    STALE = "stale"
    """From a plan that no longer counts: the sender has not heard of the next one yet."""
    HOSTILE = "hostile"
    """No well-behaved client sends this."""


@dataclass(slots=True)
class ClockRecords:
    """Passes wishes on, and counts those that it does not."""

    services: JobServices
    sessions: RankSessions
    num_hostile: int = 0
    num_stale: int = 0

    def take(self, record: ClockRecord, peer: PeerCredentials) -> Wish:
        """Check a clock record and pass its wish on to the worker."""
        session = self.sessions.of_token(record.token, peer)
        if session is None:
            return self.note_hostile()
        now_ns = time.monotonic_ns()
        clocks = {clock for clock in (record.sm_clock_mhz, record.later_sm_clock_mhz) if clock}
        is_possible = (
            0 < (record.sequence - session.last_sequence) % 2**32 < 2**31
            and clocks
            and clocks <= session.supported_sm_clocks_mhz
            and record.plan_epoch <= session.runner.slices.last_epoch
            and now_ns - OLDEST_INSTANT_NS < record.sent_mono_ns <= now_ns + CLOCK_SKEW_NS
            and record.later_at_mono_ns <= now_ns + _MAX_LATER_NS
        )
        if not is_possible:
            return self.note_hostile()
        session.last_sequence = record.sequence
        if not session.runner.clocks.accept(record.plan_epoch):
            self.num_stale += 1
            return Wish.STALE
        gpu = self.services.gpus[session.gpu_uuid]
        gpu.requested_sm_clock_mhz = record.sm_clock_mhz or record.later_sm_clock_mhz
        self.services.worker.want(
            session.gpu_uuid,
            record.sm_clock_mhz,
            later_sm_clock_mhz=record.later_sm_clock_mhz,
            later_at_mono_ns=record.later_at_mono_ns,
            asked_mono_ns=record.sent_mono_ns,
            reason=f"{session.runner.job_id} epoch {record.plan_epoch}",
        )
        return Wish.TAKEN

    def note_hostile(self) -> Wish:
        """Count a record that no well-behaved client sends."""
        self.num_hostile += 1
        return Wish.HOSTILE
