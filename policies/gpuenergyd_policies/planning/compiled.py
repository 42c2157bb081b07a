"""Runs the planner's inner loops compiled when numba is installed, and as the plain Python they are when it is not.

Kernels are written once, on flat sequences of numbers: numpy arrays when compiled, lists otherwise (a list is
several times quicker to index from Python). `ints` and `floats` make the one that fits.
"""

import hashlib
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import ArrayLike

P = ParamSpec("P")
R = TypeVar("R")

numba: Any = importlib.import_module("numba") if importlib.util.find_spec("numba") else None
KERNEL_SOURCES = (
    "compiled.py",
    "exact/network.py",
    "exact/sweep.py",
    "discrete/refinement.py",
    "discrete/rounding.py",
    "switching/segments.py",
)
"""Files that hold kernels or constants of kernels."""
IS_COMPILED: bool = numba is not None and not numba.config.DISABLE_JIT
"""Whether kernels run compiled; NUMBA_DISABLE_JIT=1 turns that off, as for any numba program."""


def compiled(kernel: Callable[P, R]) -> Callable[P, R]:
    """Compile a kernel on its first call, or load what an earlier process compiled."""
    if not IS_COMPILED:
        return kernel
    folder = _cache_folder()
    if folder is None:
        in_memory: Callable[P, R] = numba.njit(nogil=True)(kernel)
        return in_memory
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        on_disk: Callable[P, R] = numba.njit(cache=True, nogil=True)(kernel)
    finally:
        numba.config.CACHE_DIR = before
    return on_disk


@cache
def _cache_folder() -> Path | None:
    """Return where compiled kernels of exactly this source are kept, None where nothing can be written.

    numba looks only at the age and size of the file that a kernel stands in, and misses changes in the kernels it
    calls; so the folder is named after the content of all of them.
    """
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for source in KERNEL_SOURCES:
        digest.update((here / source).read_bytes())
    name = f"kernels-{digest.hexdigest()[:16]}"
    own = os.environ.get("NUMBA_CACHE_DIR")
    places = [Path(own)] if own else [here / "__pycache__", _user_cache_folder()]
    for place in places:
        try:
            (place / name).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place / name):
                return place / name
        except OSError:
            continue
    return None


def _user_cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gpuenergyd"


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
