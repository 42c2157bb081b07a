"""Keeps a GPU fully loaded for `doctor --measure`: torch multiplies matrices in a separate process."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from gpuenergyd.errors import DriverError

_START_LIMIT_S, _STOP_LIMIT_S = 120.0, 10.0
_PROGRAM = "gpuenergyd_trainers.measured_load"


class TorchLoad:
    """Multiplies large matrices on a GPU, if torch with CUDA is installed for this Python."""

    @contextmanager
    def on(self, gpu_uuid: str) -> Iterator[Mapping[str, float]]:
        """Compute inside the context; yield `run_ahead_s` and `step_s` of a training loop.

        Raises:
            DriverError: torch, CUDA or the GPU cannot be used.
        """
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PROGRAM],  # -P: the current folder may be another user's
            bufsize=0,  # a line that is read ahead would not be selected
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu_uuid},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            found = _next_message(process.stdout, _START_LIMIT_S)
            if not found or "error" in found:
                raise DriverError((found or {}).get("error", "the load by torch did not start"))
            yield found
            failed = _next_message(process.stdout, 0.0)
            if failed is not None:
                raise DriverError(failed.get("error", "the load by torch ended early"))
        finally:
            process.stdin.close()
            process.stdout.close()
            try:
                process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _next_message(output: IO[bytes], limit_s: float) -> dict[str, Any] | None:
    """Return what the program says next; None if it says nothing in time, and an empty dict if it has ended."""
    if not select.select([output], [], [], limit_s)[0]:
        return None
    return dict(json.loads(output.readline() or "{}"))
