"""The plugin API of policies that divide a power budget among jobs: their input and their decisions. No I/O."""

from dataclasses import dataclass
from typing import Protocol

from gpuenergyd.core.policy_api.policy import FrontierPoint

HIGHEST_PRIORITY, USUAL_PRIORITY, LOWEST_PRIORITY = 0, 5, 9
MAX_BUDGET_W = 1e7
"""More than any host draws; a larger budget is probably in the wrong unit."""


class PowerTargetPolicy(Protocol):
    """Divides the power budget of a host among its jobs. Entry point: `gpuenergyd.power_targets`."""

    def divide(self, view: "PowerView") -> "PowerDecision":
        """Return a share for every job of the view."""
        ...


@dataclass(frozen=True, slots=True)
class PowerJobView:
    """Power-related properties of one job on the host."""

    job_id: str
    num_gpus: int
    training_id: str = ""
    """Jobs of one training end each iteration together and get the same speed; empty if the job is not grouped."""
    priority: int = USUAL_PRIORITY
    """Priority of the job, from 0 (highest) to 9."""
    can_follow: bool = False
    """Whether the job can follow a target now, because it runs a tuned plan."""
    frontier: tuple[FrontierPoint, ...] = ()
    """The job's time-energy frontier, for all its GPUs together; empty while unknown."""
    slows_for_power: bool = False
    """Whether its plans may become slower than the least-energy plan, if the frontier has such points."""
    full_speed_time_s: float | None = None
    """Iteration time at full speed; None while unknown."""
    full_speed_power_w: float | None = None
    """Measured mean power of all its GPUs at full speed; None while unknown."""
    power_limit_range_w: tuple[float, float] | None = None
    """Lowest and default power limit of each of its GPUs; None if power cannot be limited."""


@dataclass(frozen=True, slots=True)
class PowerView:
    """Everything known for dividing a power budget."""

    budget_w: float
    """Power for the whole host, minus the measured excess over predictions."""
    jobs: tuple[PowerJobView, ...]
    other_power_w: float = 0.0
    """Power of the host without its GPUs (assumed), plus that of GPUs without a job (measured)."""
    floor_speed_ratio: float = 0.5
    """Minimum speed relative to full speed; every job gets it before any job gets more."""


@dataclass(frozen=True, slots=True)
class PowerShare:
    """Power and speed assigned to one job."""

    job_id: str
    power_w: float
    """Predicted mean power of all its GPUs."""
    iteration_time_s: float | None = None
    """Iteration time to plan for; None for full speed, and for a job that does not follow a target."""
    limit_w: float | None = None
    """Power limit of each of its GPUs, for a job that no plan can keep within its power; otherwise None."""
    speed_ratio: float | None = None
    """Speed relative to full speed; None while unknown."""
    speed_per_w: float | None = None
    """Iterations per second gained by one more watt for this job; None if unknown or at full speed."""


@dataclass(frozen=True, slots=True)
class PowerPoint:
    """Speed that a host can reach with a given power."""

    power_w: float
    """Predicted mean power of the host."""
    speed: float
    """Weighted sum of its jobs' speeds, in GPUs at full speed."""


@dataclass(frozen=True, slots=True)
class PowerDecision:
    """A budget divided among all jobs of a host."""

    shares: tuple[PowerShare, ...]
    predicted_w: float
    """Predicted mean power of the host, `other_power_w` included."""
    least_w: float
    """Minimum power of the host that plans can reach, without any other means."""
    price_per_w: float | None = None
    """Dual price of the budget: weighted speed, in GPUs at full speed, gained by one more watt. 0 if power is left
    over, None if no job follows a target."""
    reason: str = ""
    curve: tuple[PowerPoint, ...] = ()
    """Maximum speed for each power of the host, concave and increasing: from the minimum speed of every job, or the
    least power that plans can reach, up to full speed. A fleet coordinator compares hosts by it. Empty if unknown."""

    @property
    def speed_ratios(self) -> dict[str, float]:
        """Speeds relative to full speed by job, without jobs of unknown speed."""
        return {share.job_id: share.speed_ratio for share in self.shares if share.speed_ratio is not None}
