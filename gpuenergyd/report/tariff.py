"""What a kilowatt-hour costs at which hour: one price, or a file with prices for parts of the day and week."""

import tomllib
from dataclasses import dataclass
from datetime import datetime, tzinfo
from math import isfinite
from pathlib import Path
from typing import Any

from gpuenergyd.errors import UsageError

_WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


@dataclass(frozen=True, slots=True)
class TariffPeriod:
    """A price for some hours of some days; hours from 22 to 6 run over midnight and belong to the day they are in."""

    price_per_kwh: float
    from_hour: int = 0
    to_hour: int = 24
    weekdays: frozenset[int] = frozenset(range(7))

    def holds_at(self, at: datetime) -> bool:
        """Return whether an instant of the tariff's own zone lies in this period."""
        is_inside = (
            self.from_hour <= at.hour < self.to_hour
            if self.from_hour < self.to_hour
            else at.hour >= self.from_hour or at.hour < self.to_hour
        )
        return is_inside and at.weekday() in self.weekdays


@dataclass(frozen=True, slots=True)
class Tariff:
    """A price for all hours, and periods in which another holds: the first that fits."""

    all_hours_price_per_kwh: float
    periods: tuple[TariffPeriod, ...] = ()
    zone: tzinfo | None = None
    """Whose hours the periods mean; None: this host's."""

    @property
    def flat_price_per_kwh(self) -> float | None:
        """The price, where there is only one."""
        return None if self.periods else self.all_hours_price_per_kwh

    def price_per_kwh(self, at: datetime) -> float:
        """Return the price that holds at an instant."""
        if not self.periods:
            return self.all_hours_price_per_kwh
        local = at.astimezone(self.zone)
        fitting = (period.price_per_kwh for period in self.periods if period.holds_at(local))
        return next(fitting, self.all_hours_price_per_kwh)


def read_tariff(path: Path) -> Tariff:
    """Return the tariff in a TOML file: `price_per_kwh`, and tables `[[periods]]` with their own, hours and weekdays.

    Raises:
        UsageError: it cannot be read or says something else; the line names the key.
    """
    try:
        held = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the tariff {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML: {error}") from None
    _require_known(path, held, {"price_per_kwh", "periods"})
    periods = held.get("periods", [])
    if not isinstance(periods, list) or not all(isinstance(each, dict) for each in periods):
        raise UsageError(f"{path}: periods: tables [[periods]] are expected")
    return Tariff(_price(path, held), tuple(_period(path, each) for each in periods))


def _period(path: Path, held: dict[str, Any]) -> TariffPeriod:
    _require_known(path, held, {"price_per_kwh", "from_hour", "to_hour", "weekdays"})
    hours = [held.get("from_hour", 0), held.get("to_hour", 24)]
    if not all(type(hour) is int and 0 <= hour <= 24 for hour in hours) or hours[0] == hours[1]:
        raise UsageError(f"{path}: from_hour {hours[0]!r}, to_hour {hours[1]!r}: two hours from 0 to 24 are valid")
    days = held.get("weekdays", list(_WEEKDAYS))
    if not isinstance(days, list) or not days or not set(map(str, days)) <= set(_WEEKDAYS):
        raise UsageError(f"{path}: weekdays {days!r}: a list of {', '.join(_WEEKDAYS)} is valid")
    weekdays = frozenset(_WEEKDAYS.index(day) for day in days)
    return TariffPeriod(_price(path, held), hours[0], hours[1], weekdays)


def _price(path: Path, held: dict[str, Any]) -> float:
    price = held.get("price_per_kwh")
    if isinstance(price, bool) or not isinstance(price, int | float) or not isfinite(price) or price < 0:
        raise UsageError(f"{path}: price_per_kwh {price!r}: a number of at least 0 is valid")
    return float(price)


def _require_known(path: Path, held: dict[str, Any], known: set[str]) -> None:
    for key in held:
        if key not in known:
            raise UsageError(f"{path}: unknown key {key!r}; valid: {', '.join(sorted(known))}")
