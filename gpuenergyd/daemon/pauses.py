"""Keeping the event loop's pauses short: the garbage collector must not look at everything while clients wait."""

import gc

_YOUNG_OBJECTS = 5_000
_YOUNG_COLLECTIONS = 10
_MIDDLE_COLLECTIONS = 50


def keep_pauses_short() -> None:
    """Take what lives as long as the process out of the collector's sight, and let it look at the rest less often.

    Call it once all is imported and started. A full collection of modules and classes alone takes some 50 ms, and the
    default settings begin one whenever a quarter of all objects is new; objects without cycles, nearly all of ours,
    are freed without it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_COLLECTIONS, _MIDDLE_COLLECTIONS)
