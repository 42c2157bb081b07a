"""Energy by user, by GPU or by day: every joule of a GPU counted once, for a job or for nobody."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from typing import Any

from gpuenergyd.report.job import JobReport, cost_of
from gpuenergyd.store import History
from gpuenergyd.store.queries import Rollup

_BUCKET_S = 60
"""Minutes are kept for as long as the history is, seconds are not; a span of time counts in whole minutes."""


@dataclass(slots=True)
class Group:
    """One line of a grouped report; energies are sums over what was measured, None when nothing was."""

    name: str
    job_ids: set[str] = field(default_factory=set)
    job_energy_j: float | None = None
    idle_energy_j: float | None = None
    saved_energy_j: float | None = None

    @property
    def energy_j(self) -> float | None:
        """Energy for jobs and for nobody together."""
        return _add(self.job_energy_j, self.idle_energy_j)

    def figures(self, price_per_kwh: float | None) -> dict[str, Any]:
        """Return everything by name, as JSON and CSV give it; a missing figure is None."""
        return {
            "group": self.name,
            "num_jobs": len(self.job_ids),
            "energy_j": self.energy_j,
            "job_energy_j": self.job_energy_j,
            "idle_energy_j": self.idle_energy_j,
            "saved_energy_j": self.saved_energy_j,
            "price_per_kwh": price_per_kwh,
            "cost": cost_of(self.energy_j, price_per_kwh),
        }


def groups_by_user(reports: Sequence[JobReport]) -> tuple[Group, ...]:
    """Return one group per user who ran jobs; energy is that of their jobs' measured iterations."""
    groups: dict[str, Group] = {}
    for report in reports:
        summary = report.summary
        group = groups.setdefault(str(summary.uid), Group(str(summary.uid)))
        group.job_ids.add(summary.job_id)
        group.job_energy_j = _add(group.job_energy_j, summary.energy_j)
        group.saved_energy_j = _add(group.saved_energy_j, report.saved_energy_j)
    return tuple(groups[name] for name in sorted(groups))


def groups_by_gpu(history: History, *, since: datetime | None, until: datetime | None) -> tuple[Group, ...]:
    """Return one group per GPU, from the samples of the whole span: jobs and idling."""
    return _from_rollups(_rollups(history, since, until), name=lambda rollup: rollup.gpu_uuid)


def groups_by_day(
    history: History, *, since: datetime | None, until: datetime | None, zone: tzinfo | None
) -> tuple[Group, ...]:
    """Return one group per day of a time zone (None: this host's), from the samples of the whole span."""
    return _from_rollups(
        _rollups(history, since, until), name=lambda rollup: rollup.started_at.astimezone(zone).date().isoformat()
    )


def _rollups(history: History, since: datetime | None, until: datetime | None) -> Sequence[Rollup]:
    return history.rollups(bucket_s=_BUCKET_S, since=since, until=until)


def _from_rollups(rollups: Sequence[Rollup], *, name: Callable[[Rollup], str]) -> tuple[Group, ...]:
    groups: dict[str, Group] = defaultdict(lambda: Group(""))
    for rollup in rollups:
        group = groups[name(rollup)]
        if rollup.job_id:
            group.job_ids.add(rollup.job_id)
            group.job_energy_j = _add(group.job_energy_j, rollup.energy_j)
        else:
            group.idle_energy_j = _add(group.idle_energy_j, rollup.energy_j)
    for key, group in groups.items():
        group.name = key
    return tuple(groups[key] for key in sorted(groups))


def _add(total: float | None, more: float | None) -> float | None:
    return total if more is None else (total or 0.0) + more
