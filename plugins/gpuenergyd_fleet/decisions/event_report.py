"""The report of a grid event: the reduction asked for and delivered, how fast, the rebound, and the work lost.

All figures come from samples of the whole fleet, one per cycle of the coordinator. Instants are seconds since 1970 UTC.
A sample that lacks the power of a host is treated as missing, never as zero.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gpuenergyd_fleet.decisions.grid_event import GridEvent

BEFORE_S = 300.0
"""Time before an event over which its baseline load and speed are averaged."""
AFTER_S = 600.0
"""Time after an event in which the rebound is measured."""
TOLERANCE_RATIO = 0.02
"""Measured power up to this ratio above the limit is treated as within it."""
_REBOUND_S = 10.0
"""Averaging time of the power whose highest value is the rebound."""
_MOST_GAP_S = 5.0
"""Longest time that one sample stands for."""


@dataclass(frozen=True, slots=True)
class FleetSample:
    """The fleet's power and speed at one instant; None if unknown."""

    at_s: float
    limit_w: float
    measured_w: float | None
    speed: float | None = None
    """Total speed of all jobs, in units of one GPU at full speed."""
    num_hosts: int = 0
    num_silent: int = 0


@dataclass(frozen=True, slots=True)
class EventReport:
    """What a grid event asked for and what was delivered; None if unknown."""

    event_id: str
    start_s: float
    end_s: float
    value: float
    unit: str
    is_cancelled: bool
    baseline_w: float | None
    """Mean load in the five minutes before the event."""
    limit_w: float | None
    """The highest load that the event permitted."""
    asked_reduction_w: float | None
    delivered_reduction_w: float | None
    """The load before the event, minus the mean load from reaching the limit until the end."""
    mean_w: float | None
    reached_s: float | None
    """Time from the start until the load first reached the limit, with 2 % tolerance; None if it never did."""
    over_limit_s: float | None
    """Time above the limit, with 2 % tolerance, after it was reached."""
    highest_w: float | None
    """Highest load after the limit was reached."""
    rebound_w: float | None
    """How much the highest 10 s mean in the ten minutes after the event exceeded the load before it."""
    saved_energy_kwh: float | None
    """Energy saved during the event against the load before it, ignoring the energy to make up for lost work later."""
    lost_work_gpu_h: float | None
    """Work not done compared with the speed before the event, in GPU hours at full speed."""
    lost_work_ratio: float | None
    """Lost work relative to the work that would have been done."""
    num_hosts: int
    num_silent_hosts: int
    """Largest number of hosts out of contact at one time."""
    missing_s: float
    """Time within the event for which some host's power is unknown."""


def event_report(event: GridEvent, samples: Sequence[FleetSample], budget_w: float) -> EventReport:
    """Return the report of an event from samples around it, in order of time.

    Args:
        event: the event; its own baseline, if given, replaces the one measured from samples.
        samples: from five minutes before until ten minutes after the event.
        budget_w: the fleet's budget, to which a percentage refers if no load was measured.
    """
    before = [sample for sample in samples if event.start_s - BEFORE_S <= sample.at_s < event.start_s]
    during = [sample for sample in samples if event.is_active(sample.at_s)]
    after = [sample for sample in samples if event.end_s <= sample.at_s < event.end_s + AFTER_S]
    baseline_w = event.baseline_w if event.baseline_w is not None else _mean([sample.measured_w for sample in before])
    limit_w = event.limit_w(baseline_w if baseline_w is not None else budget_w)
    reached = next((k for k, sample in enumerate(during) if _is_within(sample, limit_w)), None)
    held = [] if reached is None else during[reached:]
    mean_w = _mean([sample.measured_w for sample in held])
    spans = _spans(during, event.end_s)
    known = [(sample, span_s) for sample, span_s in zip(during, spans, strict=True) if sample.measured_w is not None]
    over_s = sum(
        s
        for sample, s in zip(held, spans[len(spans) - len(held) :], strict=True)
        if not _is_within(sample, limit_w, if_unknown=True)
    )
    speed_before = _mean([sample.speed for sample in before])
    lost_s = _lost_s(during, spans, speed_before)
    full_s = None if speed_before is None else speed_before * sum(spans)
    rebound_w = _rebound_w(after, baseline_w)
    has_load = baseline_w is not None and known
    return EventReport(
        event_id=event.event_id,
        start_s=event.start_s,
        end_s=event.end_s,
        value=event.value,
        unit=event.unit,
        is_cancelled=event.is_cancelled,
        baseline_w=baseline_w,
        limit_w=limit_w,
        asked_reduction_w=None if baseline_w is None else max(0.0, baseline_w - limit_w),
        delivered_reduction_w=None if baseline_w is None or mean_w is None else baseline_w - mean_w,
        mean_w=mean_w,
        reached_s=None if reached is None else max(0.0, during[reached].at_s - event.start_s),
        over_limit_s=over_s if held else None,
        highest_w=max((sample.measured_w for sample in held if sample.measured_w is not None), default=None),
        rebound_w=rebound_w,
        saved_energy_kwh=sum((baseline_w - (sample.measured_w or 0.0)) * s for sample, s in known) / 3.6e6
        if has_load and baseline_w is not None
        else None,
        lost_work_gpu_h=None if lost_s is None else lost_s / 3600,
        lost_work_ratio=None if lost_s is None or not full_s else lost_s / full_s,
        num_hosts=max((sample.num_hosts for sample in during), default=0),
        num_silent_hosts=max((sample.num_silent for sample in during), default=0),
        missing_s=max(0.0, event.end_s - event.start_s - sum(span_s for _, span_s in known)),
    )


def _is_within(own: FleetSample, limit_w: float, *, if_unknown: bool = False) -> bool:
    return if_unknown if own.measured_w is None else own.measured_w <= limit_w * (1 + TOLERANCE_RATIO)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _spans(samples: Sequence[FleetSample], end_s: float) -> list[float]:
    """Return the time that each sample stands for: until the next one, with an upper limit."""
    ends_s = [*(sample.at_s for sample in samples[1:]), end_s]
    return [min(_MOST_GAP_S, next_s - sample.at_s) for sample, next_s in zip(samples, ends_s, strict=False)]


def _lost_s(during: Sequence[FleetSample], spans: Sequence[float], speed_before: float | None) -> float | None:
    known = [(sample.speed, span_s) for sample, span_s in zip(during, spans, strict=True) if sample.speed is not None]
    if speed_before is None or not known:
        return None
    return sum((speed_before - speed) * span_s for speed, span_s in known)


def _rebound_w(after: Sequence[FleetSample], baseline_w: float | None) -> float | None:
    """Return how much the highest 10 s mean exceeds the load before the event; None if nothing was measured."""
    known = [(sample.at_s, sample.measured_w) for sample in after if sample.measured_w is not None]
    if baseline_w is None or not known or known[-1][0] - known[0][0] < _REBOUND_S:
        return None
    highest_w, first = -math.inf, 0
    for k, (at_s, _) in enumerate(known):
        while at_s - known[first][0] >= _REBOUND_S:
            first += 1
        if at_s - known[0][0] >= _REBOUND_S:
            part = known[first : k + 1]
            highest_w = max(highest_w, math.fsum(w for _, w in part) / len(part))
    return max(0.0, highest_w - baseline_w)
