"""The zeusd routes: strict parameters, our access rules, leases that end with their process."""

import http.client
import os
import pwd
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpuenergyd.daemon.api.plugin_routes import PluginRoutes
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_zeusd.parameters import BadParameterError, Parameters
from gpuenergyd_zeusd.requests import ZeusdChange
from gpuenergyd_zeusd.routes import ZeusdRoutes
from tests.support.client_process import client_process, daemon_for_everybody, needs_namespaces, needs_root
from tests.support.daemon_process import DaemonProcess, running_daemon
from tests.support.waiting import LIMIT_S, wait_until

ROUTES: type[PluginRoutes] = ZeusdRoutes
"""Type checkers compare the class with the protocol."""
NOBODY = pwd.getpwnam("nobody").pw_uid
ALICE = NOBODY - 1
ME = (os.geteuid(), os.getegid())
LOCK_0 = "/gpu/set_gpu_locked_clocks?gpu_ids=0&min_clock_mhz=210&max_clock_mhz=1200&block=true"


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with daemon_for_everybody() as daemon:
        yield daemon


def ask(daemon: DaemonProcess, method: str, path: str) -> tuple[int, str]:
    """Send a request from this process."""
    connection = http.client.HTTPConnection("localhost")
    with closing(connection):
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(daemon.socket_path))
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()


def is_free(daemon: DaemonProcess) -> bool:
    return all(gpu["zeusd_client_lease"] is None for gpu in daemon.status()["gpus"])


@pytest.mark.parametrize(
    ("method", "path", "status", "reason"),
    [
        ("POST", "/gpu/set_power_limit?gpu_ids=0&block=true", 400, "power_limit_mw: missing parameter"),
        ("POST", "/gpu/set_power_limit?power_limit_mw=1&block=true", 400, "gpu_ids: missing parameter"),
        (
            "POST",
            "/gpu/set_power_limit?gpu_ids=0&power_limit_mw=-1&block=true",
            400,
            "power_limit_mw: '-1' is not an integer",
        ),
        ("POST", "/gpu/set_power_limit?gpu_ids=0&power_limit_mw=4294967296&block=true", 400, "is not an integer"),
        ("POST", "/gpu/set_power_limit?gpu_ids=0&power_limit_mw=1&block=True", 400, "block: 'True' is neither"),
        ("POST", "/gpu/set_power_limit?gpu_ids=a&power_limit_mw=1&block=true", 400, "'a' is not a list of indices"),
        ("POST", f"{LOCK_0}&color=red", 400, "color: unknown parameter"),
        ("POST", LOCK_0.replace("gpu_ids=0", "gpu_ids=0,7"), 400, "gpu_ids: no GPU 7; GPUs: 0, 1, 2, 3"),
        ("POST", LOCK_0.replace("=210", "=1300"), 400, "min_clock_mhz: 1300 is above max_clock_mhz, 1200"),
        ("GET", "/gpu/get_power?gpu_ids=9", 400, "no GPU 9"),
        ("GET", "/cpu/get_power", 404, "API group cpu-read is not enabled"),
        ("GET", "/auth/whoami", 404, "authentication is disabled"),
        ("GET", LOCK_0, 405, "allows POST, not GET"),
    ],
)
def test_an_invalid_parameter_is_refused_by_name_without_effect(
    daemon: DaemonProcess, method: str, path: str, status: int, reason: str
) -> None:
    answer = ask(daemon, method, path)

    assert answer[0] == status, answer
    assert reason in answer[1]
    assert daemon.is_as_found()
    assert is_free(daemon)


def test_failures_are_listed_by_gpu_with_the_highest_status(daemon: DaemonProcess) -> None:
    with client_process(daemon.socket_path, uid=ME[0], gid=ME[1], groups=None) as other:
        assert other.ask("POST", LOCK_0)[0] == 200
        status, text = ask(daemon, "POST", LOCK_0.replace("gpu_ids=0", "gpu_ids= 1 ,0,1").replace(" ", "%20"))
        locks = daemon.locks_mhz()
        client_pid = other.pid
    wait_until(lambda: daemon.status()["gpus"][0]["zeusd_client_lease"] is None)

    assert status == 409
    assert f"pid {client_pid}" in text
    assert '"0":' in text
    assert '"1":' not in text
    assert locks == [1200, 1200, None, None]
    # The lease of this process lasts until it ends or an administrator releases it.
    client = daemon.client()
    released = client.post("/v1/leases/release", {"gpu": "1"})
    client.close()
    assert released["outcomes"] == ["sm_clock_lock: restored: clock lock removed"]
    assert daemon.is_as_found()


@pytest.mark.kill
def test_changes_are_restored_when_their_process_ends_even_if_a_child_holds_the_socket(daemon: DaemonProcess) -> None:
    with client_process(daemon.socket_path, uid=ME[0], gid=ME[1], groups=None) as client:
        child = client.fork()
        assert client.ask("POST", LOCK_0)[0] == 200
        assert client.ask("POST", "/gpu/set_power_limit?gpu_ids=2&power_limit_mw=300000&block=true")[0] == 200
        lowered = (daemon.locks_mhz()[0], client.ask("GET", "/gpu/get_power_limit?gpu_ids=2")[1])
        client.process.kill()
        wait_until(lambda: is_free(daemon))
    wait_until(lambda: not Path(f"/proc/{child}").exists())

    assert lowered == (1200, {"2": {"power_limit_mw": 300000}})
    assert daemon.is_as_found()
    assert '"power_limit_mw":300000' not in ask(daemon, "GET", "/gpu/get_power_limit")[1]


