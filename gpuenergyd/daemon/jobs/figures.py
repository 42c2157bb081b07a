"""The measured figures of a job that its ranks can write into the training's own log."""

from dataclasses import astuple, dataclass, field

from gpuenergyd.core.job.job import Job
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.wire.messages import JobFigures

FIGURES_EVERY_NS = 2_000_000_000
"""Time between two figures of a job, since to estimate its saving takes longer than to answer a report."""


@dataclass(frozen=True, slots=True)
class JobTotals:
    """Sums over the iterations of a job with known energy; the next daemon continues them."""

    num_iterations: int = 0
    time_s: float = 0.0
    energy_j: float = 0.0
    num_tokens: int = 0
    tokens_energy_j: float = 0.0
    """Energy of the iterations with a known number of tokens."""

    @property
    def tokens_per_j(self) -> float | None:
        return self.num_tokens / self.tokens_energy_j if self.tokens_energy_j > 0 else None

    def plus(self, observation: IterationObservation) -> "JobTotals":
        """Return the sums with one more iteration, unless its energy is unknown.

        Energies that were apportioned to short iterations are counted, since their sum is that of the counter.
        """
        energy_j = observation.energy_j
        if energy_j is None:
            return self
        num_tokens = observation.num_tokens or 0
        added = JobTotals(1, observation.iteration_time_s, energy_j, num_tokens, energy_j if num_tokens else 0.0)
        return JobTotals(*(old + new for old, new in zip(astuple(self), astuple(added), strict=True)))

    def since(self, before: "JobTotals") -> "JobTotals":
        """Return the sums over the iterations since earlier sums."""
        return JobTotals(*(new - old for new, old in zip(astuple(self), astuple(before), strict=True)))

    def status_fields(self) -> dict[str, float | None]:
        num_tokens = self.num_tokens or None
        return {"total_energy_j": self.energy_j, "num_tokens": num_tokens, "tokens_per_j": self.tokens_per_j}


@dataclass(slots=True)
class FiguresOfJob:
    """The totals of one job, perhaps begun under an earlier daemon, and its newest figures."""

    job: Job
    totals: JobTotals = field(default_factory=JobTotals)
    _newest: JobFigures | None = None
    _before: JobTotals = field(init=False)
    """The totals of the previous figures."""
    _due_mono_ns: int = 0

    def __post_init__(self) -> None:
        self._before = self.totals

    def at(self, now_mono_ns: int) -> JobFigures:
        """Return the newest figures; the same object until others are due."""
        if self._newest is None or now_mono_ns >= self._due_mono_ns:
            self._due_mono_ns = now_mono_ns + FIGURES_EVERY_NS
            self._newest = self._new(self._newest or JobFigures())
        return self._newest

    def _new(self, last: JobFigures) -> JobFigures:
        totals, new = self.totals, self.totals.since(self._before)
        self._before = totals
        estimate, account = self.job.estimate(), self.job.account
        saving, slowdown = estimate.ratios if estimate else (None, None)
        return JobFigures(
            phase=self.job.phase,
            iteration_energy_j=new.energy_j / new.num_iterations if new.num_iterations else last.iteration_energy_j,
            power_w=new.energy_j / new.time_s if new.num_iterations else last.power_w,
            energy_j=totals.energy_j if totals.num_iterations else None,
            saving_ratio=saving.estimate if saving else None,
            saving_low_ratio=saving.low if saving else None,
            saving_high_ratio=saving.high if saving else None,
            slowdown_ratio=slowdown.estimate if slowdown else None,
            cost_s=account.cost_s if account else None,
            num_tokens=totals.num_tokens or None,
            tokens_per_j=new.tokens_per_j or last.tokens_per_j,
        )
