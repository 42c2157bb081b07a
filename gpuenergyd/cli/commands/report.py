"""`gpuenergyd report`: what jobs used and saved, from the history; the daemon need not run."""

from pathlib import Path
from typing import Annotated

import typer

from gpuenergyd.cli.commands.report_output import Format, GroupBy, ReportRequest, write_report
from gpuenergyd.cli.output import JsonOption


def report(
    *,
    since: Annotated[
        str | None, typer.Option(metavar="WHEN", help="From: 2026-11-21, 2026-11-21T08:00, or an age: 24h, 7d.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="WHEN", help="Before: as --since.")] = None,
    job: Annotated[str | None, typer.Option(metavar="JOB", help="One job, by id or name.")] = None,
    group_by: Annotated[GroupBy, typer.Option(help="What to add up over.")] = GroupBy.JOB,
    tag: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which tag --group-by tag means, e.g. git_commit.")
    ] = None,
    price_per_kwh: Annotated[
        float | None, typer.Option("--price-per-kwh", min=0.0, metavar="PRICE", help="Add what the energy costs.")
    ] = None,
    tariff: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prices by hour and weekday, as TOML; see the README.")
    ] = None,
    output_format: Annotated[Format, typer.Option("--format", help="How to write it.")] = Format.TABLE,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write here instead of to the terminal.")] = None,
    database: Annotated[
        str | None, typer.Option(metavar="PATH|URL", help="The history to read; else the daemon's own.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Report what jobs used and saved.

    Reads the history, so the daemon need not run.
    """
    return write_report(
        ReportRequest(
            since=since,
            until=until,
            job=job,
            group_by=group_by,
            tag=tag,
            price_per_kwh=price_per_kwh,
            tariff=tariff,
            output_format=output_format,
            out=out,
            database=database,
            as_json=as_json,
        )
    )
