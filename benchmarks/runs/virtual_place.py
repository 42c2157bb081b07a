"""Daemons and ranks of schedules.py as virtual processes; import it after virtual time is installed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from schedules import Place
from torch.distributed import HashStore, distributed_c10d  # type: ignore[attr-defined]  # public, not re-exported

from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.daemon.settings import load_settings
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd_sim.demo.virtual_host import VirtualHost
from gpuenergyd_sim.training.virtual_ranks import Exchange, VirtualGroup
from gpuenergyd_sim.virtual_time.kernel import VirtualKernel

BACKEND = "virtual"
LOOK_PERIOD_S = 0.05


def virtual_place(kernel: VirtualKernel) -> Place:
    """Return where daemons and ranks of this kernel run."""
    return Place(partial(running_daemon, kernel), VirtualRanks(kernel).run)


class VirtualDaemon(NamedTuple):
    """The files of a daemon."""

    world_path: Path
    socket_path: Path
    database_path: Path


@contextmanager
def running_daemon(kernel: VirtualKernel, folder: Path, **overrides: Any) -> Iterator[VirtualDaemon]:
    """Run a daemon on the simulated GPUs in its folder, with the settings of daemons in tests."""
    config = folder / "config.toml"
    config.touch()
    settings = load_settings(
        config,
        mode="control",
        driver="simulated",
        world_path=folder / "world",
        runtime_dir=folder / "run",
        state_dir=folder / "state",
        warmup_iterations=1,
        history_reserve_bytes=0,
        **overrides,
    )
    host = VirtualHost(kernel)
    host.start_daemon(settings, config)
    while not is_ready(str(settings.socket_path)):
        host.check()
        time.sleep(LOOK_PERIOD_S)
    yield VirtualDaemon(folder / "world", settings.socket_path, folder / "state" / "history.sqlite3")
    host.stop_daemon()


def is_ready(socket_path: str) -> bool:
    """Return whether the daemon replies and has a GPU worker."""
    try:
        return bool(DaemonClient(socket_path).get_status()["worker"]["is_alive"])
    except GpuEnergyError:
        return False


class VirtualRanks:
    """Runs ranks as virtual processes, which exchange tensors in memory; one training after the other."""

    def __init__(self, kernel: VirtualKernel) -> None:
        self._kernel, self._exchange = kernel, Exchange(kernel)
        torch.set_num_threads(1)
        kernel.add_own_attribute(distributed_c10d, "_world", distributed_c10d._World)  # noqa: SLF001  the module's state
        # A barrier that waits in C code would stop virtual time; groups in memory need none.
        setattr(distributed_c10d, "_store_based_barrier", lambda *_, **__: None)  # noqa: B010  torch's own, private
        dist.Backend.register_backend(BACKEND, self._group, devices=["cpu"])

    def _group(self, _store: Any, rank: int, size: int, _timeout: Any) -> VirtualGroup:
        return VirtualGroup(self._exchange, rank, size)

    def run(
        self, num_ranks: int, _folder: Path, body: Callable[..., dict[str, Any]], *args: Any, **_: Any
    ) -> list[dict[str, Any]]:
        """Run a function on each rank and return what they return."""
        store, results = HashStore(), dict[int, dict[str, Any]]()
        self._exchange = Exchange(self._kernel)

        def run(rank: int) -> None:
            dist.init_process_group(BACKEND, store=store, rank=rank, world_size=num_ranks)
            results[rank] = body(rank, *args)

        processes = [self._kernel.start_process(f"rank-{rank}", partial(run, rank)) for rank in range(num_ranks)]
        while any(process.is_alive for process in processes):
            time.sleep(LOOK_PERIOD_S)
        return [results[rank] for rank in range(num_ranks)]
