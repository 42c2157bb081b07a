"""`gpuenergyd carbon now`, `forecast` and `backtest`: grid carbon intensity, its forecast, and the value of timing."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from gpuenergyd.cli.command_help import DocumentedGroup, add_command, command_group
from gpuenergyd.cli.commands.report_output import write_text
from gpuenergyd.cli.exit_codes import EXIT_DEGRADED
from gpuenergyd.cli.option_checks import checked_slowdown, warn_of_large_slowdown
from gpuenergyd.cli.options import JsonOption
from gpuenergyd.cli.output import people_console, print_json
from gpuenergyd.core.carbon.intensity import (
    CarbonForecast,
    EmissionFactor,
    ForecastHour,
    HourlySeries,
    IntensityBasis,
    SignalKind,
)
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import CarbonDataError
from gpuenergyd.report.formatting import skill_text
from gpuenergyd_carbon.lab.files import (
    Points,
    is_power_limit_profile,
    is_trace,
    plain_zone,
    read_frontier,
    read_power_limit_profiles,
    read_starts,
    read_traces,
    utc_instant,
    utc_text,
    write_choices,
    write_forecasts,
)
from gpuenergyd_carbon.lab.plot import forecast_lines, forecast_svg
from gpuenergyd_carbon.lab.results import ReplayRequest, ZoneReplay
from gpuenergyd_carbon.rules.hourly_values import hourly_series
from gpuenergyd_carbon.rules.present_intensity import intensity_now
from gpuenergyd_plan.inputs import load_planner, plan_input
from gpuenergyd_plan.tables import PlanOptions

ZoneOption = Annotated[str | None, typer.Option("--zone", metavar="ZONE", help="Grid zone, e.g. GB or DE.")]
SourceOption = Annotated[
    str | None, typer.Option("--source", metavar="NAME", help="Carbon source [default for GB: neso].")
]
KeyFileOption = Annotated[
    Path | None, typer.Option("--key-file", metavar="FILE", help="File with the source's API key; must have mode 0600.")
]
BaseUrlOption = Annotated[
    str | None, typer.Option("--base-url", metavar="URL", help="Base URL of the source instead of its default.")
]
CsvOption = Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Trace file to use instead of a source.")]


def now(  # noqa: PLR0913  each option is a parameter
    *,
    zone: ZoneOption = None,
    source: SourceOption = None,
    key_file: KeyFileOption = None,
    base_url: BaseUrlOption = None,
    csv_file: CsvOption = None,
    fixed: Annotated[
        float | None, typer.Option("--fixed", metavar="G", help="Constant intensity in g/kWh instead of a source.")
    ] = None,
    kind: Annotated[
        SignalKind | None, typer.Option(metavar="average|marginal", help="Signal, for sources with both.")
    ] = None,
    factor: Annotated[
        EmissionFactor | None, typer.Option(metavar="lifecycle|direct|operational", help="Emission factor.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Query the current carbon intensity.

    Prints the value with its kind, age and source. Exits 4 if it is stale, estimated or incomplete.

    Examples:
        gpuenergyd carbon now --zone GB
        gpuenergyd carbon now --zone DE --source entsoe --key-file key
        gpuenergyd carbon now --zone GB --fixed 300
    """
    from gpuenergyd_carbon.fetching.fetcher import FetcherConfig, source_of  # noqa: PLC0415  start fast

    zone_name = zone or (csv_file.stem.partition("_")[0] if csv_file is not None else None)
    if zone_name is None:
        raise CarbonDataError("--zone is required, e.g. --zone GB")
    chosen = source or ("csv" if csv_file is not None else "fixed" if fixed is not None else None)
    config = FetcherConfig(zone_name, Path(), chosen, key_file, base_url, kind, factor, csv_file, fixed)
    carbon_source = source_of(config)
    at = datetime.now(tz=UTC)
    reply = carbon_source.fetch(at)
    here = intensity_now(
        at,
        hourly_series(zone_name, reply.samples),
        _given_forecast(zone_name, reply.forecast, carbon_source.signal.source),
    )
    newest = reply.samples[-1] if reply.samples else None
    is_degraded = reply.is_stale or bool(reply.rejected) or not here.basis.is_current
    signal = carbon_source.signal
    if as_json:
        print_json(
            {
                "zone": zone_name,
                "carbon_intensity_g_per_kwh": here.carbon_intensity_g_per_kwh,
                "basis": here.basis,
                "age_s": here.age_s,
                "valid_from": utc_text(newest.valid_from_at) if newest is not None else None,
                "status": newest.status if newest is not None else None,
                "kind": signal.kind,
                "factor": signal.factor,
                "source": signal.source,
                "num_samples": len(reply.samples),
                "num_forecast_samples": len(reply.forecast),
                "rejected": reply.rejected,
                "is_stale": reply.is_stale,
            }
        )
    else:
        value = here.carbon_intensity_g_per_kwh
        shown = "unknown" if value is None else f"{value:.0f} g/kWh"
        status = newest.status.value if newest is not None else "no sample"
        is_fixed = here.basis is IntensityBasis.FIXED
        origin = here.basis if is_fixed else f"{here.basis}; {status}"
        signal_text = f"{signal.kind}, {signal.factor}" + ("" if is_fixed else f"; {signal.source}")
        console = people_console()
        console.print(f"{zone_name}: {shown} ({origin}; {signal_text})")
        for reason in reply.rejected:
            console.print(f"  rejected: {reason}", markup=False)
        if reply.is_stale:
            console.print(
                "  the newest value is more than a day old: the source is late, or this host's clock is wrong"
            )
    return EXIT_DEGRADED if is_degraded else 0


