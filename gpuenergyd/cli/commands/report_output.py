"""Reads the history and writes the report of `gpuenergyd report`; slow imports are inside functions, to start fast."""

import os
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuenergyd.cli.output import json_text, people_console
from gpuenergyd.errors import GpuEnergyError, StoreError, UsageError
from gpuenergyd.report.group_keys import WITHOUT_JOBS, GroupBy
from gpuenergyd.report.plugin_groups import GroupTable, plugin_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuenergyd.quantities.tariff import Tariff
    from gpuenergyd.report.groups import EnergyQuery
    from gpuenergyd.report.job import JobReport
    from gpuenergyd.store import History

_AGE = re.compile(r"(\d+)(s|min|h|d|w)")
_MONTH = re.compile(r"\d{4}-\d{2}")
_AMBIGUOUS_AGE = re.compile(r"(\d+)m")
_CLOCK_TOLERANCE = timedelta(minutes=2)
_NOT_BY_JOB = "--format {} is a report by job; --group-by needs --format table, json or csv"
_NO_MEASUREMENTS = "no measurements in this period"
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Format(StrEnum):
    """Output formats of reports of any group; plugins have further ones, of reports by job."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRequest:
    """Parsed options of `gpuenergyd report`; None for options that were not given."""

    since: str | None = None
    until: str | None = None
    job: str | None = None
    group_by: tuple[GroupBy, ...] = (GroupBy.JOB,)
    """One or two keys."""
    plugin_group: str | None = None
    """The key of a plugin's group, instead of `group_by`."""
    tag: str | None = None
    price_per_kwh: float | None = None
    currency: str | None = None
    tariff: Path | None = None
    pue: float | None = None
    output_format: str = Format.TABLE
    out: Path | None = None
    database: str | None = None
    as_json: bool = False

    @property
    def written_as(self) -> str:
        """The output format; --json is short for --format json."""
        return Format.JSON if self.as_json else self.output_format


def write_report(request: ReportRequest) -> int:
    """Write the requested report and return the exit code.

    Raises:
        UsageError: options contradict each other, or name a job or tag that does not exist.
        StoreError: the history cannot be read.
    """
    from gpuenergyd.report.groups import EnergyQuery  # noqa: PLC0415  start fast
    from gpuenergyd.report.job import job_reports  # noqa: PLC0415  start fast
    from gpuenergyd.store import open_history  # noqa: PLC0415  start fast

    now = datetime.now(tz=UTC)
    begin = instant(request.since, now=now, option="--since")
    end = instant(request.until, now=now, option="--until")
    _check_span(begin, end, now=now)
    if request.plugin_group is not None:
        return _write_plugin_group(request.plugin_group, request, begin, end)
    _check_options(request)
    job, group_by = request.job, request.group_by
    prices = _tariff(request)
    database, pue = (request.database, 1.0) if request.database else _default_database()
    pue = pue if request.pue is None else request.pue
    with open_history(database) as history:
        has_jobs = not WITHOUT_JOBS.issuperset(group_by)
        reports = (
            job_reports(history, since=begin, until=end, job=job, tariff=prices, pue=pue, within_range_only=True)
            if has_jobs
            else ()
        )
        if job is not None and not reports:
            raise UsageError(_unknown_job(history, job, begin, end))
        query = EnergyQuery(history, begin, end, prices, pue, only_jobs=job is not None)
        rows = _rows(query, reports, request)
        for line in _clock_warnings(history, reports, now=now):
            sys.stderr.write(f"gpuenergyd: {line}\n")
        match request.written_as:
            case Format.TABLE:
                _print_table(reports, rows, group_by)
                return 0
            case Format.JSON:
                text = json_text(_document(reports, rows, group_by)) + "\n"
            case Format.CSV:
                from gpuenergyd.report.csv_table import csv_text  # noqa: PLC0415  only CSV needs it

                text = csv_text(rows)
            case name:
                from gpuenergyd.report.plugin_formats import ReportedJobs, plugin_format  # noqa: PLC0415  as above

                tables = partial(_plugin_tables, database, begin, end) if job is None else tuple
                jobs = ReportedJobs(history=history, reports=reports, made_at=now.astimezone(), tables=tables)
                text = plugin_format(name).write(jobs)
    return _write(text, request.out)


def _write(text: str, out: Path | None) -> int:
    if out is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_text(out, text)
        sys.stderr.write(f"wrote {out}\n")
    return 0


def _write_plugin_group(key: str, request: ReportRequest, begin: datetime | None, end: datetime | None) -> int:
    """Write the figures of a plugin, which have nothing to do with jobs."""
    if request.written_as not in {*Format}:
        raise UsageError(_NOT_BY_JOB.format(request.written_as))
    _check_out(request)
    of_jobs = (request.job, request.tag, request.price_per_kwh, request.currency, request.tariff, request.pue)
    if any(value is not None for value in of_jobs):
        raise UsageError(f"--group-by {key} is of whole GPUs: --job, --tag, --pue and options of costs do not apply")
    found = plugin_groups()[key](request.database or _default_database()[0], since=begin, until=end)
    match request.written_as:
        case Format.JSON:
            return _write(json_text({"groups": found.rows, "summary": found.lines}) + "\n", request.out)
        case Format.CSV:
            from gpuenergyd.report.csv_table import csv_text  # noqa: PLC0415  only CSV needs it

            return _write(csv_text(found.rows), request.out)
        case _:
            from gpuenergyd.report.terminal.tables import plugin_table  # noqa: PLC0415  Rich, only tables need it

            people_console().print(plugin_table(found) if found.rows else _NO_MEASUREMENTS, crop=False)
            return 0


