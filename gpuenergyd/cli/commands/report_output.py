"""What `gpuenergyd report` does once its arguments are read. Nothing here loads Typer: a report starts fast."""

import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from gpuenergyd.cli.json_text import json_text
from gpuenergyd.errors import StoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuenergyd.report.groups import Span
    from gpuenergyd.report.job import JobReport
    from gpuenergyd.report.tariff import Tariff
    from gpuenergyd.store import History

_AGE = re.compile(r"(\d+)([smhdw])")
_CLOCK_TOLERANCE = timedelta(minutes=2)
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
    HOST = "host"
    GPU = "gpu"
    DAY = "day"
    TAG = "tag"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRequest:
    """What is to be reported, and how it is written."""

    since: str | None = None
    until: str | None = None
    job: str | None = None
    group_by: GroupBy = GroupBy.JOB
    tag: str | None = None
    price_per_kwh: float | None = None
    tariff: Path | None = None
    output_format: Format = Format.TABLE
    out: Path | None = None
    database: str | None = None
    as_json: bool = False

    @property
    def written_as(self) -> Format:
        """The format: --json is short for one of them."""
        return Format.JSON if self.as_json else self.output_format


def write_report(request: ReportRequest) -> int:
    """Write the report that is asked for; return the exit code.

    Raises:
        UsageError: what is asked for contradicts itself, or names what is not there.
        StoreError: the history cannot be read.
    """
    from gpuenergyd.report.groups import Span  # noqa: PLC0415  a wrong option is said before anything is loaded
    from gpuenergyd.report.job import job_reports  # noqa: PLC0415  as above
    from gpuenergyd.store import open_history  # noqa: PLC0415  as above

    now = datetime.now(tz=UTC)
    begin = instant(request.since, now=now, option="--since")
    end = instant(request.until, now=now, option="--until")
    _check_span(begin, end, now=now)
    _check_options(request)
    job, group_by = request.job, request.group_by
    prices = _tariff(request.price_per_kwh, request.tariff)
    with open_history(request.database or _default_database()) as history:
        has_jobs = group_by not in {GroupBy.GPU, GroupBy.DAY}
        reports = (
            job_reports(history, since=begin, until=end, job=job, tariff=prices, counts_only_span=True)
            if has_jobs
            else ()
        )
        if job is not None and not reports:
            raise UsageError(_unknown_job(history, job, begin, end))
        span = Span(history, begin, end, prices, only_jobs=job is not None)
        rows = _rows(span, reports, group_by, request.tag)
        for line in _clock_troubles(history, reports, now=now):
            sys.stderr.write(f"gpuenergyd: {line}\n")
        match request.written_as:
            case Format.TABLE:
                _print_table(reports, rows, group_by)
                return 0
            case Format.JSON:
                text = json_text({"jobs" if group_by is GroupBy.JOB else "groups": rows}) + "\n"
            case Format.CSV:
                from gpuenergyd.report.csv_table import csv_text  # noqa: PLC0415  only who asks for it needs it

                text = csv_text(rows)
            case Format.HTML:
                from gpuenergyd.report.page import report_page  # noqa: PLC0415  Jinja2, for the page only

                text = report_page(history, reports, made_at=now.astimezone())
            case _:
                assert_never(request.written_as)
    if request.out is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_text(request.out, text)
        sys.stderr.write(f"wrote {request.out}\n")
    return 0


def _clock_troubles(history: "History", reports: "Sequence[JobReport]", *, now: datetime) -> list[str]:
    """Return what a clock that was set back did to a history: nothing is lost, but its times cannot be believed."""
    found = []
    newest = max(
        [at for at in (history.last_recorded_at(), *(r.summary.started_at for r in reports)) if at], default=now
    )
    if newest > now + _CLOCK_TOLERANCE:
        found.append(
            f"records of {newest:%Y-%m-%d %H:%M} UTC are newer than this host's clock, {now:%Y-%m-%d %H:%M} UTC:"
            " it was set back, or was wrong then"
        )
    turned = [r.summary.job_name for r in reports if r.summary.ended_at and r.summary.ended_at < r.summary.started_at]
    if turned:
        found.append(
            f"the clock was set back while {', '.join(sorted(set(turned)))} ran: durations are sums of iterations,"
            " and days and hours are those that the clock showed"
        )
    return found


