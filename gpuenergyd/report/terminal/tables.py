"""Jobs and groups as tables in a terminal."""

from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpuenergyd.core.job.result_text import NOT_SIGNIFICANT, saving_text, slowdown_text
from gpuenergyd.count_text import count_text
from gpuenergyd.report.formatting import (
    MISSING,
    cost_text,
    energy_text,
    estimate,
    fit_error_text,
    grams_text,
    pricing_text,
    ratio_text,
    time_text,
)
from gpuenergyd.report.headline import evidence, headline, is_of_modules, time_cost
from gpuenergyd.report.job import JobReport, PlanInForce
from gpuenergyd.report.plugin_groups import GroupTable
from gpuenergyd.report.totals import not_counted_text, saved_total
from gpuenergyd.store import JobSummary


def jobs_table(reports: Sequence[JobReport]) -> RenderableType:
    """Return one row per job with its baseline and tuned values."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("job", overflow="fold")
    for title in ("iterations", "time", "energy", "saving", "speed"):
        table.add_column(title, justify="right")
    for report in reports:
        job = report.summary
        name = Text(job.replica_name)
        name.append(f"\n{job.started_at:%Y-%m-%d %H:%M} {job.policy}", style="dim")
        iterations = (
            f"{job.num_baseline_iterations} baseline\n{job.num_tuned_iterations} tuned\n{job.num_iterations} in all"
        )
        table.add_row(
            name,
            iterations,
            f"{time_text(_at_full_speed(report.adjusted_baseline_time_s, job.baseline_time_s))}\n"
            f"{time_text(job.iteration_time_s)}",
            f"{energy_text(_at_full_speed(report.adjusted_baseline_energy_j, job.baseline_energy_j))}\n"
            f"{energy_text(job.energy_per_iteration_j)}",
            _saving_text(job),
            f"\n{slowdown_text(job.slowdown_ratio)}",
        )
    notes = [ADJUSTED_NOTE] if any(report.adjusted_baseline_time_s is not None for report in reports) else []
    simulated = sum(report.summary.is_simulated for report in reports)
    if simulated:
        which = "All" if simulated == len(reports) else f"{simulated} of {len(reports)}"
        notes.append(f"{which} of these jobs ran on simulated GPUs." if simulated > 1 else SIMULATED_NOTE)
    notes += [
        f"{each.summary.replica_name}: {reason}" for each in reports if (reason := no_saving_reason(each.summary))
    ]
    notes += [f"{each.summary.replica_name}, with more slowdown: {each.slowdown_advice}" for each in reports
              if each.slowdown_advice]  # fmt: skip
    if len(reports) > 1 and (total := saved_total(reports).text()):
        notes.insert(0, total)
    num_partial = sum(report.is_partial for report in reports)
    if num_partial:
        notes.append(
            f"{num_partial} of {count_text(len(reports), 'job')} are only partly within the time range. {_PARTIAL_NOTE}"
        )
    return Group(table, *(Text(note) for note in notes))


ADJUSTED_NOTE = (
    "Times and energies of the baseline are those of full speed beside the tuned iterations, adjusted for drift."
)


def _at_full_speed(adjusted: float | None, baseline: float | None) -> float | None:
    return baseline if adjusted is None else adjusted


def no_saving_reason(job: JobSummary) -> str | None:
    """Return why an ended job saved nothing; None if it saved energy, still runs, or its outcome is unknown."""
    return job.outcome_reason if job.outcome != "saved" else None


def _saving_text(job: JobSummary) -> Text:
    """Return the measured saving above its 95 % interval, or the predicted saving, marked as such."""
    if job.predicted_saving_ratio is not None:
        ratio = job.predicted_saving_ratio
        return Text(f"{ratio_text(ratio) if ratio else 'nothing to save'}\npredicted")
    if job.saving_ratio is None:
        return Text(f"\n{MISSING}")
    text = Text(ratio_text(job.saving_ratio) if job.is_saving_significant else _NO_CLAIM)
    if job.saving_interval is not None:
        low, high = (100 * end for end in job.saving_interval)
        text.append(f"\n{low:+.1f} to {high:+.1f} %", style="dim")
    return text


_NO_CLAIM = "not significant"
SIMULATED_NOTE = (
    "Simulated GPUs: clocks, power, energy and stage times come from a device model; the training was real."
)
_PARTIAL_NOTE = "Values cover that part only; the baseline is that of the whole job."


def job_table(report: JobReport) -> RenderableType:
    job = report.summary
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("")
    for name in ("baseline", "adjusted", "tuned", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(
        "iteration time",
        time_text(job.baseline_time_s),
        time_text(report.adjusted_baseline_time_s),
        time_text(job.iteration_time_s),
        slowdown_text(job.slowdown_ratio) if (job.slowdown_ratio or 0.0) < 0.0 else ratio_text(job.slowdown_ratio),
    )
    change = MISSING
    if job.saving_ratio is not None:
        change = ratio_text(-job.saving_ratio) if job.is_saving_significant else _NO_CLAIM
    table.add_row(
        "energy per iteration",
        energy_text(job.baseline_energy_j),
        energy_text(report.adjusted_baseline_energy_j),
        energy_text(job.energy_per_iteration_j),
        change,
    )
    table.add_row(
        "iterations compared",
        "",
        _count(job.num_compared_baseline_iterations),
        _count(job.num_compared_tuned_iterations),
    )
    if report.has_shown_prediction:
        table.add_row("predicted by the last plan (fit)", "", "", energy_text(job.predicted_energy_j))
    if report.has_shown_prediction and job.lower_bound_j is not None:
        table.add_row("lower bound of the last plan (fit)", "", "", energy_text(job.lower_bound_j))
    title = (
        f"{job.replica_name}: {job.schedule_name or MISSING}, {count_text(job.num_ranks, 'GPU')},"
        f" {count_text(job.num_microbatches, 'microbatch')},"
        f" policy {job.policy}, {count_text(job.num_iterations, 'iteration')}"
    )
    return Group(
        Text(title, style="bold"), table, *(Text(line) for line in (*_result_lines(report), *_energy_lines(report)))
    )


def _count(number: int | None) -> str:
    return MISSING if number is None else str(number)


def _result_lines(report: JobReport) -> list[str]:
    """Return savings, the plan in force and the cost of trials."""
    job = report.summary
    reason = no_saving_reason(job)
    texts = (headline(report), evidence(report), f"no saving: {reason}" if reason else "")
    lines = [text for text in texts if text]
    plan = report.plan_in_force
    if plan is not None and plan.num_iterations < job.num_tuned_iterations - 1:
        lines.append(
            f"plan in force ({plan.plan_id}, {count_text(plan.num_iterations, 'iteration')}):"
            f" {time_text(plan.iteration_time_s)},"
            f" {energy_text(plan.energy_j)}; {_plan_saving_text(plan)},"
            f" {slowdown_text(estimate(plan.slowdown))}"
        )
    if plan is not None and (below := fit_error_text(plan.energy_j, job.lower_bound_j)):
        lines.append(f"plan in force: {below}")
    if report.order_advice is not None:
        lines.append(f"order of instructions: {report.order_advice}")
    if report.slowdown_advice is not None:
        lines.append(f"with more slowdown: {report.slowdown_advice}")
    if cost := time_cost(job):
        lines.append(f"cost so far: {cost}")
    return [*lines, *report.cost_lines]


def _plan_saving_text(plan: PlanInForce) -> str:
    """Return the saving under one plan, without an amount if it is not significant."""
    if plan.saving is None or plan.saving.is_significant:
        return saving_text(estimate(plan.saving))
    return NOT_SIGNIFICANT


def _energy_lines(report: JobReport) -> list[str]:
    """Return carbon, total energy and cost, and notes on what the values cover."""
    is_significant = not report.is_saving_left_out
    lines = list(report.carbon.lines(is_significant=is_significant)) if report.carbon is not None else []
    used = report.energy_use
    if used.energy_j is not None or used.estimated_j is not None:
        estimated = f", {energy_text(used.estimated_j)} estimated" if used.estimated_j is not None else ""
        missing = f"; no readings for {time_text(used.missing_s)}" if used.missing_s else ""
        whose = "energy of modules (GPU, processor, memory)" if is_of_modules(report.summary) else "GPU energy"
        lines.append(f"total {whose}: {energy_text(used.energy_j)} measured{estimated}{missing}")
    if report.tokens_per_j is not None:
        lines.append(f"tokens: {report.tokens_per_j:.4g} per joule")
    if report.estimate_note:
        lines.append(report.estimate_note)
    if report.cost is not None:
        pue = f" (PUE {report.rates.pue:g})" if report.rates.pue != 1.0 else ""
        lines.append(f"cost: {cost_text(report.cost, report.rates.currency)}{pue}")
    if report.is_partial:
        lines.append(f"The job is only partly within the time range. {_PARTIAL_NOTE}")
    if report.summary.is_simulated:
        lines.append(SIMULATED_NOTE)
    return lines


_GROUP_COLUMNS: Sequence[tuple[str, str, Callable[[float | None], str]]] = (
    ("energy", "energy_j", energy_text),
    ("for jobs", "job_energy_j", energy_text),
    ("idle", "idle_energy_j", energy_text),
    ("estimated", "estimated_j", energy_text),
    ("missing", "missing_s", time_text),
    ("saved", "saved_energy_j", energy_text),
    ("host", "host_energy_j", energy_text),
    ("emissions", "carbon_g", grams_text),
    ("cost", "cost", cost_text),
)
_LONGEST_TAG = 40
_WIDE = 500
"""Width in which every table fits."""
_ONLY_WHERE_KNOWN = frozenset({"estimated_j", "missing_s", "saved_energy_j", "host_energy_j", "carbon_g", "cost"})


def groups_table(groups: Sequence[Mapping[str, Any]], *, by: Sequence[str]) -> RenderableType:
    """Return one row per group by one or two keys: measured energy of jobs and idle time, estimates, missing time.

    Names and UUIDs of GPUs are never wrapped, so that they can be copied even if the table is wider than the terminal;
    only values of tags may be wrapped.
    """
    table = Table(box=box.SIMPLE, pad_edge=False)
    for key in by:
        is_tag = key == "tag"
        table.add_column(key, overflow="fold", no_wrap=not is_tag, max_width=_LONGEST_TAG if is_tag else None)
    labels = by if len(by) > 1 else ("group",)
    shown = [
        column
        for column in _GROUP_COLUMNS
        if column[1] not in _ONLY_WHERE_KNOWN or any(row[column[1]] for row in groups)
    ]
    for title in ("jobs", *(column_title(title, groups) for title, _, _ in shown)):
        table.add_column(title, justify="right", no_wrap=True)
    for row in groups:
        table.add_row(
            *(row[label] for label in labels), str(row["num_jobs"]), *(text(row[name]) for _, name, text in shown)
        )
    table.width = full_width(table)
    left_out = not_counted_text(sum(row["num_not_significant"] for row in groups))
    notes = (f"saved: {left_out}" if left_out else "", pricing_text(groups))
    return Group(table, *(Text(note) for note in notes if note))


def plugin_table(found: GroupTable) -> RenderableType:
    """Return the rows of a plugin and its sentences."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in found.columns:
        table.add_column(column.heading, justify="right" if column.is_number else "left", no_wrap=True)
    for row in found.rows:
        table.add_row(*(Text(column.text(row[column.name])) for column in found.columns))
    table.width = full_width(table)
    return Group(table, *(Text(line) for line in found.lines))


def column_title(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the title of a column; for costs with the name of their currency, if known."""
    currency = next((row["currency"] for row in rows if row.get("currency")), None)
    return f"{title} ({currency})" if title == "cost" and currency else title


def full_width(table: Table) -> int:
    """Return the width in which no cell of a table is truncated."""
    return Console(width=_WIDE, file=StringIO()).measure(table).maximum