def _plugin_tables(database: str, begin: datetime | None, end: datetime | None) -> list[GroupTable]:
    """Return the tables of all plugins that have rows."""
    found = []
    for key, read in plugin_groups().items():
        try:
            found.append(read(database, since=begin, until=end))
        except GpuEnergyError as error:  # its section is missing, the rest of the report is right
            sys.stderr.write(f"gpuenergyd: warning: {error}\n")
        except Exception as error:  # noqa: BLE001  a plugin may fail in any way
            sys.stderr.write(f"gpuenergyd: warning: report group {key!r}: {type(error).__name__}: {error}\n")
    return [table for table in found if table.rows]


def _clock_warnings(history: "History", reports: "Sequence[JobReport]", *, now: datetime) -> list[str]:
    """Return warnings about records whose times are wrong because the wall clock was set back."""
    found = []
    newest = max(
        [at for at in (history.last_recorded_at(), *(r.summary.started_at for r in reports)) if at], default=now
    )
    if newest > now + _CLOCK_TOLERANCE:
        found.append(
            f"warning: the newest record, {newest:%Y-%m-%d %H:%M} UTC, is later than this host's clock,"
            f" {now:%Y-%m-%d %H:%M} UTC: the clock was set back, or was wrong when the record was written"
        )
    affected = [r.summary.job_name for r in reports if r.summary.ended_at and r.summary.ended_at < r.summary.started_at]
    if affected:
        found.append(
            f"warning: the clock was set back while {', '.join(sorted(set(affected)))} ran: durations are sums of"
            " iteration times; dates and hours are those of the wrong clock"
        )
    return found


def _check_out(request: ReportRequest) -> None:
    if request.out is not None and request.written_as == Format.TABLE:
        raise UsageError(
            "--out needs --format json, csv, html, trace, spdx or model-card; tables are printed to the terminal only"
        )


def _check_options(request: ReportRequest) -> None:
    """Raise UsageError for options that contradict each other."""
    job, group_by, tag = request.job, request.group_by, request.tag
    _check_out(request)
    if request.written_as not in {*Format}:
        from gpuenergyd.report.plugin_formats import plugin_format  # noqa: PLC0415  start fast

        is_by_job, found = group_by == (GroupBy.JOB,), plugin_format(request.written_as, own=[*Format])
        if found.is_of_one_training and not (job is not None and is_by_job):
            raise UsageError(f"--format {request.written_as} is of one job: give --job ID, without --group-by")
        if not is_by_job:
            raise UsageError(_NOT_BY_JOB.format(request.written_as))
    if job is not None and WITHOUT_JOBS.issuperset(group_by):
        raise UsageError(f"--group-by {','.join(group_by)} counts whole GPUs and cannot be combined with --job")
    if tag is not None and GroupBy.TAG not in group_by:
        raise UsageError(f"--tag {tag} needs --group-by tag")
    if request.pue is not None:
        from gpuenergyd.quantities.tariff import check_pue  # noqa: PLC0415  only this option needs it

        check_pue(request.pue, "--pue")


def _rows(query: "EnergyQuery", reports: "Sequence[JobReport]", request: ReportRequest) -> list[dict[str, Any]]:
    """Return the rows of the report, one mapping per row."""
    group_by, tag = request.group_by, request.tag
    if group_by == (GroupBy.JOB,):
        return [each.to_dict() for each in reports]
    if group_by == (GroupBy.TRAINING,):
        return _training_rows(query, reports, request)
    from gpuenergyd.report.groups import grouped  # noqa: PLC0415  start fast

    if GroupBy.TAG in group_by:
        known = sorted({name for report in reports for name, _ in report.summary.tags})
        if tag is None or (reports and tag not in known):
            problem = "--group-by tag needs --tag NAME" if tag is None else f"no job has a tag {tag!r}"
            raise UsageError(f"{problem}; tags in this period: {', '.join(known) or 'none'}")
    return [group.to_dict(query.rates) for group in grouped(query, reports, group_by, tag=tag or "")]


def _training_rows(
    query: "EnergyQuery", reports: "Sequence[JobReport]", request: ReportRequest
) -> list[dict[str, Any]]:
    """Return one row per training; report on stderr which trainings are incomplete.

    Rows include the parts of the training in JSON, and in a table of a single training.
    """
    from gpuenergyd.report.trainings import trainings_report  # noqa: PLC0415  start fast

    if names := [report.summary.job_name for report in reports if report.summary.job_id == request.job]:
        raise UsageError(
            f"--job {request.job} is one part of a training; --group-by training needs its name: --job {names[0]}"
        )
    found = trainings_report(query, reports)
    if line := found.incomplete_line():
        sys.stderr.write(f"gpuenergyd: {line}\n")
    is_single_table = request.written_as == Format.TABLE and len(found.trainings) == 1
    return found.rows(has_parts=request.written_as == Format.JSON or is_single_table)


