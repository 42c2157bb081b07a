"""Encoding of clock requests: the 48-byte datagram that a training process sends inside an iteration."""

import struct
from functools import partial
from typing import NamedTuple

from gpuenergyd.core.clock_request import ClockRequest
from gpuenergyd.errors import ProtocolError

_DATAGRAM = struct.Struct("<HBxI16sIHHQQ")
_MAGIC = 0x6745
_VERSION = 1
DATAGRAM_BYTES = _DATAGRAM.size
TOKEN_BYTES = 16
pack_clock_request = partial(_DATAGRAM.pack, _MAGIC, _VERSION)
"""Return a datagram of (sequence, token, plan epoch, clock, later clock, later instant, sent instant).

For the training thread, which creates no other object per request.
"""


class RankClockRequest(NamedTuple):
    """A clock request as received from a rank: with the rank's token and the position among its requests."""

    token: bytes
    sequence: int
    request: ClockRequest


def decode_clock_request(datagram: bytes) -> RankClockRequest:
    """Return the request in a datagram.

    Raises:
        ProtocolError: wrong size, magic number or version.
    """
    if len(datagram) != DATAGRAM_BYTES:
        raise ProtocolError(f"clock request has {len(datagram)} bytes; expected {DATAGRAM_BYTES}")
    magic, version, sequence, token, epoch, clock, later_clock, later_at, sent = _DATAGRAM.unpack(datagram)
    if magic != _MAGIC or version != _VERSION:
        raise ProtocolError(
            f"clock request has magic number {magic:#x}, version {version}; expected {_MAGIC:#x}, {_VERSION}"
        )
    return RankClockRequest(token, sequence, ClockRequest(clock, sent, later_clock, later_at, epoch))
