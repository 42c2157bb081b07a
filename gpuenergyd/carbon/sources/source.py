"""What a source of carbon intensities is given and what it answers; third-party ones come by entry point."""

from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from gpuenergyd.carbon.sources.web import Web
from gpuenergyd.core.carbon.intensity import CarbonSignal, EmissionFactor, IntensitySample, SignalKind
from gpuenergyd.errors import CarbonDataError

SOURCE_GROUP = "gpuenergyd.carbon_sources"


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What a source is told; a key is never shown by repr."""

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
    """What a source knows: past and present samples, what it forecasts, and what it had to leave out and why."""

    samples: tuple[IntensitySample, ...]
    forecast: tuple[IntensitySample, ...] = ()
    rejected: tuple[str, ...] = ()
    is_stale: bool = False


class CarbonSource(Protocol):
    """One provider for one zone."""

    @property
    def signal(self) -> CarbonSignal:
        """Which quantity the values are."""
        ...

    @property
    def period_s(self) -> float:
        """How often the provider has something new; it is not asked more often."""
        ...

    def fetch(self, now_at: datetime) -> SourceReply:
        """Return what the provider knows now.

        Raises:
            CarbonSourceError: nothing usable came; the message names the provider and the reason.
        """
        ...


class SourceFactory(Protocol):
    """Makes a source. Entry points: `gpuenergyd.carbon_sources`."""

    def __call__(self, options: SourceOptions) -> CarbonSource:
        """Return the source for a zone.

        Raises:
            CarbonDataError: an option is missing or makes no sense for this provider.
        """
        ...


def source_names() -> tuple[str, ...]:
    """Return the installed sources, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=SOURCE_GROUP)}))


def make_source(name: str, options: SourceOptions) -> CarbonSource:
    """Return the source with this name.

    Raises:
        CarbonDataError: no such source, or it cannot be made from these options.
    """
    points = list(entry_points(group=SOURCE_GROUP, name=name))
    if not points:
        raise CarbonDataError(f"no carbon source {name!r}; installed: {', '.join(source_names()) or 'none'}")
    factory: SourceFactory = points[0].load()
    return factory(options)


def default_source_name(zone: str) -> str:
    """Return the source that needs no key for a zone.

    Raises:
        CarbonDataError: there is none.
    """
    if zone == "GB":
        return "neso"
    installed = ", ".join(source_names())
    raise CarbonDataError(f"zone {zone!r} needs a source: only GB has one without a key; installed: {installed}")
