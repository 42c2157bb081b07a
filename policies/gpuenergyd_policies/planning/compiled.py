"""Runs the planner's inner loops compiled when numba is installed, and as the plain Python they are when it is not.

Kernels are written once, on flat sequences of numbers: numpy arrays when compiled, lists otherwise (a list is
several times quicker to index from Python). `ints` and `floats` make the one that fits.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import ArrayLike

P = ParamSpec("P")
R = TypeVar("R")

numba: Any = importlib.import_module("numba") if importlib.util.find_spec("numba") else None
IS_COMPILED: bool = numba is not None and not numba.config.DISABLE_JIT
"""Whether kernels run compiled; NUMBA_DISABLE_JIT=1 turns that off, as for any numba program."""


def compiled(kernel: Callable[P, R]) -> Callable[P, R]:
    """Compile a kernel on its first call, or later load what an earlier process compiled."""
    if not IS_COMPILED:
        return kernel
    try:
        cached: Callable[P, R] = numba.njit(cache=True, nogil=True)(kernel)
    except RuntimeError:  # numba found no directory it may write its cache to
        uncached: Callable[P, R] = numba.njit(nogil=True)(kernel)
        return uncached
    return cached


def ints(values: ArrayLike) -> list[int]:
    """Return whole numbers as kernels want them; typed as the list that it is when not compiled."""
    array: Any = np.ascontiguousarray(values, dtype=np.int64)
    sequence: list[int] = array if IS_COMPILED else array.tolist()
    return sequence


def floats(values: ArrayLike) -> list[float]:
    """Return real numbers as kernels want them; typed as the list that it is when not compiled."""
    array: Any = np.ascontiguousarray(values, dtype=np.float64)
    sequence: list[float] = array if IS_COMPILED else array.tolist()
    return sequence
