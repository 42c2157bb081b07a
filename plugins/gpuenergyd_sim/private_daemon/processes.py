"""Child processes: started in sessions of their own, always terminated, failures shown with their log."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Self

import typer

from gpuenergyd.cli.exit_codes import EXIT_USAGE
from gpuenergyd.errors import GpuEnergyError, UsageError

_TAIL_LINES = 12
_KILL_AFTER_S = 15.0
_POLL_S = 0.02


@dataclass(slots=True)
class Child:
    """One child process, leader of its own session, with its log file."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def log_tail(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join(f"  {line}" for line in lines)

    def last_line(self, prefix: str) -> str | None:
        """Return the last line of the log that begins with a prefix, without it; None without such a line."""
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.removeprefix(prefix) for line in reversed(lines) if line.startswith(prefix)), None)


@dataclass(slots=True)
class Children:
    """Child processes that are terminated at the end of the `with` block, last started first."""

    folder: Path
    inherited_fds: Sequence[int] = ()
    _children: list[Child] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A second Ctrl-C must not leave processes behind; every wait below is bounded.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for child in reversed(self._children):
                self._terminate(child)
        finally:
            for number, action in before.items():
                signal.signal(number, action)

    def start(self, name: str, arguments: Sequence[str], **variables: str) -> Child:
        """Start a Python module as a child process.

        Its own session keeps Ctrl-C from reaching it, so that children are terminated in order. If this process is
        killed, the kernel terminates the child.
        """
        log_path = self.folder / f"{name}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "gpuenergyd_sim.private_daemon.with_parent", str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
                start_new_session=True,
                pass_fds=self.inherited_fds,
            )
        child = Child(name, process, log_path)
        self._children.append(child)
        return child

    def stop(self, child: Child) -> None:
        self._children.remove(child)
        self._terminate(child)

    def check(self) -> None:
        """Check that every child is running or has exited with status 0.

        Raises:
            UsageError: a child has refused an option; the message is the child's.
            GpuEnergyError: a child has failed; the end of its log has been printed.
        """
        for child in self._children:
            code = child.process.poll()
            if code == EXIT_USAGE and (refusal := child.last_line("gpuenergyd: ")) is not None:
                raise UsageError(refusal)
            if code not in {None, 0}:
                typer.echo(child.log_tail(), err=True)
                raise GpuEnergyError(f"{child.name} failed with exit code {code}; see the end of its log above")

    def _terminate(self, child: Child) -> None:
        """Terminate a child, or kill it after a timeout, and kill what is left of its session."""
        if child.process.poll() is None:
            child.process.terminate()
            try:
                child.process.wait(_KILL_AFTER_S)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        _kill_session(child.process.pid)


def _kill_session(leader_pid: int) -> None:
    """Kill the processes that a child left in its process group; usually there are none."""
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        try:
            os.killpg(leader_pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(_POLL_S)


@contextlib.contextmanager
def remove_on_exit(folder: Path) -> Iterator[int]:
    """Remove a folder at the end of the block or, after SIGKILL, once no process holds the yielded descriptor."""
    cleanup = subprocess.Popen(
        [sys.executable, "-I", "-m", "gpuenergyd_sim.private_daemon.folder_cleanup", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    assert cleanup.stdin is not None  # stdin=PIPE
    try:
        yield cleanup.stdin.fileno()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        cleanup.stdin.close()
        cleanup.wait()


def raise_on_termination() -> None:
    """Make SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that all child processes are terminated."""

    def exit_process(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, exit_process)
    signal.signal(signal.SIGHUP, exit_process)
