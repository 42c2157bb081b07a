"""The default policy: learns each stage while the job runs, then slows down only what nobody waits for.

Three steps, each decided from the view alone, so that a restarted policy host goes on where the last one stopped:
profile (one design point per iteration), plan (exact frontier at the owed iteration time, rounded to real clocks, with
raises asked for ahead of need), correct (a plan that measures slow is followed by one with more caution: it plans as
if everything below the maximum clock took a little longer than the profile says, which leaves that much slack).
"""

import math
from dataclasses import dataclass, replace
from statistics import median

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction
from gpuenergyd.core.pipeline.plan import (
    ClockChange,
    ClockPlan,
    PlanPrediction,
    PlanPurpose,
    RankClocks,
    full_speed_plan,
    untuned_plan,
)
from gpuenergyd.core.pipeline.profile import InstructionProfile, PipelineProfile
from gpuenergyd.core.pipeline.switching import SwitchLatency
from gpuenergyd.core.pipeline.timeline import iteration_energy_j, timeline
from gpuenergyd.core.policy_api.policy import FrontierPoint, JobView
from gpuenergyd.core.policy_api.previous_run import REMEMBERED_PROFILE
from gpuenergyd_policies.observed_pipeline import observed_pipeline
from gpuenergyd_policies.planning.compiled import IS_COMPILED
from gpuenergyd_policies.planning.frontier import SolvedPlan, frontier, min_iteration_time_s, solve
from gpuenergyd_policies.planning.problem import Effort
from gpuenergyd_policies.planning.switching.requests import SimulatedIteration, clock_changes, simulate_switching
from gpuenergyd_policies.planning.switching.segments import plan_segments
from gpuenergyd_policies.predicted_savings import cheapest_clocks, would_be_plan
from gpuenergyd_policies.profiling.design import clock_levels, profile_plan
from gpuenergyd_policies.profiling.fit import NotEnoughDataError, fit_profile
from gpuenergyd_policies.profiling.previous_run import with_memory
from gpuenergyd_policies.profiling.procedure import Design, Knowledge, Ready
from gpuenergyd_policies.profiling.regret import predicted_regret_ratio
from gpuenergyd_policies.profiling.rescaling import change_of, under_ceilings

MAX_SEGMENTS = (4, 8, 12)
"""Clock segments per rank and iteration that are tried beside a free plan."""
SEARCH_STEPS = 30_000 if IS_COMPILED else 800
FEWER_SWITCHES_RATIO = 0.002
"""Energy worth giving for fewer clock changes: each may be late, and those of one host queue behind each other."""
MAX_FULL_SPEED_ITERATIONS = 24
MAX_PROFILED_ITERATIONS = 60
"""What a fit is made from, at most."""
CAUTION = "caution_ratio"
"""The figure of a tuned plan that its successors start from."""
UNVERIFIED = "unverified_ratio"
"""The figure of a plan for a job that has just changed: caution on top, until its own iterations were seen."""
CHANGE_CAUTION, MIN_CHANGE_CAUTION_RATIO, MAX_CHANGE_CAUTION_RATIO = 0.1, 0.003, 0.03
"""Of the change in time at full speed: the further a job has moved the less is known of its lower clocks."""
SWITCH_LATENCY = "switch_latency_s"
"""The longest raise latency that a tuned plan was made with."""
NEW_LATENCY_RATIO = 0.25
"""A latency that has moved by more of itself asks for another plan: its leads are too short, or cost for nothing."""
OWED = "owed_time_ratio"
"""The figure of a tuned plan that says what was owed when it was made, in baseline iteration times."""
TARGET_MOVED_RATIO = 1e-3
CAUTION_GAIN = 1.5
"""Only part of an iteration runs below the maximum clock, so caution must grow faster than what is missing."""
MAX_CAUTION_RATIO = 0.2
GROSS_RATIO, GROSS_CAUTION_RATIO = 0.04, 0.005
"""What is slower by so much is hardly a matter of caution: a disturbance, which is over, or a wrong profile, which the
core has measured again when the next plan is slow too. A plan without slack never looks fast, so that much caution
would stay for good."""
CHANCE_MARGIN = 0.5
"""Of the spread of one iteration: what a first plan keeps back."""
MIN_ITERATIONS_TO_TIGHTEN = 4
MIN_ITERATIONS_TO_LOOSEN = 8
TIGHTEN_ABOVE_RATIO = 0.003
LOOSEN_BELOW_RATIO = 0.004
"""Measured against owed iteration time; between the two a plan is left alone, and one that was corrected before is
left alone twice as far: what is left then is drift and chance, and chasing them costs more than it saves."""
WORTH_A_CHANGE_RATIO = 0.001
"""A looser plan must be predicted to save at least this much energy, or the present one stays."""


