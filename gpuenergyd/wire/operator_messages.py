"""Messages of `gpuenergyd job`: an operator changes a running job.

HTTP/1.1 with JSON bodies on the daemon's Unix socket:

    PATCH /v1/jobs/{job_id}     JobPatch -> JobPatched
"""

from dataclasses import dataclass, fields

from gpuenergyd.errors import UsageError
from gpuenergyd.wire import MAX_CONTROL_MESSAGE_BYTES
from gpuenergyd.wire.daemon_codec import decode


@dataclass(frozen=True, slots=True)
class JobPatch:
    """What to change of a running job; null leaves a value as it is."""

    policy: str | None = None
    max_slowdown_ratio: float | None = None
    priority: int | None = None
    """Rank among the jobs of the host, 0 highest (administrators)."""
    is_paused: bool | None = None
    """Whether the job runs at full speed with its GPUs restored, until it is resumed."""
    is_released: bool = False
    """Withdraws all earlier orders instead: what the job was registered with holds again."""


@dataclass(frozen=True, slots=True)
class JobPatched:
    """A job after a change; `changes` has one text per value that differs now, e.g. `priority 0 -> 2`."""

    job_id: str
    job_name: str
    phase: str
    policy: str
    max_slowdown_ratio: float
    priority: int
    is_paused: bool
    changes: tuple[str, ...]


def decode_job_patch(body: bytes) -> JobPatch:
    """Return a change of a job.

    Raises:
        ProtocolError: the body is no JSON object of this form.
        UsageError: a key is unknown, or nothing is to be changed.
    """
    patch = decode(body, JobPatch, max_bytes=MAX_CONTROL_MESSAGE_BYTES)
    names = [one.name for one in fields(JobPatch)]
    given = decode(body, dict, max_bytes=MAX_CONTROL_MESSAGE_BYTES)
    for key in given:
        if key not in names:
            raise UsageError(f"unknown key {str(key)[:100]!r}; valid: {', '.join(names)}")
    if patch == JobPatch():
        raise UsageError(f"nothing to change: give one of {', '.join(names)}")
    if patch.is_released and patch != JobPatch(is_released=True):
        raise UsageError("is_released withdraws all orders, and cannot be combined with another change")
    return patch
