"""Keeping a long-lived process small: all threads allocate from one arena, so that what one frees the other can use."""

import ctypes

_M_ARENA_MAX = -8
"""Of glibc's malloc.h."""


def allocate_from_one_arena() -> None:
    """Tell glibc so, before any thread begins; another C library has no such arenas, and is left alone.

    Each further arena keeps what its thread once needed at most, for ever.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
