"""A private daemon on simulated GPUs for `gpuenergyd prove --simulated`, with the demo's training as the program."""

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpuenergyd.client.connection import DaemonClient
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.world_kinds import WorldKind
from gpuenergyd_sim.private_daemon.daemon import forget_settings, start_daemon, wait_for_daemon
from gpuenergyd_sim.private_daemon.processes import Children, raise_on_termination

NUM_GPUS, GPU_MODEL = 4, "a100-sxm"
_SHORT = Path("/tmp")  # noqa: S108  a socket's path is limited to 107 characters; the name is unguessable


@dataclass(frozen=True, slots=True)
class ProofHost:
    """What a proof needs from the private daemon."""

    socket_path: str
    command: tuple[str, ...]
    folder: Path
    losses_path: Path
    check: Callable[[], None]
    """Raises if the daemon has ended."""


@contextmanager
def simulated_host(job_name: str, *, seed: int, microbatches: int) -> Iterator[ProofHost]:
    """Start a daemon on simulated GPUs; at the end, stop it and everything that it started."""
    forget_settings()
    folder = Path(tempfile.mkdtemp(prefix="gpuenergyd-prove-", dir=_SHORT))
    world, losses_path = folder / "world", folder / "losses.txt"
    SimulatedHost.create(world, [GPU_MODEL] * NUM_GPUS, seed=seed, kind=WorldKind.UNKIND).close()
    (folder / "config.toml").touch()
    raise_on_termination()
    socket_path = folder / "run" / "gpuenergyd.sock"
    try:
        with Children(folder) as children:
            start_daemon(children, folder, "--driver", "simulated", "--world", str(world))
            with closing(DaemonClient(str(socket_path))) as client:
                wait_for_daemon(client, children.check)
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
