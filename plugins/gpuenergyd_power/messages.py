"""Messages of `gpuenergyd budget`, which shows, sets and clears the power budget of a host.

HTTP/1.1 with JSON bodies on the daemon's Unix socket:

    GET /v1/power-budget                        -> PowerBudgetState
    PUT /v1/power-budget    PowerBudgetRequest  -> PowerBudgetState   (administrators)
"""

from dataclasses import dataclass

from gpuenergyd.core.policy_api.power import PowerPoint


@dataclass(frozen=True, slots=True)
class FallbackBudget:
    """A budget for a period after a request's lifetime is over, unless another request has come by then.

    It can only lower the budget of the settings. Begin and end are in seconds after the request.
    """

    power_budget_w: float
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class PowerBudgetRequest:
    """A budget in watts for the whole host; None withdraws the last request.

    The budget applies until the next request, also across daemon restarts. With a lifetime, it applies for that many
    seconds, and after that the budget of the settings applies again, lowered by `fallback`.
    """

    power_budget_w: float | None
    lifetime_s: float | None = None
    reason: str = ""
    fallback: tuple[FallbackBudget, ...] = ()


@dataclass(frozen=True, slots=True)
class PowerShareState:
    """One job's share of the budget; values are None if unknown or not set."""

    job_id: str
    job_name: str
    predicted_w: float
    iteration_time_s: float | None
    limit_w: float | None
    speed_ratio: float | None
    speed_per_w: float | None


@dataclass(frozen=True, slots=True)
class PowerBudgetState:
    """A host's power budget, what the host draws, and how the budget is divided; None if unknown or not set.

    Speeds are in units of one GPU at full speed. `price_per_w` is the weighted speed that one more watt would add.
    `num_cuts` is how often measured power had to be lowered at once, `over_s` the seconds above the budget. For a
    fleet: `mean_w` is the mean power of the last second, `share_w` the budget of the settings, `speed` the measured
    speed of the jobs, `curve` the speed at other powers.
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
