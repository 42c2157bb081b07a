"""A PostgreSQL server for tests and benchmarks, from the system package, in a temporary folder."""

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from tests.support.waiting import LIMIT_S

_NUMBERS = count()
TEST_OPTIONS = "-c fsync=off"


@dataclass(frozen=True, slots=True)
class PostgresqlServer:
    """A server that listens on a Unix socket only."""

    bin_dir: Path
    folder: Path
    user: str | None
    """User that runs the server; None for the user of the tests."""
    options: str = TEST_OPTIONS
    """Beyond what the package sets: tests need no data after a power cut."""

    def new_database(self) -> str:
        """Make an empty database and return its URL."""
        name = f"history_{os.getpid()}_{next(_NUMBERS)}"
        self._run("createdb", "--host", str(self.folder), "--username", "tests", name)
        return f"postgresql://tests@/{name}?host={self.folder}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        options = f"-c listen_addresses='' -c unix_socket_directories='{self.folder}' {self.options}"
        self._run("pg_ctl", "--pgdata", str(self.folder / "data"), "--wait", "--options", options,
                  "--log", str(self.folder / "log"), "start")  # fmt: skip

    def stop(self, mode: str = "immediate") -> None:
        """Stop the server; clients lose their connections."""
        self._run("pg_ctl", "--pgdata", str(self.folder / "data"), "--wait", "--mode", mode, "stop")

    def _run(self, program: str, *arguments: str) -> None:
        # The server's log stays open in its descendants: nothing of ours may wait for the end of their output.
        done = subprocess.run(
            [str(self.bin_dir / program), *arguments],
            user=self.user,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{program} ended with {done.returncode}"


def _bin_dir() -> Path | None:
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found = shutil.which("initdb")
    if found is not None:
        folders.append(Path(found).resolve().parent)
    needed = ("initdb", "pg_ctl", "createdb")
    return next((folder for folder in folders if all((folder / name).is_file() for name in needed)), None)


class NoServerError(Exception):
    """There is no server to run here; says why."""


@contextlib.contextmanager
def running_postgresql(options: str = TEST_OPTIONS) -> Iterator[PostgresqlServer]:
    """Run a server; raise NoServerError if there is none to run."""
    bin_dir = _bin_dir()
    if bin_dir is None:
        raise NoServerError("no PostgreSQL server is installed here")
    user = None
    if os.geteuid() == 0:
        user = "postgres"
        if user not in {entry.pw_name for entry in pwd.getpwall()}:
            raise NoServerError("PostgreSQL does not run as root, and there is no user postgres")
    folder = Path(tempfile.mkdtemp(prefix="gpuenergyd-pg-"))
    if user is not None:
        shutil.chown(folder, user)
    server = PostgresqlServer(bin_dir, folder, user, options)
    server._run("initdb", "--pgdata", str(folder / "data"), "--username", "tests", "--auth", "trust", "--no-sync")
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def postgresql_server() -> Iterator[PostgresqlServer]:
    """Run a server; skip the test, with the reason, where there is none to run."""
    with contextlib.ExitStack() as ends:
        try:
            server = ends.enter_context(running_postgresql())
        except NoServerError as error:
            pytest.skip(str(error))
        yield server