class BubbleAware:
    """Profiles every stage online, plans on the exact frontier, corrects from what it measures."""

    def __init__(self) -> None:
        self._frontier: tuple[tuple[int, str], tuple[FrontierPoint, ...]] | None = None

    def frontier(self, view: JobView) -> tuple[FrontierPoint, ...]:
        """Return the pipeline's frontier as fitted, what a real iteration takes beyond it included."""
        view = with_memory(view)
        num_profiled = view.num_issued(PlanPurpose.PROFILE)
        if all(plan.purpose is not PlanPurpose.TUNED for plan in view.issued_plans):
            return ()
        key = (num_profiled, f"{view.baseline.iteration_time_s:.3g}")
        if self._frontier is None or self._frontier[0] != key:
            try:
                self._frontier = (key, _frontier_points(_model(view)))
            except NotEnoughDataError:
                return ()
        return self._frontier[1]

    def next_plan(self, view: JobView) -> ClockPlan:
        """Return the next profiling plan, the tuned plan, or its correction."""
        levels = tuple(clock_levels(gpu.supported_sm_clocks_mhz) for gpu in view.gpus)
        num_levels = min(len(own) for own in levels)
        if num_levels < 2:
            return _last_issued(view) or untuned_plan(reason="a GPU of this job has a single clock")
        if not view.can_set_clocks:
            return would_be_plan(view, cheapest_clocks)
        tuned = [plan for plan in view.issued_plans if plan.purpose is PlanPurpose.TUNED]
        if tuned:
            return _correction(view, tuned)
        known = with_memory(view)
        if view.remembered is not None and known is not view:
            why = f"from what {view.remembered.job_id} showed, which still holds at full speed"
            change, unverified_ratio = change_of(view), 0.0
            if change is not None:
                why = "from what the job showed before, brought to its pace of now at full speed"
                unverified_ratio = max(CHANGE_CAUTION * change.largest_ratio, MIN_CHANGE_CAUTION_RATIO)
                unverified_ratio = min(unverified_ratio, MAX_CHANGE_CAUTION_RATIO)
            caution_ratio = view.remembered.figure(CAUTION)
            return _plan_on(known, caution_ratio=caution_ratio, number=1, why=why, unverified_ratio=unverified_ratio)
        design = Design(view, levels)
        step = design.next_step(lambda: _knowledge(view))
        if step is Ready.ENOUGH:
            return _plan_on(known, caution_ratio=None, number=1, why="first plan from the profile")
        if step is Ready.NOT_YET:
            last = view.issued_plans[-1] if view.issued_plans else untuned_plan()
            if last.purpose is not PlanPurpose.PROFILE:
                waiting = untuned_plan(
                    view.plan_id("waiting"), reason="profiling again, as slowly as the budget allows"
                )
                return last if last.ranks else waiting
            # Until the last points are known, nobody need be slow.
            clocks = [gpu.supported_sm_clocks_mhz for gpu in view.gpus]
            plan_id = view.plan_id(f"planning-{view.num_issued()}")
            return full_speed_plan(plan_id, view.schedule, clocks, reason="profiled, waiting for the last points")
        return profile_plan(
            design.plan_id(step), design.points[step.number], view.schedule, levels, reason=design.reason(step)
        )


def _last_issued(view: JobView) -> ClockPlan | None:
    return view.issued_plans[-1] if view.issued_plans else None


def _knowledge(view: JobView) -> Knowledge:
    """Return what the iterations so far are worth for planning."""
    try:
        fitted = fit_profile(_worth_fitting(view), view.gpus)
    except NotEnoughDataError:
        return Knowledge(regret_ratio=math.inf, doubtful=frozenset())
    model = PipelineModel.of(view, fitted.profile)
    target_s = view.target.iteration_time_s(view.baseline.iteration_time_s)
    regret_ratio = predicted_regret_ratio(fitted, model.graph, deadline_s=target_s - model.bias_s)
    return Knowledge(regret_ratio, fitted.doubtful)


