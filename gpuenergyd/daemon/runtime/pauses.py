"""Keeping the event loop's pauses short: neither the garbage collector nor another thread may hold it up for long."""

import gc
import sys

_YOUNG_OBJECTS = 1_000
_YOUNG_COLLECTIONS = 3
_MIDDLE_COLLECTIONS = 1_000
_OTHER_THREADS_TURN_S = 0.0005
"""A tenth of the default; switching costs some ten microseconds."""


def keep_pauses_short() -> None:
    """Take what lives as long as the process out of the collector's sight, and let it look at the rest less often.

    Call it once all is imported and started. A full collection of modules and classes alone takes some 50 ms, and the
    default settings begin one whenever a quarter of all objects is new; objects without cycles, nearly all of ours,
    are freed without it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_COLLECTIONS, _MIDDLE_COLLECTIONS)
    # Each call to the kernel hands the interpreter to the history's thread, if that has work, for so long.
    sys.setswitchinterval(_OTHER_THREADS_TURN_S)
