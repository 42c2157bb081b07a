"""What a core that is restarted leaves to the next one: its jobs, their processes' tokens, and a token for the worker.

Theory of operation. A core that is told to end writes all it knows of its jobs into one file, tells the worker (a
unit of its own, which lives on) to keep its leases for a few seconds, and goes. The next core reads the file, shows the
worker the token in it, and goes on: training processes keep their rank tokens, GPUs their clocks, jobs their plans.
Only a core that ends in order hands anything over. One that crashes, hangs or is killed leaves no token behind, so the
worker restores at once. So does a worker that nobody comes back to, and one that is stopped with its core.
"""

import contextlib
import json
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_type_hints

from gpuenergyd.core.job.description import JobDescription
from gpuenergyd.core.job.faults import Faults
from gpuenergyd.core.job.history import RememberedIterations
from gpuenergyd.core.job.issued_plans import IssuedPlans
from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.rank_reports import RankReports
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.errors import GpuEnergyError, ProtocolError
from gpuenergyd.gpu.link.messages import LeaseOwner
from gpuenergyd.gpu.process_identity import process_start_ticks, read_boot_id
from gpuenergyd.wire.daemon_codec import decode, decode_member, encode, encode_member
from gpuenergyd.wire.messages import PlanSlice, RankRegistration

T = TypeVar("T")

_Part: TypeAlias = Faults | IssuedPlans | RankReports | RememberedIterations
_Field: TypeAlias = tuple[str, object, str]
"""Its name in the file, what it is a field of, and its name there."""

_VERSION = 2
_MAX_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class HandedSession:
    """One training process that has registered."""

    token: bytes
    pp_rank: int
    gpu_uuid: str
    peer: PeerCredentials
    start_ticks: int
    """When the process began: a pid alone is reused."""
    last_sequence: int
    requested_sm_clock_mhz: int | None

    @property
    def is_alive(self) -> bool:
        """Whether that very process still runs."""
        return process_start_ticks(self.peer.pid) == self.start_ticks


@dataclass(frozen=True, slots=True)
class HandedRunner:
    """What the daemon around a job knows of it."""

    owner: LeaseOwner
    created_mono_ns: int
    last_report_mono_ns: int | None
    last_epoch: int
    slices: dict[int, list[PlanSlice]]
    given: dict[int, PlanSlice]
    num_iterations_for: dict[PlanPurpose, int]
    timeline: tuple[int, tuple[ObservedSpan, ...]] | None
    tuned_figures: tuple[tuple[float, float | None], ...]
    wants_from_epoch: int | None
    is_suspended: bool


@dataclass(frozen=True, slots=True)
class HandedJob:
    """One job: what it is, all that its state machine remembers (field by field, as JSON), and who takes part."""

    description: JobDescription
    memory: dict[str, str]
    registration: RankRegistration
    runner: HandedRunner
    sessions: tuple[HandedSession, ...]


@dataclass(frozen=True, slots=True)
class HandOver:
    """The whole file."""

    version: int
    boot_id: str
    worker_token: str
    jobs: tuple[HandedJob, ...]


def memory_of(job: Job) -> dict[str, str]:
    """Return everything that a job's state machine remembers, field by field."""
    return {path: encode_member(_plain(getattr(owner, name))) for path, owner, name in _fields_of(job)}


def recalled(description: JobDescription, rules: JobRules, memory: dict[str, str]) -> Job:
    """Return the job that remembers this.

    Raises:
        ProtocolError: it is not the memory of a job as this program knows it.
    """
    job = Job(description, rules)
    known = {path: (owner, name) for path, owner, name in _fields_of(job)}
    if memory.keys() != known.keys():
        raise ProtocolError(f"a job has no field {min(memory.keys() ^ known.keys())!r}, or lacks it")
    for path, text in memory.items():
        owner, name = known[path]
        before = getattr(owner, name)
        if isinstance(before, deque):
            before.extend(decode_member(text, list[Any]))
        else:
            setattr(owner, name, decode_member(text, get_type_hints(type(owner))[name]))
    return job


def _fields_of(owner: Job | _Part, path: str = "") -> Iterator[_Field]:
    """Yield what a job remembers, its parts' fields among its own; rules belong to the daemon."""
    for own in fields(owner):
        value = getattr(owner, own.name)
        if isinstance(value, _Part):
            yield from _fields_of(value, f"{path}{own.name}.")
        elif own.name not in {"rules", "max_kept"}:
            yield f"{path}{own.name}", owner, own.name


def write_hand_over(path: Path, worker_token: str, jobs: Iterable[HandedJob]) -> None:
    """Write the file, for our own user alone; nothing is written unless it can be read again.

    Raises:
        GpuEnergyError: it cannot be written, or not be read again.
    """
    body = encode(HandOver(_VERSION, read_boot_id(), worker_token, tuple(jobs)))
    for handed in decode(body, HandOver, max_bytes=_MAX_BYTES).jobs:
        recalled(handed.description, JobRules(), handed.memory)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.unlink(missing_ok=True)
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(body)
        unfinished.rename(path)
    except OSError as error:
        raise GpuEnergyError(f"cannot write {path}: {error.strerror}") from None


def take_hand_over(path: Path) -> HandOver | None:
    """Return what an earlier core of this boot left, and remove it: nobody takes it over twice.

    Raises:
        GpuEnergyError: there is something, but it cannot be used.
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
            raise GpuEnergyError(f"{path} is not ours alone: uid {status.st_uid}, mode {status.st_mode & 0o777:o}")
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
    handed = decode(body, HandOver, max_bytes=_MAX_BYTES)
    return handed if handed.boot_id == read_boot_id() else None


def _plain(value: object) -> object:
    if isinstance(value, deque):
        return list(value)
    return dict(value) if isinstance(value, Counter) else value
