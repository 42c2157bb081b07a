"""A client of the daemon in a separate process: as another user, in its own session or namespaces."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon_process import DaemonProcess, running_daemon
from tests.support.processes import child_pids
from tests.support.waiting import LIMIT_S

PROGRAM = """
import http.client, json, os, socket, sys

path, uid, gid, groups = sys.argv[1:5]
if groups != "keep":
    os.setgroups([int(g) for g in groups.split(",") if g])
os.setgid(int(gid))
os.setuid(int(uid))
connection = http.client.HTTPConnection("localhost")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(path)
print("connected", flush=True)
for line in sys.stdin:
    method, route, body = json.loads(line)
    if method == "fork":
        until_parent_ends, held = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(held)
            os.read(until_parent_ends, 1)
            os._exit(0)
        print(json.dumps([child, None]), flush=True)
        continue
    connection.request(method, route, body)
    response = connection.getresponse()
    print(json.dumps([response.status, response.read().decode()]), flush=True)
"""


def needs_root() -> None:
    """Skip a test that needs to become another user."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")


def needs_namespaces(*namespaces: str) -> None:
    """Skip a test if `unshare` with these options is not permitted."""
    probe = subprocess.run(["unshare", *namespaces, "true"], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"namespaces are refused here: {probe.stderr.strip()}")


@contextlib.contextmanager
def daemon_for_everybody(*, prologue: str = "", **overrides: Any) -> Iterator[DaemonProcess]:
    """Run a daemon that every user can connect to.

    Not in pytest's folder, which is closed to other users.
    """
    with tempfile.TemporaryDirectory(prefix="gpuenergyd-everybody-") as folder:
        Path(folder).chmod(0o755)
        with running_daemon(Path(folder), prologue=prologue, **overrides) as daemon:
            daemon.socket_path.parent.chmod(0o755)
            daemon.socket_path.chmod(0o666)
            yield daemon


@dataclass(slots=True)
class ClientProcess:
    """A connected client that sends the requests it is given."""

    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        """The client's pid in the host's namespace."""
        pid = self.process.pid
        while Path(f"/proc/{pid}/comm").read_text().strip() == "unshare" and (below := child_pids(pid)):
            pid = below[0]
        return pid

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Return status and decoded body of a reply."""
        status, text = self._exchange([method, path, None if body is None else json.dumps(body)])
        with contextlib.suppress(ValueError):
            return status, json.loads(text)
        return status, text

    def fork(self) -> int:
        """Start a child of the client that lives as long as the client; return its pid."""
        pid, _ = self._exchange(["fork", None, None])
        return int(pid)

    def _exchange(self, request: list[Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the client died"
        return json.loads(line)


@contextlib.contextmanager
def client_process(
    socket_path: Path,
    *,
    uid: int,
    gid: int,
    groups: Sequence[int] | None = (),
    unshare: Sequence[str] = (),
    has_own_session: bool = True,
) -> Iterator[ClientProcess]:
    """Run a client for the duration of a block; groups=None keeps the groups of this process."""
    reported = "keep" if groups is None else ",".join(map(str, groups))
    command = [sys.executable, "-I", "-c", PROGRAM, str(socket_path), str(uid), str(gid), reported]
    process = subprocess.Popen(
        ["unshare", *unshare, *command] if unshare else command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=has_own_session,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        yield ClientProcess(process)
    finally:
        process.communicate(timeout=LIMIT_S)
