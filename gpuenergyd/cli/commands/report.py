"""`gpuenergyd report`: energy, savings and cost of jobs from the history; works without the daemon."""

from pathlib import Path
from typing import Annotated

import typer

from gpuenergyd.cli.commands.report_output import Format, ReportRequest, write_report
from gpuenergyd.cli.options import DatabaseOption, JsonOption
from gpuenergyd.report.group_keys import GroupBy, parse_group_keys
from gpuenergyd.report.plugin_groups import plugin_groups


def _format_names() -> list[str]:
    from gpuenergyd.report.plugin_formats import format_names  # noqa: PLC0415  start fast

    return [*Format, *format_names()]


def report(  # noqa: PLR0913  each option is a parameter
    *,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Start: 2026-11-21, 2026-11-21T08:00, a month (2026-10), or an age (30min, 24h, 7d, 4w).",
        ),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="End, exclusive; same formats as --since.")] = None,
    job: Annotated[str | None, typer.Option(metavar="JOB", help="Only this job, by id or name.")] = None,
    group_by: Annotated[
        str,
        typer.Option(
            metavar="job|training|user|host|gpu|day|month|tag",
            help=(
                "Group the figures by this, or by two such as user,month; a tag, such as slurm_job_id, with --tag."
                " Plugins add keys, such as state."
            ),
        ),
    ] = "job",
    tag: Annotated[
        str | None, typer.Option(metavar="NAME", help="Tag to group by, with --group-by tag; e.g. git_commit.")
    ] = None,
    price_per_kwh: Annotated[
        float | None, typer.Option("--price-per-kwh", min=0.0, metavar="PRICE", help="Add cost at a flat price.")
    ] = None,
    currency: Annotated[
        str | None, typer.Option(metavar="LABEL", help="Label of costs at a flat price, such as EUR.")
    ] = None,
    tariff: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Add cost from a TOML file of prices by hour and weekday.")
    ] = None,
    pue: Annotated[
        float | None,
        typer.Option(
            metavar="RATIO",
            help="Power usage effectiveness of the site, in cost and emissions [default: the daemon's `pue`].",
        ),
    ] = None,
    output_format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="table|json|csv|html|trace|spdx|model-card",
            help="Output format.",
            autocompletion=_format_names,
        ),
    ] = Format.TABLE.value,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write to a file instead of stdout.")] = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> int:
    """Report energy and savings of jobs.

    Reads the history, so the daemon need not run.

    Examples:
        gpuenergyd report --since 7d
        gpuenergyd report --job gpt --format html --out report.html
        gpuenergyd report --group-by training
        gpuenergyd report --group-by tag --tag slurm_job_id --format csv
        gpuenergyd report --group-by day --price-per-kwh 0.25 --currency EUR --pue 1.2
        gpuenergyd report --group-by user,month --since 2026-10 --format csv
    """
    is_of_plugin = group_by not in {*GroupBy} and group_by in plugin_groups()
    return write_report(
        ReportRequest(
            since=since,
            until=until,
            job=job,
            group_by=(GroupBy.JOB,) if is_of_plugin else parse_group_keys(group_by),
            plugin_group=group_by if is_of_plugin else None,
            tag=tag,
            price_per_kwh=price_per_kwh,
            currency=currency,
            tariff=tariff,
            pue=pue,
            output_format=output_format,
            out=out,
            database=database,
            as_json=as_json,
        )
    )
