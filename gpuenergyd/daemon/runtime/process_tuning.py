"""Interpreter and allocator settings of the daemon process: short garbage collection pauses, one malloc arena."""

import ctypes
import gc
import sys

_M_ARENA_MAX = -8
"""`M_ARENA_MAX` of glibc's malloc.h."""
_GC_THRESHOLDS = (1_000, 3, 1_000)
"""New objects before a collection of the first generation, collections of it before one of the second, and so on."""
_SWITCH_INTERVAL_S = 0.0005
"""A tenth of Python's default; one thread switch costs about 10 us."""


def limit_malloc_to_one_arena() -> None:
    """Make all threads allocate from one arena, so that memory that one thread frees is reused by the others.

    Call it before any thread starts: an arena never shrinks below the peak need of its thread. Without effect on C
    libraries other than glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def shorten_event_loop_pauses() -> None:
    """Exempt all present objects from garbage collection, collect less often, and switch threads sooner.

    Call it once everything is imported and started. A full collection of modules and classes alone takes about 50 ms,
    and with the default thresholds one starts whenever a quarter of all objects is new. Objects without reference
    cycles, nearly all of the daemon's, are freed without the collector.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    # At each system call the event loop may lose the interpreter lock to the database thread for this long.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