def _document(
    reports: "Sequence[JobReport]", rows: list[dict[str, Any]], group_by: tuple[GroupBy, ...]
) -> dict[str, Any]:
    """Return the JSON document of the report; a report by job also has totals, if there are jobs."""
    if group_by != (GroupBy.JOB,):
        return {"groups": rows}
    if not reports:
        return {"jobs": rows}
    from gpuenergyd.report.totals import totals_dict  # noqa: PLC0415  start fast

    return {"jobs": rows, "totals": totals_dict(reports)}


def _tariff(request: ReportRequest) -> "Tariff | None":
    price_per_kwh, path, currency = request.price_per_kwh, request.tariff, request.currency
    if price_per_kwh is not None and path is not None:
        raise UsageError("--price-per-kwh and --tariff both set a price; give only one")
    if currency is not None and price_per_kwh is None:
        raise UsageError(f"--currency {currency} needs --price-per-kwh; a tariff file has the key currency")
    if price_per_kwh is None and path is None:
        return None
    from gpuenergyd.quantities.tariff import Tariff, check_currency, read_tariff  # noqa: PLC0415  only costs need it

    if currency is not None:
        check_currency(currency, "--currency")
    return Tariff(price_per_kwh, currency=currency) if price_per_kwh is not None else read_tariff(path or Path())


def _unknown_job(history: "History", job: str, begin: datetime | None, end: datetime | None) -> str:
    """Return the error message for a job that is not in the history, or not in the requested period."""
    if begin is not None or end is not None:
        elsewhere = history.job_summaries(job=job)
        if elsewhere:
            return (
                f"job {job!r} did not run in this period; it started at {elsewhere[-1].started_at:%Y-%m-%d %H:%M} UTC"
            )
    names = sorted({summary.job_name for summary in history.job_summaries(since=begin, until=end)})
    return f"no job {job!r} in this period; jobs: {', '.join(names) or 'none'}"


def _print_table(reports: "Sequence[JobReport]", rows: list[dict[str, Any]], group_by: tuple[GroupBy, ...]) -> None:
    from gpuenergyd.report.terminal.tables import groups_table, job_table, jobs_table  # noqa: PLC0415  Rich, only tables need it

    if not rows:
        is_of_gpus = WITHOUT_JOBS.issuperset(group_by)
        people_console().print(_NO_MEASUREMENTS if is_of_gpus else "no jobs in this period")
    elif group_by == (GroupBy.TRAINING,):
        from gpuenergyd.report.terminal.trainings import trainings_table  # noqa: PLC0415  as above

        people_console().print(trainings_table(rows), crop=False)
    elif group_by != (GroupBy.JOB,):
        people_console().print(groups_table(rows, by=group_by), crop=False)
    else:
        people_console().print(job_table(reports[0]) if len(reports) == 1 else jobs_table(reports))


def write_text(path: Path, text: str) -> None:
    """Write text to a file named by the user, or raise UsageError if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def instant(text: str | None, *, now: datetime, option: str) -> datetime | None:
    """Return the instant that an option gives: ISO 8601 in local time, the start of a month, or an age before now.

    Raises:
        UsageError: the text is none of these, or out of range.
    """
    if text is None:
        return None
    if age := _AGE.fullmatch(text.strip()):
        try:
            return now - timedelta(seconds=int(age[1]) * _SECONDS[age[2]])
        except OverflowError:
            raise UsageError(f"{option} {text!r}: date out of range") from None
    if unclear := _AMBIGUOUS_AGE.fullmatch(text.strip()):
        number = int(unclear[1])
        raise UsageError(f"{option} {text!r}: minutes are {number}min, months {30 * number}d")
    try:
        return datetime.fromisoformat(f"{text}-01" if _MONTH.fullmatch(text) else text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise UsageError(
            f"{option} {text!r}: must be a date, a month such as 2026-10, a time such as 2026-11-21T08:00, or an age"
            " such as 30min, 24h or 7d"
        ) from None


def _check_span(begin: datetime | None, end: datetime | None, *, now: datetime) -> None:
    if begin is not None and begin > now:
        raise UsageError(f"--since {begin.isoformat()} is in the future")
    if begin is not None and end is not None and begin >= end:
        raise UsageError(f"--since {begin.isoformat()} is not before --until {end.isoformat()}")


def _default_database() -> tuple[str, float]:
    """Return the URL of the daemon's history, and its PUE."""
    from gpuenergyd.cli.daemon_files import find_database  # noqa: PLC0415  only the default needs it

    found = find_database()
    path = found.url.removeprefix("sqlite:///")
    if "://" not in path and not os.access(path, os.F_OK):
        raise StoreError(f"no history at {path}, {found.origin}; --database reads another one")
    return found.url, found.pue
