"""Intensities from generation by plant type, with life-cycle factors, without storage; incomplete hours are held back.

Providers publish plant types one after the other, in hours or quarters of an hour, and revise them. So all series are
first converted to the shortest interval. A slot is then held back while plant types that matter are missing in it:
those that generate more than a few percent of the total in the nearest slots, before and after, that have a value.
"""

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import MappingProxyType

from gpuenergyd.core.carbon.intensity import SampleStatus
from gpuenergyd_carbon.sources.checking import HeldBack, RawValue
from gpuenergyd_carbon.sources.web import SourceError, SourceProblem

COAL, GAS, OIL, OTHER = 820.0, 490.0, 650.0, 700.0
BIOMASS, GEOTHERMAL, HYDRO, MARINE, NUCLEAR, WIND, SOLAR = 230.0, 38.0, 24.0, 17.0, 12.0, 11.0, 45.0
"""Life-cycle g/kWh: medians of the IPCC's fifth assessment report, annex III. `OTHER` is assumed, for what a provider
lists as other plants, including waste."""

_MATTERS_RATIO = 0.05
"""Part of the generation that may be missing or of unknown type; it changes the mean by about 40 g/kWh at most."""
_SHOWN_TYPES = 3
_MAX_SLOTS = 20_000

Slot = tuple[datetime, datetime]


@dataclass(frozen=True, slots=True)
class PlantTypes:
    """The codes that a provider uses for plant types."""

    factors: Mapping[str, float]
    """Life-cycle g/kWh by code."""
    storage: frozenset[str]
    """Codes of batteries and pumped storage; what they discharge was counted before, when it was generated."""


ENTSOE_TYPES = PlantTypes(
    MappingProxyType({
        "B01": BIOMASS, "B02": COAL, "B03": GAS, "B04": GAS, "B05": COAL, "B06": OIL, "B07": OIL, "B08": COAL,
        "B09": GEOTHERMAL, "B11": HYDRO, "B12": HYDRO, "B13": MARINE, "B14": NUCLEAR, "B15": OTHER,
        "B16": SOLAR, "B17": OTHER, "B18": WIND, "B19": WIND, "B20": OTHER,
    }),
    frozenset({"B10", "B25"}),
)  # fmt: skip
EIA_TYPES = PlantTypes(
    MappingProxyType({
        "NG": GAS, "COL": COAL, "NUC": NUCLEAR, "WAT": HYDRO, "WND": WIND, "SUN": SOLAR, "OIL": OIL, "OTH": OTHER,
        "GEO": GEOTHERMAL, "SNB": SOLAR, "WNB": WIND,
    }),
    frozenset({"BAT", "PS", "OES", "UES"}),
)  # fmt: skip
"""Solar and wind plants with a battery (`SNB`, `WNB`) are not storage: all that leaves them was generated there."""


@dataclass(slots=True)
class Generation:
    """Mean power by slot and plant type in one reply, in any unit that is the same for all."""

    name: str
    types: PlantTypes
    _points: list[tuple[Slot, str, float]] = field(default_factory=list)
    _unreadable: set[str] = field(default_factory=set)

    def add(self, slot: Slot, plant: str, power: float) -> None:
        """Add the generation of one plant type; a negative value is the plants' own use and counts as 0."""
        self._points.append((slot, plant, max(0.0, power)))

    def add_unreadable(self, plant: str) -> None:
        """Record that a value of a plant type cannot be read; if no other one is known, all slots are incomplete."""
        if plant in self.types.factors:
            self._unreadable.add(plant)

    def values(self) -> Iterator[RawValue | HeldBack | SourceError]:
        """Yield the intensity of each slot in order of time, or the reason why it has none."""
        mixes = self._on_finest_grid()
        lacking = self._unreadable - {plant for _, plant, _ in self._points}
        unknown: set[str] = set()
        for slot, missing in zip(mixes, self._missing(mixes), strict=True):
            mix = {plant: power for plant, power in mixes[slot].items() if plant not in self.types.storage}
            strange = {plant: power for plant, power in mix.items() if plant not in self.types.factors and power > 0}
            unknown |= strange.keys()
            known = sum(power for plant, power in mix.items() if plant in self.types.factors)
            total = known + sum(strange.values()) + sum(missing.values())
            if lacking or sum(missing.values()) > _MATTERS_RATIO * total:
                yield HeldBack(slot[0], f"incomplete, without {_listed(lacking or missing)}")
            elif sum(strange.values()) > _MATTERS_RATIO * total:
                share = f"{100 * sum(strange.values()) / total:.0f} %"
                yield HeldBack(slot[0], f"{share} is of unknown plant types: {_listed(strange)}")
            elif known > 0:
                grams = sum(power * self.types.factors.get(plant, 0.0) for plant, power in mix.items())
                yield RawValue(*slot, grams / known, SampleStatus.ESTIMATED)
            else:
                yield HeldBack(slot[0], "no generation")
        if unknown:
            text = f"{self.name}: plant types of unknown intensity are not counted: {_listed(unknown)}"
            yield SourceError(SourceProblem.BAD_VALUE, text)

    def _on_finest_grid(self) -> dict[Slot, dict[str, float]]:
        """Return the generation by plant type in slots of the shortest length in the reply, in order of time."""
        step = min((end - begin for (begin, end), _, _ in self._points), default=timedelta(hours=1))
        num_slots = sum((end - begin) // step for (begin, end), _, _ in self._points)
        if num_slots > _MAX_SLOTS * (1 + len(self.types.factors)):
            raise SourceError(SourceProblem.TOO_LARGE, f"{self.name}: reply has more than {_MAX_SLOTS} slots")
        mixes: dict[Slot, dict[str, float]] = {}
        for (begin, end), plant, power in self._points:
            for number in range((end - begin) // step):
                mix = mixes.setdefault((begin + number * step, begin + (number + 1) * step), {})
                mix[plant] = mix.get(plant, 0.0) + power
        return dict(sorted(mixes.items()))

    def _missing(self, mixes: Mapping[Slot, Mapping[str, float]]) -> list[dict[str, float]]:
        """Return for each slot the known plant types that lack a value, with their mean power just around it."""
        slots = list(mixes)
        plants = {plant for mix in mixes.values() for plant in mix} & self.types.factors.keys()
        missing: list[dict[str, float]] = [{} for _ in slots]
        for plant in plants:
            known = [number for number, slot in enumerate(slots) if plant in mixes[slot]]
            for number, slot in enumerate(slots):
                if plant not in mixes[slot]:
                    place = bisect(known, number)
                    around = [mixes[slots[k]][plant] for k in known[max(0, place - 1) : place + 1]]
                    if (power := sum(around) / len(around)) > 0:
                        missing[number][plant] = power
        return missing


def _listed(plants: Iterable[str]) -> str:
    """Return the names of the first few plant types, in order of generation if it is known."""
    by_power = sorted(plants, key=lambda plant: -plants[plant]) if isinstance(plants, Mapping) else sorted(plants)
    more = len(by_power) - _SHOWN_TYPES
    return ", ".join(f"{plant!r:.20}" for plant in by_power[:_SHOWN_TYPES]) + (f" and {more} more" if more > 0 else "")
