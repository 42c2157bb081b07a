"""`gpuenergyd report`: what jobs used and saved, from the history; the daemon need not run."""

import re
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gpuenergyd.cli.output import JsonOption, json_text, people_console
from gpuenergyd.errors import StoreError, UsageError

_AGE = re.compile(r"(\d+)([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Format(StrEnum):
    """How a report is written."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    HTML = "html"


def report(
    *,
    since: Annotated[
        str | None, typer.Option(metavar="WHEN", help="From: 2026-11-21, 2026-11-21T08:00, or an age: 24h, 7d.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="WHEN", help="Before: as --since.")] = None,
    job: Annotated[str | None, typer.Option(metavar="JOB", help="One job, by id or name.")] = None,
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
    from gpuenergyd.report.job import job_reports  # noqa: PLC0415  heavy: SQLAlchemy
    from gpuenergyd.store import open_history  # noqa: PLC0415

    now = datetime.now(tz=UTC)
    begin, end = (instant(text, now=now, option=name) for text, name in ((since, "--since"), (until, "--until")))
    _check_span(begin, end, now=now)
    if as_json:
        output_format = Format.JSON
    with open_history(database or _default_database()) as history:
        reports = job_reports(history, since=begin, until=end, job=job)
        if job is not None and not reports:
            names = sorted({summary.job_name for summary in history.job_summaries(since=begin, until=end)})
            raise UsageError(f"no job {job!r} in that time; known: {', '.join(names) or 'none'}")
        match output_format:
            case Format.TABLE:
                if out is None:
                    from gpuenergyd.report.tables import job_table, jobs_table  # noqa: PLC0415  Rich, for tables only

                    view = job_table(reports[-1]) if len(reports) == 1 else jobs_table(reports)
                    people_console().print(view if reports else "no job ran in that time")
                    return 0
                raise UsageError("--out needs --format json, csv or html; a table is for the terminal")
            case Format.JSON:
                text = json_text({"jobs": [each.figures() for each in reports]}) + "\n"
            case Format.CSV:
                from gpuenergyd.report.tables import jobs_csv  # noqa: PLC0415

                text = jobs_csv(reports)
            case Format.HTML:
                from gpuenergyd.report.page import report_page  # noqa: PLC0415  Jinja2, for the page only

                text = report_page(history, reports, made_at=now.astimezone())
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(out, text)
        typer.echo(f"wrote {out}", err=True)
    return 0


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
