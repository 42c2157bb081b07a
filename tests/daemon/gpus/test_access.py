"""Access rules and limits by kernel credentials: groups, users, container root, request rates, connections."""

import grp
import http.client
import json
import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.daemon.api.connection_guard import ConnectionCounts
from gpuenergyd.daemon.gpus.access import AccessRules
from gpuenergyd.daemon.runtime import peer_credentials as peers
from gpuenergyd.daemon.runtime.peer_credentials import (
    PeerCredentials,
    is_dead,
    is_host_root,
    open_pidfd,
    open_pidfd_by_number,
    peer_credentials,
)
from gpuenergyd.errors import AccessError, JobError, UsageError
from tests.support.client_process import client_process, daemon_for_everybody, needs_root
from tests.support.daemon_process import DaemonProcess, running_daemon
from tests.support.registration import one_stage_registration
from tests.support.waiting import LIMIT_S, wait_until

NOBODY = pwd.getpwnam("nobody").pw_uid
SOME_GROUP = next(g for g in grp.getgrall() if g.gr_gid not in {0, pwd.getpwnam("nobody").pw_gid})


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    needs_root()
    with daemon_for_everybody(control_groups=[SOME_GROUP.gr_name], requires_gpu_use=False) as daemon:
        yield daemon


def registration(daemon: DaemonProcess) -> dict[str, Any]:
    return one_stage_registration(daemon.status()["gpus"][0]["gpu_uuid"])


def register_as(daemon: DaemonProcess, uid: int, gid: int, groups: Sequence[int] = ()) -> tuple[int, dict[str, Any]]:
    with client_process(daemon.socket_path, uid=uid, gid=gid, groups=groups) as client:
        status, answer = client.ask("POST", "/v1/ranks", registration(daemon))
    wait_until(lambda: daemon.job() is None)
    return status, answer


@pytest.mark.fault(42)
def test_a_user_outside_the_group_is_refused_with_those_allowed_and_the_remedy(daemon: DaemonProcess) -> None:
    status, answer = register_as(daemon, NOBODY, pwd.getpwnam("nobody").pw_gid)

    assert status == 403
    assert f"uid {NOBODY} pid" in answer["error"]
    assert f"allowed: root of this host and group {SOME_GROUP.gr_name}; to join:" in answer["error"]
    assert f"to join: `usermod -aG {SOME_GROUP.gr_name} $(id -nu {NOBODY})`" in answer["error"]


def test_a_supplementary_group_is_enough_for_control(daemon: DaemonProcess) -> None:
    status, answer = register_as(daemon, NOBODY, pwd.getpwnam("nobody").pw_gid, groups=[SOME_GROUP.gr_gid])

    assert status == 200, answer


def test_root_of_this_host_may_control(daemon: DaemonProcess) -> None:
    status, answer = register_as(daemon, 0, 0)

    assert status == 200, answer


def test_everyone_may_read_the_status(daemon: DaemonProcess) -> None:
    needs_root()
    program = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "s.sendall(b'GET /v1/status HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')\n"
        "print(s.recv(15).decode())\n"
    )

    answer = subprocess.run(
        [sys.executable, "-I", "-c", program, str(daemon.socket_path)], capture_output=True, text=True, check=True
    )

    assert answer.stdout.strip() == "HTTP/1.1 200 OK"


def test_a_rank_token_is_useless_to_another_user(daemon: DaemonProcess) -> None:
    needs_root()
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(daemon.socket_path))
    connection.request("POST", "/v1/ranks", json.dumps(registration(daemon)))
    token = json.loads(connection.getresponse().read())["rank_token"]
    program = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "body = sys.argv[2].encode()\n"
        "s.sendall(b'POST /v1/release HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: %d\\r\\n\\r\\n' % len(body) + body)\n"
        "print(s.recv(12).decode())\n"
    )
    body = json.dumps({"rank_token": token})

    stolen = subprocess.run(
        [sys.executable, "-I", "-c", program, str(daemon.socket_path), body], capture_output=True, text=True, check=True
    )
    connection.request("POST", "/v1/release", body)
    own = connection.getresponse().status
    connection.close()

    assert stolen.stdout.strip() == "HTTP/1.1 404"
    assert own == 200


