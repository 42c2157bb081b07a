"""Messages of the routes for calibrations and measured GPUs."""

from dataclasses import dataclass
from enum import StrEnum

from gpuenergyd.core.host.measured_gpu import MeasuredGpu
from gpuenergyd_doctor.walk import CalibratedTarget


class CalibrationPhase(StrEnum):
    """Phase of the calibration of one GPU."""

    QUEUED = "queued"
    """Waiting until other GPUs are measured."""
    AWAITING_LOAD = "awaiting_load"
    """Waiting until the requesting process computes on the GPU; an idle GPU does not run at the clock that is set."""
    MEASURING = "measuring"
    DONE = "done"
    """All changes were made; the GPU is restored."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class CalibrationRequest:
    """Request to measure switch latencies on idle GPUs, named by UUID or index; if empty, on all GPUs of the host.

    At least `num_changes` changes are made to each target clock in each direction.
    """

    gpus: tuple[str, ...] = ()
    num_changes: int = 20
    is_dry_run: bool = False


@dataclass(frozen=True, slots=True)
class CalibratedGpu:
    """A GPU to measure: the clocks to switch between, the number of changes and about how long they take."""

    gpu_uuid: str
    index: int
    model_name: str
    sm_clocks_mhz: tuple[int, ...]
    num_changes: int
    expected_s: float


@dataclass(frozen=True, slots=True)
class CalibrationStarted:
    """Reply: the GPUs are leased to the process that sent the request, and restored when it ends.

    They are measured in this order; each measurement waits until the process computes on the GPU. In a dry run nothing
    is leased, and there is no id.
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


@dataclass(frozen=True, slots=True)
class MeasuredGpus:
    """What `gpuenergyd doctor --measure` has found: one GPU of each model."""

    gpus: tuple[MeasuredGpu, ...]


@dataclass(frozen=True, slots=True)
class MeasuredGpusKept:
    """Reply: the models of this host whose measurements the daemon keeps."""

    model_names: tuple[str, ...]
