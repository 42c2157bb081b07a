"""Builds the compiled thread that sends clock requests, with the host's C compiler, and keeps it in the user's cache.

It is optional: without a compiler or a cache folder, or with GPUENERGYD_COMPILED_THREAD=0, a process does the same.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from gpuenergyd.client.timing import request_memory
from gpuenergyd.errors import GpuEnergyError

VARIABLE = "GPUENERGYD_COMPILED_THREAD"
_SOURCE_PATH = Path(__file__).with_name("request_thread.c")
_WORDS = ("REACHED", "PUT", "SENT", "DROPPED", "IS_BROKEN", "SHALL_STOP", "SOCKET_NUMBER", "SOCKET")
_SIZES = ("NUM_SLOTS", "SLOTS_OFFSET", "SLOT_BYTES", "SLOT_HEAD_BYTES", "INSTANTS_OFFSET", "MEMORY_BYTES",
          "IDLE_AFTER_POLLS")  # fmt: skip
_COMPILE_LIMIT_S = 60.0
_NS_PER_S = 1e9


class NotCompiledError(GpuEnergyError):
    """The thread cannot be built or started here; the message is the reason."""


def start_compiled_thread(memory_descriptor: int, environ: Mapping[str, str] = os.environ) -> None:
    """Start the thread on a request memory; it ends when the memory says so.

    Raises:
        NotCompiledError: there is no compiler, no folder of the user's own, or the user wants no compiled thread.
    """
    try:
        library = ctypes.CDLL(str(_find_library(environ)))
        status = library.start(memory_descriptor)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        raise NotCompiledError(str(error)) from error
    if status:
        raise NotCompiledError(os.strerror(status))


def _find_library(environ: Mapping[str, str]) -> Path:
    if environ.get(VARIABLE) == "0":
        raise NotCompiledError(f"{VARIABLE} is 0")
    source, options = _SOURCE_PATH.read_bytes(), _definitions()
    version = hashlib.sha256(source + repr((options, platform.machine(), platform.libc_ver())).encode()).hexdigest()
    folder = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpuenergyd"
    library = folder / f"request-thread-{version[:16]}.so"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise NotCompiledError(f"{folder} can be written by other users")
    if not library.exists():
        _compile(library, options)
    return library


def _definitions() -> list[str]:
    values = {name: getattr(request_memory, name) for name in (*_WORDS, *_SIZES)}
    for name in ("COMPILED_POLL", "QUIET_POLL", "IDLE_POLL"):
        values[f"{name}_NS"] = round(getattr(request_memory, f"{name}_S") * _NS_PER_S)
    return [f"-D{name}={value}" for name, value in values.items()]


def _compile(library: Path, options: list[str]) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NotCompiledError("there is no C compiler")
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-pthread", *options, "-o", str(built), str(_SOURCE_PATH)],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_COMPILE_LIMIT_S,
        )
        built.replace(library)  # several ranks may build it at once