# --- planning ---


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """A pipeline as it is planned for; `bias_s` is what an iteration at full speed takes beyond the graph."""

    profile: PipelineProfile
    graph: DependencyGraph
    baseline_energy_j: float
    bias_s: float

    @classmethod
    def of(cls, view: JobView, profile: PipelineProfile) -> "PipelineModel":
        """Return the model of a job whose profile is known."""
        observed = observed_pipeline(view, profile)
        options = [profile[i.instruction_class].at_max_clock for i in observed.graph.instructions]
        energy_j = iteration_energy_j(
            energies_j=[option.energy_j for option in options],
            durations_s=[option.time_s for option in options],
            iteration_time_s=view.baseline.iteration_time_s,
            num_ranks=observed.graph.num_ranks,
            blocking_power_w=profile.blocking_power_w,
        )
        return cls(profile, observed.graph, energy_j, observed.bias_s)


def _worth_fitting(view: JobView) -> list[IterationObservation]:
    """Return the iterations to learn from: those that profiled, and some at full speed from first to last.

    Tuned iterations would add clocks seen once or twice, which the planner would pick for their lucky errors. The cost
    of a fit grows with the cube of the iterations, and a job may run hundreds at full speed before it is planned for.
    """
    purpose_of = {plan.plan_id: plan.purpose for plan in view.issued_plans}
    purpose_of[REMEMBERED_PROFILE] = PlanPurpose.PROFILE
    regular = [o for o in view.observations if o.is_regular]
    profiled = [o for o in regular if purpose_of.get(o.plan_id or "") is PlanPurpose.PROFILE]
    at_full_speed = [
        o for o in regular if purpose_of.get(o.plan_id or "", PlanPurpose.BASELINE) is PlanPurpose.BASELINE
    ]
    step = max(1, math.ceil(len(at_full_speed) / MAX_FULL_SPEED_ITERATIONS))
    return sorted(profiled[-MAX_PROFILED_ITERATIONS:] + at_full_speed[::step], key=lambda o: o.iteration_index)


def _model(view: JobView) -> PipelineModel:
    profile = fit_profile(_worth_fitting(view), view.gpus).profile
    return PipelineModel.of(view, under_ceilings(profile, view))


def _tuned_plan(view: JobView, *, caution_ratio: float, number: int, why: str) -> ClockPlan:
    return _plan_on(with_memory(view), caution_ratio=caution_ratio, number=number, why=why)


def _plan_on(
    view: JobView, *, caution_ratio: float | None, number: int, why: str, unverified_ratio: float = 0.0
) -> ClockPlan:
    """Return a plan for what is owed, as if everything below the maximum clock took `caution_ratio` longer.

    The view holds all that is believed. Without an earlier plan to learn caution from, profiling teaches it: by how
    much its iterations came out slower than the model says; and chance, all of which a plan without slack suffers.
    """
    try:
        model = _model(view)
    except NotEnoughDataError as error:
        return untuned_plan(view.plan_id(f"unprofiled-{view.num_issued()}"), reason=f"cannot plan: {error}")
    return plan_from(
        view, model, caution_ratio=caution_ratio, number=number, why=why, unverified_ratio=unverified_ratio
    )


