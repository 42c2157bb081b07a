"""What energy is priced with: money by the tariff, emissions by the carbon intensity of its time, both by the PUE."""

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
    """The mean carbon intensity of a span of time, over the part of it whose intensity is known."""

    carbon_intensity_g_per_kwh: float
    known_ratio: float
    """The part of the span whose intensity is known."""
    measured_ratio: float
    """The part of the span whose intensity was measured."""


class Grid:
    """The carbon intensities of one signal: of each begin the value of the best status, in its latest revision."""

    def __init__(self, stored: Sequence[StoredIntensity]) -> None:
        """Take stored intensities; those of the signal with the most of them count."""
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
        """Return the mean intensity of a span of time, None if all of it is unknown."""
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
    """Prices and carbon intensities of a report; without any, energy has neither cost nor emissions."""

    tariff: Tariff | None = None
    intensities: Sequence[StoredIntensity] = ()
    spans: Mapping[str, tuple[datetime, datetime | None]] = field(
        default_factory=dict[str, tuple[datetime, datetime | None]]
    )
    """Start and end of each job: energy of an hour in which it began is priced from its start."""
    host_power_w: Mapping[str, float] = field(default_factory=dict[str, float])
    """Power assumed for the rest of the host, per GPU, of jobs whose energy was recorded without it."""
    pue: float = 1.0
    """Power usage effectiveness of the site: its energy for each joule of its computers, in cost and emissions."""
    now: datetime = field(default_factory=lambda: datetime.now(tz=UTC))
    _grids: dict[str, Grid | None] = field(default_factory=dict[str, "Grid | None"], repr=False, compare=False)

    @property
    def is_by_time(self) -> bool:
        """Whether it matters when energy was used."""
        return bool(self.intensities) or (self.tariff is not None and self.tariff.periods != ())

    def grid_of(self, job_id: str) -> Grid | None:
        """Return the grid of a job or, with an empty ID, of idle GPUs; None if no intensity of its time is known."""
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
        """Return whether the intensity changes inside an hour, so that its minutes are priced one by one."""
        grid = self.grid_of("")
        return grid is not None and grid.changes_within(hour)

    @property
    def currency(self) -> str | None:
        """The label of costs, None if they have none."""
        return None if self.tariff is None else self.tariff.currency

    def cost(self, part: EnergySum, energy_j: float) -> float | None:
        """Return the cost of energy at the time at which a part begins, PUE included; None without a tariff."""
        if self.tariff is None:
            return None
        return self.pue * energy_j / JOULES_PER_KWH * self.tariff.price_per_kwh(part.started_at or self.now)

    def emissions_g(self, energy_j: float, intensity: MeanIntensity) -> float:
        """Return the emissions of energy in the part of its time whose intensity is known, PUE included."""
        return self.pue * intensity.known_ratio * grams(energy_j, intensity.carbon_intensity_g_per_kwh)

    def to_dict(self) -> dict[str, Any]:
        """Return what amounts rest on, by its JSON and CSV names."""
        price = None if self.tariff is None else self.tariff.flat_price_per_kwh
        return {"price_per_kwh": price, "currency": self.currency, "pue": self.pue}

    def intensity(self, part: EnergySum) -> MeanIntensity | None:
        """Return the mean intensity of the time of a part in which its job ran; None if it is unknown."""
        grid = self.grid_of(part.job_id)
        if grid is None or part.started_at is None or part.bucket_s is None:
            return None
        begin, end = part.started_at, part.started_at + timedelta(seconds=part.bucket_s)
        job_begin, job_end = self.spans.get(part.job_id, (begin, None))
        within = max(begin, job_begin), min(end, job_end or self.now, self.now)
        # Energy beside the times of its job, as when the clock was set back, counts for the whole bucket.
        return grid.mean(*within) if within[0] < within[1] else grid.mean(begin, end)

    def assumed_host_j(self, part: EnergySum) -> float | None:
        """Return the energy assumed for the rest of the hosts of a part, None without any."""
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
    """Return what the energy of a time range is priced with."""
    stored = history.intensities(since=since, until=until)
    return Rates(tariff, stored, history.job_spans() if stored else {}, history.target_host_power_w(), pue)
