"""An unprivileged container: bubblewrap, started by a user who is not root, with the daemon's socket mounted into it.

The container has user, pid, mount, network, IPC and UTS namespaces of its own, no capabilities, a read-only system, and
of the host only the folder of the sockets. It has no GPU: the driver knows processes by their pids on the host, so a
test attaches them to a simulated one from outside.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from tests.support.daemon_process import ROOT, DaemonProcess
from tests.support.processes import child_pids, finished
from tests.support.waiting import LIMIT_S

SOCKET = "/run/gpuenergyd/gpuenergyd.sock"
"""The path in the container, where clients look for it; on the host it is another one."""

# Root's interpreter may be in a folder that is closed to others, so it is mounted elsewhere before root is given up.
_PREPARE = """
set -e
mount -t tmpfs none /mnt
mkdir /mnt/base /mnt/tree /mnt/site
mount --bind "$1" /mnt/base
mount --bind "$2" /mnt/tree
mount --bind "$3" /mnt/site
uid=$4
shift 4
exec setpriv --reuid "$uid" --regid "$uid" --clear-groups -- "$@"
"""


def needs_bubblewrap() -> None:
    """Skip a test where such a container cannot be started."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user, as whom the container is started, needs root")
    for command, package in (("bwrap", "bubblewrap"), ("setpriv", "util-linux"), ("unshare", "util-linux")):
        if shutil.which(command) is None:
            pytest.skip(f"no {command} here: install the Debian package {package}")
    tried = finished([*_as_user(65534), "bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"])
    if tried.returncode != 0:
        pytest.skip(f"users may not start containers here: {tried.stderr.strip()}")


@dataclass(slots=True)
class Container:
    """A running container with one program."""

    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def log(self) -> str:
        """Output of the program so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def host_pid(self) -> int:
        """Return the pid on the host of the program; 0 while it has not begun.

        The first process is never the program, though it has the name of the tests for a moment.
        """
        waiting = child_pids(self.process.pid)
        while waiting:
            pid = waiting.pop()
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").startswith("python"):
                    return pid
            waiting += child_pids(pid)
        return 0


@contextmanager
def container(
    daemon: DaemonProcess, program: Sequence[str], *, uid: int, name: str, environ: Mapping[str, str] | None = None
) -> Iterator[Container]:
    """Run a program of this checkout in a container of a user; `program` is what follows the interpreter."""
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    variables = {
        "PATH": "/usr/bin",
        "PYTHONPATH": "/opt/tree:/opt/tree/policies:/opt/tree/trainers:/opt/tree/plugins:/opt/site",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LD_LIBRARY_PATH": "/opt/base/lib",
        **(environ or {}),
    }
    isolation = [
        *("bwrap", "--unshare-all", "--die-with-parent", "--hostname", name, "--clearenv"),
        *("--ro-bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
        *("--ro-bind", "/mnt/base", "/opt/base", "--ro-bind", "/mnt/tree", "/opt/tree"),
        *("--ro-bind", "/mnt/site", "/opt/site", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
        *("--bind", str(daemon.socket_path.parent), str(Path(SOCKET).parent)),
        *(word for variable in variables.items() for word in ("--setenv", *variable)),
        *("--chdir", "/opt/tree", f"/opt/base/bin/{python}", *program),
    ]
    site_packages = Path(msgspec.__file__).parents[1]  # packages may be those of an environment that this one shares
    log_path = daemon.folder / f"{name}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [
                *("unshare", "--mount", "sh", "-c", _PREPARE, "sh"),
                *(sys.base_prefix, str(ROOT), str(site_packages), str(uid), *isolation),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            yield Container(process, log_path)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(LIMIT_S)


def _as_user(uid: int) -> list[str]:
    return ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--"]
