"""Compiles the fake driver library, once per source and installed binding, and puts a fake `nvidia-smi` beside it."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pynvml

SOURCE = Path(__file__).with_name("fake_nvml.c")
_ROOT = Path(__file__).resolve().parents[3]
_NVIDIA_SMI = f"""#!/bin/sh
unset PYTHONHOME
PYTHONPATH={_ROOT} exec {sys.executable} -m tests.support.fake_nvml.nvidia_smi "$@"
"""


def compiler() -> str | None:
    """Return the system's C compiler, if there is one."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build_library() -> Path:
    """Return the folder of `libnvidia-ml.so.1`, with `nvidia-smi` in its folder `bin`.

    A symbol that we do not implement returns "not supported".
    """
    source = SOURCE.read_text()
    stubs = _stubs(source, Path(pynvml.__file__).read_text())
    digest = hashlib.sha256((source + stubs + _NVIDIA_SMI).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"gpuenergyd-fake-nvml-{os.getuid()}-{digest}"
    if (folder / "libnvidia-ml.so.1").exists():
        return folder
    command = compiler()
    assert command is not None
    with tempfile.TemporaryDirectory(prefix="fake-nvml-") as name:
        work = Path(name)
        (work / "stubs.c").write_text(stubs)
        subprocess.run(
            [
                *(command, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Wl,-soname,libnvidia-ml.so.1"),
                *("-o", str(work / "libnvidia-ml.so.1"), str(SOURCE), str(work / "stubs.c"), "-lm", "-lpthread"),
            ],
            check=True,
            capture_output=True,
            text=True,
        )
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin" / "nvidia-smi").write_text(_NVIDIA_SMI)
        (folder / "bin" / "nvidia-smi").chmod(0o755)
        unfinished = folder / f".{os.getpid()}"
        shutil.copy2(work / "libnvidia-ml.so.1", unfinished)
        unfinished.rename(folder / "libnvidia-ml.so.1")
    return folder


def _stubs(source: str, binding: str) -> str:
    """Return one-line functions for every symbol the installed binding asks for and the source does not have."""
    wanted = set(re.findall(r'_nvmlGetFunctionPointer\("(nvml\w+)"\)', binding))
    present = set(re.findall(r"^(?:int|const char \*)\s*(nvml\w+)\(", source, re.MULTILINE))
    functions = (f'int {name}(void) {{ return refuse_change("{name}"); }}\n' for name in sorted(wanted - present))
    return "int refuse_change(const char *);\n" + "".join(functions)
