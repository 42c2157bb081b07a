"""The plugin API of policies that divide a power budget among jobs: what they see, and what they decide. No I/O."""

from dataclasses import dataclass
from typing import Protocol

from gpuenergyd.core.policy_api.policy import FrontierPoint

HIGHEST_PRIORITY, USUAL_PRIORITY, LOWEST_PRIORITY = 0, 5, 9
MAX_BUDGET_W = 1e7
"""More than any host draws: a larger budget is a mistake in the unit."""


class PowerTargetPolicy(Protocol):
    """Divides the power budget of a host among its jobs. Entry point: `gpuenergyd.power_targets`."""

    def divide(self, view: "PowerView") -> "PowerDecision":
        """Return a share for every job of the view."""
        ...


@dataclass(frozen=True, slots=True)
class PowerJobView:
    """One job on the host, as far as its power is concerned."""

    job_id: str
    num_gpus: int
    training_id: str = ""
    """Jobs of one training end each iteration together, and get the same speed; empty: the job alone."""
    priority: int = USUAL_PRIORITY
    """From 0, the highest, to 9."""
    can_follow: bool = False
    """Whether the job follows a target now: it runs a tuned plan."""
    frontier: tuple[FrontierPoint, ...] = ()
    """Its time-energy frontier, all its GPUs together; empty while unknown."""
    slows_for_power: bool = False
    """Whether its plans become slower than the one of least energy, where the frontier has such points."""
    full_speed_time_s: float | None = None
    """Iteration time at full speed; None while unknown."""
    full_speed_power_w: float | None = None
    """Measured mean power of all its GPUs at full speed; None while unknown."""
    power_limit_range_w: tuple[float, float] | None = None
    """Lowest and default power limit of each of its GPUs; None if power cannot be limited."""


@dataclass(frozen=True, slots=True)
class PowerView:
    """Everything that is known for dividing a power budget."""

    budget_w: float
    """Power for the whole host, less what it was measured to draw beyond predictions."""
    jobs: tuple[PowerJobView, ...]
    other_power_w: float = 0.0
    """Power of the host without its GPUs, as assumed, and of GPUs without a job, as measured."""
    floor_speed_ratio: float = 0.5
    """Speed, relative to full speed, that every job has before any job has more."""


@dataclass(frozen=True, slots=True)
class PowerShare:
    """What one job may draw, and what it does with it."""

    job_id: str
    power_w: float
    """Predicted mean power of all its GPUs."""
    iteration_time_s: float | None = None
    """Iteration time to plan for; None for full speed, and for a job that follows no target."""
    limit_w: float | None = None
    """Power limit of each of its GPUs, for a job whose power a plan cannot hold; None without."""
    speed_ratio: float | None = None
    """Speed relative to full speed; None while unknown."""
    speed_per_w: float | None = None
    """Iterations per second that one more watt for this job would add; None where it is unknown or at full speed."""


@dataclass(frozen=True, slots=True)
class PowerPoint:
    """What a host can do with some power."""

    power_w: float
    """Predicted mean power of the host."""
    speed: float
    """Weighted sum of the speeds of its jobs, in GPUs at full speed."""


@dataclass(frozen=True, slots=True)
class PowerDecision:
    """A budget divided among all jobs of a host."""

    shares: tuple[PowerShare, ...]
    predicted_w: float
    """Predicted mean power of the host, `other_power_w` included."""
    least_w: float
    """Least power of the host that plans alone can reach."""
    price_per_w: float | None = None
    """Dual price of the budget: weighted speed, in GPUs at full speed, that one more watt would add. 0 if power is
    left, None where no job follows a target."""
    reason: str = ""
    curve: tuple[PowerPoint, ...] = ()
    """The most speed for each power of the host, concave and rising: from every job's floor of speed, or the least that
    plans can reach, up to full speed. A fleet's coordinator compares hosts by it. Empty while unknown."""

    @property
    def speed_ratios(self) -> dict[str, float]:
        """Speeds relative to full speed by job, as far as they are known."""
        return {share.job_id: share.speed_ratio for share in self.shares if share.speed_ratio is not None}
