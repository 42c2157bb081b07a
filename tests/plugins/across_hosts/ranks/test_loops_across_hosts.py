"""DistributedDataParallel on two hosts: ranks of the faster host follow the pace of a slower one on the other host."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from gpuenergyd_trainers.autostart.launching import launch_environment
from tests.support.daemon_process import ROOT
from tests.support.phase_ranks import gpu_uuids, launcher_environment
from tests.support.two_hosts import NoNetworkNamespaceError, TwoHosts, two_hosts
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.torch, pytest.mark.thorough]
RANKS_PER_HOST = 2
SCALE, SLOWER = 0.5, 1.3
"""Factor on the times of all phases, and how much longer they are on the second host."""
SETTINGS = {"policy": "uniform", "warmup_iterations": 0, "baseline_iterations": 2}
PORT = 29_583


@contextmanager
def ddp_over(hosts: TwoHosts, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run two ranks of DDP on each host until the block ends, joined by `gpuenergyd run`."""
    common = {
        **launcher_environment(folder),
        "WORLD_SIZE": f"{2 * RANKS_PER_HOST}",
        "LOCAL_WORLD_SIZE": f"{RANKS_PER_HOST}",
        "MASTER_ADDR": hosts.addresses[0],
        "MASTER_PORT": f"{PORT}",
        "GLOO_SOCKET_IFNAME": "hop",
        "TORCHELASTIC_RUN_ID": "loops",
    }
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for host, daemon in enumerate(hosts.daemons):
            gpus = {"GPUENERGYD_SOCKET": str(daemon.socket_path), "GPUENERGYD_GPU_UUID": gpu_uuids(daemon.world_path)}
            environ = launch_environment({**common, **gpus, "GPUENERGYD_JOB": "loops"})
            for local_rank in range(RANKS_PER_HOST):
                rank = host * RANKS_PER_HOST + local_rank
                command = [sys.executable, "-m", "tests.support.phase_training", "ddp", "--iterations", "100000"]
                where = ["--world", str(daemon.world_path), "--out", str(folder / f"{rank}.json")]
                scale = ["--scale", f"{SCALE * (SLOWER if host else 1.0)}"]
                own = {**environ, "RANK": f"{rank}", "LOCAL_RANK": f"{local_rank}"}
                with (folder / f"rank-{rank}.log").open("wb") as log:
                    ranks.append(
                        subprocess.Popen(
                            ["ip", "netns", "exec", hosts.names[host], *command, *where, *scale],
                            cwd=ROOT, env=own, stdout=log, stderr=log,
                        )
                    )  # fmt: skip
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def jobs_of(hosts: TwoHosts, host: int) -> list[dict[str, Any]]:
    return [job for job in hosts.daemons[host].status()["jobs"] if job["ranks"]]


def test_ranks_of_a_loop_follow_a_slower_host(tmp_path: Path) -> None:
    def is_followed() -> bool:
        assert all(process.poll() is None for process in ranks), (tmp_path / "rank-0.log").read_text()[-2000:]
        faster = jobs_of(hosts, 0)
        return len(faster) == RANKS_PER_HOST and all(
            job["straggler"] == "a replica elsewhere" and job["straggler_time_s"] > 1.1 * job["own_time_s"]
            for job in faster
        )

    os.environ.pop("LOCAL_RANK", None)
    try:
        with two_hosts(tmp_path / "hosts", **SETTINGS) as hosts, ddp_over(hosts, tmp_path) as ranks:
            wait_until(is_followed)
            slower = jobs_of(hosts, 1)
    except NoNetworkNamespaceError as error:
        pytest.skip(f"no network namespaces here: {error}")

    assert all(job["straggler"] != "a replica elsewhere" for job in slower)
