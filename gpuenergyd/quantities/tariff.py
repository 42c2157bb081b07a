"""Electricity prices, either one or a file of prices by hour and weekday, with a currency; the PUE of a site."""

import tomllib
from dataclasses import dataclass
from datetime import datetime, tzinfo
from math import isfinite
from pathlib import Path
from typing import Any

from gpuenergyd.errors import UsageError

MAX_PUE = 5.0
"""A larger PUE must be a mistake, such as a percentage."""
_MAX_CURRENCY_CHARS = 8
_WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


@dataclass(frozen=True, slots=True)
class TariffPeriod:
    """A price for some hours of some weekdays; a range from 22 to 6 covers 22 to 24 and 0 to 6 of each weekday."""

    price_per_kwh: float
    from_hour: int = 0
    to_hour: int = 24
    weekdays: frozenset[int] = frozenset(range(7))

    def applies_at(self, at: datetime) -> bool:
        """Return whether the price applies at an instant, in the time zone of the tariff."""
        is_inside = (
            self.from_hour <= at.hour < self.to_hour
            if self.from_hour < self.to_hour
            else at.hour >= self.from_hour or at.hour < self.to_hour
        )
        return is_inside and at.weekday() in self.weekdays


@dataclass(frozen=True, slots=True)
class Tariff:
    """A default price and periods with other prices; the first period that applies determines the price."""

    all_hours_price_per_kwh: float
    periods: tuple[TariffPeriod, ...] = ()
    zone: tzinfo | None = None
    """The time zone of the periods; None means that of this host."""
    currency: str | None = None
    """The label of amounts, such as EUR; None means no label."""

    @property
    def flat_price_per_kwh(self) -> float | None:
        """The price if there is only one, else None."""
        return None if self.periods else self.all_hours_price_per_kwh

    def price_per_kwh(self, at: datetime) -> float:
        if not self.periods:
            return self.all_hours_price_per_kwh
        local = at.astimezone(self.zone)
        applicable = (period.price_per_kwh for period in self.periods if period.applies_at(local))
        return next(applicable, self.all_hours_price_per_kwh)


def read_tariff(path: Path) -> Tariff:
    """Return the tariff in a TOML file: `price_per_kwh`, `currency` and tables `[[periods]]` of prices.

    Raises:
        UsageError: the file cannot be read or is invalid; the message names the key.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the tariff {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    _require_known(path, values, {"currency", "price_per_kwh", "periods"})
    periods = values.get("periods", [])
    if not isinstance(periods, list) or not all(isinstance(each, dict) for each in periods):
        raise UsageError(f"{path}: periods must be tables [[periods]]")
    currency = values.get("currency")
    if currency is not None:
        check_currency(currency, f"{path}: currency")
    return Tariff(_price(path, values), tuple(_period(path, each) for each in periods), currency=currency)


def check_currency(label: object, name: str) -> None:
    """Raise UsageError, naming the value, unless it is a label short enough to print beside an amount."""
    is_label = isinstance(label, str) and label.isprintable() and not any(char.isspace() for char in label)
    if not is_label or not 1 <= len(str(label)) <= _MAX_CURRENCY_CHARS:
        raise UsageError(
            f"{name} {label!r}: must be 1 to {_MAX_CURRENCY_CHARS} printable characters without spaces, such as EUR"
        )


def check_pue(pue: float, name: str) -> None:
    """Raise UsageError, naming the value, unless it is a possible power usage effectiveness."""
    if not 1.0 <= pue <= MAX_PUE:
        raise UsageError(
            f"{name} {pue:g}: must be from 1 to {MAX_PUE:g}, the power of the site as a ratio of its computers'; 1.2"
            " adds 20 %"
        )


def _period(path: Path, values: dict[str, Any]) -> TariffPeriod:
    _require_known(path, values, {"price_per_kwh", "from_hour", "to_hour", "weekdays"})
    hours = [values.get("from_hour", 0), values.get("to_hour", 24)]
    if not all(type(hour) is int and 0 <= hour <= 24 for hour in hours) or hours[0] == hours[1]:
        raise UsageError(
            f"{path}: invalid from_hour {hours[0]!r}, to_hour {hours[1]!r}; valid: two different integers from 0 to 24"
        )
    days = values.get("weekdays", list(_WEEKDAYS))
    if not isinstance(days, list) or not days or not set(map(str, days)) <= set(_WEEKDAYS):
        raise UsageError(f"{path}: invalid weekdays {days!r}; valid: a list of {', '.join(_WEEKDAYS)}")
    weekdays = frozenset(_WEEKDAYS.index(day) for day in days)
    return TariffPeriod(_price(path, values), hours[0], hours[1], weekdays)


def _price(path: Path, values: dict[str, Any]) -> float:
    price = values.get("price_per_kwh")
    if isinstance(price, bool) or not isinstance(price, int | float) or not isfinite(price) or price < 0:
        raise UsageError(f"{path}: invalid price_per_kwh {price!r}; valid: a number >= 0")
    return float(price)


def _require_known(path: Path, values: dict[str, Any], known: set[str]) -> None:
    for key in values:
        if key not in known:
            raise UsageError(f"{path}: unknown key {key!r}; valid: {', '.join(sorted(known))}")
