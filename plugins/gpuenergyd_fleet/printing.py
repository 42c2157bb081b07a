"""Output of `gpuenergyd fleet`: the fleet's state, its events, and the report on an event."""

from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from gpuenergyd.count_text import count_text
from gpuenergyd_fleet.decisions.coordination import FleetHost, FleetRules
from gpuenergyd_fleet.decisions.event_report import EventReport
from gpuenergyd_fleet.decisions.grid_event import GridEvent

if TYPE_CHECKING:
    from gpuenergyd_fleet.store.store import FleetState

EVENT_ROW = "{event_id}  {start}  {end}  {value:g} {unit}  {state}  {reason}"


def fleet_object(state: "FleetState") -> dict[str, Any]:
    return {
        "budget_w": state.budget_w,
        "reason": state.reason,
        "hosts": [_host(host, state.now_s) for host in state.hosts],
        "events": [event_row(event) for event in state.events],
    }


def fleet_lines(state: "FleetState") -> Iterator[str]:
    if state.budget_w is None:
        yield "no fleet budget; set one with `gpuenergyd fleet set WATTS`"
    else:
        reason = f" ({state.reason})" if state.reason else ""
        held_w = sum(host.held.most_w(state.now_s, FleetRules().margin_s) for host in state.hosts)
        yield (
            f"fleet budget: {state.budget_w:g} W{reason}; {count_text(len(state.hosts), 'host')} may draw"
            f" {held_w:.0f} W now"
        )
    for known in state.hosts:
        host = _host(known, state.now_s)
        measured = "unknown" if host["measured_w"] is None else f"{host['measured_w']:.0f} W"
        lease = "no lease" if host["lease_w"] is None else f"lease {host['lease_w']:.0f} W for {host['lease_s']:.0f} s"
        contact = "" if host["in_contact"] else f"; out of contact for {host['silent_s']:.0f} s"
        yield f"{host['host']}: measured {measured}, {lease}, share {host['share_w']:.0f} W{contact}"
    for event in state.events:
        yield EVENT_ROW.format(**event_row(event)).rstrip()


def _host(own: FleetHost, now_s: float) -> dict[str, Any]:
    newest = own.held.newest
    lease = newest if newest is not None and newest.end_s > now_s else None
    silent_s = max(0.0, now_s - own.reported_s)
    return {
        "host": own.host,
        "share_w": own.held.share_w,
        "measured_w": own.measured_w,
        "speed": own.speed,
        "lease_w": None if lease is None else lease.power_w,
        "lease_s": None if lease is None else lease.end_s - now_s,
        "most_w": own.held.most_w(now_s, FleetRules().margin_s),
        "in_contact": silent_s <= FleetRules().silent_s,
        "silent_s": silent_s,
    }


def event_row(event: GridEvent) -> dict[str, Any]:
    """Return an event with its instants as text."""
    return {
        "event_id": event.event_id,
        "start": utc_text(event.start_s),
        "end": utc_text(event.end_s),
        "value": event.value,
        "unit": str(event.unit),
        "state": "cancelled" if event.is_cancelled else "open",
        "reason": event.reason,
        "source": event.source,
        "baseline_w": event.baseline_w,
    }


def report_row(report: EventReport) -> dict[str, Any]:
    """Return a report with its instants as text."""
    row = asdict(report)
    start_s, end_s = row.pop("start_s"), row.pop("end_s")
    event_id = row.pop("event_id")
    return {"event_id": event_id, "start": utc_text(start_s), "end": utc_text(end_s)} | row


def report_lines(report: EventReport) -> Iterator[str]:
    cancelled = ", cancelled" if report.is_cancelled else ""
    yield (
        f"{report.event_id}: at most {report.value:g} {report.unit} from {utc_text(report.start_s)}"
        f" until {utc_text(report.end_s)}{cancelled}"
    )
    yield f"asked: {_watts(report.asked_reduction_w)} less than {_watts(report.baseline_w)}"
    yield f"delivered: {_watts(report.delivered_reduction_w)} less, a mean of {_watts(report.mean_w)}"
    reached = "never reached" if report.reached_s is None else f"reached after {report.reached_s:.0f} s"
    over = "" if report.over_limit_s is None else f", then {report.over_limit_s:.0f} s above it"
    yield f"limit: {_watts(report.limit_w)}, {reached}{over}"
    yield f"rebound: {_watts(report.rebound_w)} above the load before"
    saved = "unknown" if report.saved_energy_kwh is None else f"{report.saved_energy_kwh:.3g} kWh"
    lost = "unknown" if report.lost_work_gpu_h is None else f"{report.lost_work_gpu_h:.3g} GPU hours"
    ratio = "" if report.lost_work_ratio is None else f" ({100 * report.lost_work_ratio:.1f} %)"
    yield f"energy saved: {saved}; work lost: {lost}{ratio}, which takes energy later"
    silent = f", {report.num_silent_hosts} of them out of contact" if report.num_silent_hosts else ""
    yield f"{count_text(report.num_hosts, 'host')}{silent}; {report.missing_s:.0f} s without measured power"


def utc_text(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, tz=UTC):%Y-%m-%dT%H:%M:%SZ}"


def _watts(power_w: float | None) -> str:
    return "unknown" if power_w is None else f"{power_w:.0f} W"
