"""The HTML page: one self-contained file without network requests, in light and dark mode, usable on a phone."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import pairwise

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from gpuenergyd import __version__
from gpuenergyd.core.carbon.intensity import IntensitySample, SampleStatus
from gpuenergyd.core.pipeline.power_swing import SwingFigure
from gpuenergyd.count_text import count_text
from gpuenergyd.report import formatting
from gpuenergyd.report.formatting import power_text
from gpuenergyd.report.group_keys import GroupBy
from gpuenergyd.report.groups import EnergyQuery, grouped
from gpuenergyd.report.headline import evidence, headline, time_cost
from gpuenergyd.report.job import JobReport, before_and_after, plan_in_force
from gpuenergyd.report.plugin_formats import ReportedJobs, ReportFormat
from gpuenergyd.report.plugin_groups import GroupTable
from gpuenergyd.report.timelines import ClockScale, clock_scale
from gpuenergyd.report.totals import saved_total
from gpuenergyd.store import History, PlanRecord
from gpuenergyd.store.records import RollupRecord
from gpuenergyd_formats.charts.axes import NARROW, WIDE, Frame
from gpuenergyd_formats.charts.carbon_intensity import IntensityStep, TargetStep, intensity_svg
from gpuenergyd_formats.charts.daily_energy import days_svg
from gpuenergyd_formats.charts.iterations import series_svg
from gpuenergyd_formats.charts.power import power_svg
from gpuenergyd_formats.charts.time_energy import plane_svg
from gpuenergyd_formats.charts.timeline import timelines_svg
from gpuenergyd_formats.tiles import Tile, tiles

_SHORT_JOB_S = 7200.0
_STATUS_ORDER = {status: rank for rank, status in enumerate(SampleStatus)}


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart, drawn for desktops and for phones; false if there is nothing to draw."""

    wide: Markup
    narrow: Markup

    def __bool__(self) -> bool:
        return bool(self.wide)

    def __html__(self) -> Markup:
        """Return both drawings; the style of the page shows the one that fits the window."""
        return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(self.wide, self.narrow)


_NO_CHART = Chart(Markup(), Markup())


@dataclass(frozen=True, slots=True)
class JobSection:
    """The section of one job, with its result in words and its charts."""

    report: JobReport
    headline: str
    evidence: str
    cost: str
    """Time that the daemon has cost the job's training, as text; empty if not measured."""
    tiles: Sequence[Tile]
    fit_error: str
    plan_reason: str | None
    timelines: Chart
    scale: ClockScale | None
    num_timelines: int
    series: Chart
    purposes: Collection[str]
    plane: Chart
    has_frontier: bool
    power: Chart
    has_baseline_power: bool
    swing: str
    """Size of the power swing, as text; empty if unknown."""
    intensity: Chart


def report_page(
    history: History,
    reports: Sequence[JobReport],
    *,
    made_at: datetime,
    note: str = "",
    tables: Sequence[GroupTable] = (),
) -> str:
    """Return the report page; `note` is shown below its title, and tables of plugins after the jobs."""
    return _rendered("report.html.j2", history, reports, made_at=made_at, note=note, tables=tables)


def _page_of(jobs: ReportedJobs) -> str:
    return report_page(jobs.history, jobs.reports, made_at=jobs.made_at, note=jobs.note, tables=jobs.tables())


HTML = ReportFormat(_page_of)


def live_page(
    history: History | None, reports: Sequence[JobReport], *, made_at: datetime, nonce: str, note: str = ""
) -> str:
    """Return the page with a live section first; its script has `nonce` and fetches `status.json`."""
    return _rendered("live.html.j2", history, reports, made_at=made_at, note=note, nonce=nonce)