def forecast(
    traces: Annotated[
        list[Path] | None, typer.Argument(metavar="TRACE.csv", help="History of one zone [default: from the source].")
    ] = None,
    *,
    hours: Annotated[int, typer.Option(min=1, max=72, metavar="H", help="Forecast horizon in hours.")] = 24,
    zone: ZoneOption = None,
    source: SourceOption = None,
    key_file: KeyFileOption = None,
    base_url: BaseUrlOption = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the forecast as SVG.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Forecast the carbon intensity of a zone.

    Uses the source's own forecast if it has one, else the zone's history; ranges are 95 % prediction intervals.

    Examples:
        gpuenergyd carbon forecast --zone GB
        gpuenergyd carbon forecast GB_2025.csv --hours 48 --svg forecast.svg
    """
    given: CarbonForecast | None = None
    if traces:
        series = read_traces(traces)
        if len(series) != 1:
            raise CarbonDataError(
                f"traces of {count_text(len(series), 'zone')} ({', '.join(s.zone for s in series)}); give traces of"
                " one zone"
            )
        history: HourlySeries | None = series[0]
    else:
        history, given = _from_source(zone, source, key_file, base_url, hours)
    expected = given
    if expected is None and history is not None:
        from gpuenergyd_carbon.policy import forecast as own  # noqa: PLC0415  numpy, the help starts fast

        expected = own.forecast(history, num_hours=hours)
    if expected is None:
        raise CarbonDataError("the source returned neither a history nor a forecast")
    if svg is not None:
        write_text(svg, forecast_svg(expected, history))
    if as_json:
        print_json(
            {
                "zone": expected.zone,
                "issued_at_utc": utc_text(expected.issued_at),
                "model": expected.model,
                "unit": expected.unit,
                "skill": expected.skill,
                "hours": [
                    {
                        "target_utc": utc_text(hour.target_at),
                        "carbon_intensity_g_per_kwh": hour.carbon_intensity_g_per_kwh,
                        "low_g_per_kwh": hour.low_g_per_kwh,
                        "high_g_per_kwh": hour.high_g_per_kwh,
                    }
                    for hour in expected.hours
                ],
            }
        )
        return 0
    console = people_console()
    issued = f"{expected.issued_at:%Y-%m-%d %H:%M}"
    console.print(f"{expected.zone}: {expected.unit} from {issued} UTC, model {expected.model}", markup=False)
    for line in forecast_lines(expected):
        console.print(line, markup=False)
    if expected.skill is not None:
        skill = expected.skill
        text = skill_text(skill.skill_1h_ratio, skill.skill_6h_ratio, skill.skill_24h_mean_ratio)
        console.print(f"{text}; last 4 weeks")
    return 0


def backtest(  # noqa: PLR0913  each option is a parameter
    files: Annotated[list[Path], typer.Argument(metavar="TRACE.csv", help="Hourly traces, named ZONE_anything.csv.")],
    *,
    train_until: Annotated[str, typer.Option(metavar="DATE", help="Issue the first forecast at this time (UTC).")],
    frontier: Annotated[
        Path | None, typer.Option(metavar="FILE", help='Operating points: [{"T": s, "E": J}, ...].')
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Power-limit profiles or a pipeline profile, instead of --frontier."),
    ] = None,
    schedule: Annotated[str | None, typer.Option(metavar="NAME", help="Schedule, for a pipeline profile.")] = None,
    microbatches: Annotated[int | None, typer.Option(metavar="M", help="Microbatches, for a pipeline profile.")] = None,
    max_slowdown: Annotated[
        float,
        typer.Option(
            "--max-slowdown",
            callback=checked_slowdown,
            metavar="RATIO",
            help="Allowed slowdown of the whole job, 0 to 1.",
        ),
    ] = 0.025,
    job_hours: Annotated[float, typer.Option(metavar="H", help="Length of a job in hours at full speed.")] = 72.0,
    starts: Annotated[int, typer.Option(metavar="N", help="Jobs per zone, with random start times.")] = 240,
    seed: Annotated[int, typer.Option(metavar="S", help="Random seed of the start times.")] = 1,
    starts_file: Annotated[
        Path | None, typer.Option(metavar="JSON", help='Start times: [{"zone": ..., "starts_utc": [...]}].')
    ] = None,
    host_power_w: Annotated[float, typer.Option(metavar="W", help="Power of the host without its GPUs.")] = 0.0,
    history_days: Annotated[
        int | None, typer.Option(metavar="D", min=8, help="Limit the history that forecasts see, in days.")
    ] = None,
    forecasts_out: Annotated[Path | None, typer.Option(metavar="CSV", help="Write all forecasts to a file.")] = None,
    choices_out: Annotated[
        Path | None, typer.Option(metavar="JSON", help="Write the points chosen for each job to a file.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Replay historical traces without look-ahead.

    Reports how much carbon timing could save with perfect forecasts, and how much of that real forecasts capture.

    Examples:
        gpuenergyd carbon backtest GB_2025.csv --train-until 2025-07-01 --frontier frontier.json
        gpuenergyd carbon backtest GB_2025.csv --train-until 2025-07-01 --profile profile.csv --microbatches 8
    """
    warn_of_large_slowdown(max_slowdown)
    # `--profile A B` makes B a positional argument; profiles and traces differ in their columns.
    profiles = list(profile or ())
    traces = [path for path in files if not profiles or is_trace(path)]
    profiles += [path for path in files if path not in traces]
    request = ReplayRequest(
        traces=read_traces(traces),
        frontier=_frontier_points(frontier, profiles, schedule, microbatches),
        train_until_at=_instant("--train-until", train_until),
        max_slowdown_ratio=max_slowdown,
        job_hours=job_hours,
        num_starts=starts,
        seed=seed,
        starts_at=read_starts(starts_file) if starts_file is not None else None,
        host_power_w=host_power_w,
        history_days=history_days,
        want_forecasts=forecasts_out is not None,
    )
    from gpuenergyd_carbon.lab.replay import replay  # noqa: PLC0415  numpy, the help starts fast

    zones = replay(request)
    if forecasts_out is not None:
        write_forecasts(forecasts_out, zones)
    if choices_out is not None:
        write_choices(choices_out, zones)
    if as_json:
        documents = [plain_zone(zone) for zone in zones]
        print_json(documents[0] if len(documents) == 1 else documents)
    else:
        for zone in zones:
            _print_zone(zone)
    return 0


carbon = command_group(
    name="carbon",
    cls=DocumentedGroup,
    help="Query, forecast and backtest grid carbon intensity.",
    epilog="gpuenergyd carbon now --zone GB\ngpuenergyd carbon forecast --zone GB",
)
for _command in (now, forecast, backtest):
    add_command(carbon, _command)


def _frontier_points(
    frontier: Path | None, profiles: Sequence[Path], schedule: str | None, microbatches: int | None
) -> Points:
    """Return the operating points: from a file, from power-limit profiles, or planned from a pipeline profile.

    Raises:
        CarbonDataError: neither or both are given, or a file is invalid.
    """
    if (frontier is None) == (not profiles):
        raise CarbonDataError("give either --frontier FILE or --profile FILE")
    if frontier is not None:
        return read_frontier(frontier)
    if all(is_power_limit_profile(path) for path in profiles):
        return read_power_limit_profiles(profiles)
    if len(profiles) > 1:
        raise CarbonDataError("several profiles: each must be a power-limit profile of one GPU of the job")
    options = PlanOptions(schedule=schedule, microbatches=microbatches, want_frontier=True)
    planned = load_planner("bubble-aware")(plan_input(profiles[0], options).request)
    return tuple((point.iteration_time_s, point.energy_j) for point in planned.frontier)


def _instant(option: str, text: str) -> datetime:
    try:
        return utc_instant(text)
    except ValueError:
        raise CarbonDataError(
            f"{option} {text!r}: must be a date or time, e.g. 2024-01-01 or 2024-01-01T06:00Z"
        ) from None


def _from_source(
    zone: str | None, source: str | None, key_file: Path | None, base_url: str | None, hours: int
) -> tuple[HourlySeries | None, CarbonForecast | None]:
    """Return a source's history and its own forecast, which is preferred because ours needs a longer history."""
    from gpuenergyd_carbon.fetching.fetcher import FetcherConfig, source_of  # noqa: PLC0415  start fast

    if zone is None:
        raise CarbonDataError("give TRACE.csv files of a zone, or --zone, e.g. --zone GB")
    carbon_source = source_of(FetcherConfig(zone, Path(), source, key_file, base_url))
    reply = carbon_source.fetch(datetime.now(tz=UTC))
    given = _given_forecast(zone, reply.forecast, carbon_source.signal.source, hours)
    return hourly_series(zone, reply.samples), given


def _given_forecast(zone: str, samples: Any, source: str, hours: int = 72) -> CarbonForecast | None:
    """Return a provider's own hourly forecast, which has no prediction interval."""
    series = hourly_series(zone, samples)
    if series is None:
        return None
    step = (series.end_at - series.first_hour_at) / len(series.values)
    ahead = tuple(
        ForecastHour(series.first_hour_at + k * step, value, value, value)
        for k, value in enumerate(series.values[:hours])
        if value == value  # noqa: PLR0124  NaN marks hours without a value
    )
    return CarbonForecast(zone, datetime.now(tz=UTC), f"{source} (provider)", ahead)


def _print_zone(zone: ZoneReplay) -> None:
    from rich import box  # noqa: PLC0415  only tables need it
    from rich.table import Table  # noqa: PLC0415

    console = people_console()
    console.print(
        f"{zone.zone}: {count_text(zone.num_jobs, 'job')}; a constant speed saves"
        f" {100 * zone.constant_saving_ratio:.2f} %, "
        f"perfect timing adds {100 * zone.timing_gain_ratio:.2f} points; forecasts capture "
        f"{100 * zone.captured_ratio:.0f} % of that"
    )
    skill = zone.skill
    console.print(skill_text(skill.skill_1h_ratio, skill.skill_6h_ratio, skill.skill_24h_mean_ratio))
    table = Table(box=box.SIMPLE, pad_edge=False)
    for title in ("forecast", "saving %", "captured %", "worst job, points", "slowdown %", "time used of allowed %"):
        table.add_column(title, justify="left" if title == "forecast" else "right")
    for method in zone.methods:
        table.add_row(
            method.name,
            f"{100 * method.saving_ratio:.2f}",
            f"{100 * method.captured_ratio:.0f}",
            f"{100 * method.worst_job_ratio:+.2f}",
            f"{100 * method.mean_slowdown_ratio:+.2f}",
            f"{100 * method.time_used_ratio_max:.3f}",
        )
    console.print(table)
    for note in zone.notes:
        console.print(f"note: {note}", markup=False)
