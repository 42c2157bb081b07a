"""Messages of `gpuenergyd calibrate`: a process has switch latencies measured, and follows the progress.

HTTP/1.1 with JSON bodies on the daemon's Unix socket:

    POST /v1/calibrations       CalibrationRequest -> CalibrationStarted
    GET  /v1/calibrations/{id}                     -> CalibrationState
"""

from dataclasses import dataclass
from enum import StrEnum

from gpuenergyd.core.pipeline.calibration import CalibratedTarget


class CalibrationPhase(StrEnum):
    """Phase of the calibration of one GPU."""

    QUEUED = "queued"
    """Another GPU is measured first."""
    AWAITING_LOAD = "awaiting_load"
    """The requesting process must compute on the GPU: an idle GPU does not show the clocks that are set."""
    MEASURING = "measuring"
    DONE = "done"
    """All changes were made; the GPU is restored."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class CalibrationRequest:
    """Request to measure switch latencies on idle GPUs, by UUID or index; without any, on all GPUs of the host.

    At least `num_changes` changes are made to each target clock in each direction.
    """

    gpus: tuple[str, ...] = ()
    num_changes: int = 20
    is_dry_run: bool = False


@dataclass(frozen=True, slots=True)
class CalibratedGpu:
    """A GPU to measure: the clocks that are changed between, the number of changes and about how long they take."""

    gpu_uuid: str
    index: int
    model_name: str
    sm_clocks_mhz: tuple[int, ...]
    num_changes: int
    expected_s: float


@dataclass(frozen=True, slots=True)
class CalibrationStarted:
    """Reply: the GPUs are leased to the process that sent the request, and restored when it ends.

    They are measured in this order. Each one waits until the process computes on it. In a dry run nothing is leased,
    and there is no id.
    """

    calibration_id: str | None
    gpus: tuple[CalibratedGpu, ...]


@dataclass(frozen=True, slots=True)
class CalibrationProgress:
    """Progress of one GPU; `reason` says why it failed."""

    gpu_uuid: str
    phase: CalibrationPhase
    num_changes: int
    num_done: int
    reason: str = ""
    targets: tuple[CalibratedTarget, ...] = ()
    """Statistics of the changes measured so far."""


@dataclass(frozen=True, slots=True)
class CalibrationState:
    """State of a calibration, GPU by GPU."""

    calibration_id: str
    is_finished: bool
    gpus: tuple[CalibrationProgress, ...]
