"""How long the job will be, as the environment says it; nothing here raises: no wrong word may stop a training."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

ITERATIONS_VARIABLE = "GPUENERGYD_JOB_ITERATIONS"
HOURS_VARIABLE = "GPUENERGYD_JOB_HOURS"
DEADLINE_VARIABLE = "GPUENERGYD_JOB_DEADLINE"


@dataclass(frozen=True, slots=True)
class SaidLength:
    """What is said of a job's length: iterations, hours at full speed, an instant by which it has to end."""

    iterations: int | None = None
    hours: float | None = None
    deadline: str | None = None


def find_length(environ: Mapping[str, str] | None = None) -> SaidLength:
    """Return what the environment says; what makes no sense is as if nobody had said it."""
    environ = os.environ if environ is None else environ
    iterations = _number(environ.get(ITERATIONS_VARIABLE))
    return SaidLength(
        int(iterations) if iterations is not None and iterations >= 1 else None,
        _number(environ.get(HOURS_VARIABLE)),
        utc_text(environ.get(DEADLINE_VARIABLE)),
    )


def utc_text(text: str | None) -> str | None:
    """Return an instant in UTC; one without an offset is of this host's time zone. None: there is none in the text."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC).isoformat() if text else None
    except (ValueError, OverflowError, OSError):
        return None


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None
