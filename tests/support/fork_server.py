"""A process that has imported the daemon and forks it on request: a daemon starts without importing everything again.

Importing takes most of a daemon's start, and the tests start more than a hundred. Everything after the imports is as in
a daemon that was started by its command. Programs that are not the daemon itself are started in the ordinary way,
except the first helpers of each daemon if the server has loaded the policies, see `forked_helpers`.
"""

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODULE = "tests.support.fork_server"
_PRELOADED = ("tests.support.daemon_main", "tests.support.fake_trainer")
"""Modules with a `main(arguments)` that may be requested."""
_POLICIES = "tests.support.forked_helpers"
_WITH_POLICIES = "--with-policies"


@dataclass(slots=True)
class ForkedProcess:
    """A process of the fork server, with the part of `subprocess.Popen` that tests use."""

    server: "ForkServer"
    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        if self.returncode is None:
            self.server.collect(0.0)
            self.returncode = self.server.statuses.pop(self.pid, None)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status when the process has ended; raise subprocess.TimeoutExpired if it has not in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0.0:
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"{MODULE}, process {self.pid}", timeout)
            self.server.collect(left_s)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Link:
    """Two pipes to a fork server: the ends of the test process."""

    requests: int
    reports: int

    def close(self) -> None:
        """Leave the server, which then ends if no other process has these ends."""
        os.close(self.requests)
        os.close(self.reports)


@dataclass(slots=True)
class ForkServer:
    """The client side: one server per test process, started by the first request."""

    has_policies: bool = False
    """Whether the server loads the policies, too. Benchmarks do not: a first plan includes that time."""
    pid: int | None = None
    """The server's process id; None before the first request."""
    statuses: dict[int, int] = field(default_factory=dict)
    """Exit statuses that nobody has asked for yet, by pid."""
    _link: Link | None = None
    _started: list[int] = field(default_factory=list)
    """Pids of forked processes whose number has arrived, oldest first."""
    _received: bytes = b""

    def connect(self, link: Link) -> None:
        """Use a server that was started for this process."""
        self._link = link

    def fork(
        self, module: str, arguments: Sequence[str], *, log: Path | None = None, is_session_leader: bool = False
    ) -> ForkedProcess:
        """Run `main(arguments)` of a preloaded module in a new process, in the environment and folder of this one."""
        if self._link is None:
            [self._link] = start_servers(1, has_policies=self.has_policies)
        request = {
            "module": module,
            "arguments": list(arguments),
            "log": None if log is None else str(log),
            "is_session_leader": is_session_leader,
            "environment": dict(os.environ),
            "folder": str(Path.cwd()),
        }
        os.write(self._link.requests, json.dumps(request).encode() + b"\n")
        while not self._started:
            self.collect(None)
        return ForkedProcess(self, self._started.pop())

    def collect(self, timeout_s: float | None) -> None:
        """Read what the server reports; wait for a first report up to the timeout."""
        assert self._link is not None
        while select.select([self._link.reports], [], [], timeout_s)[0]:
            chunk = os.read(self._link.reports, 65536)
            if not chunk:
                raise RuntimeError("the fork server has ended; its last output tells why")
            *lines, self._received = (self._received + chunk).split(b"\n")
            for line in lines:
                report: dict[str, int] = json.loads(line)
                if "server" in report:
                    self.pid = report["server"]
                elif "status" in report:
                    self.statuses[report["pid"]] = report["status"]
                else:
                    self._started.append(report["pid"])
            timeout_s = 0.0


SERVER = ForkServer()


def start_servers(number: int, *, has_policies: bool, output: Path | None = None) -> list[Link]:
    """Start servers, forks of one process that imports everything once; `output` gets what they and theirs print."""
    requests, reports = [os.pipe() for _ in range(number)], [os.pipe() for _ in range(number)]
    theirs = [end for (read, _), (_, write) in zip(requests, reports, strict=True) for end in (read, write)]
    command = [sys.executable, "-m", MODULE, *([_WITH_POLICIES] if has_policies else []), *map(str, theirs)]
    with contextlib.nullcontext() if output is None else output.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=theirs, stderr=file, start_new_session=True)
    for end in theirs:
        os.close(end)
    links = [Link(write, read) for (_, write), (read, _) in zip(requests, reports, strict=True)]
    atexit.register(_end, process, links)
    return links


def _end(process: "subprocess.Popen[bytes]", links: Sequence[Link]) -> None:
    for link in links:
        link.close()
    process.wait()


def main() -> None:
    """Import everything, then serve on each pair of pipes, in a process of its own where there are several."""
    mains: Mapping[str, Callable[[Sequence[str]], int]] = {name: import_module(name).main for name in _PRELOADED}
    if _WITH_POLICIES in sys.argv:
        import_module(_POLICIES).load_policies()
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy the pages of all these objects
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    ends = [int(argument) for argument in sys.argv[1:] if argument != _WITH_POLICIES]
    pairs = list(zip(ends[::2], ends[1::2], strict=True))
    for requests, reports in pairs:
        if len(pairs) == 1 or os.fork() == 0:
            for end in set(ends) - {requests, reports}:
                os.close(end)
            serve(mains, requests, reports)
            return
    for end in ends:
        os.close(end)
    for _ in pairs:
        os.wait()


def serve(mains: Mapping[str, Callable[[Sequence[str]], int]], requests: int, reports: int) -> None:
    """Fork for each request; report pids and exit statuses.

    At the end of the requests, which is the end of the test process however that came about, it ends what it has
    forked.
    """
    with contextlib.suppress(BrokenPipeError):  # the test process has ended meanwhile
        _report(reports, {"server": os.getpid()})
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: set[int] = set()
    received = b""
    while True:
        readable, _, _ = select.select([requests, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            for pid, status in _ended(children):
                _report(reports, {"pid": pid, "status": status})
        if requests in readable:
            chunk = os.read(requests, 65536)
            if not chunk:
                break
            *lines, received = (received + chunk).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for descriptor in (requests, reports, woken, wake):
                        os.close(descriptor)
                    _run(mains[request["module"]], request)
                children.add(pid)
                _report(reports, {"pid": pid})
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            # A session leader, such as a training run, ends with its ranks.
            (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)


def _ended(children: set[int]) -> list[tuple[int, int]]:
    found = []
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            children.remove(pid)
            found.append((pid, os.waitstatus_to_exitcode(status)))
    return found


def _report(reports: int, report: dict[str, int]) -> None:
    os.write(reports, json.dumps(report).encode() + b"\n")


def _run(main: Callable[[Sequence[str]], int], request: Mapping[str, Any]) -> None:
    """Run a program in the forked process, which ends here."""
    status = 1
    try:
        if request["is_session_leader"]:
            os.setsid()
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        if request["log"] is not None:
            log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
        status = main(request["arguments"])
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else 1
    except BaseException:  # noqa: BLE001  reported here, since a fork must never return to the server's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