def _rendered(
    template: str,
    history: History | None,
    reports: Sequence[JobReport],
    *,
    made_at: datetime,
    note: str,
    nonce: str = "",
    tables: Sequence[GroupTable] = (),
) -> str:
    environment = Environment(
        loader=PackageLoader("gpuenergyd_formats"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "time": formatting.time_text,
        "energy": formatting.energy_text,
        "difference": formatting.difference_text,
        "clock": formatting.clock_text,
        "cost_in": formatting.cost_text,
        "count_of": count_text,
        "instant": lambda at: at.astimezone(made_at.tzinfo).strftime("%Y-%m-%d %H:%M:%S"),
    }
    return environment.get_template(template).render(
        days=_days(history, reports, made_at),
        sections=[_section(history, report) for report in reports] if history is not None else [],
        total=saved_total(reports).text(),
        tables=tables,
        made_at=made_at,
        note=note,
        version=__version__,
        missing=formatting.MISSING,
        nonce=nonce,
    )


def _days(history: History | None, reports: Sequence[JobReport], made_at: datetime) -> Chart:
    """Return the chart of the energy of all GPUs per day, from the start of the first job."""
    if history is None or not reports:
        return _NO_CHART
    first = min(report.summary.started_at for report in reports).astimezone(made_at.tzinfo)
    query = EnergyQuery(history, since=first.replace(hour=0, minute=0, second=0, microsecond=0))
    return _chart(partial(days_svg, grouped(query, reports, [GroupBy.DAY], zone=made_at.tzinfo)))


def _section(history: History, report: JobReport) -> JobSection:
    job = report.summary
    iterations = before_and_after(history, report)
    plan = plan_in_force(history, report)
    predicted = plan if report.has_shown_prediction else None
    frontier = next((row.frontier for row in reversed(history.targets(job.job_id)) if row.frontier), ())
    allowed_s = None if job.baseline_time_s is None else job.baseline_time_s * (1.0 + job.max_slowdown_ratio)
    baseline_w = job.baseline_energy_j / job.baseline_time_s if job.baseline_energy_j and job.baseline_time_s else None
    # Data by second shows single iterations but expires earlier than data by minute.
    seconds, minutes = (
        history.rollups(bucket_s=bucket_s, since=job.started_at, until=job.ended_at, job_id=job.job_id)
        if bucket_s > 1 or job.duration_s < _SHORT_JOB_S
        else ()
        for bucket_s in (1, 60)
    )
    power = partial(
        power_svg,
        seconds or minutes,
        num_gpus=len(job.gpu_uuids),
        plans=history.plans(job.job_id),
        baseline_power_w=baseline_w,
    )
    series = partial(
        series_svg, report.iterations, baseline_time_s=job.baseline_time_s, baseline_energy_j=job.baseline_energy_j
    )
    return JobSection(
        report=report,
        headline=headline(report),
        evidence=evidence(report),
        cost=time_cost(report.summary),
        tiles=tiles(report),
        fit_error=_fit_error(report),
        plan_reason=plan.plan.reason if plan else None,
        timelines=_chart(partial(timelines_svg, iterations)),
        scale=clock_scale(iterations),
        num_timelines=len(iterations),
        series=_chart(series),
        purposes={row.plan_purpose or "" if row.is_regular else "disturbed" for row in report.iterations},
        plane=_chart(partial(plane_svg, report.iterations, predicted, allowed_time_s=allowed_s, frontier=frontier)),
        has_frontier=len(frontier) > 1,
        intensity=_intensity(history, report),
        power=_chart(power),
        has_baseline_power=baseline_w is not None,
        swing=swing_text(plan, seconds, num_gpus=len(job.gpu_uuids)),
    )


def _fit_error(report: JobReport) -> str:
    plan = report.plan_in_force
    return "" if plan is None else formatting.fit_error_text(plan.energy_j, report.summary.lower_bound_j)


def _intensity(history: History, report: JobReport) -> Chart:
    """Return the chart of carbon intensity and targets during a job; empty if no intensity is known."""
    job, carbon = report.summary, report.carbon
    if carbon is None:
        return _NO_CHART
    best: dict[datetime, IntensitySample] = {}
    for row in history.intensities(since=job.started_at, until=job.ended_at):
        other = best.get(row.host.valid_from_at)
        if row.signal == carbon.signal and (
            other is None or _STATUS_ORDER[row.host.status] <= _STATUS_ORDER[other.status]
        ):
            best[row.host.valid_from_at] = row.host
    draw = partial(
        intensity_svg,
        [
            IntensityStep(
                sample.valid_from_at,
                sample.valid_to_at,
                sample.carbon_intensity_g_per_kwh,
                is_measured=sample.status is SampleStatus.MEASURED,
            )
            for _, sample in sorted(best.items())
        ],
        [TargetStep(row.decided_at, row.permitted_time_s) for row in carbon.targets],
        unit=f"carbon intensity in g/kWh, zone {carbon.signal.zone}",
        full_speed_time_s=job.baseline_time_s,
        end_at=job.ended_at or max(best, default=job.started_at),
    )
    return _chart(draw)


def _chart(draw: Callable[..., str]) -> Chart:
    """Return a chart drawn in both widths, as safe HTML; element ids differ between them."""

    def drawn(frame: Frame) -> str:
        return draw(frame=frame)

    narrow = drawn(NARROW).replace(' id="', ' id="narrow-').replace("url(#", "url(#narrow-")
    # All text in a chart is escaped where it is drawn.
    return Chart(Markup(drawn(WIDE)), Markup(narrow))  # noqa: S704


_SECOND_S = 1.0


def swing_text(plan: PlanRecord | None, rollups: Sequence[RollupRecord], *, num_gpus: int) -> str:
    """Return the power swing under the plan in force; empty if it is neither predicted nor measured.

    Args:
        plan: the plan in force.
        rollups: stored power of each GPU by second; other bucket lengths are ignored.
        num_gpus: number of GPUs of the job; seconds in which one of them was not measured are left out.
    """
    return " ".join(filter(None, (_predicted(plan), _measured(plan, rollups, num_gpus))))


def _predicted(plan: PlanRecord | None) -> str:
    if plan is None:
        return ""
    peak_w, trough_w = plan.plan.figure(SwingFigure.PEAK), plan.plan.figure(SwingFigure.TROUGH)
    rms_w = plan.plan.figure(SwingFigure.BAND_RMS)
    if peak_w is None or trough_w is None or rms_w is None:
        return ""
    return (
        f"Predicted for an iteration of the plan in force: {power_text(trough_w)} to {power_text(peak_w)},"
        f" {power_text(rms_w)} RMS from 0.1 to 20 Hz."
    )


def _measured(plan: PlanRecord | None, rollups: Sequence[RollupRecord], num_gpus: int) -> str:
    by_second: dict[float, list[float]] = defaultdict(list)
    for rollup in rollups:
        is_under_plan = plan is not None and rollup.started_at >= plan.issued_at
        if is_under_plan and rollup.bucket_s == _SECOND_S and rollup.mean_power_w is not None:
            by_second[rollup.started_at.timestamp()].append(rollup.mean_power_w)
    means_w = {at: sum(powers_w) for at, powers_w in sorted(by_second.items()) if len(powers_w) == num_gpus}
    ramps_w = [abs(means_w[b] - means_w[a]) for a, b in pairwise(means_w) if b - a <= 1.5 * _SECOND_S]
    if not ramps_w:
        return ""
    return (
        f"Measured, means of seconds: {power_text(min(means_w.values()))} to {power_text(max(means_w.values()))},"
        f" at most {power_text(max(ramps_w))} from one second to the next."
    )
