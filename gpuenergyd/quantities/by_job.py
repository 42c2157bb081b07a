"""The energy that each job used, within iterations and between them, with its cost and emissions."""

from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime

from gpuenergyd.quantities.energy_use import EnergyUse
from gpuenergyd.quantities.rates import Rates
from gpuenergyd.store import History


def energy_by_job(
    history: History, rates: Rates, *, first_at: datetime, since: datetime | None = None, until: datetime | None = None
) -> Mapping[str, EnergyUse]:
    """Return by ID the energy that jobs used in a time range; the first of the jobs started at `first_at`."""
    used: dict[str, EnergyUse] = defaultdict(EnergyUse)
    # The hour in which the job started is stored as a whole, so the range has to begin with that hour.
    begin = first_at.replace(minute=0, second=0, microsecond=0)
    for part in history.energy_sums(
        since=max(begin, since or begin),
        until=until,
        by_time=rates.is_by_time,
        is_split=rates.is_split if rates.intensities else None,
    ):
        if part.job_id:
            used[part.job_id] = used[part.job_id].plus(part, rates)
    return used
