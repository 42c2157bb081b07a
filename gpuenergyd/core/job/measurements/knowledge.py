"""All measurements of one job: its plans, iterations, pace and saving, and the curves that it may start from."""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from statistics import median

from gpuenergyd.core.distributed.pace import PaceEstimator
from gpuenergyd.core.distributed.straggler_savings import StragglerSavingEstimator
from gpuenergyd.core.job.description import JobRanks
from gpuenergyd.core.job.issued_plans import IssuedPlans, IssuedPlansSnapshot, Purposes
from gpuenergyd.core.job.measurements.brackets import REACH
from gpuenergyd.core.job.measurements.history import KeptIterations
from gpuenergyd.core.job.measurements.reordering import Reordering, ReorderingSnapshot
from gpuenergyd.core.job.measurements.savings import MeasuredSaving, SavingEstimate, measured_saving
from gpuenergyd.core.job.messages import IterationObserved, RecordIteration
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.learned_curves import LearnedCurves
from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.core.policy_api.policy import BaselineView, JobView
from gpuenergyd.core.policy_api.target import PerformanceTarget

_MOST_KEPT = 1024
"""Maximum number of kept iterations: about forty brackets."""


@dataclass(slots=True)
class ComparedIterations:
    """The iterations that brackets consist of, oldest first: the ones from which a job's saving is computed.

    They are kept longer than other iterations and without their instructions, because in a long job the blocks at full
    speed are far apart and a confidence interval needs many of them. Each run, at full speed or under plans,
    contributes its first iterations, because they follow the run before, and its last ones, once another run follows.
    """

    _kept: list[tuple[IterationObservation, bool]] = field(default_factory=list)
    """Each iteration, and whether it ran under a plan."""
    _newest: deque[IterationObservation] = field(default_factory=lambda: deque(maxlen=REACH))
    """Iterations of the present run that are not kept yet."""
    _num_first: int = 0
    """Number of iterations of the present run that are kept."""
    _is_tuned: bool | None = None
    """Whether the present run is under plans; None before the first run."""
    _plan_id: str | None = BASELINE_PLAN_ID

    def add(self, observation: IterationObservation, purposes: Purposes) -> None:
        """Add an iteration, unless it was disturbed, ran at another replica's pace or under an experiment."""
        is_first_of_plan = observation.plan_id != self._plan_id
        self._plan_id = observation.plan_id
        purpose = purposes.get(observation.plan_id)
        is_tuned = purpose is PlanPurpose.TUNED
        if not observation.is_own or observation.waited_s or not (is_tuned or purpose is PlanPurpose.BASELINE):
            return
        if not is_tuned and is_first_of_plan:  # clocks are still rising
            return
        if is_tuned is not self._is_tuned:
            self._kept += [(iteration, not is_tuned) for iteration in self._newest]
            self._newest.clear()
            self._is_tuned, self._num_first = is_tuned, 0
        light = replace(observation, instruction_samples=())
        if self._num_first < REACH:
            self._num_first += 1
            self._kept.append((light, is_tuned))
        else:
            self._newest.append(light)
        del self._kept[: max(0, len(self._kept) - _MOST_KEPT)]

    def keep(self, is_kept: Callable[[IterationObservation], bool]) -> None:
        """Drop all iterations except those for which `is_kept` is true."""
        self._kept = [(iteration, is_tuned) for iteration, is_tuned in self._kept if is_kept(iteration)]
        newest = [iteration for iteration in self._newest if is_kept(iteration)]
        self._newest.clear()
        self._newest.extend(newest)

    def restore(self, observations: Iterable[IterationObservation], purposes: Purposes) -> None:
        """Start with these iterations, which are in order."""
        for observation in observations:
            self.add(observation, purposes)

    def saving(self, *, until: int | None = None) -> MeasuredSaving | None:
        """Return the measured saving of the iterations before `until`; None while there are too few."""
        everything = [*self._kept, *((newest, self._is_tuned is True) for newest in self._newest)]
        counted = [(o, is_tuned) for o, is_tuned in everything if until is None or o.iteration_index < until]
        return measured_saving(
            [o for o, is_tuned in counted if not is_tuned], [o for o, is_tuned in counted if is_tuned]
        )


