"""A real Slurm on this machine: munge, controller and one node, each in a folder of a test and on free ports."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.waiting import LIMIT_S, wait_until

_PROGRAMS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client"}
_CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
PrologFlags=Alloc
Prolog={folder}/prolog
Epilog={folder}/epilog
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def needs_slurm() -> None:
    """Skip a test where Slurm cannot be started."""
    if os.geteuid() != 0:
        pytest.skip("slurmd needs root")
    for program, package in _PROGRAMS.items():
        if _path_of(program) is None:
            pytest.skip(f"no {program} here: install the Debian package {package}")


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """A cluster of one node, which is this machine."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Environment of Slurm's commands for this cluster."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    @property
    def state(self) -> str:
        """State of the node, such as idle or drain."""
        return self._output("sinfo", "-h", "-o", "%T").strip()

    @property
    def reason(self) -> str:
        """Why the node is drained."""
        return self._output("sinfo", "-h", "-o", "%E").strip()

    @property
    def log(self) -> str:
        """Log output of controller and node so far."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("slurm*.log")))

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Run a command as a job and return its `srun`, whose end by a signal cancels the job."""
        return subprocess.Popen(["srun", "--ntasks=1", "--immediate=60", *command], env=self.environment)

    def run(self, command: Sequence[str]) -> int:
        """Run a command as a job; return its exit status."""
        return self.start(command).wait(LIMIT_S)

    def cancel_all(self) -> None:
        subprocess.run(["scancel", "--user=root"], env=self.environment, check=True)

    def _output(self, *command: str) -> str:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False).stdout


@contextmanager
def slurm_node(folder: Path, *, prolog: str, epilog: str, environ: Mapping[str, str]) -> Iterator[SlurmNode]:
    """Run a cluster whose prolog and epilog are these programs; Slurm passes them no environment of ours."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    exports = "".join(f"export {name}='{value}'\n" for name, value in environ.items())
    for name, program in (("prolog", prolog), ("epilog", epilog)):
        (folder / name).write_text(f"#!/bin/sh\n{exports}exec '{program}'\n")
        (folder / name).chmod(0o755)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, host=host, ports=_free_ports(2)))
    node = SlurmNode(folder)
    munge = [
        *("--force", "--foreground", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"),
        *(f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"),
    ]
    commands = {"munged": munge, "slurmctld": ["-D", "-c"], "slurmd": ["-D", "-c", "-N", host]}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for name, arguments in commands.items():
            path = _path_of(name)
            assert path is not None
            with (folder / f"{name}.out").open("wb") as out:
                processes.append(
                    subprocess.Popen([path, *arguments], env=node.environment, stdout=out, stderr=subprocess.STDOUT)
                )
            if name == "munged":
                wait_until((folder / "munge.socket").exists)
        wait_until(lambda: node.state == "idle", log=lambda: node.log)
        yield node
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(LIMIT_S)


def _path_of(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports
