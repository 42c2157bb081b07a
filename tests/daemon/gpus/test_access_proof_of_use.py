"""Proof of use with real users, sessions and namespaces."""

import asyncio
import grp
import os
import pwd
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuenergyd.daemon.gpus.access import AccessRules
from gpuenergyd.daemon.gpus.proof_of_use import ProofOfUse, is_of_same_job
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.errors import AccessError, JobError
from gpuenergyd_sim.driver.host import SimulatedHost
from tests.support.client_process import (
    ClientProcess,
    client_process,
    daemon_for_everybody,
    needs_namespaces,
    needs_root,
)
from tests.support.daemon_process import DaemonProcess, running_daemon
from tests.support.registration import one_stage_registration
from tests.support.waiting import wait_until

NOBODY = pwd.getpwnam("nobody").pw_uid
ALICE, BOB = NOBODY - 1, NOBODY - 2
"""Uids without an entry in the user database."""
TRAINERS, ADMINS = [g for g in grp.getgrall() if g.gr_gid not in {0, NOBODY, ALICE, BOB}][:2]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """A daemon with a control group (trainers) and an administrators' group (admins)."""
    needs_root()
    with daemon_for_everybody(control_groups=[TRAINERS.gr_name], admin_groups=[ADMINS.gr_name]) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def world(daemon: DaemonProcess) -> Iterator[SimulatedHost]:
    host = SimulatedHost.open(daemon.world_path)
    yield host
    host.close()


def claim(client: ClientProcess, gpu_uuid: str) -> tuple[int, str]:
    """Register on a GPU; return the status and the error message."""
    status, answer = client.ask("POST", "/v1/ranks", one_stage_registration(gpu_uuid))
    return status, answer.get("error", "")


def gpu(daemon: DaemonProcess, index: int) -> str:
    return str(daemon.status()["gpus"][index]["gpu_uuid"])


def wait_until_free(daemon: DaemonProcess) -> None:
    wait_until(lambda: all(gpu["job_id"] is None for gpu in daemon.status()["gpus"]))


def test_a_process_is_refused_until_it_runs_on_the_gpu(daemon: DaemonProcess, world: SimulatedHost) -> None:
    mine = gpu(daemon, 0)
    with client_process(daemon.socket_path, uid=ALICE, gid=ALICE, groups=[TRAINERS.gr_gid]) as client:
        before = claim(client, mine)
        world.attach_process(mine, client.pid)
        after = claim(client, mine)
    wait_until_free(daemon)

    assert before[0] == 403
    assert f"uid {ALICE} pid" in before[1]
    assert "no process of its job runs on it (processes on it: none)" in before[1]
    assert f"use the GPU first, then retry; exempt: root of this host and group {ADMINS.gr_name}" in before[1]
    assert after == (200, "")


@pytest.mark.fault(28)
def test_a_gpu_in_use_by_another_user_is_refused_with_its_processes(
    daemon: DaemonProcess, world: SimulatedHost
) -> None:
    theirs = gpu(daemon, 1)
    with (
        client_process(daemon.socket_path, uid=ALICE, gid=ALICE, groups=[TRAINERS.gr_gid]) as alice,
        client_process(daemon.socket_path, uid=BOB, gid=BOB, groups=[TRAINERS.gr_gid]) as bob,
    ):
        world.attach_process(theirs, alice.pid)
        owned = claim(alice, theirs)
        job_id = daemon.status()["gpus"][1]["job_id"]
        from_outside = claim(bob, theirs)
        world.attach_process(theirs, bob.pid)
        from_beside = claim(bob, theirs)
        alice_pid = alice.pid
    wait_until_free(daemon)

    assert owned[0] == 200
    assert from_outside[0] == 403
    assert f"(processes on it: {alice_pid})" in from_outside[1]
    assert from_beside[0] == 409
    assert f"in use by job {job_id} ('one stage') of uid {ALICE} for" in from_beside[1]


def test_a_launcher_may_claim_the_gpu_of_its_worker(daemon: DaemonProcess, world: SimulatedHost) -> None:
    mine = gpu(daemon, 2)
    with client_process(daemon.socket_path, uid=ALICE, gid=ALICE, groups=[TRAINERS.gr_gid]) as launcher:
        world.attach_process(mine, launcher.fork())
        answer = claim(launcher, mine)
    wait_until_free(daemon)

    assert answer == (200, "")


def test_an_unrelated_process_of_the_same_user_belongs_to_another_job(
    daemon: DaemonProcess, world: SimulatedHost
) -> None:
    mine = gpu(daemon, 3)
    with (
        client_process(daemon.socket_path, uid=ALICE, gid=ALICE, groups=[TRAINERS.gr_gid]) as first,
        client_process(daemon.socket_path, uid=ALICE, gid=ALICE, groups=[TRAINERS.gr_gid]) as second,
    ):
        world.attach_process(mine, first.pid)
        answer = claim(second, mine)

    assert answer[0] == 403


def test_the_administrators_group_may_have_any_gpu_changed(daemon: DaemonProcess) -> None:
    with client_process(daemon.socket_path, uid=BOB, gid=BOB, groups=[ADMINS.gr_gid]) as client:
        claimed = claim(client, gpu(daemon, 0))
        leased = client.ask("POST", "/v1/leases", {"gpu": "1", "sm_clock_mhz": 1200})
        released = client.ask("POST", "/v1/leases/release", {"gpu": "1"})
    wait_until_free(daemon)

    assert (claimed, leased[0], released[0]) == ((200, ""), 200, 200)
    assert daemon.is_as_found()


