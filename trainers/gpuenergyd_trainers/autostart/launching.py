"""The environment that makes every Python process of a program load the hook."""

import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

import gpuenergyd
import gpuenergyd_trainers
from gpuenergyd.client.environment import can_see, find_socket_path
from gpuenergyd.client.run_mark import MARK_VARIABLE

HOOK_FOLDER = Path(__file__).parent / "hook"
ROOTS_VARIABLE = "GPUENERGYD_HOOK_ROOTS"
"""Variable with the folders in which the hook finds this package, if the process's Python does not have it."""


def launch_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the hook's folder first in PYTHONPATH, for a program that replaces this process.

    If there is a daemon's socket, the program's first process also reports at its end if no rank has joined.
    """
    roots = (Path(str(package.__file__)).parents[1] for package in (gpuenergyd, gpuenergyd_trainers))
    before = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    folders = [str(HOOK_FOLDER), *(entry for entry in before if entry != str(HOOK_FOLDER))]
    mark = f"{os.getpid()}:{tempfile.gettempdir()}/gpuenergyd-run-{os.getpid()}-{secrets.token_hex(8)}"
    return {
        **environ,
        **({MARK_VARIABLE: mark} if can_see(find_socket_path(environ=environ)) else {}),
        "PYTHONPATH": os.pathsep.join(folders),
        ROOTS_VARIABLE: os.pathsep.join(dict.fromkeys(map(str, roots))),
    }
