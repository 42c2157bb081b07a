"""`gpuenergyd status --watch` on a real terminal fills the screen, follows resizes and restores it at the end."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyte
import pytest

from gpuenergyd.report.terminal.live import _shortened
from tests.support.daemon_process import DaemonProcess, running_daemon
from tests.support.waiting import LIMIT_S, wait_until


class Terminal:
    """A terminal of a size, what a command draws on it, and that command."""

    def __init__(self, command: list[str], columns: int, lines: int) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        self._slave = slave  # stays open: where the last one closes, what was not read yet may be lost

    def read_until(self, output: bytes) -> None:
        """Read until something was said: what a command says last may reach us a moment after it has gone."""
        wait_until(lambda: bool(self.text()) and output in self.raw)

    def text(self) -> str:
        """Return what stands on the screen after all that has been drawn so far."""
        while select.select([self._master], [], [], 0.0)[0]:
            try:
                drawn = os.read(self._master, 65_536)
            except OSError:  # the other end is closed
                break
            if not drawn:
                break
            self.raw += drawn
            self._stream.feed(drawn)
        return "\n".join(line.rstrip() for line in self.screen.display)

    def wait_for(self, is_shown: Callable[[str], bool]) -> str:
        """Return the first screen that shows what is waited for."""
        wait_until(lambda: is_shown(self.text()))
        return self.text()

    def close(self) -> None:
        """End the command, if it has not, and let go of the terminal."""
        self.process.kill()
        self.process.wait(LIMIT_S)
        os.close(self._master)
        os.close(self._slave)


@contextmanager
def watching(daemon: DaemonProcess, columns: int, lines: int) -> Iterator[Terminal]:
    command = [sys.executable, "-m", "gpuenergyd.cli.main", "status", "--watch", "--socket", str(daemon.socket_path)]
    terminal = Terminal(command, columns, lines)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with running_daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (200, 50)])
def test_a_watched_status_fills_the_screen_and_restores_it_on_ctrl_c(
    columns: int, lines: int, daemon: DaemonProcess
) -> None:
    """Health, a line for each GPU and the jobs are there; Ctrl-C is an orderly end."""
    with watching(daemon, columns, lines) as terminal:
        shown = terminal.wait_for(lambda text: "no jobs" in text and text.count(" MHz") >= 4)
        os.kill(terminal.process.pid, signal.SIGINT)
        assert terminal.process.wait(LIMIT_S) == 130
        terminal.read_until(b"\x1b[?1049l")

    assert "gpuenergyd " in shown
    assert "simulated GPUs" in shown
    assert "Traceback" not in terminal.raw.decode()
    assert b"\x1b[?1049h" in terminal.raw  # a screen of its own, so that what stood there before comes back
    assert terminal.raw.rindex(b"\x1b[?1049l") > terminal.raw.rindex(b"\x1b[?1049h")
    assert b"\x1b[?25h" in terminal.raw  # and the cursor too


def test_a_watched_status_ends_with_one_line_when_the_daemon_stops(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon, watching(daemon, 80, 24) as terminal:
        terminal.wait_for(lambda text: "no jobs" in text)
        assert daemon.stop() == 0
        assert terminal.process.wait(LIMIT_S) == 3
        terminal.read_until(b"gpuenergyd: ")

    assert terminal.raw.rindex(b"\x1b[?1049l") < terminal.raw.rindex(b"gpuenergyd: ")
    assert "Traceback" not in terminal.raw.decode()


def test_jobs_that_differ_at_the_end_of_their_names_can_be_distinguished() -> None:
    names = [f"megatron-gpt-1.3b-pretraining-run-{k}" for k in (7, 8)]

    assert [_shortened(name, 18) for name in names] == ["megatron-…ng-run-7", "megatron-…ng-run-8"]
    assert [_shortened("gpt", width) for width in (3, 2, 1)] == ["gpt", "g…", "…"]
