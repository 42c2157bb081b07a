"""What a registration says of its job's length, checked."""

import math
from datetime import UTC, datetime

from gpuenergyd.core.carbon.slowdown_account import JobLength
from gpuenergyd.errors import ProtocolError
from gpuenergyd.wire.messages import RankRegistration

_MAX_ITERATIONS = 2**53
_MAX_HOURS = 1e6


def checked_length(registration: RankRegistration) -> JobLength:
    """Return how long a job will be.

    Raises:
        ProtocolError: a number is out of range, or the deadline is no instant with an offset from UTC.
    """
    iterations, hours = registration.job_iterations, registration.job_hours
    if iterations is not None and not 1 <= iterations <= _MAX_ITERATIONS:
        raise ProtocolError(f"job_iterations {iterations} must be in [1, 2**53]")
    if hours is not None and not (math.isfinite(hours) and 0 < hours <= _MAX_HOURS):
        raise ProtocolError(f"job_hours {hours} must be in (0, {_MAX_HOURS:g}]")
    return JobLength(iterations, hours, _instant(registration.job_deadline))


def _instant(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
        if at.utcoffset() is not None:
            return at.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise ProtocolError(f"job_deadline {text!r:.60} is no instant with an offset, e.g. 2027-01-31T08:00+00:00")