_TUNED_FIGURES_KEPT = 512
_NEWEST_OF_PLAN = 128
"""Number of a plan's iterations whose medians are shown; limited, because each status response computes them."""


@dataclass(frozen=True, slots=True)
class KnowledgeSnapshot:
    """All state of `JobKnowledge` except the estimators, which start again after a restart."""

    plans: IssuedPlansSnapshot
    iterations: tuple[IterationObservation, ...]
    generation: int
    num_iterations_for: dict[PlanPurpose, int]
    tuned_figures: tuple[tuple[float, float | None], ...]
    changed_at: int = 0
    estimate_before: SavingEstimate | None = None
    reordering: ReorderingSnapshot = field(default_factory=ReorderingSnapshot)
    past_jobs: tuple[PastJob, ...] = ()
    learned: LearnedCurves | None = None
    curves_before: LearnedCurves | None = None


@dataclass(frozen=True, slots=True)
class PlanMeasurement:
    """Results of one plan's regular iterations; values are None if there are none."""

    num_iterations: int
    iteration_time_s: float | None
    """Median over the newest iterations, like `energy_j`."""
    energy_j: float | None


@dataclass(slots=True)
class JobKnowledge:
    """The measurements of one job; at most `max_kept` iterations are kept."""

    job_id: str
    max_kept: int
    plans: IssuedPlans = field(default_factory=IssuedPlans)
    iterations: KeptIterations = field(init=False)
    compared: ComparedIterations = field(default_factory=ComparedIterations)
    past_jobs: tuple[PastJob, ...] = ()
    """Curves of earlier jobs; emptied if plans made from them were too slow."""
    learned: LearnedCurves | None = None
    """Curves measured since the job last changed, as returned by its policy with the newest plan."""
    curves_before: LearnedCurves | None = None
    """Curves measured before the job last changed."""
    generation: int = 0
    """Number of times that trials started over."""
    pace: PaceEstimator = field(default_factory=PaceEstimator)
    straggler_saving: StragglerSavingEstimator = field(default_factory=StragglerSavingEstimator)
    num_iterations_for: Counter[PlanPurpose] = field(default_factory=Counter)
    """Number of regular iterations by the purpose of their plan."""
    tuned_figures: deque[tuple[float, float | None]] = field(default_factory=lambda: deque(maxlen=_TUNED_FIGURES_KEPT))
    """Time and energy of the newest tuned iterations at the job's own pace."""
    changed_at: int = 0
    """First iteration after the job last changed; earlier ones were dropped."""
    estimate_before: SavingEstimate | None = None
    """Estimate at the time when measurements were last dropped, used until the saving is measured again."""
    reordering: Reordering = field(default_factory=Reordering)
    _saving: tuple[MeasuredSaving | None] | None = None
    """Cached saving; None if it must be computed again."""
    _plan_measurement: tuple[str, PlanMeasurement] | None = None
    """Cached figures of one plan with its id; None if they must be computed again."""

    def __post_init__(self) -> None:
        self.iterations = KeptIterations(self.max_kept)

    def record(
        self, event: IterationObserved, ranks: JobRanks, target: PerformanceTarget, baseline: BaselineView | None
    ) -> RecordIteration:
        """Add an iteration, irregular if it ran before the last change; return the command that records it."""
        observation = event.observation
        if observation.iteration_index < self.changed_at:
            observation = replace(observation, is_regular=False)
        observation, purpose = self.add(
            observation,
            ranks.graph_in(self.plans.orders_of(observation.plan_id)),
            is_forced=target.is_forced,
            permitted_ratio=0.0 if baseline is None else target.permitted_ratio(baseline.iteration_time_s),
            least_other_overhead_s=event.least_other_overhead_s,
        )
        return RecordIteration(observation, purpose, event.began_mono_ns, event.spans)

    def add(
        self,
        observation: IterationObservation,
        graph: DependencyGraph,
        *,
        is_forced: bool,
        permitted_ratio: float,
        least_other_overhead_s: float | None,
    ) -> tuple[IterationObservation, PlanPurpose | None]:
        """Add an iteration; return it with its waiting time for other replicas, and the purpose of its plan.

        `graph` is that of the order in which it ran. `permitted_ratio` is the slowdown that the target permits beyond
        full speed or a straggler's pace.
        """
        purpose = self.plans.purpose_of(observation.plan_id)
        is_for_straggler = self.plans.is_for_straggler(observation.plan_id)
        observation = self.pace.observe(
            observation, purpose, graph, is_at_straggler_pace=is_forced, least_overhead_s=least_other_overhead_s
        )
        if is_for_straggler:
            observation = replace(observation, is_at_straggler_pace=True)
        self.straggler_saving.add(
            observation, purpose, is_plan_for_straggler=is_for_straggler, permitted_ratio=permitted_ratio
        )
        if observation.is_regular and purpose is not None:
            self.num_iterations_for[purpose] += 1
            if purpose is PlanPurpose.TUNED and observation.is_own:
                self.tuned_figures.append((observation.iteration_time_s, observation.energy_j))
        purposes = self.plans.purposes()
        self.iterations.add(observation, purposes)
        self.compared.add(observation, purposes)
        self._iterations_changed()
        return observation, purpose

    def _iterations_changed(self) -> None:
        self._saving = self._plan_measurement = None

    def add_plan(self, plan: ClockPlan) -> None:
        """Add a plan before it is sent."""
        self.plans.add(plan, (o.plan_id for o in self.iterations.kept))

    def full_speed(self, *, since: int = 0) -> list[IterationObservation]:
        return self.iterations.at_full_speed(self.plans.purposes(), since=since)

    def saving(self) -> MeasuredSaving | None:
        """Return the measured saving; None while there are too few iterations."""
        if self._saving is None:
            self._saving = (self.compared.saving(),)
        return self._saving[0]

    def tuned_medians(self) -> tuple[float | None, float | None]:
        """Return median time and energy over the last tuned iterations; None while there is none."""
        energies_j = [energy_j for _, energy_j in self.tuned_figures if energy_j is not None]
        return (
            median(time_s for time_s, _ in self.tuned_figures) if self.tuned_figures else None,
            median(energies_j) if energies_j else None,
        )

    def measured_under(self, plan_id: str) -> PlanMeasurement:
        """Return the number, time and energy of one plan's regular iterations."""
        if self._plan_measurement is None or self._plan_measurement[0] != plan_id:
            under = self.iterations.regular_under(plan_id)
            newest = under[-_NEWEST_OF_PLAN:]
            energies_j = [o.energy_j for o in newest if o.energy_j is not None]
            figures = PlanMeasurement(
                num_iterations=len(under),
                iteration_time_s=median(o.iteration_time_s for o in newest) if newest else None,
                energy_j=median(energies_j) if energies_j else None,
            )
            self._plan_measurement = plan_id, figures
        return self._plan_measurement[1]

    def view(
        self,
        ranks: JobRanks,
        target: PerformanceTarget,
        baseline: BaselineView | None,
        *,
        affordable_s: float | None = None,
    ) -> JobView | None:
        """Return the job as its policy sees it; None until there is a baseline.

        The view includes iterations without instruction times only for tuned plans, whose total time and energy matter.
        """
        if ranks.schedule is None or baseline is None:
            return None
        purposes = self.plans.purposes()
        return JobView(
            job_id=ranks.description.job_id,
            schedule=ranks.schedule,
            gpus=tuple(ranks.gpus[r] for r in range(ranks.schedule.num_ranks)),
            target=target,
            baseline=baseline,
            observations=tuple(
                o for o in self.iterations.kept if o.is_timed or purposes.get(o.plan_id) is PlanPurpose.TUNED
            ),
            issued_plans=tuple(self.plans.kept),
            num_dropped_plans=dict(self.plans.num_dropped),
            communication_latency_s=self.iterations.typical(lambda o: o.communication_latency_s),
            launch_gap_s=self.iterations.typical(lambda o: o.launch_gap_s),
            generation=self.generation,
            past_jobs=self.past_jobs,
            curves_before=self.curves_before,
            num_dp_ranks=ranks.description.num_dp_ranks,
            reorder=self.reordering.view(ranks.schedule.num_ranks, ranks.description.num_stage_ranks),
            affordable_s=affordable_s,
        )

    def estimate(self, baseline: BaselineView, *, until: int | None = None) -> SavingEstimate:
        """Return the estimate since the last change, or the previous one until the saving has been measured again.

        With `until`, only iterations before that index are used for the saving.
        """
        saving = self.saving() if until is None else self.compared.saving(until=until)
        if saving is None and self.estimate_before is not None:
            return self.estimate_before
        iteration_time_s, energy_j = self.tuned_medians()
        return SavingEstimate(
            since_iteration=self.changed_at,
            baseline_time_s=baseline.iteration_time_s,
            baseline_energy_j=baseline.energy_j,
            iteration_time_s=iteration_time_s,
            energy_j=energy_j,
            saving=saving,
        )

    def keep_curves(self) -> None:
        """Keep the curves measured up to now, for plans after a change of the job."""
        self.curves_before = self.learned or self.curves_before

    def begin_anew(self, is_kept: Callable[[IterationObservation], bool]) -> None:
        """Drop all measurements except the kept iterations, so that the policy starts over."""
        self.tuned_figures.clear()
        self.iterations.kept = [o for o in self.iterations.kept if is_kept(o)]
        self.compared.keep(is_kept)
        self.plans.begin_anew()
        self.reordering.advice = None
        self.learned = None
        self.generation += 1
        self._iterations_changed()

    def change_schedule(self, baseline: BaselineView | None, *, first_iteration: int) -> None:
        """Drop iterations and plans, which hold for one number of microbatches only; keep the curves."""
        if baseline is not None and (before := self.estimate(baseline)).saving is not None:
            self.estimate_before = before
        self.changed_at = first_iteration
        self.keep_curves()
        self.begin_anew(lambda _: False)
        self.pace = PaceEstimator()

    def snapshot(self) -> KnowledgeSnapshot:
        """Return a copy of all state except the estimators."""
        return KnowledgeSnapshot(
            plans=self.plans.snapshot(),
            iterations=tuple(self.iterations.kept),
            generation=self.generation,
            num_iterations_for=dict(self.num_iterations_for),
            tuned_figures=tuple(self.tuned_figures),
            changed_at=self.changed_at,
            estimate_before=self.estimate_before,
            reordering=self.reordering.snapshot(),
            past_jobs=self.past_jobs,
            learned=self.learned,
            curves_before=self.curves_before,
        )

    def restore(self, snapshot: KnowledgeSnapshot) -> None:
        """Replace all state except the estimators."""
        self.plans.restore(snapshot.plans)
        self.iterations.kept = list(snapshot.iterations)
        self.compared.restore(snapshot.iterations, self.plans.purposes())
        self.generation = snapshot.generation
        self.num_iterations_for = Counter(snapshot.num_iterations_for)
        self.tuned_figures.extend(snapshot.tuned_figures)
        self.changed_at, self.estimate_before = snapshot.changed_at, snapshot.estimate_before
        self.reordering.restore(snapshot.reordering)
        self.past_jobs = snapshot.past_jobs
        self.learned, self.curves_before = snapshot.learned, snapshot.curves_before
        self._iterations_changed()
