"""A job as a trace for Perfetto and chrome://tracing: instructions, bubbles, plans, clocks and power on one time line.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format). Times are
wall-clock times in microseconds since `baseTimeNanoseconds`. torch.profiler writes that field too, with the same value
within each quarter of a year (libkineto, ChromeTraceBaseTime), so that events of both can be in one file.
"""

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby, pairwise
from typing import Any
from zlib import crc32

from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.errors import UsageError
from gpuenergyd.report.plugin_formats import ReportedJobs, ReportFormat
from gpuenergyd.store import History, IterationRow, JobSummary, PlanRecord
from gpuenergyd.store.records import RankRecord, SampleRecord

_BASE_PERIOD_US = 7_889_238 * 10**6
_US_PER_S = 1e6
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_PLANS, _ITERATIONS, _EVENTS, _FIRST_STAGE = range(1, 5)
"""Thread numbers of the tracks; Perfetto would call 0 the main thread."""
_SHORTEST_BUBBLE_US = 1.0

_Event = dict[str, Any]


def trace_text(history: History, job: JobSummary) -> str:
    """Return a job as a JSON trace, from data still stored singly: iterations, some timelines, raw samples."""
    base_us = _us(job.started_at) // _BASE_PERIOD_US * _BASE_PERIOD_US
    trace = _Trace(history, job, base_us)
    slices = [*trace.plans(), *trace.iterations()]
    _end_before_the_next(slices)
    events = [*trace.names(), *slices, *trace.control_events(), *trace.readings()]
    document = {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_us * 1000,
        "otherData": {"job_id": job.job_id, "job_name": job.job_name, "is_simulated": job.is_simulated},
        "traceEvents": events,
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


class _Trace:
    """The events of one job."""

    def __init__(self, history: History, job: JobSummary, base_us: int) -> None:
        self._history, self._job, self._base_us = history, job, base_us
        self._process = crc32(job.job_id.encode()) >> 1  # differs from pids of the host, whose traces may be shown too
        self._ranks = sorted(history.ranks([job.job_id]), key=lambda rank: (rank.pp_rank, rank.stage_rank))
        self._plans = history.plans(job.job_id)
        self._iterations = history.iterations(job.job_id)

    def names(self) -> Iterator[_Event]:
        """Yield the names of the process and the tracks, in the order of display."""
        yield self._name("process_name", 0, f"gpuenergyd: {self._job.job_name}")
        tracks = {_PLANS: "plan in force", _ITERATIONS: "iterations", _EVENTS: "control events"}
        for pp_rank in sorted({rank.pp_rank for rank in self._ranks}):
            tracks[_FIRST_STAGE + pp_rank] = f"stage {pp_rank}: {_gpus_text(self._ranks, pp_rank)}"
        for number, text in tracks.items():
            yield self._name("thread_name", number, text)

    def plans(self) -> Iterator[_Event]:
        """Yield one slice per plan, over the consecutive iterations that ran under it."""
        for record, under_it in groupby(self._iterations, key=lambda row: self._plan_at(row.iteration_index)):
            rows = list(under_it)
            if record is None:
                continue
            plan = record.plan
            figures = {
                "purpose": plan.purpose.value,
                "reason": plan.reason,
                "predicted energy (J)": plan.predicted.energy_j if plan.predicted else None,
                "predicted time (s)": plan.predicted.iteration_time_s if plan.predicted else None,
            }
            begin, last = rows[0].started_at, rows[-1]
            duration_s = (last.started_at - begin).total_seconds() + last.iteration_time_s
            yield self._slice(_PLANS, plan.plan_id, begin, duration_s, figures)

    def iterations(self) -> Iterator[_Event]:
        """Yield one slice per iteration, and the instructions and bubbles of iterations with a stored timeline."""
        with_spans = set(self._history.iterations_with_spans(self._job.job_id))
        for row in self._iterations:
            plan = self._plan_at(row.iteration_index)
            figures = {
                "plan": plan.plan.plan_id if plan else None,
                "energy (J)": row.energy_j,
                "estimated, at least (J)": row.energy_low_j,
                "estimated, at most (J)": row.energy_high_j,
            }
            name = f"iteration {row.iteration_index}"
            yield self._slice(_ITERATIONS, name, row.started_at, row.iteration_time_s, figures)
            if row.iteration_index in with_spans:
                yield from self._instructions(row, plan)

    def control_events(self) -> Iterator[_Event]:
        """Yield one instant event per entry of the audit log."""
        for event in self._history.control_events(self._job.job_id):
            figures = {"reason": event.reason, "by": event.actor, "before": event.before, "after": event.after}
            yield {**self._event("i", _EVENTS, event.action, event.at), "s": "t", "args": _known(figures)}

    def readings(self) -> Iterator[_Event]:
        """Yield power and SM clock of each GPU as counters; missing readings give no event."""
        for gpu_uuid in dict.fromkeys(rank.gpu_uuid for rank in self._ranks):
            for sample in self._history.samples(gpu_uuid, since=self._job.started_at, until=self._job.ended_at):
                yield from self._sample(sample)

    def _sample(self, sample: SampleRecord) -> Iterator[_Event]:
        for name, unit, value in (("power", "W", sample.power_w), ("SM clock", "MHz", sample.sm_clock_mhz)):
            if value is not None:
                yield {**self._event("C", 0, f"{name} of {sample.gpu_uuid}", sample.at), "args": {unit: value}}

    def _instructions(self, row: IterationRow, plan: PlanRecord | None) -> Iterator[_Event]:
        by_rank: dict[int, list[ObservedSpan]] = {}
        for span in sorted(self._history.spans(self._job.job_id, row.iteration_index), key=lambda span: span.start_s):
            by_rank.setdefault(span.pp_rank, []).append(span)
        for pp_rank, spans in by_rank.items():
            track, asked_mhz = _FIRST_STAGE + pp_rank, _asked_mhz(plan, pp_rank, len(spans))
            for span, clock_mhz in zip(spans, asked_mhz, strict=True):
                figures = {
                    "microbatch": span.microbatch_index,
                    "chunk": span.chunk_index,
                    "planned SM clock (MHz)": clock_mhz,
                    "mean SM clock read (MHz)": span.mean_sm_clock_mhz,
                }
                name = f"{span.kind.value}{span.microbatch_index}"
                begin = row.started_at + timedelta(seconds=span.start_s)
                yield self._slice(track, name, begin, span.end_s - span.start_s, figures)
            for before, after in pairwise(spans):
                gap_s = after.start_s - before.end_s
                if gap_s * _US_PER_S >= _SHORTEST_BUBBLE_US:
                    yield self._slice(track, "bubble", row.started_at + timedelta(seconds=before.end_s), gap_s, {})

    def _plan_at(self, iteration_index: int) -> PlanRecord | None:
        """Return the plan that ranks followed in an iteration, None before the first plan."""
        return next((plan for plan in reversed(self._plans) if plan.apply_at_iteration <= iteration_index), None)

    def _slice(self, track: int, name: str, begin: datetime, duration_s: float, figures: dict[str, Any]) -> _Event:
        duration_us = max(0.0, round(duration_s * _US_PER_S, 3))
        return {**self._event("X", track, name, begin), "dur": duration_us, "args": _known(figures)}

    def _event(self, phase: str, track: int, name: str, at: datetime) -> _Event:
        return {"ph": phase, "pid": self._process, "tid": track, "name": name, "ts": _us(at) - self._base_us}

    def _name(self, kind: str, track: int, text: str) -> _Event:
        return {"ph": "M", "pid": self._process, "tid": track, "name": kind, "args": {"name": text}}


def _end_before_the_next(slices: list[_Event]) -> None:
    """Shorten slices that overlap the next one in their track, due to rounding or a wall clock that was set back.

    Perfetto drops slices that overlap in a track without being nested.
    """
    slices.sort(key=lambda event: (event["tid"], event["ts"]))
    for event, following in pairwise(slices):
        if event["tid"] == following["tid"]:
            event["dur"] = min(event["dur"], following["ts"] - event["ts"])


def _asked_mhz(plan: PlanRecord | None, pp_rank: int, num_instructions: int) -> Sequence[int | None]:
    """Return the planned clock of each instruction of a rank; None if the plan sets none, or has another order."""
    own = next((rank for rank in plan.plan.ranks if rank.pp_rank == pp_rank), None) if plan is not None else None
    if own is None or len(own.sm_clocks_mhz) != num_instructions:
        return [None] * num_instructions
    return own.sm_clocks_mhz


def _gpus_text(ranks: Sequence[RankRecord], pp_rank: int) -> str:
    return ", ".join(dict.fromkeys(rank.gpu_uuid for rank in ranks if rank.pp_rank == pp_rank))


def _known(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the values that are known; missing values are left out, never 0."""
    return {name: value for name, value in figures.items() if value is not None}


def _us(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(microseconds=1)


def _trace_of(jobs: ReportedJobs) -> str:
    summaries = [report.summary for report in jobs.reports]
    if len(summaries) > 1:
        ids, name = ", ".join(summary.job_id for summary in summaries), summaries[0].job_name
        raise UsageError(f"--format trace is of one job, and {name!r} is the name of {len(summaries)}: {ids}")
    return trace_text(jobs.history, summaries[0])


TRACE = ReportFormat(_trace_of, is_of_one_training=True)
