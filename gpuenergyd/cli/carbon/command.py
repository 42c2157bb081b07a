"""`gpuenergyd carbon now | forecast | backtest`: what the grid emits, what comes, and what following it is worth."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gpuenergyd.cli.carbon.files import (
    is_trace,
    plain_zone,
    read_starts,
    read_traces,
    utc_text,
    write_choices,
    write_forecasts,
)
from gpuenergyd.cli.carbon.inputs import (
    checked_instant,
    forecast_machinery,
    frontier_points,
    replay_machinery,
    utc_now,
)
from gpuenergyd.cli.carbon.plot import forecast_lines, write_forecast_svg
from gpuenergyd.cli.output import JsonOption, print_json
from gpuenergyd.cli.terminal import people_console
from gpuenergyd.core.carbon.intensity import (
    CarbonForecast,
    EmissionFactor,
    ForecastHour,
    HourlySeries,
    IntensityBasis,
    SignalKind,
    hourly_series,
    intensity_now,
)
from gpuenergyd.core.carbon.replay import ReplayRequest, ZoneReplay
from gpuenergyd.errors import CarbonDataError

EXIT_DEGRADED = 4

carbon = typer.Typer(
    name="carbon",
    help="What the grid emits, what comes, and what following it is worth.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

ZoneOption = Annotated[str | None, typer.Option("--zone", metavar="ZONE", help="The grid's zone, e.g. GB or DE.")]
SourceOption = Annotated[
    str | None, typer.Option("--source", metavar="NAME", help="Who to ask [default for GB: neso].")
]
KeyFileOption = Annotated[
    Path | None, typer.Option("--key-file", metavar="FILE", help="The source's key; mode 0600, never printed.")
]
BaseUrlOption = Annotated[str | None, typer.Option("--base-url", metavar="URL", help="Another address of the source.")]
CsvOption = Annotated[
    Path | None, typer.Option("--csv", metavar="FILE", help="Use a file instead of a source that is asked.")
]


@carbon.command()
def now(
    *,
    zone: ZoneOption = None,
    source: SourceOption = None,
    key_file: KeyFileOption = None,
    base_url: BaseUrlOption = None,
    csv_file: CsvOption = None,
    fixed: Annotated[float | None, typer.Option("--fixed", metavar="G", help="A constant in g/kWh.")] = None,
    kind: Annotated[SignalKind | None, typer.Option(help="Which signal, where the source has both.")] = None,
    factor: Annotated[EmissionFactor | None, typer.Option(help="What counts as an emission.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Ask a source what the grid emits now, and say what the value is and how old."""
    from gpuenergyd.carbon.fetcher import FetcherConfig, source_of  # noqa: PLC0415  needs requests

    asked_zone = zone or (csv_file.stem.partition("_")[0] if csv_file is not None else None)
    if asked_zone is None:
        raise CarbonDataError("give --zone, e.g. --zone GB")
    chosen = source or ("csv" if csv_file is not None else "fixed" if fixed is not None else None)
    config = FetcherConfig(asked_zone, Path(), chosen, key_file, base_url, kind, factor, csv_file, fixed)
    asked = source_of(config)
    at = utc_now()
    reply = asked.fetch(at)
    here = intensity_now(
        at, hourly_series(asked_zone, reply.samples), _given_forecast(asked_zone, reply.forecast, asked.signal.source)
    )
    newest = reply.samples[-1] if reply.samples else None
    is_degraded = reply.is_stale or bool(reply.rejected) or here.basis is not IntensityBasis.LIVE
    signal = asked.signal
    if as_json:
        print_json(
            {
                "zone": asked_zone,
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
        console = people_console()
        console.print(
            f"{asked_zone}: {shown} ({here.basis}; {status}; {signal.kind}, {signal.factor}; {signal.source})"
        )
        for reason in reply.rejected:
            console.print(f"  not used: {reason}", markup=False)
        if reply.is_stale:
            console.print("  the newest value is older than a day: the source lags or this host's clock is wrong")
    return EXIT_DEGRADED if is_degraded else 0


@carbon.command()
def forecast(
    traces: Annotated[
        list[Path] | None, typer.Argument(metavar="[TRACE.csv]...", help="One zone's history; else a source's.")
    ] = None,
    *,
    hours: Annotated[int, typer.Option(min=1, max=72, help="How far to look ahead.")] = 24,
    zone: ZoneOption = None,
    source: SourceOption = None,
    key_file: KeyFileOption = None,
    base_url: BaseUrlOption = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it there too.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Forecast a zone's carbon intensity from its history, with the range that holds 8 of 10 hours."""
    given: CarbonForecast | None = None
    if traces:
        series = read_traces(traces)
        if len(series) != 1:
            raise CarbonDataError(
                f"traces of {len(series)} zones ({', '.join(s.zone for s in series)}); give one zone's"
            )
        history: HourlySeries | None = series[0]
    else:
        history, given = _from_source(zone, source, key_file, base_url, hours)
    expected = given if given is not None or history is None else forecast_machinery()(history, num_hours=hours)
    if expected is None:
        raise CarbonDataError("the source gave neither a history nor a forecast")
    if svg is not None:
        write_forecast_svg(svg, expected, history)
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
    console.print(f"{expected.zone}: {expected.unit} from {issued} UTC on, by {expected.model}", markup=False)
    for line in forecast_lines(expected):
        console.print(line, markup=False)
    if expected.skill is not None:
        skill = expected.skill
        console.print(
            f"error against the best naive forecast, last 4 weeks: 1 h {-100 * skill.skill_1h_ratio:+.0f} %, "
            f"6 h {-100 * skill.skill_6h_ratio:+.0f} %, mean of 24 h {-100 * skill.skill_24h_mean_ratio:+.0f} %"
        )
    return 0


@carbon.command()
def backtest(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="TRACE.csv...", help="Hourly traces; a name up to its first _ is the zone."),
    ],
    *,
    train_until: Annotated[str, typer.Option(metavar="DATE", help="The first forecast is issued then (UTC).")],
    frontier: Annotated[
        Path | None, typer.Option(metavar="FILE", help='Points to run at: [{"T": s, "E": J}, ...].')
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE...", help="Instead: its GPUs' power-limit profiles, or a pipeline's profile."),
    ] = None,
    schedule: Annotated[str | None, typer.Option(help="Schedule of a pipeline's profile.")] = None,
    microbatches: Annotated[int | None, typer.Option(metavar="M", help="Microbatches of a pipeline's profile.")] = None,
    budget: Annotated[float, typer.Option(metavar="R", help="Permitted slowdown of the whole job.")] = 0.025,
    job_hours: Annotated[float, typer.Option(metavar="H", help="Length of a job at full speed.")] = 72.0,
    starts: Annotated[int, typer.Option(metavar="N", help="Jobs per zone, at hours drawn at random.")] = 240,
    seed: Annotated[int, typer.Option(metavar="S", help="Of that draw.")] = 1,
    starts_file: Annotated[
        Path | None, typer.Option(metavar="JSON", help='Instead: [{"zone": ..., "starts_utc": [...]}].')
    ] = None,
    host_power_w: Annotated[float, typer.Option(metavar="W", help="Power of the host beside its GPUs.")] = 0.0,
    history_days: Annotated[
        int | None, typer.Option(metavar="D", min=8, help="Let forecasts see only so many days, as after installing.")
    ] = None,
    forecasts_out: Annotated[Path | None, typer.Option(metavar="CSV", help="Write every forecast.")] = None,
    choices_out: Annotated[Path | None, typer.Option(metavar="JSON", help="Write what each job ran at.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Live past traces again without look-ahead: what timing is worth, and how much of it forecasts capture."""
    # `--profile A B` leaves B among the traces: it is told apart by its columns.
    profiles = list(profile or ())
    traces = [path for path in files if not profiles or is_trace(path)]
    profiles += [path for path in files if path not in traces]
    request = ReplayRequest(
        traces=read_traces(traces),
        frontier=frontier_points(frontier, profiles, schedule=schedule, microbatches=microbatches),
        train_until_at=checked_instant("--train-until", train_until),
        max_slowdown_ratio=budget,
        job_hours=job_hours,
        num_starts=starts,
        seed=seed,
        starts_at=read_starts(starts_file) if starts_file is not None else None,
        host_power_w=host_power_w,
        history_days=history_days,
        want_forecasts=forecasts_out is not None,
    )
    zones = replay_machinery()(request)
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


def _from_source(
    zone: str | None, source: str | None, key_file: Path | None, base_url: str | None, hours: int
) -> tuple[HourlySeries | None, CarbonForecast | None]:
    """Return what a source knows; its own forecast goes first, ours needs a longer history than sources give."""
    from gpuenergyd.carbon.fetcher import FetcherConfig, source_of  # noqa: PLC0415  needs requests

    if zone is None:
        raise CarbonDataError("give a zone's history as TRACE.csv, or --zone, e.g. --zone GB")
    asked = source_of(FetcherConfig(zone, Path(), source, key_file, base_url))
    reply = asked.fetch(utc_now())
    given = _given_forecast(zone, reply.forecast, asked.signal.source, hours)
    return hourly_series(zone, reply.samples), given


def _given_forecast(zone: str, samples: Any, source: str, hours: int = 72) -> CarbonForecast | None:
    """Return a provider's own forecast by the hour; it states no range."""
    series = hourly_series(zone, samples)
    if series is None:
        return None
    step = (series.end_at - series.first_hour_at) / len(series.values)
    ahead = tuple(
        ForecastHour(series.first_hour_at + k * step, value, value, value)
        for k, value in enumerate(series.values[:hours])
        if value == value  # noqa: PLR0124  NaN is an hour the provider left out
    )
    return CarbonForecast(zone, utc_now(), f"{source}'s own", ahead)


def _print_zone(zone: ZoneReplay) -> None:
    from rich import box  # noqa: PLC0415  only a person who reads needs it
    from rich.table import Table  # noqa: PLC0415

    console = people_console()
    console.print(
        f"{zone.zone}: {zone.num_jobs} jobs; a constant point saves {100 * zone.constant_saving_ratio:.2f} %, "
        f"perfect timing adds {100 * zone.timing_gain_ratio:.2f} points, ours {100 * zone.captured_ratio:.0f} % of that"
    )
    skill = zone.skill
    console.print(
        f"forecast skill against the best naive one: 1 h {100 * skill.skill_1h_ratio:.0f} %, "
        f"6 h {100 * skill.skill_6h_ratio:.0f} %, mean of 24 h {100 * skill.skill_24h_mean_ratio:.0f} %"
    )
    table = Table(box=box.SIMPLE, pad_edge=False)
    for title in ("look-ahead", "saving %", "captured %", "worst job, points", "slowdown %", "time of permitted %"):
        table.add_column(title, justify="left" if title == "look-ahead" else "right")
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