def plan_from(
    view: JobView,
    model: PipelineModel,
    *,
    caution_ratio: float | None,
    number: int,
    why: str,
    unverified_ratio: float = 0.0,
) -> ClockPlan:
    """Return the plan that a model of the pipeline calls for; caution as in `_plan_on`.

    `unverified_ratio` is caution on top of it, until the plan's own iterations have shown whether the model holds.
    """
    target_s = view.target.iteration_time_s(view.baseline.iteration_time_s)
    if caution_ratio is None:
        slower_s = max(0.0, _profiling_excess_s(view, model)) + CHANCE_MARGIN * view.baseline.iteration_sigma_s
        caution_ratio = slower_s / target_s
    caution_ratio = min(max(caution_ratio, 0.0), MAX_CAUTION_RATIO)
    cautious = _with_caution(model.profile, caution_ratio + unverified_ratio)
    deadline_s = max(target_s - model.bias_s, min_iteration_time_s(model.graph, cautious))
    solved = solve(model.graph, cautious, deadline_s=deadline_s, forced=view.target.is_forced)
    bound = solve(
        model.graph,
        model.profile,
        deadline_s=deadline_s,
        forced=view.target.is_forced,
        effort=Effort.QUICK,
    )
    chosen = _chosen(view, model, cautious, solved)
    waiting_j = model.profile.blocking_power_w * model.graph.num_ranks * model.bias_s
    return ClockPlan(
        plan_id=view.plan_id(f"tuned-{number}"),
        purpose=PlanPurpose.TUNED,
        ranks=tuple(
            RankClocks(pp_rank, tuple(chosen.clock_of[i] for i in order), chosen.changes[pp_rank])
            for pp_rank, order in enumerate(view.schedule.orders)
        ),
        predicted=PlanPrediction(
            iteration_time_s=chosen.simulated.iteration_time_s + model.bias_s,
            energy_j=chosen.simulated.energy_j + waiting_j,
            lower_bound_j=bound.lower_bound_j + waiting_j,
            baseline_time_s=view.baseline.iteration_time_s,
            baseline_energy_j=model.baseline_energy_j,
        ),
        reason=why,
        figures=(
            (CAUTION, caution_ratio),
            (UNVERIFIED, unverified_ratio),
            (SWITCH_LATENCY, _raise_latency_s(view)),
            (OWED, target_s / view.baseline.iteration_time_s),
        ),
    )


def _frontier_points(model: PipelineModel) -> tuple[FrontierPoint, ...]:
    waiting_j = model.profile.blocking_power_w * model.graph.num_ranks * model.bias_s
    return tuple(
        FrontierPoint(
            point.iteration_time_s + model.bias_s,
            point.energy_j + waiting_j,
            None if point.lower_bound_j is None else point.lower_bound_j + waiting_j,
        )
        for point in frontier(model.graph, model.profile, until_slowest=False).points
    )


def _with_caution(profile: PipelineProfile, caution_ratio: float) -> PipelineProfile:
    """Return a profile in which everything below the maximum clock takes longer; at full speed nothing is in doubt."""
    classes = {
        key: InstructionProfile(
            (
                own.at_max_clock,
                *(replace(option, time_s=option.time_s * (1 + caution_ratio)) for option in own.options[1:]),
            )
        )
        for key, own in profile.classes.items()
    }
    return PipelineProfile(classes, profile.blocking_power_w)


