"""The state of the power budget and of swings, for `GET /v1/power-budget` and the status."""

from dataclasses import asdict, replace

from gpuenergyd.daemon.settings import Settings
from gpuenergyd_power.messages import PowerBudgetState
from gpuenergyd_power.rules.budget import PowerBudget
from gpuenergyd_power.rules.control import PowerControl
from gpuenergyd_power.rules.swing_meter import WINDOW_S, SwingMeter
from gpuenergyd_power.shares import JobShares


def budget_state(
    settings: Settings, budget: PowerBudget | None, control: PowerControl, shares: JobShares, trouble: str | None
) -> PowerBudgetState:
    decision, backstop, has_budget = shares.decision, control.backstop, budget is not None
    return PowerBudgetState(
        power_budget_w=budget.budget_w if budget is not None else None,
        source=budget.source if budget is not None else None,
        reason=budget.reason if budget is not None else "",
        end_at=budget.end_at.isoformat(timespec="seconds")
        if budget is not None and budget.end_at is not None
        else None,
        measured_w=backstop.measured_w if has_budget else None,
        predicted_w=decision.predicted_w if decision is not None else None,
        least_w=decision.least_w if decision is not None else None,
        host_power_w=settings.carbon_host_power_w,
        excess_w=control.trim.excess_w,
        price_per_w=decision.price_per_w if decision is not None else None,
        policy=settings.power_target,
        division=decision.reason if decision is not None else "",
        is_cutting=backstop.is_cutting,
        num_cuts=backstop.num_cuts,
        over_s=backstop.over_s,
        jobs=shares.states(),
        trouble=trouble,
        mean_w=control.mean_w if has_budget else None,
        share_w=settings.power_budget_w,
        speed=shares.measured_speed(),
        curve=tuple(
            replace(point, power_w=point.power_w + max(0.0, control.trim.excess_w))
            for point in (decision.curve if decision is not None else ())
        ),
    )


def swing_fields(meter: SwingMeter) -> dict[str, float] | None:
    """Return how much the measured power of all GPUs has swung; None if unknown.

    `swing_rms_w` is the RMS of the power from 0.1 Hz to `highest_hz`, which is half the rate of readings or 20 Hz.
    """
    figures = meter.figures()
    if figures is None:
        return None
    band = {"window_s": WINDOW_S, "highest_hz": meter.highest_hz, "swing_rms_w": figures.band_rms_w}
    return band | asdict(figures)


def budget_text(budget: PowerBudget | None) -> str:
    """Return a budget for the log and the history."""
    if budget is None:
        return "no budget"
    until = "" if budget.end_at is None else f" until {budget.end_at:%Y-%m-%d %H:%M:%S} UTC"
    return f"{budget.budget_w:g} W{until}"
