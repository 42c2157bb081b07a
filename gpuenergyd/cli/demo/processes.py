"""The demo's processes: a private daemon and a training run, ended whatever happens, with the log of one that fails."""

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
from types import FrameType, TracebackType
from typing import Self

import typer

from gpuenergyd.errors import GpuEnergyError

_TAIL_LINES = 12
_KILL_AFTER_S = 15.0
_POLL_S = 0.02


@dataclass(slots=True)
class Child:
    """One child process, its session's leader, with its log."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path

    def tail(self) -> str:
        """Return the last lines of its log, indented."""
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join(f"  {line}" for line in lines)


@dataclass(slots=True)
class Children:
    """Children that do not outlive the `with` block: last started, first ended."""

    folder: Path
    inherited_fds: Sequence[int] = ()
    _children: list[Child] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Whoever presses Ctrl-C twice shall still not find processes left behind; every wait below is bounded.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for child in reversed(self._children):
                self.end(child)
        finally:
            for number, action in before.items():
                signal.signal(number, action)

    def start(self, name: str, arguments: Sequence[str], **variables: str) -> Child:
        """Start a Python module as a child in a session of its own: Ctrl-C reaches us, and we end it in order.

        If we are killed and cannot, the kernel asks it to end.
        """
        log_path = self.folder / f"{name}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "gpuenergyd.cli.demo.with_parent", str(os.getpid()), *arguments],
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

    def check(self) -> None:
        """Check that every child lives or has ended well.

        Raises:
            GpuEnergyError: one has failed; the end of its log has been printed.
        """
        for child in self._children:
            code = child.process.poll()
            if code not in {None, 0}:
                typer.echo(child.tail(), err=True)
                raise GpuEnergyError(f"{child.name} failed with exit code {code}; the end of its log stands above")

    def end(self, child: Child) -> None:
        """Ask a child to end and wait; what is left of its session after a while is killed."""
        if child.process.poll() is None:
            child.process.terminate()
            try:
                child.process.wait(_KILL_AFTER_S)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        _kill_session(child.process.pid)


def _kill_session(leader_pid: int) -> None:
    """Kill what a child left running in its process group; usually nothing."""
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        try:
            os.killpg(leader_pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(_POLL_S)


@contextlib.contextmanager
def removed_when_left(folder: Path) -> Iterator[int]:
    """Remove a folder at the end of the block, or, if we are killed, when nobody holds the yielded descriptor."""
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-m", "gpuenergyd.cli.demo.folder_cleanup", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    assert keeper.stdin is not None  # a pipe was asked for
    try:
        yield keeper.stdin.fileno()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        keeper.stdin.close()
        keeper.wait()


def raise_on_termination() -> None:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that everything that was started is ended."""

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGHUP, end)
