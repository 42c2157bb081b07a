"""Messages of `gpuenergyd release-gpu`: the daemon lets go of GPUs, and reopens them.

HTTP/1.1 with JSON bodies on the daemon's Unix socket:

    POST /v1/gpus/release       GpuRelease  -> GpusReleased   (administrators)
    POST /v1/gpus/reopen     GpuReopen -> GpusReleased   (administrators)
"""

from dataclasses import dataclass

ALL_GPUS = "all"


@dataclass(frozen=True, slots=True)
class GpuRelease:
    """Request to let go of a GPU, named by UUID or index, or of `all`, for at most `lifetime_s`."""

    gpu: str
    lifetime_s: float = 900.0


@dataclass(frozen=True, slots=True)
class GpuReopen:
    """Request to open a released GPU, or `all` released ones, again now."""

    gpu: str


@dataclass(frozen=True, slots=True)
class GpusReleased:
    """Reply: the GPUs, whether they are released now, and processes that computed on them before."""

    gpu_uuids: tuple[str, ...]
    is_released: bool
    remaining_s: float | None
    """After this time they are reopened; None if they were."""
    pids: tuple[int, ...] = ()
    """Processes that use the GPUs, which no reset allows; those of other users included."""
    job_ids: tuple[str, ...] = ()
    """Jobs on the GPUs, which run at full speed meanwhile."""
