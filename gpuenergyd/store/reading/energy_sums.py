"""Sums of attributed energy by job, GPU, host or hour, read from the coarsest buckets that the time range allows."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from gpuenergyd.store.reader import Reader

_HOUR_S, _MINUTE_S = 3600, 60
_ROUNDING_S = 0.001
_AMOUNTS = ("energy_j", "estimated_j", "measured_s", "estimated_s", "missing_s", "assumed_host_j")


@dataclass(frozen=True, slots=True)
class EnergySum:
    """Energy that GPUs used for one job (empty `job_id`: idle); GPU, start and host are set only if summed by them.

    `energy_j` was measured during `measured_s`, `estimated_j` estimated during `estimated_s`; for `missing_s` there is
    no reading. An energy is None, never 0, if there is none of its kind.
    """

    gpu_uuid: str | None
    started_at: datetime | None
    job_id: str
    energy_j: float | None
    estimated_j: float | None
    measured_s: float
    estimated_s: float
    missing_s: float
    assumed_host_j: float | None = None
    """The GPUs' share of the energy assumed for the rest of their hosts; None if none was recorded."""
    bucket_s: int | None = None
    """Length of the bucket that begins at `started_at`; only for sums by time."""
    host: str | None = None
    """Host of the GPU; None if recorded by a version that did not record hosts."""


@dataclass(frozen=True, slots=True)
class HostEnergyRow:
    """The energy of one RAPL domain of a host in one hour; for `missing_s` there is no reading."""

    domain: str
    started_at: datetime
    energy_j: float | None
    measured_s: float
    missing_s: float
    host: str = ""
    """Empty if recorded by a version that did not record hosts."""


def host_energy(reader: Reader, since: datetime | None, until: datetime | None) -> tuple[HostEnergyRow, ...]:
    """Return the energy of every host per hour, by domain, then time."""
    wanted = {"bucket_s = ?": _HOUR_S, "started_at >= ?": since, "started_at < ?": until}
    return reader.records(HostEnergyRow, "host_rollups", wanted, order_by="host, domain, started_at")


def energy_sums(
    reader: Reader,
    *,
    since: datetime | None,
    until: datetime | None,
    by_gpu: bool,
    by_time: bool,
    by_host: bool = False,
    is_split: Callable[[datetime], bool] | None = None,
) -> Iterator[EnergySum]:
    """Yield sums over a time range: whole hours from hourly rollups, the rest from minutes.

    For sums by time, hours for which `is_split` returns True are yielded as minutes if those are still stored. A key
    may occur up to three times, once for each part of the range.
    """
    keys = [
        "job_id",
        *(["gpu_uuid"] if by_gpu else []),
        *(["started_at"] if by_time else []),
        *(["host"] if by_host else []),
    ]
    table = "gpu_rollups LEFT JOIN gpu_hosts USING (gpu_uuid)" if by_host else "gpu_rollups"

    def sums(bucket_s: int, begin: datetime | None, end: datetime | None) -> list[EnergySum]:
        columns = ", ".join((*keys, *(f"sum({name}) AS {name}" for name in _AMOUNTS)))
        wanted = {"bucket_s = ?": bucket_s, "started_at >= ?": begin, "started_at < ?": end}
        rows = reader.select(columns, table, wanted, group_by=", ".join(keys))
        common = {"gpu_uuid": None, "started_at": None, "bucket_s": bucket_s if by_time else None}
        return [EnergySum(**{**common, **vars(row)}) for row in rows]

    for bucket_s, begin, end in _parts(since, until):
        hours: dict[datetime, list[EnergySum]] = defaultdict(list)
        for part in sums(bucket_s, begin, end):
            at = part.started_at if is_split is not None and bucket_s == _HOUR_S else None
            if at is not None and is_split is not None and is_split(at):
                hours[at].append(part)
            else:
                yield part
        for at, whole in hours.items():
            minutes = sums(_MINUTE_S, at, at + timedelta(hours=1))
            # If some minutes of the hour were already deleted, use the whole hour, dated at its start.
            yield from minutes if _known_s(minutes) >= _known_s(whole) - _ROUNDING_S else whole


def _known_s(parts: Iterable[EnergySum]) -> float:
    return sum(part.measured_s + part.estimated_s + part.missing_s for part in parts)


def _parts(since: datetime | None, until: datetime | None) -> list[tuple[int, datetime | None, datetime | None]]:
    """Return bucket length, start and end of each part: minutes to the first full hour, hours, minutes again."""
    first = None if since is None else _hour(since, is_up=True)
    last = None if until is None else _hour(until, is_up=False)
    if first is not None and last is not None and first >= last:
        return [(_MINUTE_S, since, until)]
    parts: list[tuple[int, datetime | None, datetime | None]] = [(_HOUR_S, first, last)]
    if first != since:
        parts.append((_MINUTE_S, since, first))
    if last != until:
        parts.append((_MINUTE_S, last, until))
    return parts


def _hour(at: datetime, *, is_up: bool) -> datetime:
    at_s = at.timestamp()
    whole_s = at_s // _HOUR_S * _HOUR_S
    return datetime.fromtimestamp(whole_s + _HOUR_S if is_up and whole_s < at_s else whole_s, tz=UTC)
