"""Messages of `gpuenergyd lock` and `limit`.

HTTP/1.1 with JSON bodies on the daemon's Unix socket, for administrators:

    POST /v1/leases          LeaseRequest  -> LeaseGranted
    POST /v1/leases/release  LeaseRelease  -> LeaseReleased
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Request of an administrator to lock a GPU's clock, limit its power, or both; `gpu` is a UUID or an index."""

    gpu: str
    sm_clock_mhz: int | None = None
    power_limit_w: float | None = None
    lifetime_s: float | None = None
    is_dry_run: bool = False


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """Settings of a granted lease; without `remaining_s`, it lasts until it is released or the daemon stops."""

    gpu_uuid: str
    lease_id: str | None
    sm_clock_mhz: int | None
    power_limit_w: float | None
    remaining_s: float | None
    is_dry_run: bool


@dataclass(frozen=True, slots=True)
class LeaseRelease:
    """Request to release a manual lease, with both its clock lock and its power limit."""

    gpu: str
    is_dry_run: bool = False


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """Reply: the outcome for each setting that the lease had changed."""

    gpu_uuid: str
    lease_id: str
    outcomes: tuple[str, ...]
    is_dry_run: bool
