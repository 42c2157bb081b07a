"""The environment in which every Python process of a program loads the hook."""

import os
from collections.abc import Mapping
from pathlib import Path

import gpuenergyd
import gpuenergyd_trainers

HOOK_FOLDER = Path(__file__).parent / "hook"
ROOTS_VARIABLE = "GPUENERGYD_HOOK_ROOTS"
"""The folders in which the hook finds this package, for a Python without it."""


def launch_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the hook's folder first in PYTHONPATH."""
    roots = (Path(str(package.__file__)).parents[1] for package in (gpuenergyd, gpuenergyd_trainers))
    before = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    folders = [str(HOOK_FOLDER), *(entry for entry in before if entry != str(HOOK_FOLDER))]
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join(folders),
        ROOTS_VARIABLE: os.pathsep.join(dict.fromkeys(map(str, roots))),
    }
