"""`gpuenergyd report`: what jobs used and saved, from the history; the daemon need not run."""

import re
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, assert_never

import typer

from gpuenergyd.cli.output import JsonOption, json_text, people_console
from gpuenergyd.errors import StoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuenergyd.report.job import JobReport

_AGE = re.compile(r"(\d+)([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Format(StrEnum):
    """How a report is written."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    HTML = "html"


class GroupBy(StrEnum):
    """What a report adds up over."""

    JOB = "job"
    USER = "user"
    GPU = "gpu"
    DAY = "day"


def report(
    *,
    since: Annotated[
        str | None, typer.Option(metavar="WHEN", help="From: 2026-11-21, 2026-11-21T08:00, or an age: 24h, 7d.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="WHEN", help="Before: as --since.")] = None,
    job: Annotated[str | None, typer.Option(metavar="JOB", help="One job, by id or name.")] = None,
    group_by: Annotated[GroupBy, typer.Option(help="What to add up over.")] = GroupBy.JOB,
    price_per_kwh: Annotated[
        float | None, typer.Option("--price-per-kwh", min=0.0, metavar="PRICE", help="Add what the energy costs.")
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
    from gpuenergyd.report.groups import groups_by_day, groups_by_gpu, groups_by_user  # noqa: PLC0415  heavy: SQLAlchemy
    from gpuenergyd.report.job import job_reports  # noqa: PLC0415
    from gpuenergyd.store import open_history  # noqa: PLC0415

    now = datetime.now(tz=UTC)
    begin, end = (instant(text, now=now, option=name) for text, name in ((since, "--since"), (until, "--until")))
    _check_span(begin, end, now=now)
    output_format = Format.JSON if as_json else output_format
    if out is not None and output_format is Format.TABLE:
        raise UsageError("--out needs --format json, csv or html; a table is for the terminal")
    if group_by is not GroupBy.JOB and output_format is Format.HTML:
        raise UsageError("--format html shows jobs; use --group-by with table, json or csv")
    if group_by in {GroupBy.GPU, GroupBy.DAY} and job is not None:
        raise UsageError(f"--group-by {group_by} counts whole GPUs; it takes no --job")
    with open_history(database or _default_database()) as history:
        reports = job_reports(history, since=begin, until=end, job=job, price_per_kwh=price_per_kwh)
        if job is not None and not reports:
            names = sorted({summary.job_name for summary in history.job_summaries(since=begin, until=end)})
            raise UsageError(f"no job {job!r} in that time; known: {', '.join(names) or 'none'}")
        match group_by:
            case GroupBy.JOB:
                rows = [each.figures() for each in reports]
            case GroupBy.USER:
                rows = [group.figures(price_per_kwh) for group in groups_by_user(reports)]
            case GroupBy.GPU:
                rows = [group.figures(price_per_kwh) for group in groups_by_gpu(history, since=begin, until=end)]
            case GroupBy.DAY:
                days = groups_by_day(history, since=begin, until=end, zone=None)
                rows = [group.figures(price_per_kwh) for group in days]
            case _:
                assert_never(group_by)
        match output_format:
            case Format.TABLE:
                _print_table(reports, rows, group_by)
                return 0
            case Format.JSON:
                text = json_text({"jobs" if group_by is GroupBy.JOB else "groups": rows}) + "\n"
            case Format.CSV:
                from gpuenergyd.report.tables import csv_text  # noqa: PLC0415  Rich, for people only

                text = csv_text(rows)
            case Format.HTML:
                from gpuenergyd.report.page import report_page  # noqa: PLC0415  Jinja2, for the page only

                text = report_page(history, reports, made_at=now.astimezone())
            case _:
                assert_never(output_format)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(out, text)
        typer.echo(f"wrote {out}", err=True)
    return 0


def _print_table(reports: "Sequence[JobReport]", rows: list[dict[str, Any]], group_by: GroupBy) -> None:
    from gpuenergyd.report.tables import groups_table, job_table, jobs_table  # noqa: PLC0415  Rich, for tables only

    if not rows:
        people_console().print(
            "no job ran in that time" if group_by is not GroupBy.DAY else "nothing was measured then"
        )
    elif group_by is not GroupBy.JOB:
        people_console().print(groups_table(rows, by=group_by))
    else:
        people_console().print(job_table(reports[0]) if len(reports) == 1 else jobs_table(reports))


def write_text(path: Path, text: str) -> None:
    """Write a file the user named.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def instant(text: str | None, *, now: datetime, option: str) -> datetime | None:
    """Return the instant a user means: ISO 8601 in local time, or an age before now.

    Raises:
        UsageError: neither of them.
    """
    if text is None:
        return None
    if age := _AGE.fullmatch(text.strip()):
        try:
            return now - timedelta(seconds=int(age[1]) * _SECONDS[age[2]])
        except OverflowError:
            raise UsageError(f"{option} {text!r}: before the calendar begins") from None
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise UsageError(f"{option} {text!r}: a date, a time as 2026-11-21T08:00, or an age as 24h is valid") from None


def _check_span(begin: datetime | None, end: datetime | None, *, now: datetime) -> None:
    if begin is not None and begin > now:
        raise UsageError(f"--since {begin.isoformat()} lies in the future")
    if begin is not None and end is not None and begin >= end:
        raise UsageError(f"--since {begin.isoformat()} is not before --until {end.isoformat()}")


def _default_database() -> str:
    from gpuenergyd.daemon.settings import load_settings  # noqa: PLC0415  pydantic, only where no database is named

    url = load_settings().database_url
    path = url.removeprefix("sqlite:///")
    if path != url and not Path(path).exists():
        raise StoreError(f"no history at {path}; the daemon writes it there, or name another with --database")
    return url
