"""EnvPipe's policy: full speed on the outer envelope of the pipeline, the clock of least energy inside it.

Kept for comparison and because it needs little: no energy of single instructions, few clock changes. Online it first
runs all GPUs at a few clocks, as the published planner does, then plans on the measured times. When the plan measures
slower than the target, its clocks are raised; they are never lowered.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import InstructionClass, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, RankClocks, baseline_plan
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd.core.policy_api.policy import JobView, Lever, OfflinePlan, OfflineRequest
from gpuenergyd.errors import TargetError, UsageError
from gpuenergyd_other_policies.envpipe import (
    BALANCED_STEP_MHZ,
    VALLEY_STEP_MHZ,
    EnvelopeMode,
    EnvelopePlan,
    extra_warm_up,
    plan_envelope,
    profiled_clocks,
    valleys,
)
from gpuenergyd_policies.full_speed import plan_at_full_speed, reason_for_full_speed
from gpuenergyd_policies.observed_pipeline import observed_graph
from gpuenergyd_policies.planning.offline_requests import requested_caps, require_plain, unproven_plan
from gpuenergyd_policies.planning.plan_evaluation import baseline
from gpuenergyd_policies.planning.switching.requests import clock_changes
from gpuenergyd_policies.setting_measurements import iterations_by_setting
from gpuenergyd_policies.uniform_settings import Setting, common_clocks_mhz, setting_plan

_IterationsByClock = Mapping[int, Sequence[IterationObservation]]

LOWEST_CLOCK_RATIO = 0.55
"""Lowest clock measured, as a share of the highest; the published planner uses about the same."""
ITERATIONS_TO_EVALUATE = 4
"""Undisturbed iterations measured before clocks are raised."""
TOLERATED_SLOWDOWN_RATIO = 0.005
"""Excess of the measured iteration time over the target above which clocks are raised."""


class Envelope:
    """Measures a few uniform clocks, then runs the envelope at full speed and everything else at lower clocks."""

    def next_plan(self, view: JobView) -> ClockPlan:
        """Return a plan for the next clock to measure, or the tuned plan, one step faster each time it was too slow."""
        clocks_mhz = common_clocks_mhz(view)
        if not clocks_mhz:
            return baseline_plan(reason="the GPUs of this job have no clock in common")
        if (reason := reason_for_full_speed(view)) is not None:
            return plan_at_full_speed(view, reason)
        by_setting = iterations_by_setting(view)
        measured = {setting.value: point for setting, point in by_setting.items() if setting.lever is Lever.CLOCKS}
        for mhz in _clocks_to_try(clocks_mhz):
            if mhz not in measured:
                setting = Setting(Lever.CLOCKS, mhz)
                reason = f"measuring {setting} on all GPUs"
                return setting_plan(view, setting, PlanPurpose.TRIAL, policy="envelope", reason=reason)
        valleys_mhz = _measured_valleys(measured, len(view.gpus))
        if valleys_mhz is None:
            return baseline_plan(reason="no clock of least energy is known: no energy was measured")
        return _tuned_plan(view, measured, valleys_mhz, clocks_mhz)


def _clocks_to_try(clocks_mhz: Sequence[int]) -> list[int]:
    """Return the clocks of the profiling run, in descending order."""
    lowest_mhz = LOWEST_CLOCK_RATIO * clocks_mhz[0]
    coarse = [mhz for mhz in clocks_mhz[1:] if mhz % VALLEY_STEP_MHZ == 0 and mhz >= lowest_mhz]
    if not coarse:  # no supported clock is such a multiple
        usable = [mhz for mhz in clocks_mhz[1:] if mhz >= lowest_mhz]
        coarse = usable[:: max(1, len(usable) // 6)]
    return [clocks_mhz[0], *coarse]


def _measured_valleys(measured: _IterationsByClock, num_ranks: int) -> tuple[int, ...] | None:
    """Return the clock of least energy of each rank; None if there is a rank without energies."""
    result = []
    for rank in range(num_ranks):
        known = []
        for mhz, iterations in measured.items():
            own = [energy for seen in iterations for energy in seen.ranks if energy.pp_rank == rank]
            energies_j = [energy.energy_j for energy in own if energy.energy_j is not None]
            if energies_j:
                known.append((median(energies_j), mhz))
        if not known:
            return None
        result.append(min(known)[1])
    return tuple(result)


def _tuned_plan(
    view: JobView, measured: _IterationsByClock, valleys_mhz: Sequence[int], clocks_mhz: Sequence[int]
) -> ClockPlan:
    tuned = [plan for plan in view.issued_plans if plan.purpose is PlanPurpose.TUNED]
    num_issued = view.num_issued(PlanPurpose.TUNED)
    num_raises = max(0, num_issued - 1)
    target_s = view.target.iteration_time_s(view.baseline.iteration_time_s)
    why = "envelope at full speed, lower clocks elsewhere"
    if tuned:
        times_s = [o.own_time_s for o in view.observations if o.is_regular and o.plan_id == tuned[-1].plan_id]
        if len(times_s) < ITERATIONS_TO_EVALUATE or median(times_s) <= target_s * (1 + TOLERATED_SLOWDOWN_RATIO):
            return tuned[-1]
        num_raises += 1
        why = f"clocks raised: measured {median(times_s):.4g} s, target {target_s:.4g} s"
    graph = observed_graph(view)
    profile = _time_profile(measured, clocks_mhz)
    if any(i.instruction_class not in profile.classes for i in graph.instructions):
        return baseline_plan(reason="cannot plan: some instructions have no measured time")
    raised = [min(mhz + num_raises * BALANCED_STEP_MHZ, clocks_mhz[0]) for mhz in valleys_mhz]
    raised = [min(mhz for mhz in clocks_mhz if mhz >= wanted) for wanted in raised]
    evaluated = plan_envelope(graph, profile, raised).evaluation
    clocks = dict(zip(graph.instructions, evaluated.sm_clocks_mhz, strict=True))
    changes = clock_changes(evaluated.timeline, clocks, latency=view.switch_latencies)
    return ClockPlan(
        plan_id=view.plan_id(f"envelope-{num_issued + 1}"),
        purpose=PlanPurpose.TUNED,
        ranks=tuple(
            RankClocks(pp_rank, tuple(clocks[i] for i in order), changes[pp_rank])
            for pp_rank, order in enumerate(view.schedule.orders)
        ),
        reason=why,
    )


def _time_profile(measured: _IterationsByClock, clocks_mhz: Sequence[int]) -> PipelineProfile:
    """Return times at every clock down to the lowest measured, linearly interpolated; energies are zero."""
    options: dict[InstructionClass, list[ClockOption]] = defaultdict(list)
    for mhz in sorted(measured, reverse=True):
        for key, time_s in _times_at(mhz, measured[mhz]).items():
            options[key].append(ClockOption(mhz, time_s, 0.0))
    classes = {}
    for key, points in options.items():
        known = InstructionProfile(tuple(points))
        lowest_mhz = known.options[-1].sm_clock_mhz
        classes[key] = InstructionProfile(
            tuple(ClockOption(mhz, known.interpolated(mhz).time_s, 0.0) for mhz in clocks_mhz if mhz >= lowest_mhz)
        )
    return PipelineProfile(classes, blocking_power_w=0.0)


def _times_at(sm_clock_mhz: int, iterations: Sequence[IterationObservation]) -> dict[InstructionClass, float]:
    """Return the median times of the instructions that ran at a clock."""
    times_s: dict[InstructionClass, list[float]] = defaultdict(list)
    for seen in iterations:
        for sample in seen.instruction_samples:
            if sample.main_share.sm_clock_mhz == sm_clock_mhz:
                times_s[sample.instruction_class].append(sample.time_s)
    return {key: median(known) for key, known in times_s.items()}


def plan_offline(request: OfflineRequest) -> OfflinePlan:
    """Return EnvPipe's plan for tables; options `mode` (uniform, envelope, balanced, greedy) and `step_mhz`.

    Raises:
        TargetError: the plan is slower than the target.
        UsageError: `mode` is unknown, or `step_mhz` is not a whole number of MHz.
    """
    began_cpu_s = time.process_time()
    profile = request.profile
    require_plain(request)
    mode, step_mhz = _mode(request.options), _step_mhz(request.options)
    valleys_mhz = valleys(request.graph, profile, profiled_clocks(profile))
    graph, extra_inflight = request.graph, tuple[int, ...]()
    if request.extra_inflight is not None:
        num_microbatches = len({i.microbatch_index for i in graph.instructions})
        extra_inflight = extra_warm_up(
            profile, valleys_mhz, num_microbatches=num_microbatches, caps=requested_caps(request, graph.num_ranks)
        )
        graph = dependency_graph(
            one_forward_one_backward(graph.num_ranks, num_microbatches, extra_inflight),
            communication_latency_s=float(request.options.get("communication_latency_s", "0")),
        )
    planned: EnvelopePlan = plan_envelope(graph, profile, valleys_mhz, mode=mode, step_mhz=step_mhz)
    target_s = request.target.iteration_time_s(baseline(request.graph, profile).iteration_time_s)
    if planned.evaluation.iteration_time_s > target_s:
        raise TargetError(
            f"target {target_s:.6g} s: policy envelope in mode {mode} takes {planned.evaluation.iteration_time_s:.6g} s"
        )
    plan = unproven_plan(
        replace(request, graph=graph), planned.evaluation, solve_cpu_s=time.process_time() - began_cpu_s
    )
    return replace(plan, extra_inflight=extra_inflight)


def _mode(options: Mapping[str, str]) -> EnvelopeMode:
    name = options.get("mode", EnvelopeMode.BALANCED.value)
    try:
        return EnvelopeMode(name)
    except ValueError:
        raise UsageError(f"policy envelope: unknown mode {name!r}; valid: {', '.join(EnvelopeMode)}") from None


def _step_mhz(options: Mapping[str, str]) -> int | None:
    text = options.get("step_mhz")
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"policy envelope: step_mhz {text!r} must be a whole number >= 1")
    return int(text)
