"""Trainers in unprivileged containers join by the mounted socket; a stranger in another container is refused."""

import json
import pwd
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd_sim.driver.host import SimulatedHost
from tests.support.client_process import daemon_for_everybody
from tests.support.container import Container, container, needs_bubblewrap
from tests.support.daemon_process import DaemonProcess
from tests.support.registration import one_stage_registration
from tests.support.waiting import LIMIT_S, wait_until

NOBODY = pwd.getpwnam("nobody").pw_uid
ALICE, BOB = NOBODY - 1, NOBODY - 2
"""Uids without an entry in the user database."""
CLAIM = """
import sys
from gpuenergyd.client.connection import HttpConnection

reply = HttpConnection("/run/gpuenergyd/gpuenergyd.sock").request("POST", "/v1/ranks", sys.argv[1].encode(), limit_s=60)
print(*reply, flush=True)
"""
"""Registers once, with more patience than a trainer has on a loaded machine."""
TRAINER = """
import time
import gpuenergyd

with gpuenergyd.job("contained", phases=False) as job:
    while True:
        with job.iteration():
            time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """A daemon on the host that every user may connect to."""
    needs_bubblewrap()
    no_waits: dict[str, Any] = {"warmup_iterations": 0, "baseline_iterations": 2}
    with daemon_for_everybody(policy="uniform", max_slowdown_ratio=1.0, **no_waits) as daemon:
        daemon.clock_socket_path.chmod(0o666)
        yield daemon


@pytest.fixture(scope="module")
def world(daemon: DaemonProcess) -> Iterator[SimulatedHost]:
    host = SimulatedHost.open(daemon.world_path)
    yield host
    host.close()


@contextmanager
def trainer(
    daemon: DaemonProcess, name: str, program: Sequence[str] = (TRAINER,), **variables: str
) -> Iterator[Container]:
    """Run a training loop in a container until its block ends; then wait until the daemon has noticed."""
    with container(daemon, ["-c", *program], uid=ALICE, name=name, environ=variables) as started:
        wait_until(lambda: started.host_pid() > 0)
        yield started
    wait_until(lambda: not daemon.status()["jobs"])


def attach(world: SimulatedHost, gpu_uuid: str, started: Container) -> int:
    """Let the driver list the trainer; return its pid on the host."""
    pid = started.host_pid()
    world.attach_process(gpu_uuid, pid)
    return pid


def claim(gpu_uuid: str) -> str:
    return json.dumps(one_stage_registration(gpu_uuid))


def gpu_uuid(world: SimulatedHost, index: int) -> str:
    return world.identities()[index].gpu_uuid


def test_a_trainer_in_a_container_joins_once_the_driver_lists_it_and_its_gpu_is_restored(
    daemon: DaemonProcess, world: SimulatedHost
) -> None:
    own = gpu_uuid(world, 0)
    with trainer(daemon, "own", (CLAIM + TRAINER, claim(own)), GPUENERGYD_GPU_UUID=own) as started:
        wait_until(lambda: "no process of its job runs on it" in started.log)
        pid = attach(world, own, started)
        wait_until(daemon.is_lowered)
        (rank,) = daemon.status()["jobs"][0]["ranks"]
        status = Path(f"/proc/{pid}/status").read_text()
        own_pid = status.partition("\nNSpid:")[2].partition("\n")[0].split()[-1]

    wait_until(daemon.is_as_found)
    assert f"uid {ALICE} pid {pid} may not have {own} changed" in started.log
    assert rank["gpu_uuid"] == own
    assert own_pid != str(pid)
    assert status.partition("\nCapEff:")[2].split()[0] == "0" * 16
    assert "clock socket" not in started.log


@pytest.mark.parametrize("visible", ["0", "1,0", "GPU-51a0", "{gpu_uuid}"], ids=["index", "list", "prefix", "uuid"])
def test_the_gpu_that_cuda_shows_is_found_although_its_index_is_another_one_on_the_host(
    daemon: DaemonProcess, world: SimulatedHost, visible: str
) -> None:
    third = gpu_uuid(world, 2)
    with trainer(daemon, "visible", CUDA_VISIBLE_DEVICES=visible.format(gpu_uuid=third)) as started:
        attach(world, third, started)
        wait_until(lambda: bool(daemon.status()["jobs"]))
        (rank,) = daemon.status()["jobs"][0]["ranks"]

    assert rank["gpu_uuid"] == third


@pytest.mark.parametrize("uid", [ALICE, BOB], ids=["same user", "another user"])
def test_a_stranger_in_another_container_is_refused(daemon: DaemonProcess, world: SimulatedHost, uid: int) -> None:
    own = gpu_uuid(world, 1)
    with trainer(daemon, "owner", GPUENERGYD_GPU_UUID=own) as owner:
        pid = attach(world, own, owner)
        wait_until(lambda: bool(daemon.status()["jobs"]))
        with container(daemon, ["-c", CLAIM, claim(own)], uid=uid, name="stranger") as stranger:
            stranger.process.wait(LIMIT_S)
            num_jobs = len(daemon.status()["jobs"])

    assert f"may not have {own} changed: no process of its job runs on it (processes on it: {pid})" in stranger.log
    assert num_jobs == 1


def test_two_containers_of_one_user_with_the_same_program_are_two_jobs(
    daemon: DaemonProcess, world: SimulatedHost
) -> None:
    first, second = gpu_uuid(world, 0), gpu_uuid(world, 3)
    with (
        trainer(daemon, "first", GPUENERGYD_GPU_UUID=first) as one,
        container(daemon, ["-c", TRAINER], uid=ALICE, name="second", environ={"GPUENERGYD_GPU_UUID": second}) as other,
    ):
        wait_until(lambda: other.host_pid() > 0)
        attach(world, first, one)
        attach(world, second, other)
        wait_until(lambda: len(daemon.status()["jobs"]) == 2)
        used = {rank["gpu_uuid"] for job in daemon.status()["jobs"] for rank in job["ranks"]}

    assert used == {first, second}
