"""Encoding of clock requests: the datagram that a training process sends inside an iteration.

48 bytes hold a clock for now and one for later. The timetable of a captured graph adds eight bytes per further clock:
its delay after the sent instant in microseconds, and the clock.
"""

import struct
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from gpuenergyd.core.clock_request import MAX_LATER_CLOCKS, ClockRequest, TimedClock
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ProtocolError

_DATAGRAM = struct.Struct("<HBxI16sIHHQQ")
_FURTHER = struct.Struct("<IHxx")
_MAGIC = 0x6745
_VERSION = 1
_NS_PER_US = 1000
DATAGRAM_BYTES = _DATAGRAM.size
MAX_DATAGRAM_BYTES = DATAGRAM_BYTES + (MAX_LATER_CLOCKS - 1) * _FURTHER.size
TOKEN_BYTES = 16
pack_clock_request = partial(_DATAGRAM.pack, _MAGIC, _VERSION)
"""Return a datagram with (sequence, token, plan epoch, clock, later clock, later instant, sent instant).

It is meant for the training thread, and creates no other object per request.
"""


def fill_clock_request(datagram: bytes, sequence: int, later_at_mono_ns: int, sent_mono_ns: int) -> bytes:
    """Return a datagram with another number and other instants."""
    numbered = datagram[:4] + sequence.to_bytes(4, "little") + datagram[8:32]
    return numbered + struct.pack("<QQ", later_at_mono_ns, sent_mono_ns) + datagram[DATAGRAM_BYTES:]


def pack_further_clocks(clocks: Iterable[TimedClock], sent_mono_ns: int) -> bytes:
    """Return the part after a request's 48 bytes: further later clocks, with delays rounded up to a microsecond.

    Args:
        clocks: in order of their instants, all after `sent_mono_ns` by at most 2**32 us.
        sent_mono_ns: the sent instant of the request.
    """
    # Rounded up, so that no clock comes before the first later one, whose instant is exact.
    return b"".join(_FURTHER.pack(-((sent_mono_ns - c.at_mono_ns) // _NS_PER_US), c.sm_clock_mhz) for c in clocks)


class RankClockRequest(NamedTuple):
    """A clock request as received from a rank, with the rank's token and the request's sequence number."""

    token: bytes
    sequence: int
    request: ClockRequest


def decode_clock_request(datagram: bytes) -> RankClockRequest:
    """Return the request in a datagram.

    Raises:
        ProtocolError: wrong size, magic number or version; further clocks without a first one, or not in order.
    """
    size = len(datagram)
    if size < DATAGRAM_BYTES or size > MAX_DATAGRAM_BYTES or (size - DATAGRAM_BYTES) % _FURTHER.size:
        raise ProtocolError(
            f"clock request has {count_text(size, 'byte')}; expected {DATAGRAM_BYTES}, or up to {MAX_DATAGRAM_BYTES} in"
            f" steps of {_FURTHER.size}"
        )
    magic, version, sequence, token, epoch, clock, later_clock, later_at, sent = _DATAGRAM.unpack_from(datagram)
    if magic != _MAGIC or version != _VERSION:
        raise ProtocolError(
            f"clock request has magic number {magic:#x}, version {version}; expected {_MAGIC:#x}, {_VERSION}"
        )
    later: tuple[TimedClock, ...] = (TimedClock(later_clock, later_at),) if later_clock else ()
    if size > DATAGRAM_BYTES:
        further = _FURTHER.iter_unpack(datagram[DATAGRAM_BYTES:])
        later += tuple(TimedClock(mhz, sent + delay_us * _NS_PER_US) for delay_us, mhz in further)
        if not later_clock or any(b.at_mono_ns < a.at_mono_ns for a, b in pairwise(later)):
            raise ProtocolError("the later clocks of a request are not in order of their instants")
    return RankClockRequest(token, sequence, ClockRequest(clock, sent, later, epoch))