def _check_options(request: ReportRequest) -> None:
    """Refuse options that contradict each other."""
    job, group_by, tag = request.job, request.group_by, request.tag
    if request.out is not None and request.written_as is Format.TABLE:
        raise UsageError("--out needs --format json, csv or html; a table is for the terminal")
    if group_by is not GroupBy.JOB and request.written_as is Format.HTML:
        raise UsageError("--format html shows jobs; use --group-by with table, json or csv")
    if job is not None and group_by in {GroupBy.GPU, GroupBy.DAY}:
        raise UsageError(f"--group-by {group_by} counts whole GPUs; it takes no --job")
    if tag is not None and group_by is not GroupBy.TAG:
        raise UsageError(f"--tag {tag} says what --group-by tag adds up over, and has no meaning without it")


def _rows(span: "Span", reports: "Sequence[JobReport]", group_by: GroupBy, tag: str | None) -> list[dict[str, Any]]:
    """Return what the report says, a mapping for each line."""
    if group_by is GroupBy.JOB:
        return [each.figures() for each in reports]
    from gpuenergyd.report import groups  # noqa: PLC0415  heavy: SQLAlchemy

    match group_by:
        case GroupBy.USER:
            found = groups.groups_by_user(span, reports)
        case GroupBy.TAG:
            known = sorted({name for report in reports for name, _ in report.summary.tags})
            if tag is None or (reports and tag not in known):
                said = "needs --tag NAME" if tag is None else f"knows no tag {tag!r}"
                raise UsageError(f"--group-by tag {said}; jobs of that time carry: {', '.join(known) or 'none'}")
            found = groups.groups_by_tag(span, reports, tag)
        case GroupBy.HOST:
            found = groups.groups_by_host(span, reports)
        case GroupBy.GPU:
            found = groups.groups_by_gpu(span)
        case GroupBy.DAY:
            found = groups.groups_by_day(span, zone=None)
        case _:
            assert_never(group_by)
    return [group.figures(span.tariff) for group in found]


def _tariff(price_per_kwh: float | None, path: Path | None) -> "Tariff | None":
    if price_per_kwh is None and path is None:
        return None
    if price_per_kwh is not None and path is not None:
        raise UsageError("--price-per-kwh and --tariff both say what energy costs; give one")
    from gpuenergyd.report.tariff import Tariff, read_tariff  # noqa: PLC0415  only who asks for costs needs it

    return Tariff(price_per_kwh) if price_per_kwh is not None else read_tariff(path or Path())


def _unknown_job(history: "History", job: str, begin: datetime | None, end: datetime | None) -> str:
    """Return what is wrong with a job's name: nothing of that name in the span, or none at all."""
    if begin is not None or end is not None:
        elsewhere = history.job_summaries(job=job)
        if elsewhere:
            return f"job {job!r} did not run in that time; it began {elsewhere[-1].started_at:%Y-%m-%d %H:%M} UTC"
    names = sorted({summary.job_name for summary in history.job_summaries(since=begin, until=end)})
    return f"no job {job!r} in that time; known: {', '.join(names) or 'none'}"


def _print_table(reports: "Sequence[JobReport]", rows: list[dict[str, Any]], group_by: GroupBy) -> None:
    from gpuenergyd.cli.terminal import people_console  # noqa: PLC0415  as below
    from gpuenergyd.report.terminal.tables import groups_table, job_table, jobs_table  # noqa: PLC0415  Rich, for tables only

    if not rows:
        people_console().print(
            "nothing was measured then" if group_by in {GroupBy.DAY, GroupBy.GPU} else "no job ran in that time"
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
