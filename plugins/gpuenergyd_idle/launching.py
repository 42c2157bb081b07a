"""Lifts idle GPUs before `gpuenergyd run` replaces itself with a program, which will soon use them."""

import re
from collections.abc import Mapping
from contextlib import closing, suppress

from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.client.environment import can_see, find_socket_path
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd_idle.messages import LIFT_PATH, PROGRAM_HOLD_S

_LIMIT_S = 0.5
_UUID = re.compile(r"GPU-[0-9a-f-]{36}")
"""CUDA also takes the beginning of a UUID, the daemon does not."""


def lift_for_program(environ: Mapping[str, str]) -> dict[str, str]:
    """Have the GPUs lifted that the program may see, all unless it names them by whole UUIDs; the environment stays.

    A daemon that refuses or does not answer delays the program by half a second at most.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES", "all").split(",")
    gpu_uuids = visible if all(map(_UUID.fullmatch, visible)) else []
    path = find_socket_path(environ=environ)
    if can_see(path) and visible not in ([""], ["-1"]):
        with suppress(GpuEnergyError, OSError), closing(DaemonClient(path, limit_s=_LIMIT_S)) as client:
            client.put(LIFT_PATH, {"gpu_uuids": gpu_uuids, "hold_s": PROGRAM_HOLD_S})
    return dict(environ)
