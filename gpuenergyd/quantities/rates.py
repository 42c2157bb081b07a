"""Rates that turn energy into money (the tariff) and emissions (the carbon intensity at its time), with the PUE."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from gpuenergyd.core.carbon.intensity import JOULES_PER_KWH, CarbonSignal, IntensitySample, SampleStatus, grams
from gpuenergyd.quantities.tariff import Tariff
from gpuenergyd.store import History, StoredIntensity
from gpuenergyd.store.reading.energy_sums import EnergySum

_STATUS_ORDER = {status: rank for rank, status in enumerate(SampleStatus)}
_HOUR = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class MeanIntensity:
    """The mean carbon intensity of a time span, taken over the part for which the intensity is known."""

    carbon_intensity_g_per_kwh: float
    known_ratio: float
    """The part of the span for which the intensity is known."""
    measured_ratio: float
    """The part of the span for which the intensity was measured."""


class Grid:
    """The carbon intensities of one signal: for each start the value of the best status, in its latest revision."""

    def __init__(self, stored: Sequence[StoredIntensity]) -> None:
        """Take the stored intensities of the signal that has most of them; the others are ignored."""
        self.signal: CarbonSignal = Counter(row.signal for row in stored).most_common(1)[0][0]
        self.known = [row for row in stored if row.signal == self.signal]
        best: dict[datetime, IntensitySample] = {}
        for row in self.known:
            sample, other = row.host, best.get(row.host.valid_from_at)
            if other is None or _STATUS_ORDER[sample.status] <= _STATUS_ORDER[other.status]:
                best[sample.valid_from_at] = sample
        self._begins = sorted(best)
        self._samples = [best[begin] for begin in self._begins]
        self._changes = sorted({at for sample in self._samples for at in (sample.valid_from_at, sample.valid_to_at)})

    def at(self, instant: datetime) -> IntensitySample | None:
        index = bisect_right(self._begins, instant) - 1
        found = self._samples[index] if index >= 0 else None
        return found if found is not None and instant < found.valid_to_at else None

    def mean(self, begin: datetime, end: datetime) -> MeanIntensity | None:
        """Return the mean intensity of a time span, None if it is unknown for all of the span."""
        known = measured = timedelta()
        total = 0.0
        for index in range(max(0, bisect_right(self._begins, begin) - 1), len(self._begins)):
            if self._begins[index] >= end:
                break
            sample = self._samples[index]
            next_begin = self._begins[index + 1] if index + 1 < len(self._begins) else end
            part = min(sample.valid_to_at, next_begin, end) - max(sample.valid_from_at, begin)
            if part <= timedelta():
                continue
            known += part
            measured += part if sample.status is SampleStatus.MEASURED else timedelta()
            total += sample.carbon_intensity_g_per_kwh * part.total_seconds()
        if not known:
            return None
        return MeanIntensity(total / known.total_seconds(), known / (end - begin), measured / (end - begin))

    def changes_within(self, hour: datetime) -> bool:
        """Return whether an intensity begins or ends inside an hour."""
        index = bisect_right(self._changes, hour)
        return index < len(self._changes) and self._changes[index] < hour + _HOUR


@dataclass(frozen=True)
class Rates:
    """The prices and carbon intensities that a report uses; without them energy has no cost or emissions."""

    tariff: Tariff | None = None
    intensities: Sequence[StoredIntensity] = ()
    spans: Mapping[str, tuple[datetime, datetime | None]] = field(
        default_factory=dict[str, tuple[datetime, datetime | None]]
    )
    """Start and end of each job; in the hour in which a job started, its energy is priced from its start on."""
    host_power_w: Mapping[str, float] = field(default_factory=dict[str, float])
    """Assumed power of the rest of the host, per GPU, for jobs whose energy was recorded without it."""
    pue: float = 1.0
    """Power usage effectiveness: the energy of the site per joule of its computers; scales cost and emissions."""
    now: datetime = field(default_factory=lambda: datetime.now(tz=UTC))
    _grids: dict[str, Grid | None] = field(default_factory=dict[str, "Grid | None"], repr=False, compare=False)

    @property
    def is_by_time(self) -> bool:
        """Whether cost or emissions depend on when energy was used."""
        return bool(self.intensities) or (self.tariff is not None and self.tariff.periods != ())

    def grid_of(self, job_id: str) -> Grid | None:
        """Return the intensities for a job, or for idle GPUs if the ID is empty; None if none is known for its time."""
        if job_id not in self._grids:
            found = self.intensities
            if job_id in self.spans:
                begin, end = self.spans[job_id]
                found = [
                    row
                    for row in found
                    if row.host.valid_to_at > begin and (end is None or row.host.valid_from_at < max(begin, end))
                ]
            self._grids[job_id] = Grid(found) if found else None
        return self._grids[job_id]

    def is_split(self, hour: datetime) -> bool:
        """Return whether the intensity changes within an hour, so that each minute must be priced separately."""
        grid = self.grid_of("")
        return grid is not None and grid.changes_within(hour)

    @property
    def currency(self) -> str | None:
        """The label of costs, None without a tariff or if the tariff has no label."""
        return None if self.tariff is None else self.tariff.currency

    def cost(self, part: EnergySum, energy_j: float) -> float | None:
        """Return the cost of energy at the price when the part begins, including PUE; None without a tariff."""
        if self.tariff is None:
            return None
        return self.pue * energy_j / JOULES_PER_KWH * self.tariff.price_per_kwh(part.started_at or self.now)

    def emissions_g(self, energy_j: float, intensity: MeanIntensity) -> float:
        """Return the emissions of energy during the part of its time with known intensity, including PUE."""
        return self.pue * intensity.known_ratio * grams(energy_j, intensity.carbon_intensity_g_per_kwh)

    def to_dict(self) -> dict[str, Any]:
        """Return the price, currency and PUE that amounts are computed with, by JSON and CSV name."""
        price = None if self.tariff is None else self.tariff.flat_price_per_kwh
        return {"price_per_kwh": price, "currency": self.currency, "pue": self.pue}

    def intensity(self, part: EnergySum) -> MeanIntensity | None:
        """Return the mean intensity while the job of a part ran within that part's time; None if unknown."""
        grid = self.grid_of(part.job_id)
        if grid is None or part.started_at is None or part.bucket_s is None:
            return None
        begin, end = part.started_at, part.started_at + timedelta(seconds=part.bucket_s)
        job_begin, job_end = self.spans.get(part.job_id, (begin, None))
        within = max(begin, job_begin), min(end, job_end or self.now, self.now)
        # Energy can lie outside its job's time, e.g. if the clock was set back; then the whole bucket's time is used.
        return grid.mean(*within) if within[0] < within[1] else grid.mean(begin, end)

    def assumed_host_j(self, part: EnergySum) -> float | None:
        """Return the energy assumed for the rest of the hosts in a part, None if none is assumed."""
        if part.assumed_host_j is not None or part.job_id not in self.host_power_w:
            return part.assumed_host_j
        return self.host_power_w[part.job_id] * (part.measured_s + part.estimated_s + part.missing_s)


def read_rates(
    history: History,
    tariff: Tariff | None = None,
    *,
    pue: float = 1.0,
    since: datetime | None = None,
    until: datetime | None = None,
) -> Rates:
    """Return the rates for the energy of a time range."""
    stored = history.intensities(since=since, until=until)
    return Rates(tariff, stored, history.job_spans() if stored else {}, history.target_host_power_w(), pue)
