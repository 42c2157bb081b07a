"""Layout of the shared memory that holds the GPU's progress and the clock requests that wait for it.

Used by the training process, by `request_process`, which runs without this package, and by the compiled thread. Words
are unsigned, of 32 bits, in the host's order of bytes. Requests have consecutive numbers from 1; each waits in the slot
of its number until the GPU has written that number or a later one.
"""

NUM_SLOTS = 64
SLOTS_OFFSET = 4096
SLOT_BYTES = 1024
MEMORY_BYTES = SLOTS_OFFSET + NUM_SLOTS * SLOT_BYTES
REACHED, PUT, SENT, DROPPED, IS_BROKEN, SHALL_STOP, SOCKET_NUMBER, SOCKET = range(8)
"""Words: the number that the GPU has written; the newest request put and sent; requests that could not be sent; whether
the socket is broken; whether to end; how often the socket has changed; and its descriptor, for the compiled thread."""
SLOT_HEAD = "=I4xQ"
"""Length of the datagram, and delay in ns of its later clock after the sent instant, 0 without one."""
SLOT_HEAD_BYTES = 16
SEQUENCE, SEQUENCE_OFFSET = "<I", 4
"""Number of the request, in a datagram; see `gpuenergyd.wire.clock_request`."""
INSTANTS = "<QQ"
"""Instants of the later clock and of sending, in a datagram."""
INSTANTS_OFFSET = 32
POLL_S = 0.001
COMPILED_POLL_S = 0.0005
"""Times between two looks while the GPU has not reached a request that was put."""
QUIET_POLL_S = 0.002
"""The same while there is none. Where a request can be late by this, the GPU waits for the program."""
IDLE_POLL_S = 0.01
"""The same after `IDLE_AFTER_POLLS` looks without any."""
IDLE_AFTER_POLLS = 500