def _profiling_excess_s(view: JobView, model: PipelineModel) -> float:
    """Return by how much iterations at mixed clocks take longer than the model says, beyond the baseline's own bias.

    A graph of instructions misses what couples ranks otherwise (sends that wait for their receiver, bursts of clock
    changes); at full speed little of it shows, in a plan that uses all slack all of it does.
    """
    changes_of = {p.plan_id: p for p in view.issued_plans if p.purpose is PlanPurpose.PROFILE}
    latencies = tuple(gpu.switch_latency for gpu in view.gpus)
    excesses_s = []
    for observation in view.observations:
        plan = changes_of.get(observation.plan_id or "")
        if plan is None or not observation.is_regular:
            continue
        changes = tuple(plan.changes_of(r) for r in range(model.graph.num_ranks))
        simulated = simulate_switching(model.graph, model.profile, changes, latency=latencies)
        excesses_s.append(observation.own_time_s - simulated.iteration_time_s - model.bias_s)
    return median(excesses_s) if excesses_s else 0.0


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Clocks with the changes that bring them about, and what comes of them when every change is late."""

    clock_of: dict[Instruction, int]
    changes: tuple[tuple[ClockChange, ...], ...]
    simulated: SimulatedIteration

    @property
    def num_changes(self) -> int:
        """Clock changes in one iteration, all ranks."""
        return sum(len(own) for own in self.changes)


def _candidates(
    view: JobView,
    model: PipelineModel,
    cautious: PipelineProfile,
    solved: SolvedPlan,
    *,
    latencies: tuple[SwitchLatency, ...],
) -> list[_Candidate]:
    """Return the plan free to switch at every instruction, and plans with few switches."""
    free = dict(zip(model.graph.instructions, solved.sm_clocks_mhz, strict=True))
    planned = timeline(model.graph, solved.durations_s)
    found = [(free, clock_changes(planned, free, latency=latencies, profile=cautious))]
    for max_segments in MAX_SEGMENTS:
        plan = plan_segments(
            model.graph,
            cautious,
            solved,
            deadline_s=solved.iteration_time_s,
            max_segments=max_segments,
            latency=latencies,
            forced=view.target.is_forced,
            steps=SEARCH_STEPS,
        )
        if plan is not None:
            found.append((dict(zip(model.graph.instructions, plan.sm_clocks_mhz, strict=True)), plan.changes))
    return [
        _Candidate(
            clock_of,
            changes,
            simulate_switching(model.graph, model.profile, changes, latency=latencies),
        )
        for clock_of, changes in found
    ]


def _chosen(view: JobView, model: PipelineModel, cautious: PipelineProfile, solved: SolvedPlan) -> _Candidate:
    """Return the candidate with the fewest clock changes among those that cost about the least."""
    latencies = tuple(gpu.switch_latency for gpu in view.gpus)
    candidates = _candidates(view, model, cautious, solved, latencies=latencies)
    least_j = min(c.simulated.energy_j for c in candidates)
    return min(
        (c for c in candidates if c.simulated.energy_j <= (1 + FEWER_SWITCHES_RATIO) * least_j),
        key=lambda c: (c.num_changes, c.simulated.energy_j),
    )


# --- correcting ---


def _correction(view: JobView, tuned: list[ClockPlan]) -> ClockPlan:
    plan, number = tuned[-1], view.num_issued(PlanPurpose.TUNED) + 1
    target_s = view.target.iteration_time_s(view.baseline.iteration_time_s)
    measured = _settled_times_s(view.observations, plan.plan_id)
    is_in_force = view.issued_plans[-1].plan_id == plan.plan_id
    caution_ratio = plan.figure(CAUTION) or 0.0
    assert plan.predicted is not None
    planned_for = plan.figure(OWED)
    if planned_for is not None and abs(target_s / view.baseline.iteration_time_s - planned_for) > TARGET_MOVED_RATIO:
        # What was measured under another target says nothing of caution.
        why = f"another target: {target_s:.4g} s owed"
        return _tuned_plan(view, caution_ratio=caution_ratio, number=number, why=why)
    if is_in_force and len(measured) < MIN_ITERATIONS_TO_TIGHTEN:
        return plan
    if not measured:
        return _tuned_plan(view, caution_ratio=caution_ratio, number=number, why="again after full speed")
    if plan.figure(UNVERIFIED):
        why = "the job is, below the maximum clock, as its first planned iterations show"
        return _tuned_plan(view, caution_ratio=caution_ratio, number=number, why=why)
    off_s = median(measured) - target_s
    chance_s = view.baseline.iteration_sigma_s / math.sqrt(len(measured)) if measured else 0.0
    patience = 1 if number == 2 else 2
    is_slow = off_s > patience * TIGHTEN_ABOVE_RATIO * target_s + chance_s
    is_fast = off_s < -patience * LOOSEN_BELOW_RATIO * target_s - chance_s and len(measured) >= MIN_ITERATIONS_TO_LOOSEN
    planned_s, latency_s = plan.figure(SWITCH_LATENCY) or 0.0, _raise_latency_s(view)
    has_new_latency = abs(latency_s - planned_s) > NEW_LATENCY_RATIO * planned_s
    if is_in_force and not is_slow and not is_fast and not has_new_latency:
        return plan
    why = f"measured {median(measured):.4g} s, owed {target_s:.4g} s"
    if has_new_latency:
        # What was slow may have been late: the new leads are tried before more caution is.
        why += f", clock changes take {1000 * latency_s:.3g} ms, not {1000 * planned_s:.3g} ms"
        return _tuned_plan(view, caution_ratio=caution_ratio, number=number, why=why)
    caution_ratio += CAUTION_GAIN * off_s / target_s if off_s < GROSS_RATIO * target_s else GROSS_CAUTION_RATIO
    candidate = _tuned_plan(view, caution_ratio=caution_ratio, number=number, why=why)
    is_worth_it = (
        candidate.predicted is not None
        and candidate.predicted.energy_j < (1 - WORTH_A_CHANGE_RATIO) * plan.predicted.energy_j
    )
    return candidate if is_slow or not is_in_force or is_worth_it else plan


def _raise_latency_s(view: JobView) -> float:
    return max(gpu.switch_latency.raise_s for gpu in view.gpus)


def _settled_times_s(observations: tuple[IterationObservation, ...], plan_id: str) -> list[float]:
    """Return the regular iteration times of a plan, the first one (clocks still moving) left out."""
    return [o.own_time_s for o in observations if o.is_regular and o.plan_id == plan_id][1:]
