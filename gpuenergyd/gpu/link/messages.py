"""What the core and the GPU worker say to each other: one JSON object per datagram.

core -> worker    hello, hand_over, ping, lease, limit, restore, users, look (answered by `reply` with the same
                  request_id), want (unanswered); a lease carries pidfds beside the datagram
worker -> core    reply, samples, clock_set, gpu_state
"""

import json
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gpuenergyd.core.clock_request import ClockRequest
from gpuenergyd.errors import ProtocolError
from gpuenergyd.gpu.device import GpuIdentity

LINK_VERSION = 2
MAX_DATAGRAM_BYTES = 131_072
PEERCRED = struct.Struct("3i")
"""What SO_PEERCRED gives: pid, uid, gid."""
MAX_PIDFDS = 128
"""With one datagram; the kernel takes 253."""


@dataclass(frozen=True, slots=True)
class LeaseOwner:
    """On whose behalf a GPU is changed."""

    job_id: str
    pid: int
    uid: int
    pidfds: tuple[int, ...] = ()
    """Of the processes whose death ends the lease: the worker then restores by itself, waiting for nobody."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One look at a GPU. The counter is given as it stood at its newest update, and when that was.

    None is what is not known: a counter whose update has not been seen yet has no instant.
    """

    gpu_uuid: str
    read_mono_ns: int
    power_w: float | None
    total_energy_j: float | None
    energy_edge_mono_ns: int | None
    sm_clock_mhz: int | None
    temperature_celsius: float | None
    is_power_capped: bool | None


@dataclass(frozen=True, slots=True)
class ClockSet:
    """One clock change, from the wish to the effect; `effective_mono_ns` is when the clock was first read back.

    With an `error` nothing was set. An idle GPU never shows a raised clock, so the effect may stay unknown.
    """

    gpu_uuid: str
    requested_sm_clock_mhz: int
    due_mono_ns: int
    """When it was to be asked for: the instant the wish was sent, or the later one it named."""
    called_mono_ns: int
    returned_mono_ns: int
    effective_mono_ns: int | None
    actual_sm_clock_mhz: int | None
    error: str | None
    previous_sm_clock_mhz: int | None = None
    """The clock last read before the change; None too where an idle GPU did not show when the new one was there."""
    blocked_ns: int = 0
    """Of the time from due to called, how much went into calls for other GPUs."""
    unseen_until_mono_ns: int | None = None
    """The last look after the call at which the change was visibly still on its way."""


class GpuHealth(StrEnum):
    """What can be expected of a GPU."""

    OK = "ok"
    DEGRADED = "degraded"
    WEDGED = "wedged"
    LOST = "lost"
    UNRESTORED = "unrestored"
    OBSERVE_ONLY = "observe_only"


@dataclass(frozen=True, slots=True)
class GpuStateChange:
    """A GPU's health and the reason for it."""

    gpu_uuid: str
    health: GpuHealth
    detail: str


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as a datagram."""
    return json.dumps(message, separators=(",", ":")).encode()


def decode(datagram: bytes) -> dict[str, Any]:
    """Return the message in a datagram.

    Raises:
        ProtocolError: not a JSON object with a type.
    """
    try:
        message = json.loads(datagram)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError("a JSON object with a type is expected")
    return message


def identity_row(identity: GpuIdentity) -> list[Any]:
    """Return an identity as it travels."""
    return [
        identity.gpu_uuid,
        identity.index,
        identity.model_name,
        list(identity.supported_sm_clocks_mhz),
        identity.is_simulated,
        identity.default_power_limit_w,
        identity.blocking_power_w,
        identity.switch_latency_s,
    ]


def identity_from_row(row: list[Any]) -> GpuIdentity:
    """Return the identity in a row."""
    uuid, index, name, clocks, is_simulated, limit_w, blocking_w, switch_s = row
    return GpuIdentity(uuid, index, name, tuple(clocks), is_simulated, limit_w, blocking_w, switch_s)


def sample_row(sample: GpuSample) -> list[Any]:
    """Return a sample as it travels."""
    return [
        sample.gpu_uuid,
        sample.read_mono_ns,
        sample.power_w,
        sample.total_energy_j,
        sample.energy_edge_mono_ns,
        sample.sm_clock_mhz,
        sample.temperature_celsius,
        sample.is_power_capped,
    ]


def clock_request_row(request: ClockRequest) -> list[int]:
    """Return a clock request as it travels."""
    return [
        request.sm_clock_mhz,
        request.sent_mono_ns,
        request.later_sm_clock_mhz,
        request.later_at_mono_ns,
        request.plan_epoch,
    ]


def clock_set_row(change: ClockSet) -> list[Any]:
    """Return a clock change as it travels."""
    return [
        change.gpu_uuid,
        change.requested_sm_clock_mhz,
        change.due_mono_ns,
        change.called_mono_ns,
        change.returned_mono_ns,
        change.effective_mono_ns,
        change.actual_sm_clock_mhz,
        change.error,
        change.previous_sm_clock_mhz,
        change.blocked_ns,
        change.unseen_until_mono_ns,
    ]
