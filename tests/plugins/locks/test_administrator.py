"""Clock locks and power limits of administrators on a real daemon: leased, journaled, restored, never during a job."""

import json
import os
import pwd
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd.daemon.gpus.access import AccessRules
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.errors import AccessError
from gpuenergyd.gpu.restore.journal import Journal
from gpuenergyd_sim.driver.host import SimulatedHost
from tests.support.client_process import daemon_for_everybody
from tests.support.daemon_process import DaemonProcess, running_daemon, training
from tests.support.processes import finished
from tests.support.registration import one_stage_registration
from tests.support.waiting import wait_until

NOBODY = pwd.getpwnam("nobody").pw_uid

ASK_AS_NOBODY = """
import http.client, json, os, socket, sys

path, route, uid, body = sys.argv[1:5]
os.setgroups([])
os.setgid(int(uid))
os.setuid(int(uid))
connection = http.client.HTTPConnection("localhost")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(path)
connection.request("POST", route, body)
response = connection.getresponse()
print(json.dumps([response.status, json.loads(response.read())]))
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    with daemon_for_everybody() as daemon:
        yield daemon


@pytest.fixture
def daemon(shared: DaemonProcess) -> Iterator[DaemonProcess]:
    """A daemon whose GPUs must be restored at the end of the test."""
    limits_w = power_limits_w(shared)
    yield shared
    assert shared.is_as_found()
    assert power_limits_w(shared) == limits_w
    assert journalled(shared) == set()


def power_limits_w(daemon: DaemonProcess) -> list[float]:
    host = SimulatedHost.open(daemon.world_path)
    try:
        return [host.power_limit_w(identity.gpu_uuid) for identity in host.identities()]
    finally:
        host.close()


def journalled(daemon: DaemonProcess) -> set[tuple[str, str]]:
    return {(e.gpu_uuid, str(e.control)) for e in Journal(daemon.journal_path).read().entries}


def command(daemon: DaemonProcess, *arguments: str) -> int:
    return run([*arguments, "--socket", str(daemon.socket_path)])


def lease_of(daemon: DaemonProcess, index: int) -> dict[str, Any] | None:
    lease: dict[str, Any] | None = daemon.status()["gpus"][index]["administrator_lease"]
    return lease


def test_a_lock_outlives_its_command_and_a_release_restores_the_gpu(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_uuid = daemon.status()["gpus"][1]["gpu_uuid"]

    assert command(daemon, "lock", "1", "1000", "--json") == 0
    granted = json.loads(capsys.readouterr().out)
    lease = lease_of(daemon, 1)

    assert daemon.locks_mhz() == [None, 1005, None, None]
    assert (granted["gpu_uuid"], granted["sm_clock_mhz"], granted["remaining_s"]) == (gpu_uuid, 1005, None)
    assert lease is not None
    assert (lease["lease_id"], lease["uid"]) == (granted["lease_id"], os.geteuid())
    assert (lease["sm_clock_mhz"], lease["power_limit_w"], lease["remaining_s"]) == (1005, None, None)
    assert daemon.status()["gpus"][1]["job_id"] is None
    assert journalled(daemon) == {(gpu_uuid, "sm_clock_lock")}

    assert command(daemon, "lock", "--release", gpu_uuid) == 0

    assert "clock lock removed" in capsys.readouterr().out
    assert daemon.is_as_found()
    assert lease_of(daemon, 1) is None


def test_a_limit_and_a_lock_are_one_lease_and_restored_together(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    before_w = power_limits_w(daemon)[0]

    assert command(daemon, "limit", "0", "300", "--json") == 0
    assert command(daemon, "limit", "0", "250", "--json") == 0
    assert command(daemon, "lock", "0", "1200", "--json") == 0
    first, _, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())

    assert last["lease_id"] == first["lease_id"]
    assert (last["power_limit_w"], power_limits_w(daemon)[0], daemon.locks_mhz()[0]) == (250.0, 250.0, 1200)
    lease = lease_of(daemon, 0)
    assert lease is not None
    assert (lease["sm_clock_mhz"], lease["power_limit_w"], lease["remaining_s"]) == (1200, 250.0, None)

    assert command(daemon, "limit", "0", "--release") == 0

    assert power_limits_w(daemon)[0] == before_w
    assert daemon.is_as_found()


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_a_limit_out_of_the_range_of_the_gpu_is_a_usage_error_with_the_range(
    daemon: DaemonProcess, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_uuid = daemon.status()["gpus"][1]["gpu_uuid"]

    assert command(daemon, "limit", "1", "5", *options) == 2

    assert capsys.readouterr().err == f"gpuenergyd: 5 W is out of range; GPU {gpu_uuid} supports 100 to 480 W\n"
    assert lease_of(daemon, 1) is None


def test_a_lease_ends_after_its_lifetime(daemon: DaemonProcess) -> None:
    assert command(daemon, "lock", "0", "1200", "--for", "0.3") == 0

    wait_until(lambda: lease_of(daemon, 0) is None)

    assert daemon.is_as_found()
    assert "its lifetime of 0.3 s is over" in daemon.log


def test_a_dry_run_reports_the_change_without_applying_it(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(daemon, "lock", "0", "1001", "--dry-run") == 0

    assert "would be: clock locked at 1005 MHz, until released" in capsys.readouterr().out
    assert daemon.is_as_found()
    assert lease_of(daemon, 0) is None

    assert command(daemon, "lock", "0", "1200") == 0
    assert command(daemon, "lock", "0", "--release", "--dry-run") == 0
    assert daemon.locks_mhz()[0] == 1200
    assert command(daemon, "lock", "0", "--release") == 0


@pytest.mark.parametrize(
    ("arguments", "exit_code", "reason"),
    [
        (("lock", "0", "5000"), 2, "supports 210 to 1410"),
        (("lock", "99", "1200"), 1, "no GPU '99' on this host"),
        (("lock", "0", "1200", "--for", "0"), 2, "valid are values above 0"),
        (("limit", "0", "1"), 2, "supports 100 to 480 W"),
        (("limit", "0", "20000"), 2, "valid are values above 0"),
        (("lock", "0", "--release"), 1, "has no lease"),
    ],
)
def test_an_invalid_request_is_refused_in_one_line_without_a_lease(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], exit_code: int, reason: str
) -> None:
    assert command(daemon, *arguments) == exit_code

    error = capsys.readouterr().err
    assert reason in error
    assert len(error.splitlines()) == 1
    assert lease_of(daemon, 0) is None


@pytest.mark.parametrize("arguments", [("lock", "0"), ("limit", "0"), ("lock", "0", "1200", "--release")])
def test_a_command_without_or_with_contradicting_options_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert run(list(arguments)) == 2

    assert "--release" in capsys.readouterr().err


def test_a_gpu_is_never_in_use_by_a_job_and_leased_to_an_administrator(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    with training(daemon, arguments=("--policy", "uniform")):
        wait_until(lambda: all(gpu["job_id"] for gpu in daemon.status()["gpus"]))
        job = daemon.job()
        assert job is not None
        locks_before = lease_of(daemon, 0)

        assert command(daemon, "lock", "0", "600") == 1
        assert command(daemon, "lock", "0", "600", "--dry-run") == 1
        assert command(daemon, "lock", "0", "--release") == 1

        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == 3
        assert all(f"in use by job {job['job_id']} ('fake') of uid {os.geteuid()} for" in line for line in errors)
        assert locks_before is None
        assert lease_of(daemon, 0) is None
    wait_until(lambda: daemon.job() is None)
    wait_until(daemon.is_as_found)


def test_a_job_is_refused_on_a_leased_gpu_with_its_holder(daemon: DaemonProcess) -> None:
    assert command(daemon, "lock", "0", "1200") == 0
    registration = one_stage_registration(daemon.status()["gpus"][0]["gpu_uuid"])
    client = daemon.client()

    with pytest.raises(Exception, match=rf"409.*leased to the administrator, uid {os.geteuid()}, for"):
        client.post("/v1/ranks", registration)

    assert daemon.locks_mhz()[0] == 1200
    assert command(daemon, "lock", "0", "--release") == 0
    client.post("/v1/release", {"rank_token": client.post("/v1/ranks", registration)["rank_token"]})
    client.close()
    wait_until(lambda: daemon.job() is None)


@pytest.mark.kill
def test_a_lease_is_applied_again_after_a_worker_restart(daemon: DaemonProcess) -> None:
    assert command(daemon, "lock", "0", "1200") == 0
    assert command(daemon, "limit", "0", "250") == 0
    worker = daemon.status()["worker"]

    os.kill(worker["pid"], signal.SIGKILL)
    wait_until(lambda: "after the worker's end: GPU-" in daemon.log)

    wait_until(lambda: daemon.locks_mhz()[0] == 1200 and power_limits_w(daemon)[0] == 250.0)
    assert lease_of(daemon, 0) is not None
    assert command(daemon, "lock", "0", "--release") == 0


def test_a_stopping_daemon_restores_leased_gpus(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        before_w = power_limits_w(daemon)
        assert command(daemon, "lock", "0", "1200") == 0
        assert command(daemon, "limit", "1", "250") == 0

        assert daemon.stop() == 0

        assert daemon.is_as_found()
        assert power_limits_w(daemon) == before_w
        assert journalled(daemon) == set()


def test_an_observing_daemon_refuses_locks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_daemon(tmp_path, mode="observe") as daemon:
        assert command(daemon, "lock", "0", "1200") == 1

        assert "the daemon never changes a GPU" in capsys.readouterr().err
        assert daemon.is_as_found()


@pytest.mark.parametrize("route", ["/v1/leases", "/v1/leases/release"])
def test_a_user_without_administrator_rights_is_refused(daemon: DaemonProcess, route: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    body = json.dumps({"gpu": "0"} if route.endswith("release") else {"gpu": "0", "sm_clock_mhz": 1200})

    asked = finished(
        [sys.executable, "-I", "-c", ASK_AS_NOBODY, str(daemon.socket_path), route, str(NOBODY), body], check=True
    )

    status, answer = json.loads(asked.stdout)
    assert status == 403
    assert "allowed: root of this host" in answer["error"]
    assert lease_of(daemon, 0) is None


def test_only_root_and_the_daemons_own_user_are_administrators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    rules = AccessRules()
    rules.require_administrator(PeerCredentials(os.getpid(), NOBODY, NOBODY))

    with pytest.raises(AccessError, match=rf"allowed: root of this host and uid {NOBODY} \(the daemon's own user\)"):
        rules.require_administrator(PeerCredentials(os.getpid(), NOBODY - 1, NOBODY))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(AccessError, match=r"outside a job; allowed: root of this host"):
        rules.require_administrator(PeerCredentials(os.getpid(), NOBODY, NOBODY))
