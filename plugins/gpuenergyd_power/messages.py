"""Messages of `gpuenergyd budget`: the power budget of a host is shown, set and cleared.

HTTP/1.1 with JSON bodies on the daemon's Unix socket:

    GET /v1/power-budget                        -> PowerBudgetState
    PUT /v1/power-budget    PowerBudgetRequest  -> PowerBudgetState   (administrators)
"""

from dataclasses import dataclass

from gpuenergyd.core.policy_api.power import PowerPoint


@dataclass(frozen=True, slots=True)
class FallbackBudget:
    """A budget for some of the time after a lifetime is over, if no other request has come until then.

    It may only lower the budget of the settings. Begin and end are seconds from the request on.
    """

    power_budget_w: float
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class PowerBudgetRequest:
    """A budget in watts for the whole host; without one, the last request is withdrawn.

    The budget holds until the next request, over restarts of the daemon; with a lifetime, for so many seconds, and
    after that the budget of the settings holds again, lowered by `fallback`.
    """

    power_budget_w: float | None
    lifetime_s: float | None = None
    reason: str = ""
    fallback: tuple[FallbackBudget, ...] = ()


@dataclass(frozen=True, slots=True)
class PowerShareState:
    """What one job gets of the budget; None is unknown, or not set."""

    job_id: str
    job_name: str
    predicted_w: float
    iteration_time_s: float | None
    limit_w: float | None
    speed_ratio: float | None
    speed_per_w: float | None


@dataclass(frozen=True, slots=True)
class PowerBudgetState:
    """The power budget of a host, what it draws, and how it is divided; None is unknown, or not set.

    `price_per_w` is the weighted speed, in GPUs at full speed, that one more watt would add. `num_cuts` counts how
    often measured power had to be lowered at once, `over_s` the seconds above the budget. For a fleet: `mean_w` is the
    mean power of the last second, `share_w` the budget of the settings, `speed` the measured speed of the jobs in GPUs
    at full speed, `curve` what more or less power would do.
    """

    power_budget_w: float | None
    source: str | None
    reason: str
    end_at: str | None
    measured_w: float | None
    predicted_w: float | None
    least_w: float | None
    host_power_w: float
    excess_w: float
    price_per_w: float | None
    policy: str
    division: str
    is_cutting: bool
    num_cuts: int
    over_s: float
    jobs: tuple[PowerShareState, ...] = ()
    trouble: str | None = None
    mean_w: float | None = None
    share_w: float | None = None
    speed: float | None = None
    curve: tuple[PowerPoint, ...] = ()
