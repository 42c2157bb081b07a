"""The two ranks of a data-parallel loop of `phase_training`, as real processes over gloo on simulated GPUs."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.site.house_map import PYTHON_PATH
from gpuenergyd_sim.driver.host import SimulatedHost
from tests.support.framework_environments import ROOT

NUM_RANKS = 2


def gpu_uuids(world_path: Path) -> str:
    """Return the GPUs of a world as GPUENERGYD_GPU_UUID lists them."""
    host = SimulatedHost.open(world_path)
    try:
        return ",".join(identity.gpu_uuid for identity in host.identities())
    finally:
        host.close()


def run_ranks(
    framework: str,
    folder: Path,
    world_path: Path,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    limit_s: float,
    python: str = sys.executable,
) -> list[Any]:
    """Run both ranks and return what each has written.

    Raises:
        SystemExit: a rank failed.
        subprocess.TimeoutExpired: a rank did not end in time.
    """
    outs = [folder / f"rank-{rank}.json" for rank in range(NUM_RANKS)]
    command = [python, "-m", "tests.support.phase_training", framework, "--world", str(world_path), *arguments]
    processes = [
        subprocess.Popen(
            [*command, "--out", str(out)],
            cwd=ROOT,
            env={**environ, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
            stdout=sys.stderr.fileno(),
        )
        for rank, out in enumerate(outs)
    ]
    try:
        codes = [process.wait(limit_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise SystemExit(f"{framework}: a rank failed with exit codes {codes}")
    return [json.loads(out.read_text(encoding="ascii")) for out in outs]


def launcher_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a launcher that starts both ranks on this host, without any options of ours."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("GPUENERGYD_")},
        "PYTHONPATH": PYTHON_PATH,
        "WORLD_SIZE": f"{NUM_RANKS}",
        "LOCAL_WORLD_SIZE": f"{NUM_RANKS}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
    }
