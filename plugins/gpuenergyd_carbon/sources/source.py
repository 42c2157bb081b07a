"""Protocol of carbon intensity sources, with their options and replies; sources are found as entry points."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, runtime_checkable

from gpuenergyd.core.carbon.intensity import CarbonSignal, EmissionFactor, IntensitySample, SignalKind
from gpuenergyd.errors import CarbonDataError
from gpuenergyd_carbon.sources.web import Web

SOURCE_GROUP = "gpuenergyd.carbon_sources"


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Options of a source; `repr` hides the key."""

    zone: str
    web: Web
    key: str | None = field(default=None, repr=False)
    base_url: str | None = None
    kind: SignalKind | None = None
    factor: EmissionFactor | None = None
    path: Path | None = None
    g_per_kwh: float | None = None


@dataclass(frozen=True, slots=True)
class SourceReply:
    """Values of a source: samples, forecast, and the reasons for rejected values."""

    samples: tuple[IntensitySample, ...]
    forecast: tuple[IntensitySample, ...] = ()
    rejected: tuple[str, ...] = ()
    is_stale: bool = False


class CarbonSource(Protocol):
    """The intensities of one zone from one provider."""

    @property
    def signal(self) -> CarbonSignal:
        """Quantity, zone and source of the values."""
        ...

    @property
    def period_s(self) -> float:
        """How often the provider updates its values, and so how often they are requested."""
        ...

    def fetch(self, now_at: datetime) -> SourceReply:
        """Return the provider's current values.

        Raises:
            CarbonSourceError: there is no usable value; the message names the provider and the reason.
        """
        ...


@runtime_checkable
class PastSource(CarbonSource, Protocol):
    """A source that can also fetch the values of past weeks."""

    @property
    def past_window(self) -> timedelta:
        """Longest period of one request."""
        ...

    def fetch_past(self, begin_at: datetime, end_at: datetime) -> SourceReply:
        """Return the provider's values of a past period.

        Raises:
            CarbonSourceError: there is no usable value; the message names the provider and the reason.
        """
        ...


class SourceFactory(Protocol):
    """Constructor of a source. Entry points: `gpuenergyd.carbon_sources`."""

    def __call__(self, options: SourceOptions) -> CarbonSource:
        """Return the source for a zone.

        Raises:
            CarbonDataError: an option is missing or invalid for this provider.
        """
        ...


def source_names() -> tuple[str, ...]:
    """Return the names of the installed sources, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=SOURCE_GROUP)}))


def make_source(name: str, options: SourceOptions) -> CarbonSource:
    """Return the source with this name.

    Raises:
        CarbonDataError: the source is not installed, or its options are invalid.
    """
    points = list(entry_points(group=SOURCE_GROUP, name=name))
    if not points:
        raise CarbonDataError(f"no carbon source {name!r}; installed: {', '.join(source_names()) or 'none'}")
    factory: SourceFactory = points[0].load()
    return factory(options)


def default_source_name(zone: str) -> str:
    """Return the default source of a zone, one without a key, or raise CarbonDataError if there is none."""
    if zone == "GB":
        return "neso"
    installed = ", ".join(source_names())
    raise CarbonDataError(f"zone {zone!r} requires a source: only GB has one without a key; installed: {installed}")
