"""Compiles kernels with numba, or runs them as plain Python if numba is missing or would take longer.

A kernel is written once, on flat sequences of numbers: numpy arrays when compiled, lists otherwise (indexing a list is
several times faster in Python). `ints` and `floats` return whichever fits. Arrays that are passed together form a named
tuple. Loading numba and its cached code takes longer than planning a small pipeline in Python. Numba is therefore
imported only when the first kernel runs compiled, and `plain_python` avoids that.

Kernels are in files that import only the standard library and other kernel files (a test checks this), so the content
of these files determines the compiled code. A kernel of a plugin calls only kernels of its own file and of these.
"""

import hashlib
import importlib
import importlib.util
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, cached_property, update_wrapper
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np
from numpy.typing import ArrayLike

P = ParamSpec("P")
R = TypeVar("R")

IS_COMPILED: bool = importlib.util.find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"
"""Whether kernels run compiled; the environment variable NUMBA_DISABLE_JIT=1 disables numba."""
_is_plain: ContextVar[bool] = ContextVar("_is_plain", default=not IS_COMPILED)


logger = logging.getLogger("gpuenergyd.policies")
NO_CACHE_FOLDER = (
    "no folder for the compiled planner is writable, so every process compiles it again, about 20 s of CPU time;"
    " set NUMBA_CACHE_DIR to a folder that can be written"
)


def _warn(activity: str) -> None:
    # Most programs do not configure logging, but a warning is printed anyway.
    logger.warning("gpuenergyd: %s, about 20 s", activity)


class CompileClock:
    """CPU time that this process spends compiling kernels that were not in the disk cache."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        """CPU time of all finished compilations."""
        self._began_cpu_s = 0.0
        self._depth = 0
        self._is_announced = False
        self.announce: Callable[[str], None] = _warn

    def begin(self) -> None:
        """Record the start of a compilation, which may be nested; the first one of a process is announced."""
        if not self._is_announced:
            self._is_announced = True
            how = ", once" if cache_folder() is not None else " in memory, as no cache folder is writable"
            self.announce(f"compiling the planner{how}")
        if self._depth == 0:
            self._began_cpu_s = time.process_time()
        self._depth += 1

    def end(self) -> None:
        """Record the end of a compilation."""
        self._depth -= 1
        if self._depth == 0:
            self.cpu_s += time.process_time() - self._began_cpu_s


COMPILE_CLOCK = CompileClock()


@cache
def _numba() -> Any:
    """Import numba, and register the clock to measure its compilations."""
    numba: Any = importlib.import_module("numba")
    events: Any = importlib.import_module("numba.core.event")

    class CompileListener(events.Listener):  # type: ignore[misc]  # numba ships no types
        def on_start(self, _event: Any) -> None:
            COMPILE_CLOCK.begin()

        def on_end(self, _event: Any) -> None:
            COMPILE_CLOCK.end()

    events.register("numba:compile", CompileListener())
    return numba


class Kernel(Generic[P, R]):
    """A function that numba compiles at its first call, or loads from the disk cache of an earlier process."""

    def __init__(self, plain: Callable[P, R]) -> None:
        self.plain = plain
        update_wrapper(self, plain)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the kernel, compiled unless `plain_python` is in effect."""
        result: R = self.plain(*args, **kwargs) if _is_plain.get() else self.machine_code(*args, **kwargs)
        return result

    @cached_property
    def machine_code(self) -> Any:
        """Numba's dispatcher; inlined into kernels that call it, since a call counts references to each array."""
        numba, folder = _numba(), cache_folder()
        if folder is None:
            return numba.njit(nogil=True, forceinline=True)(self.plain)
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(folder)
        try:
            return numba.njit(cache=True, nogil=True, forceinline=True)(self.plain)
        finally:
            numba.config.CACHE_DIR = before

    @property
    def _numba_type_(self) -> Any:
        """Attribute that numba reads when it compiles another kernel that calls this one."""
        return self.machine_code._numba_type_


def compiled(kernel: Callable[P, R]) -> Callable[P, R]:
    """Turn a function into a kernel."""
    return Kernel(kernel) if IS_COMPILED else kernel


@contextmanager
def plain_python(*, is_quicker: bool = True) -> Iterator[None]:
    """Run kernels within a block as plain Python, if that is quicker than loading their compiled code."""
    token = _is_plain.set(is_quicker or _is_plain.get())
    try:
        yield
    finally:
        _is_plain.reset(token)


def kernel_files() -> list[Path]:
    here = Path(__file__)
    return [path for path in sorted(here.parent.rglob("*.py")) if path == here or b"\n@compiled\n" in path.read_bytes()]


@cache
def cache_folder() -> Path | None:
    """Return the cache folder for kernels compiled from exactly this source, None if no folder is writable.

    numba checks only the age and size of the file that defines a kernel, and misses changes in kernels that it calls.
    The folder is therefore named after the content of all kernel files.
    """
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in kernel_files():
        digest.update(path.read_bytes())
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
    """Return integers for a kernel: an int64 array when compiled, else a list (the declared type)."""
    array: Any = np.ascontiguousarray(values, dtype=np.int64)
    sequence: list[int] = array.tolist() if _is_plain.get() else array
    return sequence


def floats(values: ArrayLike) -> list[float]:
    """Return floats for a kernel: a float64 array when compiled, else a list (the declared type)."""
    array: Any = np.ascontiguousarray(values, dtype=np.float64)
    sequence: list[float] = array.tolist() if _is_plain.get() else array
    return sequence