@pytest.mark.fault(37)
def test_excess_connections_of_one_user_are_refused_while_others_are_served(tmp_path: Path) -> None:
    with running_daemon(tmp_path, max_connections_per_user=3) as daemon:
        held = []
        for _ in range(3):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(daemon.socket_path))
            connection.sendall(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 200"
            held.append(connection)
        with socket.socket(socket.AF_UNIX) as one_too_many:
            one_too_many.connect(str(daemon.socket_path))
            refusal = one_too_many.recv(12)
        for connection in held:
            connection.close()

        assert refusal == b"HTTP/1.1 503"
        assert daemon.status()["jobs"] == []


@pytest.mark.fault(36)
def test_a_request_flood_of_one_user_is_refused_with_retry_after(tmp_path: Path) -> None:
    with running_daemon(tmp_path, max_requests_per_user_per_s=5) as daemon:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(daemon.socket_path))
        answers = []
        for _ in range(40):
            connection.request("GET", "/v1/status")
            response = connection.getresponse()
            response.read()
            answers.append((response.status, response.headers.get("Retry-After")))
        connection.close()

    refused = [wait for status, wait in answers if status == 429]
    assert refused
    assert all(wait is not None and 0 < float(wait) <= 0.2 for wait in refused)


def test_connections_are_counted_per_user() -> None:
    counts = ConnectionCounts(2)

    allowed = [counts.add(1), counts.add(1), counts.add(1), counts.add(2)]
    counts.remove(1)

    assert allowed == [True, True, False, True]
    assert counts.add(1)


def test_unknown_groups_and_users_in_access_rules_are_refused() -> None:
    with pytest.raises(UsageError, match="control_groups: group 'no-such-group' does not exist"):
        AccessRules.from_names(control_groups=("no-such-group",))
    with pytest.raises(UsageError, match="admin_groups: group 'no-such-group' does not exist"):
        AccessRules.from_names(admin_groups=("no-such-group",))
    with pytest.raises(UsageError, match="control_users: user 'no-such-user' does not exist"):
        AccessRules.from_names(control_users=("no-such-user",))


def test_without_control_rules_everyone_may_control() -> None:
    AccessRules().require_control(PeerCredentials(1, NOBODY, NOBODY))


def test_only_listed_users_may_control() -> None:
    rules = AccessRules.from_names(control_users=("nobody",))

    rules.require_control(PeerCredentials(os.getpid(), NOBODY, 1))
    with pytest.raises(AccessError, match=r"user nobody$"):
        rules.require_control(PeerCredentials(os.getpid(), NOBODY - 1, 1))


def test_the_overflow_uid_of_a_user_namespace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_our_namespaces", lambda: (b"0 100000 65536", 1))
    rules = AccessRules()

    rules.require_control(PeerCredentials(os.getpid(), NOBODY - 1, 1))
    with pytest.raises(AccessError, match="outside the daemon's user namespace"):
        rules.require_control(PeerCredentials(os.getpid(), 65_534, 1))


def test_uid_0_of_an_unreadable_process_is_not_host_root() -> None:
    assert not is_host_root(PeerCredentials(0, 0, 0))
    assert not is_host_root(PeerCredentials(2**22 + 1, 0, 0))


@pytest.mark.fault(2)
@pytest.mark.kill
def test_a_dead_client_is_detected_by_pidfd_while_its_child_holds_the_socket() -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen(1)
    program = (
        "import os, socket, sys, time\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(bytes.fromhex(sys.argv[1]))\n"
        "child = os.fork()\n"
        "if child == 0:\n    sys.stdin.read(); os._exit(0)\n"
        "print('connected', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", program, listener.getsockname().hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    connection, _ = listener.accept()
    assert process.stdout is not None
    assert process.stdout.readline() == "connected\n"
    peer = peer_credentials(connection)
    pidfd = open_pidfd(connection, peer)

    was_dead = is_dead(pidfd)
    process.kill()
    process.wait(LIMIT_S)
    now_dead = is_dead(pidfd)
    connection.setblocking(False)
    with pytest.raises(BlockingIOError):
        connection.recv(1)

    assert (peer.pid, was_dead, now_dead) == (process.pid, False, True)
    assert process.stdin is not None
    process.stdin.close()
    process.stdout.close()
    os.close(pidfd)
    for end in (connection, listener):
        end.close()


@pytest.mark.fault(38)
def test_without_so_peerpidfd_processes_are_identified_by_pid_start_time_and_user() -> None:
    pidfd = open_pidfd_by_number(PeerCredentials(os.getpid(), os.getuid(), os.getgid()))
    was_dead = is_dead(pidfd)
    os.close(pidfd)

    assert not was_dead
    with pytest.raises(JobError, match=f"process {os.getpid()} has ended"):
        open_pidfd_by_number(PeerCredentials(os.getpid(), NOBODY - 1, NOBODY))
    with pytest.raises(JobError, match="has ended or is in a pid namespace"):
        open_pidfd_by_number(PeerCredentials(0, 0, 0))