def test_a_flood_of_unawaited_changes_sets_few_clocks_and_ends_at_the_last(daemon: DaemonProcess) -> None:
    host = SimulatedHost.open(daemon.world_path)
    gpu_uuid = host.identities()[3].gpu_uuid
    before = host.num_clock_sets(gpu_uuid)
    clocks = [1005, 1200] * 40
    with client_process(daemon.socket_path, uid=ME[0], gid=ME[1], groups=None) as client:
        statuses = {
            client.ask("POST", f"/gpu/set_gpu_locked_clocks?gpu_ids=3&min_clock_mhz=0&max_clock_mhz={mhz}&block=false")[
                0
            ]
            for mhz in clocks
        }
        wait_until(lambda: daemon.locks_mhz()[3] == clocks[-1])
        num_sets = host.num_clock_sets(gpu_uuid) - before
    wait_until(lambda: is_free(daemon))
    host.close()

    assert statuses == {200}
    assert num_sets < len(clocks)


def test_a_change_that_arrives_during_another_is_applied_too(daemon: DaemonProcess) -> None:
    """The last change must not be lost: no later one would correct the clock."""
    with client_process(daemon.socket_path, uid=ME[0], gid=ME[1], groups=None) as client:
        for _ in range(8):
            for mhz in (1005, 1200):
                change = f"gpu_ids=1&min_clock_mhz=0&max_clock_mhz={mhz}&block=false"
                assert client.ask("POST", f"/gpu/set_gpu_locked_clocks?{change}")[0] == 200
            wait_until(lambda: daemon.locks_mhz()[1] == 1200)
    wait_until(lambda: is_free(daemon))


def test_newer_changes_replace_older_ones_of_the_same_kind_only() -> None:
    limited = ZeusdChange(power_limit_w=300.0)

    assert limited.merged_with(ZeusdChange(sm_clock_mhz=900)) == ZeusdChange(sm_clock_mhz=900, power_limit_w=300.0)
    assert ZeusdChange(sm_clock_mhz=900).merged_with(ZeusdChange(is_clock_reset=True)) == ZeusdChange(
        is_clock_reset=True
    )
    assert ZeusdChange(is_clock_reset=True).merged_with(ZeusdChange(sm_clock_mhz=900)) == ZeusdChange(sm_clock_mhz=900)
    assert limited.merged_with(ZeusdChange(power_limit_w=200.0)) == ZeusdChange(power_limit_w=200.0)


def test_an_unread_parameter_is_unknown() -> None:
    given = Parameters({"gpu_ids": "1, 0,1", "extra": ""})

    assert given.indices(is_required=True) == (1, 0)
    with pytest.raises(BadParameterError, match="extra: unknown parameter"):
        given.done()


def test_a_user_is_refused_until_running_on_the_gpu(daemon: DaemonProcess) -> None:
    needs_root()
    with client_process(daemon.socket_path, uid=ALICE, gid=ALICE) as alice:
        before = alice.ask("POST", LOCK_0)
        host = SimulatedHost.open(daemon.world_path)
        host.attach_process(host.identities()[0].gpu_uuid, alice.pid)
        host.close()
        after = alice.ask("POST", LOCK_0)
        read = alice.ask("GET", "/gpu/get_power_limit?gpu_ids=1")[0]
    wait_until(lambda: is_free(daemon))

    assert before[0] == 403
    assert "no process of its job runs on it" in before[1]["errors"]["0"]
    assert after[0] == 200
    assert read == 200
    assert daemon.is_as_found()


@pytest.mark.parametrize("namespaces", [("--pid", "--fork"), ("--user", "--map-root-user")], ids=["pid", "user"])
def test_root_of_a_container_changes_no_gpu_that_it_does_not_run_on(
    daemon: DaemonProcess, namespaces: tuple[str, ...]
) -> None:
    needs_root()
    needs_namespaces(*namespaces)
    groups = None if "--user" in namespaces else ()
    with client_process(daemon.socket_path, uid=0, gid=0, groups=groups, unshare=namespaces) as root:
        status, _ = root.ask("POST", LOCK_0)

    assert status == 403
    assert daemon.is_as_found()


def test_power_is_streamed_as_it_changes_and_the_stream_ends_with_the_daemon(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon, socket.socket(socket.AF_UNIX) as reader:
        reader.settimeout(LIMIT_S)
        reader.connect(str(daemon.socket_path))
        reader.sendall(b"GET /gpu/stream_power?gpu_ids=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        received = b""
        while received.count(b"data: ") < 3:
            received += reader.recv(4096)
        status = daemon.stop()

    assert b"Content-Type: text/event-stream" in received
    assert b'"gpu_id":1,"power_mw":' in received
    assert status == 0


def test_an_observing_daemon_offers_no_control(tmp_path: Path) -> None:
    with running_daemon(tmp_path, mode="observe") as daemon:
        offered = ask(daemon, "GET", "/discover")[1]
        refused = ask(daemon, "POST", LOCK_0)

        assert '"enabled_api_groups":["gpu-read"]' in offered
        assert refused[0] == 404
        assert daemon.is_as_found()
