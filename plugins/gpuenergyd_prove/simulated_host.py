"""A private daemon on simulated GPUs for `gpuenergyd prove --simulated`, with the demo's training as the program."""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.errors import DaemonNotRunningError
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.world_kinds import WorldKind
from gpuenergyd_sim.private_daemon.processes import Children, raise_on_termination

NUM_GPUS, GPU_MODEL = 4, "a100-sxm"
_START_TIMEOUT_S = 60.0
_SHORT = Path("/tmp")  # noqa: S108  a socket's path is limited to 107 characters; the name is unguessable


@dataclass(frozen=True, slots=True)
class ProofHost:
    """What a proof needs of the private daemon."""

    socket_path: str
    command: tuple[str, ...]
    folder: Path
    losses_path: Path
    check: Callable[[], None]
    """Raises if the daemon has ended."""


@contextmanager
def simulated_host(job_name: str, *, seed: int, microbatches: int) -> Iterator[ProofHost]:
    """Start a daemon on simulated GPUs as they are on real hosts; end it with everything that it started."""
    for name in [name for name in os.environ if name.startswith("GPUENERGYD_") and name != "GPUENERGYD_DEBUG"]:
        del os.environ[name]  # isolate the proof from an installed daemon
    folder = Path(tempfile.mkdtemp(prefix="gpuenergyd-prove-", dir=_SHORT))
    world, losses_path = folder / "world", folder / "losses.txt"
    SimulatedHost.create(world, [GPU_MODEL] * NUM_GPUS, seed=seed, kind=WorldKind.UNKIND).close()
    (folder / "config.toml").touch()
    raise_on_termination()
    socket_path = folder / "run" / "gpuenergyd.sock"
    try:
        with Children(folder) as children:
            children.start(
                "daemon",
                [
                    "gpuenergyd.cli.main", "serve",
                    "--config", str(folder / "config.toml"),
                    "--driver", "simulated",
                    "--world", str(world),
                    "--runtime-dir", str(folder / "run"),
                    "--state-dir", str(folder / "state"),
                ],
            )  # fmt: skip
            _wait(str(socket_path), children)
            command = (
                sys.executable, "-m", "gpuenergyd_sim.training.gpt",
                "--world", str(world),
                "--stages", str(NUM_GPUS),
                "--microbatches", str(microbatches),
                "--seed", str(seed),
                "--job", job_name,
                "--run-ahead", "1",
                "--losses-out", str(losses_path),
            )  # fmt: skip
            yield ProofHost(str(socket_path), command, folder, losses_path, children.check)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(socket_path: str, children: Children) -> None:
    until_s = time.monotonic() + _START_TIMEOUT_S
    client = DaemonClient(socket_path)
    try:
        while True:
            children.check()
            with suppress(DaemonNotRunningError):
                client.get_status()
                return
            if time.monotonic() > until_s:
                client.get_status()
            time.sleep(0.05)
    finally:
        client.close()
