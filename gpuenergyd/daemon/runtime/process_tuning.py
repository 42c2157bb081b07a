"""Interpreter and allocator settings of the daemon process: short garbage collection pauses, one malloc arena."""

import ctypes
import gc
import sys

_M_ARENA_MAX = -8
"""`M_ARENA_MAX` of glibc's malloc.h."""
_GC_THRESHOLDS = (1_000, 3, 1_000)
"""Arguments of `gc.set_threshold`: new objects per collection of generation 0, such collections per one of 1, etc."""
_SWITCH_INTERVAL_S = 0.0005
"""A tenth of Python's default; one thread switch costs about 10 us."""


def limit_malloc_to_one_arena() -> None:
    """Make all threads allocate from one arena, so that memory that one thread frees is reused by the others.

    Call it before any thread starts, because an arena never shrinks below the peak need of its thread. It has no effect
    with C libraries other than glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def shorten_event_loop_pauses() -> None:
    """Exempt all present objects from garbage collection, collect less often, and switch threads sooner.

    Call it once everything is imported and started. A full collection takes about 50 ms for modules and classes alone,
    and with the default thresholds one starts whenever a quarter of all objects is new. Nearly all of the daemon's
    objects are in no reference cycle, and are freed without the collector.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    # At each system call, the event loop may lose the interpreter lock to the database thread for this long.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
