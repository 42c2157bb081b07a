"""The hand-over file from a stopping daemon to the next one: jobs, session tokens, and a token for the GPU worker.

Theory of operation. A stopping daemon writes the state of its jobs into one file, asks the GPU worker (a separate
systemd unit, which keeps running) to keep the leases for a few seconds, and exits. The next daemon reads the file,
shows its token to the GPU worker, and continues: training processes keep their rank tokens, GPUs their clocks, jobs
their plans. Only an orderly stop hands over. A daemon that crashes, hangs or is killed leaves no token, so the GPU
worker restores the GPUs at once. It also restores them if no daemon returns in time, or if it is stopped itself.
"""

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpuenergyd.atomic_file import replace_file
from gpuenergyd.core.job.description import JobDescription
from gpuenergyd.core.job.state import JobSnapshot
from gpuenergyd.daemon.jobs.runner import RunnerSnapshot
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.errors import GpuEnergyError, ProtocolError
from gpuenergyd.gpu.process_identity import process_start_ticks, read_boot_id
from gpuenergyd.wire.daemon_codec import decode, encode
from gpuenergyd.wire.messages import RankRegistration

_VERSION = 3
_MAX_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class HandedSession:
    """The session of one training process."""

    token: bytes
    pp_rank: int
    gpu_uuid: str
    peer: PeerCredentials
    start_ticks: int
    """Start time of the process, which distinguishes it from a later process with the same pid."""
    last_sequence: int
    requested_sm_clock_mhz: int | None
    stage_rank: int = 0

    @property
    def is_alive(self) -> bool:
        """Whether the process, and not another one with its pid, is still running."""
        return process_start_ticks(self.peer.pid) == self.start_ticks


@dataclass(frozen=True, slots=True)
class HandedJob:
    """One job: its description, the states of its state machine and runner, and its processes."""

    description: JobDescription
    state: JobSnapshot
    registration: RankRegistration
    runner: RunnerSnapshot
    sessions: tuple[HandedSession, ...]


@dataclass(frozen=True, slots=True)
class HandoverFile:
    """The content of the file."""

    version: int
    boot_id: str
    worker_token: str
    jobs: tuple[HandedJob, ...]


def write_hand_over(path: Path, worker_token: str, jobs: Iterable[HandedJob]) -> None:
    """Write the file, readable by this user only, after checking that it can be read again.

    Raises:
        GpuEnergyError: the file cannot be written, or could not be read again.
    """
    body = encode(HandoverFile(_VERSION, read_boot_id(), worker_token, tuple(jobs)))
    decode(body, HandoverFile, max_bytes=_MAX_BYTES)
    try:
        replace_file(path, body)
    except OSError as error:
        raise GpuEnergyError(f"cannot write {path}: {error.strerror}") from None


def consume_hand_over(path: Path) -> HandoverFile | None:
    """Return what an earlier daemon left since the host booted, and delete the file, so that it is used only once.

    Raises:
        GpuEnergyError: there is a file, but it cannot be used.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise GpuEnergyError(f"cannot read {path}: {error.strerror}") from None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            mode = f"{status.st_mode & 0o777:o}"
            raise GpuEnergyError(f"{path} must belong to this user alone: uid {status.st_uid}, mode {mode}")
        body = file.read(_MAX_BYTES + 1)
    with contextlib.suppress(OSError):
        path.unlink()
    try:
        head = json.loads(body)
        version = head["version"] if isinstance(head, dict) else None
    except (ValueError, KeyError):
        version = None
    if version != _VERSION:
        raise ProtocolError(f"{path}: version {version}; this program reads {_VERSION}")
    handed = decode(body, HandoverFile, max_bytes=_MAX_BYTES)
    return handed if handed.boot_id == read_boot_id() else None
