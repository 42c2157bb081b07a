"""Keeps a GPU fully loaded for `doctor --measure`: torch multiplies matrices in a separate process, by this file.

The program measures how far the host runs ahead of the GPU in a training loop, prints that as one line of JSON, and
then multiplies large matrices until its standard input is closed.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import IO, Any

from gpuenergyd.errors import DriverError

_START_LIMIT_S, _STOP_LIMIT_S = 120.0, 10.0
_PROGRAM = "gpuenergyd_doctor.torch_load"
_NUM_STEPS = 60
_NUM_LAYERS, _WIDTH, _NUM_HEADS = 8, 1024, 16
_PRODUCT_WIDTH = 8192
"""Products of matrices of this size bring an H200 to its power limit."""


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


def main() -> None:
    """Measure, then compute; an error is also printed as JSON."""
    try:
        import torch  # noqa: PLC0415  need not be installed
    except ImportError:
        _print({"error": "torch is not installed for this Python"})
        return
    if not torch.cuda.is_available():
        _print({"error": "torch finds no CUDA GPU"})
        return
    try:
        _print(_run_ahead(torch))
        _compute(torch)
    except RuntimeError as error:
        _print({"error": f"torch: {str(error).splitlines()[0]}"})


def _run_ahead(torch: Any) -> dict[str, float]:
    """Return how far the host runs ahead in a training loop without synchronization, and its iteration time."""
    nn = torch.nn
    layers = [
        nn.TransformerEncoderLayer(_WIDTH, _NUM_HEADS, 4 * _WIDTH, batch_first=True, norm_first=True)
        for _ in range(_NUM_LAYERS)
    ]
    model = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(16, 512, _WIDTH, device="cuda", dtype=torch.bfloat16)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_NUM_STEPS)]
    launched_s = []
    for mark in marks:
        mark.record()
        launched_s.append(time.monotonic())
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    reached_s = [marks[0].elapsed_time(mark) / 1e3 for mark in marks]
    ahead_s = [reached - (launched - launched_s[0]) for reached, launched in zip(reached_s, launched_s, strict=True)]
    half = _NUM_STEPS // 2
    return {"run_ahead_s": median(ahead_s[half:]), "step_s": (reached_s[-1] - reached_s[half]) / (half - 1)}


def _compute(torch: Any) -> None:
    factors = [torch.randn(_PRODUCT_WIDTH, _PRODUCT_WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    reader = threading.Thread(target=sys.stdin.read, daemon=True)
    reader.start()
    while reader.is_alive():
        for _ in range(8):
            torch.mm(*factors)
        torch.cuda.synchronize()


def _print(found: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
