"""A full load on a GPU by torch, in a process of its own."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gpuenergyd.errors import DriverError

_START_LIMIT_S = 120.0
_STOP_LIMIT_S = 10.0
_PROGRAM = "gpuenergyd_trainers.measured_load"


class TorchLoad:
    """Multiplies large matrices on a GPU, if torch with CUDA is installed for this Python."""

    @contextmanager
    def on(self, gpu_uuid: str) -> Iterator[Mapping[str, float]]:
        """Compute inside the context; yield `run_ahead_s` and `step_s` of a training loop.

        Raises:
            DriverError: torch, CUDA or the GPU cannot be used.
        """
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu_uuid}
        process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            is_ready = select.select([process.stdout], [], [], _START_LIMIT_S)[0]
            line = process.stdout.readline() if is_ready else b""
            found: dict[str, Any] = json.loads(line) if line else {"error": "the load by torch did not start"}
            if "error" in found:
                raise DriverError(found["error"])
            yield found
            if process.poll() is not None:
                raise DriverError("the load by torch ended early")
        finally:
            process.stdin.close()
            process.stdout.close()
            try:
                process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
