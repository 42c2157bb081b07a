"""WattTime v3: five-minute marginal intensities; the free plan includes CAISO_NORTH."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from gpuenergyd.core.carbon.intensity import CarbonSignal, EmissionFactor, SampleStatus, SignalKind
from gpuenergyd.errors import CarbonDataError
from gpuenergyd_carbon.sources.checking import (
    RawValue,
    check_zone,
    checked_reply,
    in_g_per_kwh,
    instant,
    part,
    read_rows,
    rows,
)
from gpuenergyd_carbon.sources.source import SourceOptions, SourceReply
from gpuenergyd_carbon.sources.web import SourceError, SourceProblem, Web

NAME = "watttime"
HOST = "https://api.watttime.org"
_SIGNALS = {SignalKind.MARGINAL: "co2_moer", SignalKind.AVERAGE: "co2_aoer"}
_PERIOD = timedelta(minutes=5)
_HISTORY = timedelta(hours=24)


@dataclass(slots=True)
class WattTime:
    """Intensities requested with an access token; if it has expired and is rejected, one new login is tried."""

    web: Web
    key: str = field(repr=False)
    signal: CarbonSignal
    base_url: str = HOST
    period_s: float = 1800.0
    """Two requests per hour are far below all rate limits."""
    past_window: timedelta = timedelta(days=7)
    _token: str | None = field(default=None, repr=False)

    def fetch_past(self, begin_at: datetime, end_at: datetime) -> SourceReply:
        """Return the values of a past period of at most 32 days."""
        window = {"start": f"{begin_at:%Y-%m-%dT%H:%MZ}", "end": f"{end_at:%Y-%m-%dT%H:%MZ}"}
        values = self._values(self._ask("historical", window), SampleStatus.ESTIMATED)
        return checked_reply(self.signal, values, end_at)

    def fetch(self, now_at: datetime) -> SourceReply:
        """Return the last 24 hours, and the forecast if the plan includes it."""
        window = {"start": f"{now_at - _HISTORY:%Y-%m-%dT%H:%MZ}", "end": f"{now_at:%Y-%m-%dT%H:%MZ}"}
        values = list(self._values(self._ask("historical", window), SampleStatus.ESTIMATED))
        try:
            values += self._values(self._ask("forecast", {"horizon_hours": "24"}), SampleStatus.FORECAST)
        except SourceError as failure:
            if failure.problem is not SourceProblem.FORBIDDEN:  # not in every plan
                values.append(failure.with_traceback(None))  # a traceback would keep the connection open
        return checked_reply(self.signal, values, now_at)

    def _ask(self, what: str, parameters: dict[str, str]) -> Any:
        asked = {"region": self.signal.zone, "signal_type": _SIGNALS[self.signal.kind], **parameters}
        for is_last in (False, True):
            had_token = self._token is not None
            token = self._token or self._log_in()
            try:
                return self.web.get_json(
                    NAME, f"{self.base_url}/v3/{what}", parameters=asked, headers={"Authorization": f"Bearer {token}"}
                )
            except SourceError as failure:
                self._token = None
                if failure.problem is not SourceProblem.UNAUTHORIZED or is_last or not had_token:
                    raise
        raise AssertionError("the second try returns or raises")

    def _log_in(self) -> str:
        user, _, password = self.key.partition(":")
        reply = self.web.get_json(NAME, f"{self.base_url}/login", basic_auth=(user, password))
        token = part(NAME, reply, "token")
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise SourceError(SourceProblem.NOT_PARSED, f"{NAME}: login reply has no token")
        self._token = token
        return token

    def _values(self, reply: Any, status: SampleStatus) -> Iterator[RawValue | SourceError]:
        meta = part(NAME, reply, "meta")
        check_zone(NAME, self.signal.zone, part(NAME, meta, "region"))
        asked = _SIGNALS[self.signal.kind]
        if part(NAME, meta, "signal_type") != asked:
            raise SourceError(SourceProblem.WRONG_UNIT, f"{NAME}: requested {asked}, got {meta['signal_type']!r:.40}")
        unit = part(NAME, meta, "units")

        def read(row: Any) -> RawValue:
            begin = instant(NAME, part(NAME, row, "point_time"))
            return RawValue(begin, begin + _PERIOD, in_g_per_kwh(NAME, part(NAME, row, "value"), unit), status)

        return read_rows(rows(NAME, reply, "data"), read)


def make(options: SourceOptions) -> WattTime:
    """Return the source; the key file must contain `user:password`."""
    if not options.key or ":" not in options.key:
        raise CarbonDataError(f"carbon source {NAME} needs a key file that holds user:password")
    if options.factor not in {None, EmissionFactor.DIRECT}:
        raise CarbonDataError(f"carbon source {NAME} offers direct factors only")
    signal = CarbonSignal(options.zone, NAME, options.kind or SignalKind.MARGINAL, EmissionFactor.DIRECT)
    return WattTime(options.web, options.key, signal, options.base_url or HOST)
