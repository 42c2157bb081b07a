"""Runs of data-parallel loops that mark nothing, joined by `gpuenergyd run`: real processes over gloo."""

import json
import multiprocessing
import os
import warnings
from pathlib import Path
from typing import Any

from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_trainers.autostart.launching import launch_environment
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon
from tests.support import phase_training
from tests.support.phase_ranks import NUM_RANKS, gpu_uuids, launcher_environment, run_ranks

NUM_ITERATIONS = 8
RUN_LIMIT_S = 300.0


def train(framework: str, folder: Path, *, num_iterations: int = NUM_ITERATIONS, socket_path: str | None) -> list[Any]:
    """Train two ranks on simulated GPUs; return what each has written."""
    world = folder / "world"
    SimulatedHost.create(world, ["a100-sxm"] * NUM_RANKS, seed=1).close()
    environ, arguments = launcher_environment(folder), ["--iterations", f"{num_iterations}", "--scale", "0.3"]
    if socket_path is None:
        return _train_forked(folder, [framework, "--world", str(world), *arguments], environ)
    gpus = {"GPUENERGYD_SOCKET": socket_path, "GPUENERGYD_GPU_UUID": gpu_uuids(world)}
    return run_ranks(framework, folder, world, arguments, launch_environment({**environ, **gpus}), limit_s=RUN_LIMIT_S)


def _train_forked(folder: Path, arguments: list[str], environ: dict[str, str]) -> list[Any]:
    """Train without the daemon in forks of this process, which has imported torch already."""
    outs = [folder / f"rank-{rank}.json" for rank in range(NUM_RANKS)]
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_train_rank, args=([*arguments, "--out", str(out)], environ, rank))
        for rank, out in enumerate(outs)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(RUN_LIMIT_S)
        assert [process.exitcode for process in processes] == [0] * NUM_RANKS
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [json.loads(out.read_text(encoding="ascii")) for out in outs]


def _train_rank(arguments: list[str], environ: dict[str, str], rank: int) -> None:
    os.environ.clear()
    os.environ.update({**environ, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"})
    warnings.simplefilter("default")  # those of frameworks are no errors, as in a process of its own
    phase_training.main(arguments)


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
