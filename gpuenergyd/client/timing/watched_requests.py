"""Sends clock requests when the GPU has written their number into host memory, without polling events.

The training thread puts a request into memory that it shares with a watcher, and a write of the request's number on the
stream. The watcher looks at the memory, which needs no interpreter: it is a compiled thread
where one can be built, else a process of its own.
"""

import ctypes
import mmap
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Protocol

from gpuenergyd.client.timing import request_memory as layout
from gpuenergyd.client.timing.compiled_thread import NotCompiledError, start_compiled_thread
from gpuenergyd.client.timing.stream_requests import PlannedRequest
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.log_lines import safe_logger

StreamWrite = Callable[[int], bool]
"""Has the stream write a number into the first word of the memory; returns False if the device refuses."""
MapMemory = Callable[[int, int], StreamWrite]
"""Makes memory at an address, of a size in bytes, writable for the device; on the training thread. May raise."""

_SLOT_HEAD, _SEQUENCE = struct.Struct(layout.SLOT_HEAD), struct.Struct(layout.SEQUENCE)
_WORD_MASK = 0xFFFFFFFF
_mapped_for_good: list[mmap.mmap] = []
"""The device may write after the client has left, so the memory is never unmapped."""

logger = safe_logger("gpuenergyd.client")


class _Watcher(Protocol):
    def use_socket(self, clock_socket: socket.socket, words: memoryview) -> None:
        """Send on this socket from now on."""
        ...

    def close(self) -> None: ...


class _CompiledThread:
    def __init__(self, memory_descriptor: int) -> None:
        start_compiled_thread(memory_descriptor)
        self._held: list[int] = []

    def use_socket(self, clock_socket: socket.socket, words: memoryview) -> None:
        """Send on a copy of this socket; the copy before it stays open, since the thread may be using it."""
        self._held.append(os.dup(clock_socket.fileno()))
        words[layout.SOCKET] = self._held[-1]
        while len(self._held) > 2:
            os.close(self._held.pop(0))

    def close(self) -> None:
        """Close the earlier copy; the thread closes the one in use when it sees the end."""
        for descriptor in self._held[:-1]:
            os.close(descriptor)


class _WatchingProcess:
    def __init__(self, memory_descriptor: int) -> None:
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        program = str(Path(__file__).with_name("request_process.py"))
        descriptors = (memory_descriptor, theirs.fileno())
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", program, *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def use_socket(self, clock_socket: socket.socket, words: memoryview) -> None:
        """Pass the process a copy of this socket."""
        socket.send_fds(self._control, [b"socket"], [clock_socket.fileno()])
        words[layout.SOCKET_NUMBER] += 1

    def close(self) -> None:
        """End the process, without waiting for what it does."""
        self._control.close()
        self._process.kill()
        self._process.wait()


class WatchedRequests:
    """The requests of one rank on the current stream of its device."""

    def __init__(self, map_memory: MapMemory) -> None:
        """Start the watcher; not on the training thread.

        Raises:
            OSError: neither a thread nor a process can be started.
        """
        self._map_memory = map_memory
        self._write: StreamWrite | None = None
        self._socket: socket.socket | None = None
        self._number = self._num_dropped = self._num_reported = 0
        self._is_closed = False
        self._prepared: list[PlannedRequest] = []
        """Requests whose slots are already filled in, for the next puts; the next one comes last."""
        descriptor = os.memfd_create("gpuenergyd-requests")
        try:
            os.ftruncate(descriptor, layout.MEMORY_BYTES)
            self._memory = mmap.mmap(descriptor, layout.MEMORY_BYTES)
            self._words = memoryview(self._memory).cast("I")
            self._watcher: _Watcher = _start_watcher(descriptor)
        finally:
            os.close(descriptor)
        _mapped_for_good.append(self._memory)

    @property
    def is_compiled(self) -> bool:
        """Whether the watcher is the compiled thread."""
        return isinstance(self._watcher, _CompiledThread)

    def put(self, request: PlannedRequest) -> bool:
        if self._is_closed:
            return False
        words, prepared = self._words, self._prepared
        number = (self._number + 1) & _WORD_MASK
        if words[layout.IS_BROKEN] or not prepared or prepared.pop() is not request:
            prepared.clear()
            if not self._num_free:
                self._num_dropped += 1
                return True
            if not self._fill(request, number):
                return True
        words[layout.PUT] = self._number = number
        try:
            if self._write is None:
                address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
                self._write = self._map_memory(address, layout.MEMORY_BYTES)
            if self._write(number):
                return True
            reason = "the device refuses"
        except (OSError, AttributeError, GpuEnergyError) as error:
            reason = str(error)
        logger.info("gpuenergyd: the GPU cannot write its progress (%s); its events are asked instead", reason)
        self.close()
        return False

    def prepare(self, requests: Iterable[PlannedRequest]) -> None:
        """Fill in the next requests to be put, in this order, as many as there is room for."""
        prepared: list[PlannedRequest] = []
        for request in islice(requests, self._num_free):
            if not self._fill(request, self._number + 1 + len(prepared)):
                break
            prepared.append(request)
        self._prepared = prepared[::-1]

    @property
    def _num_free(self) -> int:
        return layout.NUM_SLOTS - ((self._number - self._words[layout.SENT]) & _WORD_MASK)

    def _fill(self, request: PlannedRequest, number: int) -> bool:
        """Fill in the slot of a number; return False if the request cannot be sent at present."""
        words, memory = self._words, self._memory
        if words[layout.IS_BROKEN]:
            words[layout.IS_BROKEN] = 0
            request.give_up_socket()
        datagram = request.datagram()
        if datagram is None:
            return False
        data, sequence, later_delay_ns, clock_socket = datagram
        if clock_socket is not self._socket:
            self._watcher.use_socket(clock_socket, words)
            self._socket = clock_socket
        begin = layout.SLOTS_OFFSET + number % layout.NUM_SLOTS * layout.SLOT_BYTES
        _SLOT_HEAD.pack_into(memory, begin, len(data), later_delay_ns)
        begin += layout.SLOT_HEAD_BYTES
        memory[begin : begin + len(data)] = data
        _SEQUENCE.pack_into(memory, begin + layout.SEQUENCE_OFFSET, sequence)
        return True

    def pop_num_dropped(self) -> int:
        total = self._num_dropped + self._words[layout.DROPPED]
        num_new, self._num_reported = total - self._num_reported, total
        return num_new

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._words[layout.SHALL_STOP] = 1
            self._watcher.close()


def _start_watcher(memory_descriptor: int) -> _Watcher:
    try:
        return _CompiledThread(memory_descriptor)
    except NotCompiledError as error:
        logger.info("gpuenergyd: clock requests are sent by a process, not by a compiled thread: %s", error)
    return _WatchingProcess(memory_descriptor)
