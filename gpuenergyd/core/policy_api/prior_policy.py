"""What past jobs show about a GPU model, and how a policy presents it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd.core.policy_api.past_jobs import PastJob


class PriorPolicy(Protocol):
    """Optional method of a clock policy: shows the curves from which a job would start."""

    def prior(self, gpu_model_name: str, past_jobs: Sequence[PastJob]) -> "PriorView":
        """Return the estimated curves of a GPU model, given past jobs of one user."""
        ...


@dataclass(frozen=True, slots=True)
class PriorPoint:
    """Estimated time and power at a share of the maximum clock, relative to the maximum, with their standard errors."""

    clock_ratio: float
    time_ratio: float
    time_sigma_ratio: float
    power_ratio: float
    power_sigma_ratio: float


@dataclass(frozen=True, slots=True)
class PriorCurve:
    """Estimated curve of a kind of instruction."""

    kind: InstructionKind
    points: tuple[PriorPoint, ...]


@dataclass(frozen=True, slots=True)
class PriorView:
    """What a job on a GPU model would start from: published curves, and a past job of the same model."""

    gpu_model_name: str
    basis: str
    num_past_jobs: int
    """Number of the given past jobs that are used."""
    curves: tuple[PriorCurve, ...]
