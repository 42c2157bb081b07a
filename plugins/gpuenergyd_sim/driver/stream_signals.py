"""Signals between the streams of simulated GPUs, as a collective library passes them: a file mapped by all processes.

A channel has one sender and one receiver. The sender counts its signals and keeps the instants of the newest ones; the
receiver waits for the n-th.
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
    """The channels of one training, in a file that all its processes open; `num_channels` is the same in all."""

    def __init__(self, path: Path, num_channels: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, num_channels * _CHANNEL_BYTES)
            self._map = mmap.mmap(fd, num_channels * _CHANNEL_BYTES)
        finally:
            os.close(fd)

    def send(self, channel: int, mono_ns: int) -> None:
        """Send the next signal of a channel, given at this instant."""
        begin = channel * _CHANNEL_BYTES
        (count,) = _COUNT.unpack_from(self._map, begin)
        _INSTANT.pack_into(self._map, begin + _COUNT.size + count % _NUM_KEPT * _INSTANT.size, mono_ns)
        _COUNT.pack_into(self._map, begin, count + 1)  # last: who sees the count finds the instant

    def instant_ns(self, channel: int, number: int) -> int | None:
        """Return when the signal with this number, from 0 on, was given; None if it has not been given yet."""
        begin = channel * _CHANNEL_BYTES
        (count,) = _COUNT.unpack_from(self._map, begin)
        if count <= number:
            return None
        (mono_ns,) = _INSTANT.unpack_from(self._map, begin + _COUNT.size + number % _NUM_KEPT * _INSTANT.size)
        return int(mono_ns)

    def pause(  # only processes that share memory alone have to look again and again
        self,
        channel: int,  # noqa: ARG002  for subclasses
        number: int,  # noqa: ARG002  for subclasses
        *,
        limit_s: float,
        sleep: Callable[[float], None],
    ) -> None:
        """Wait until it is worth looking for a signal again, at most for a time."""
        sleep(min(limit_s, _POLL_S))

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()
