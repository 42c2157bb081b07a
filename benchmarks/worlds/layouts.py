"""One training with a real framework over two hosts: with a daemon on each, and without, on simulated GPUs.

Each host is a network namespace. `python -m benchmarks.worlds.layouts --framework megatron --tp 2 --dp 2 --folder DIR`
prints savings and slowdowns by the exact energies and the times of all steps, and what the daemons say, as JSON. It
runs in the environment of the framework.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.worlds.deepspeed_training import DeepSpeedTraining
from tests.support.host_trainer import RANK_PRIORITY, enter_namespace
from tests.support.megatron_training import MegatronTraining
from tests.support.stage_gpu import path_of_steps
from tests.support.two_hosts import TwoHosts, two_hosts
from tests.support.waiting import wait_until
from tests.trainers.pipeline_processes import run_ranks

NUM_COMPARED = 40
"""Last steps that are compared."""
FULL_SPEED_MHZ = 1410
"""Clock of a simulated A100 without a lock."""
_PORT = 29_613
_SETTINGS = {"baseline_iterations": 10}
_SHOWN = ("job_name", "phase", "outcome", "summary", "saving_ratio", "saving_interval", "slowdown_ratio")
Training = MegatronTraining | DeepSpeedTraining


@dataclass(frozen=True)
class Steps:
    """The steps of all ranks of one training."""

    of_rank: list[list[dict[str, Any]]]

    @classmethod
    def read(cls, folder: Path, num_ranks: int) -> "Steps":
        """Read what the ranks recorded."""
        paths = [path_of_steps(folder, rank) for rank in range(num_ranks)]
        return cls([[json.loads(line) for line in path.read_text(encoding="ascii").splitlines()] for path in paths])

    @property
    def time_s(self) -> float:
        """Typical time of a compared step."""
        return float(median(step["time_s"] for step in self.of_rank[0][-NUM_COMPARED:]))

    @property
    def energy_j(self) -> float:
        """Typical energy of a compared step, all GPUs."""
        compared = zip(*(steps[-NUM_COMPARED:] for steps in self.of_rank), strict=True)
        return float(median(sum(step["energy_j"] for step in of_ranks) for of_ranks in compared))

    def clock_difference_ratio(self, siblings: Sequence[int]) -> float:
        """Return by how much the mean clocks of ranks of one stage typically differ in a compared step."""
        differences = []
        for of_ranks in zip(*(self.of_rank[rank][-NUM_COMPARED:] for rank in siblings), strict=True):
            clocks_mhz = [mean(clock or FULL_SPEED_MHZ for clock in step["clocks_mhz"]) for step in of_ranks]
            differences.append(1 - min(clocks_mhz) / max(1.0, *clocks_mhz))
        return float(median(differences))


def measure(training: Training, hosts: TwoHosts) -> dict[str, Any]:
    """Train with daemons, then without; return what differs."""
    folders = {name: hosts.folder / name for name in ("joined", "alone")}
    for folder in folders.values():
        folder.mkdir()
    sockets = tuple(str(daemon.socket_path) for daemon in hosts.daemons)
    joined = run(replace(training, socket_paths=sockets, record_folder=folders["joined"]), hosts)
    wait_until(lambda: not any(daemon.status()["jobs"] for daemon in hosts.daemons))
    jobs = [job for daemon in hosts.daemons for job in daemon.status()["ended_jobs"]]
    plain = run(replace(training, record_folder=folders["alone"]), hosts)
    managed, unmanaged = (Steps.read(folder, training.num_ranks) for folder in folders.values())
    tp = getattr(training, "tp", 1)
    stages = [range(first, first + tp) for first in range(0, training.num_ranks, tp)]
    return {
        "num_ranks": training.num_ranks,
        "saving_ratio": 1 - managed.energy_j / unmanaged.energy_j,
        "slowdown_ratio": managed.time_s / unmanaged.time_s - 1,
        "time_s": unmanaged.time_s,
        "are_losses_equal": [losses for losses, _ in joined] == [losses for losses, _ in plain],
        "num_steps_under_plans_min": min(sum(epoch > 0 for epoch in epochs) for _, epochs in joined),
        "sibling_clock_difference_max_ratio": max(managed.clock_difference_ratio(stage) for stage in stages)
        if tp > 1
        else None,
        "jobs": [{name: job.get(name) for name in _SHOWN} for job in jobs],
    }


def run(training: Training, hosts: TwoHosts) -> list[Any]:
    """Run all ranks, each in the namespace of its host; the training's own store is on the first host."""
    per_host = training.num_ranks // len(hosts.names)
    folder = training.record_folder
    assert folder is not None
    prepare = partial(_enter_host, hosts.names, hosts.addresses[0], per_host)
    return run_ranks(training.num_ranks, folder, training.run_rank, prepare=prepare, limit_s=1_800)


def _enter_host(names: Sequence[str], address: str, per_host: int, rank: int) -> str:
    enter_namespace(names[rank // per_host])
    os.environ.update(GLOO_SOCKET_IFNAME="hop", TP_SOCKET_IFNAME="hop", MASTER_ADDR=address, MASTER_PORT=str(_PORT))
    with contextlib.suppress(OSError):  # another host's load would not slow a GPU down
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(RANK_PRIORITY))
    return "env://"


def main() -> int:
    """Measure one layout and print the figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--framework", choices=("megatron", "deepspeed"), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=120)
    parser.add_argument("--scale", type=float, default=3.0)
    options = parser.parse_args()
    sizes = {name: getattr(options, name) for name in ("dp", "microbatches", "iterations", "scale")}
    options.folder.mkdir(parents=True, exist_ok=True)
    with two_hosts(options.folder, **_SETTINGS) as hosts:
        worlds = tuple(daemon.world_path for daemon in hosts.daemons)
        training: Training = (
            MegatronTraining(worlds, tp=options.tp, chunks=options.chunks, overlaps_p2p=options.chunks > 1, **sizes)
            if options.framework == "megatron"
            else DeepSpeedTraining(worlds, **sizes)
        )
        figures = measure(training, hosts)
    sys.stdout.write(json.dumps(figures) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