@pytest.mark.fault(42)
def test_an_unprivileged_user_is_refused_every_change_with_the_remedy(daemon: DaemonProcess) -> None:
    with client_process(daemon.socket_path, uid=NOBODY, gid=NOBODY) as client:
        answers = [
            client.ask("POST", "/v1/ranks", one_stage_registration(gpu(daemon, 0))),
            client.ask("POST", "/v1/leases", {"gpu": "0", "sm_clock_mhz": 1200}),
            client.ask("POST", "/v1/leases/release", {"gpu": "0"}),
        ]

    assert [status for status, _ in answers] == [403, 403, 403]
    assert f"to join: `usermod -aG {TRAINERS.gr_name} $(id -nu {NOBODY})`" in answers[0][1]["error"]
    assert f"to join: `usermod -aG {ADMINS.gr_name} $(id -nu {NOBODY})`" in answers[1][1]["error"]
    assert daemon.is_as_found()


@pytest.mark.fault(41)
@pytest.mark.parametrize("namespaces", [("--pid", "--fork"), ("--user", "--map-root-user")], ids=["pid", "user"])
def test_container_root_has_no_rights_whatever_its_groups(daemon: DaemonProcess, namespaces: tuple[str, ...]) -> None:
    needs_namespaces(*namespaces)
    # Groups cannot be set inside a user namespace; root keeps its own.
    groups = None if "--user" in namespaces else [TRAINERS.gr_gid, ADMINS.gr_gid]
    with client_process(daemon.socket_path, uid=0, gid=0, groups=groups, unshare=namespaces) as root:
        answers = [
            root.ask("POST", "/v1/ranks", one_stage_registration(gpu(daemon, 0))),
            root.ask("POST", "/v1/leases", {"gpu": "0", "sm_clock_mhz": 1200}),
        ]

    assert [status for status, _ in answers] == [403, 403]
    assert "root of a container is not root of this host" in answers[0][1]["error"]
    assert daemon.is_as_found()


@pytest.mark.fault(41)
def test_container_root_must_run_on_the_gpu_even_without_control_rules(tmp_path: Path) -> None:
    needs_root()
    needs_namespaces("--pid", "--fork")
    with running_daemon(tmp_path) as daemon:
        mine = gpu(daemon, 0)
        world = SimulatedHost.open(daemon.world_path)
        with client_process(daemon.socket_path, uid=0, gid=0, unshare=("--pid", "--fork")) as root:
            without = claim(root, mine)
            commanded, _ = root.ask("POST", "/v1/leases", {"gpu": "0", "sm_clock_mhz": 1200})
            world.attach_process(mine, root.pid)
            running = claim(root, mine)
        world.close()

    assert without[0] == 403
    assert "no process of its job runs on it" in without[1]
    assert commanded == 403
    assert running == (200, "")


def test_a_host_process_does_not_belong_to_a_container_job(tmp_path: Path) -> None:
    needs_root()
    needs_namespaces("--pid", "--fork")
    listener = socket.socket(socket.AF_UNIX)
    path = tmp_path / "socket"
    listener.bind(str(path))
    listener.listen(2)
    me = PeerCredentials(os.getpid(), 0, 0)
    with (
        client_process(path, uid=0, gid=0, has_own_session=False) as beside,
        client_process(path, uid=0, gid=0, unshare=("--pid", "--fork"), has_own_session=False) as inside,
    ):
        evaluated = [
            is_of_same_job(me, beside.pid),
            is_of_same_job(PeerCredentials(beside.pid, 0, 0), me.pid),
            is_of_same_job(me, inside.pid),
            is_of_same_job(PeerCredentials(inside.pid, 0, 0), me.pid),
        ]
    listener.close()

    assert evaluated == [True, True, False, False]


def test_proof_of_use_can_be_switched_off() -> None:
    needs_root()
    with (
        daemon_for_everybody(requires_gpu_use=False) as daemon,
        client_process(daemon.socket_path, uid=ALICE, gid=ALICE) as client,
    ):
        answer = claim(client, gpu(daemon, 0))

    assert answer == (200, "")


def test_a_process_that_names_no_gpu_has_the_one_that_it_runs_on() -> None:
    users = {"GPU-a": (7, 8), "GPU-b": (8,), "GPU-c": ()}

    async def users_of(gpu_uuid: str) -> tuple[int, ...]:
        return users[gpu_uuid]

    proof = ProofOfUse(AccessRules(), users_of)

    assert asyncio.run(proof.find_gpu(PeerCredentials(7, ALICE, ALICE), users)) == "GPU-a"
    with pytest.raises(AccessError, match="names no GPU and runs on none; use the GPU first, then retry"):
        asyncio.run(proof.find_gpu(PeerCredentials(9, ALICE, ALICE), users))
    with pytest.raises(JobError, match="runs on 2: set GPUENERGYD_GPU_UUID to GPU-a or GPU-b"):
        asyncio.run(proof.find_gpu(PeerCredentials(8, ALICE, ALICE), users))
