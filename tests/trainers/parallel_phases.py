"""Runs of data-parallel loops that mark nothing, joined by `gpuenergyd run`: real processes over gloo."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpuenergyd.gpu.drivers.simulated import SimulatedHost
from gpuenergyd_trainers.autostart.launching import launch_environment
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon
from tests.support.framework_environments import ROOT

NUM_RANKS, NUM_ITERATIONS = 2, 8
RUN_LIMIT_S = 300.0


def train(framework: str, folder: Path, *, num_iterations: int = NUM_ITERATIONS, socket_path: str | None) -> list[Any]:
    """Train two ranks on simulated GPUs; return what each has written."""
    world = folder / "world"
    host = SimulatedHost.create(world, ["a100-sxm"] * NUM_RANKS, seed=1)
    uuids = ",".join(identity.gpu_uuid for identity in host.identities())
    host.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GPUENERGYD_")},
        "PYTHONPATH": os.pathsep.join(str(ROOT / own) for own in ("", "policies", "trainers")),
        "WORLD_SIZE": f"{NUM_RANKS}",
        "LOCAL_WORLD_SIZE": f"{NUM_RANKS}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
    }
    if socket_path is not None:
        environ = launch_environment({**environ, "GPUENERGYD_SOCKET": socket_path, "GPUENERGYD_GPU_UUID": uuids})
    command = [sys.executable, "-m", "tests.support.phase_training", framework, "--world", str(world)]
    outs = [folder / f"rank-{rank}.json" for rank in range(NUM_RANKS)]
    processes = [
        subprocess.Popen(
            [*command, "--iterations", f"{num_iterations}", "--scale", "0.3", "--out", str(out)],
            cwd=ROOT,
            env={**environ, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
        )
        for rank, out in enumerate(outs)
    ]
    try:
        assert [process.wait(RUN_LIMIT_S) for process in processes] == [0] * NUM_RANKS
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads(out.read_text(encoding="ascii")) for out in outs]


def check_phases(framework: str, folder: Path) -> None:
    """Assert that each rank registers its phases, and that losses are equal bit for bit without the daemon."""
    (folder / "alone").mkdir()
    alone = train(framework, folder / "alone", socket_path=None)
    with FakeDaemon(folder) as daemon:
        joined = train(framework, folder, socket_path=daemon.socket_path)
        registrations = [daemon.registrations.get(timeout=WAIT_LIMIT_S) for _ in range(NUM_RANKS)]

    assert [rank["losses"] for rank in joined] == [rank["losses"] for rank in alone]
    assert sorted(registration["dp_rank"] for registration in registrations) == [0, 1]
    for registration in registrations:
        assert (registration["schedule_name"], registration["num_dp_ranks"]) == ("loop", NUM_RANKS)
        assert [row[0] for row in registration["order"]] == ["F", "B", "C", "O", "D"]
