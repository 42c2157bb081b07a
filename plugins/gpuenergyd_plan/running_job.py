"""A running job as the planner's input: its fitted profile, latencies and target, and the plan now in force."""

import json
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpuenergyd.cli.job.finding import find_job
from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.client.environment import find_socket_path
from gpuenergyd.core.pipeline.fitted import with_clocks
from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction, Schedule
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.errors import GpuEnergyError, UsageError
from gpuenergyd.wire import MAX_REPLY_BYTES
from gpuenergyd.wire.daemon_codec import decode
from gpuenergyd.wire.operator_messages import JobFit
from gpuenergyd_plan.inputs import PlanInput, plan_input
from gpuenergyd_plan.profiles.instance_json import PlannerInstance
from gpuenergyd_plan.tables import PlanOptions
from gpuenergyd_policies.planning.plan_evaluation import baseline, evaluate_clocks

_LIMIT_S = 60.0
"""The policy host may be busy computing a plan."""


@dataclass(frozen=True, slots=True)
class EvaluatedPlan:
    """The plan that a job follows now, with the time and energy that the fitted profile gives it."""

    schedule: Schedule
    graph: DependencyGraph
    profile: PipelineProfile
    """The fitted profile, extended to all clocks of the plan."""
    sm_clocks_mhz: dict[Instruction, int]
    iteration_time_s: float
    """Iteration time without the part outside the graph, and without the latency of clock changes."""
    energy_j: float


@dataclass(frozen=True, slots=True)
class RunningJobInput:
    """The planner's input for a running job."""

    fit: JobFit
    given: PlanInput
    content: PlannerInstance
    in_force: EvaluatedPlan | None
    """None while the job runs at full speed, or under power limits only."""

    def figures(self) -> dict[str, Any]:
        """Return the JSON fields about the job; those of the plan are added elsewhere."""
        plan, in_force, fitted = self.fit.plan, self.in_force, self.fit.fitted
        predicted = plan.predicted
        return {
            "job_id": self.fit.job_id,
            "job_name": self.fit.job_name,
            "policy": self.fit.policy,
            "phase": self.fit.phase,
            "target_time_s": fitted.target_time_s,
            "bias_s": fitted.bias_s,
            "in_force": None
            if in_force is None
            else {
                "plan_id": plan.plan_id,
                "iteration_time_s": in_force.iteration_time_s,
                "energy_j": in_force.energy_j,
                "predicted_iteration_time_s": predicted.iteration_time_s if predicted else None,
                "predicted_energy_j": predicted.energy_j if predicted else None,
            },
        }


def running_job_input(name: str, socket: str | None, options: PlanOptions) -> RunningJobInput:
    """Ask the daemon for a job's fitted profile, and return it as the planner's input.

    If the options set no target, the job's own is used; slowdowns and times refer to whole iterations of the job.

    Raises:
        UsageError: no such job runs, or an option contradicts it.
        GpuEnergyError: the daemon does not answer, or has no profile of the job.
    """
    with closing(DaemonClient(find_socket_path(socket), limit_s=_LIMIT_S)) as client:
        job_id = find_job(client.get_status(), name)["job_id"]
        answer = client.get(f"/v1/jobs/{quote(job_id, safe='')}/fit")
    fit = decode(json.dumps(answer).encode(), JobFit, max_bytes=2 * MAX_REPLY_BYTES)
    fitted = fit.fitted
    profile, graph = fitted.profile, fitted.graph_of(fitted.schedule)
    content = PlannerInstance(f"job {job_id}", fitted.schedule, graph, profile)
    given = plan_input(Path(f"job {job_id}"), _with_deadline(fit, options), content)
    return RunningJobInput(fit, given, content, _in_force(fit, profile))


def _with_deadline(fit: JobFit, options: PlanOptions) -> PlanOptions:
    """Return options whose target is a time for the graph, without the time that an iteration takes outside it."""
    fitted = fit.fitted
    if options.power_cap_w is not None:
        return options
    if options.slowdown is not None and options.target_s is not None:
        raise UsageError("--max-slowdown and --target-s: give only one of them")
    if options.target_s is not None:
        return replace(options, target_s=options.target_s - fitted.bias_s)
    if options.slowdown is None:
        return replace(options, target_s=fitted.deadline_s)
    profile, graph = fitted.profile, fitted.graph_of(fitted.schedule)
    full_speed_s = baseline(graph, profile).iteration_time_s
    target_s = full_speed_s + options.slowdown * (full_speed_s + fitted.bias_s)
    return replace(options, slowdown=None, target_s=target_s)


def _in_force(fit: JobFit, profile: PipelineProfile) -> EvaluatedPlan | None:
    plan, fitted = fit.plan, fit.fitted
    if not any(clock_mhz for rank in plan.ranks for clock_mhz in rank.sm_clocks_mhz):
        return None
    schedule = plan.schedule(fitted.schedule)
    try:
        clocks = _clocks_of(plan, schedule, profile)
    except ValueError:
        raise GpuEnergyError(f"job {fit.job_id}: the plan in force is for another order; ask again") from None
    graph, known = fitted.graph_of(schedule), with_clocks(profile, clocks)
    evaluated = evaluate_clocks(graph, known, [clocks[i] for i in graph.instructions])
    return EvaluatedPlan(schedule, graph, known, clocks, evaluated.iteration_time_s, evaluated.energy_j)


def _clocks_of(plan: ClockPlan, schedule: Schedule, profile: PipelineProfile) -> dict[Instruction, int]:
    """Return a plan's clock of each instruction of a schedule; the highest where the plan does not set one."""
    clocks = {i: profile[i.instruction_class].at_max_clock.sm_clock_mhz for order in schedule.orders for i in order}
    for rank in plan.ranks:
        for instruction, clock_mhz in zip(schedule.orders[rank.pp_rank], rank.sm_clocks_mhz, strict=True):
            clocks[instruction] = clock_mhz or clocks[instruction]
    return clocks
