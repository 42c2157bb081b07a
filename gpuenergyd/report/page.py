"""The HTML page: one self-contained file, light and dark, readable on a phone, that asks nothing of any network."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from gpuenergyd import __version__
from gpuenergyd.core.carbon.intensity import IntensitySample, SampleStatus
from gpuenergyd.report import formatting as figures
from gpuenergyd.report.charts.carbon_intensity import IntensityStep, OwedStep, intensity_svg
from gpuenergyd.report.charts.colours import ClockScale
from gpuenergyd.report.charts.daily_energy import days_svg
from gpuenergyd.report.charts.iterations import series_svg
from gpuenergyd.report.charts.power import power_svg
from gpuenergyd.report.charts.time_energy import plane_svg
from gpuenergyd.report.charts.timeline import clock_scale, timelines_svg
from gpuenergyd.report.groups import EnergyQuery, groups_by_day
from gpuenergyd.report.job import JobReport, before_and_after, plan_in_force
from gpuenergyd.store import History

_SHORT_JOB_S = 7200.0
_BELIEF = {status: rank for rank, status in enumerate(SampleStatus)}


@dataclass(frozen=True, slots=True)
class JobSection:
    """One job's part of the page, pictures drawn."""

    report: JobReport
    plan_reason: str | None
    timelines: Markup
    scale: ClockScale | None
    series: Markup
    plane: Markup
    has_frontier: bool
    power: Markup
    intensity: Markup


def report_page(history: History, reports: Sequence[JobReport], *, made_at: datetime, note: str = "") -> str:
    """Return the page; `note` is a sentence of the caller's own for its head."""
    return _rendered("report.html.j2", history, reports, made_at=made_at, note=note)


def live_page(
    history: History | None, reports: Sequence[JobReport], *, made_at: datetime, nonce: str, note: str = ""
) -> str:
    """Return the page with a live part in front; its script carries `nonce` and asks for `status.json` beside it."""
    return _rendered("live.html.j2", history, reports, made_at=made_at, note=note, nonce=nonce)


def _rendered(
    template: str,
    history: History | None,
    reports: Sequence[JobReport],
    *,
    made_at: datetime,
    note: str,
    nonce: str = "",
) -> str:
    environment = Environment(
        loader=PackageLoader("gpuenergyd.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "interval": figures.interval_text,
        "time": figures.time_text,
        "energy": figures.energy_text,
        "difference": figures.difference_text,
        "ratio": figures.ratio_text,
        "clock": figures.clock_text,
        "cost": figures.cost_text,
        "instant": lambda at: at.astimezone(made_at.tzinfo).strftime("%Y-%m-%d %H:%M:%S"),
    }
    return environment.get_template(template).render(
        days=_days(history, reports, made_at),
        sections=[_section(history, report) for report in reports] if history is not None else [],
        made_at=made_at,
        note=note,
        version=__version__,
        missing=figures.MISSING,
        nonce=nonce,
    )


def _days(history: History | None, reports: Sequence[JobReport], made_at: datetime) -> Markup:
    """Return the energy per day since the first of the jobs began, all GPUs, idle time included."""
    if history is None or not reports:
        return Markup()
    first = min(report.summary.started_at for report in reports).astimezone(made_at.tzinfo)
    query = EnergyQuery(history, since=first.replace(hour=0, minute=0, second=0, microsecond=0))
    return _drawn(days_svg(groups_by_day(query, zone=made_at.tzinfo)))


def _section(history: History, report: JobReport) -> JobSection:
    job = report.summary
    iterations = before_and_after(history, report)
    plan = plan_in_force(history, report)
    frontier = next((row.frontier for row in reversed(history.targets(job.job_id)) if row.frontier), ())
    allowed_s = None if job.baseline_time_s is None else job.baseline_time_s * (1.0 + job.max_slowdown_ratio)
    # Seconds show each iteration, but are not kept for ever.
    seconds, minutes = (
        history.rollups(bucket_s=bucket_s, since=job.started_at, until=job.ended_at, job_id=job.job_id)
        if bucket_s > 1 or job.duration_s < _SHORT_JOB_S
        else ()
        for bucket_s in (1, 60)
    )
    return JobSection(
        report=report,
        plan_reason=plan.plan.reason if plan else None,
        timelines=_drawn(timelines_svg(iterations)),
        scale=clock_scale(iterations),
        series=_drawn(series_svg(report.iterations)),
        plane=_drawn(plane_svg(report.iterations, plan, allowed_time_s=allowed_s, frontier=frontier)),
        has_frontier=len(frontier) > 1,
        intensity=_drawn(_intensity(history, report)),
        power=_drawn(power_svg(seconds or minutes, num_gpus=len(job.gpu_uuids), plans=history.plans(job.job_id))),
    )


def _intensity(history: History, report: JobReport) -> str:
    """Return the grid over a job's time with what was owed; nothing where no intensity of it is known."""
    job, carbon = report.summary, report.carbon
    if carbon is None:
        return ""
    best: dict[datetime, IntensitySample] = {}
    for row in history.intensities(since=job.started_at, until=job.ended_at):
        held = best.get(row.host.valid_from_at)
        if row.signal == carbon.signal and (held is None or _BELIEF[row.host.status] <= _BELIEF[held.status]):
            best[row.host.valid_from_at] = row.host
    return intensity_svg(
        [
            IntensityStep(
                sample.valid_from_at,
                sample.valid_to_at,
                sample.carbon_intensity_g_per_kwh,
                is_measured=sample.status is SampleStatus.MEASURED,
            )
            for _, sample in sorted(best.items())
        ],
        [OwedStep(row.decided_at, row.permitted_time_s) for row in carbon.targets],
        unit=f"g/kWh in zone {carbon.signal.zone}",
        full_speed_time_s=job.baseline_time_s,
        end_at=job.ended_at or max(best, default=job.started_at),
    )


def _drawn(svg: str) -> Markup:
    """Return a picture as part of the page."""
    return Markup(svg)  # noqa: S704  every text in a picture is escaped where it is drawn
