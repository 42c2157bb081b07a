"""The one thing a training process sends inside an iteration: 48 bytes that ask for a clock.

A record states an absolute wish, never a difference, so the next one heals a lost one. It may carry a second
wish for later: a raise ahead of need, timed by the receiver so that the sender need not wake up.
"""

import struct
from dataclasses import dataclass
from functools import partial

from gpuenergyd.errors import ProtocolError

_RECORD = struct.Struct("<HBxI16sIHHQQ")
_MAGIC = 0x6745
_VERSION = 1
RECORD_BYTES = _RECORD.size
pack_record = partial(_RECORD.pack, _MAGIC, _VERSION)
"""The fields of a ClockRecord in their order, as bytes: for the training thread, which makes no object of them."""
TOKEN_BYTES = 16


@dataclass(frozen=True, slots=True)
class ClockRecord:
    """A wish for one rank's GPU; a clock of 0 MHz means no wish. Instants are host monotonic ns."""

    sequence: int
    token: bytes
    plan_epoch: int
    sm_clock_mhz: int
    later_sm_clock_mhz: int
    later_at_mono_ns: int
    sent_mono_ns: int


def encode_record(record: ClockRecord) -> bytes:
    """Return the record's bytes."""
    return pack_record(
        record.sequence & 0xFFFFFFFF,
        record.token,
        record.plan_epoch,
        record.sm_clock_mhz,
        record.later_sm_clock_mhz,
        record.later_at_mono_ns,
        record.sent_mono_ns,
    )


def decode_record(data: bytes) -> ClockRecord:
    """Return the record in `data`.

    Raises:
        ProtocolError: wrong size, magic number or version.
    """
    if len(data) != RECORD_BYTES:
        raise ProtocolError(f"clock record of {len(data)} bytes; {RECORD_BYTES} are expected")
    magic, version, sequence, token, epoch, clock, later_clock, later_at, sent = _RECORD.unpack(data)
    if magic != _MAGIC or version != _VERSION:
        raise ProtocolError(
            f"clock record with magic {magic:#x} version {version}; {_MAGIC:#x} and {_VERSION} are expected"
        )
    return ClockRecord(sequence, token, epoch, clock, later_clock, later_at, sent)
