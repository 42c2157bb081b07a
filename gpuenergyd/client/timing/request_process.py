"""Process of its own that sends a rank's clock requests when the GPU reaches them; started by `watched_requests`.

It does not share the interpreter of the training, so that its looks at the memory cost the training nothing. It uses
the connected socket that the training process passes to it, so that requests count as those of the training process. It
ends when the training process closes its end of the control socket, as it does at its own end, however that comes.
"""

import contextlib
import mmap
import os
import runpy
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_CONTROL_EVERY_POLLS = 64
_WORD_MASK = 0xFFFFFFFF
_SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class _ClockSocket:
    """The socket to send on: the newest that the training process has passed."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._number = 0
        self.is_open = True
        self.newest: socket.socket | None = None

    def acquire(self) -> None:
        """Receive what has been passed."""
        with contextlib.suppress(BlockingIOError):
            while self.is_open:
                data, descriptors, _, _ = socket.recv_fds(self._control, 64, 16)
                self.is_open = bool(data)
                for descriptor in descriptors:
                    self.newest = socket.socket(fileno=descriptor)
                    self._number += 1

    def is_outdated(self, number: int) -> bool:
        """Return whether the socket of this number has not been received yet."""
        return self._number < number


def watch(memory: mmap.mmap, control: socket.socket, layout: Any) -> None:
    """Send requests until the control socket is closed."""
    words = memoryview(memory).cast("I")
    clock_socket = _ClockSocket(control)
    num_polls = num_idle = 0
    parent_pid = os.getppid()
    while clock_socket.is_open and not words[layout.SHALL_STOP]:
        num_polls += 1
        num_idle += 1
        if num_polls % _CONTROL_EVERY_POLLS == 0:
            if os.getppid() != parent_pid:  # a process that it forked may hold the control socket open
                return
            clock_socket.acquire()
        while words[layout.SENT] != words[layout.PUT]:
            due = (words[layout.SENT] + 1) & _WORD_MASK
            if (words[layout.REACHED] - due) & _WORD_MASK >= 1 << 31:
                break
            if clock_socket.is_outdated(words[layout.SOCKET_NUMBER]):
                clock_socket.acquire()
            _send(memory, words, layout, due, clock_socket.newest)
            words[layout.SENT] = due
            num_idle = 0
        quiet_s = layout.QUIET_POLL_S if num_idle < layout.IDLE_AFTER_POLLS else layout.IDLE_POLL_S
        time.sleep(quiet_s if words[layout.SENT] == words[layout.PUT] else layout.POLL_S)


def _send(memory: mmap.mmap, words: Any, layout: Any, number: int, clock_socket: socket.socket | None) -> None:
    begin = layout.SLOTS_OFFSET + number % layout.NUM_SLOTS * layout.SLOT_BYTES
    length, later_delay_ns = struct.unpack_from(layout.SLOT_HEAD, memory, begin)
    begin += layout.SLOT_HEAD_BYTES
    now_ns = time.monotonic_ns()
    later_ns = now_ns + later_delay_ns if later_delay_ns else 0
    struct.pack_into(layout.INSTANTS, memory, begin + layout.INSTANTS_OFFSET, later_ns, now_ns)
    try:
        if clock_socket is None:
            raise BlockingIOError
        clock_socket.send(memory[begin : begin + length], _SEND_FLAGS)
    except OSError as error:
        words[layout.DROPPED] += 1
        words[layout.IS_BROKEN] |= not isinstance(error, BlockingIOError)


def main(memory_descriptor: int, control_descriptor: int) -> None:
    """Watch the memory behind a descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's, for the training
    layout = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("request_memory.py"))))
    with socket.socket(fileno=control_descriptor) as control:
        control.setblocking(False)
        with contextlib.suppress(ConnectionError):
            watch(mmap.mmap(memory_descriptor, layout.MEMORY_BYTES), control, layout)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
