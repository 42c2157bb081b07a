"""Signals between the streams of simulated GPUs, like those of a collective library, in a file mapped by all processes.

A channel has one sender and one receiver. The sender counts its signals and stores the times of the newest ones; the
receiver waits for the n-th signal.
"""

import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path

_NUM_KEPT = 256
_POLL_S = 0.0005
_COUNT = struct.Struct("<Q")
_INSTANT = struct.Struct("<q")
_CHANNEL_BYTES = _COUNT.size + _NUM_KEPT * _INSTANT.size


class StreamSignals:
    """The channels of one training, in a file that all its processes open with the same `num_channels`."""

    def __init__(self, path: Path, num_channels: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, num_channels * _CHANNEL_BYTES)
            self._map = mmap.mmap(fd, num_channels * _CHANNEL_BYTES)
        finally:
            os.close(fd)

    def send(self, channel: int, mono_ns: int) -> None:
        """Send the next signal of a channel, with this time."""
        begin = channel * _CHANNEL_BYTES
        (count,) = _COUNT.unpack_from(self._map, begin)
        _INSTANT.pack_into(self._map, begin + _COUNT.size + count % _NUM_KEPT * _INSTANT.size, mono_ns)
        _COUNT.pack_into(self._map, begin, count + 1)  # last, so that a receiver that sees it can read the time

    def instant_ns(self, channel: int, number: int) -> int | None:
        """Return the time of the signal with this number, counted from 0; None if it has not been sent yet."""
        begin = channel * _CHANNEL_BYTES
        (count,) = _COUNT.unpack_from(self._map, begin)
        if count <= number:
            return None
        (mono_ns,) = _INSTANT.unpack_from(self._map, begin + _COUNT.size + number % _NUM_KEPT * _INSTANT.size)
        return int(mono_ns)

    def pause(  # overridden where the sender can wake the receiver; through shared memory it has to poll
        self,
        channel: int,  # noqa: ARG002  for subclasses
        number: int,  # noqa: ARG002  for subclasses
        *,
        limit_s: float,
        sleep: Callable[[float], None],
    ) -> None:
        """Wait before the next look for a signal, at most `limit_s`."""
        sleep(min(limit_s, _POLL_S))

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()
