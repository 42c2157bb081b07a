"""The task `carbon-forecast` of the policy host: a forecast, and the value of timing."""

from dataclasses import asdict

from gpuenergyd.daemon.processes.policy_host import MAX_LINE_BYTES
from gpuenergyd.wire.daemon_codec import decode, encode
from gpuenergyd_carbon.forecasting import ForecastQuery, ForecastReply
from gpuenergyd_carbon.policy.forecast import forecast
from gpuenergyd_carbon.policy.timing_value import timing_value

FORECAST_HOURS = 72


def answer(argument: str) -> str:
    """Compute a forecast, and the value of timing if requested; an entry point of `gpuenergyd.tasks`.

    Raises:
        GpuEnergyError: the history cannot be used.
    """
    query = decode(argument.encode(), ForecastQuery, max_bytes=MAX_LINE_BYTES)
    history, wanted = query.history.series(), query.timing_value
    expected = forecast(history, num_hours=FORECAST_HOURS)
    value = None if wanted is None else timing_value(history, **asdict(wanted))
    return encode(ForecastReply(expected, value)).decode()
