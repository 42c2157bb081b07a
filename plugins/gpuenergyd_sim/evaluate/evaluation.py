"""Energy and time of a policy on a virtual training, compared with full speed and with the best plan of equal time."""

from dataclasses import dataclass
from statistics import fmean

from gpuenergyd.core.job.messages import SendPlan
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.pipeline.graph import dependency_graph
from gpuenergyd.core.pipeline.plan import ClockPlan, baseline_plan
from gpuenergyd.core.pipeline.profile import with_waiting_power
from gpuenergyd.core.pipeline.waiting import waiting_power
from gpuenergyd.core.policy_api.policy import ClockPolicy, JobView, Lever, OfflinePlanner, OfflineRequest
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd_sim.driver.device_model import blocking_power_w
from gpuenergyd_sim.virtual_training.random_jobs import COMMUNICATION_LATENCY_S, TrueJob
from gpuenergyd_sim.virtual_training.training import VirtualTraining

NUM_MEASURED = 20
"""Number of iterations at the end of a run whose mean time and energy are the result."""


@dataclass(frozen=True, slots=True)
class Achieved:
    """Energy and time of an iteration at the end of a run, and the energy of all its iterations."""

    energy_j: float
    iteration_time_s: float
    total_energy_j: float


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """A policy's result; savings and slowdown are relative to full speed on the same training."""

    policy: str
    energy_j: float
    iteration_time_s: float
    saving_ratio: float
    slowdown_ratio: float
    regret_ratio: float
    """Relative excess over the energy of the best plan of equal time."""
    total_saving_ratio: float
    """Saving over the whole run, including the iterations in which the policy learned."""
    num_plans: int
    failure: str | None
    """The last error that the policy raised; None if it raised none."""


class _FullSpeed:
    def next_plan(self, view: JobView) -> ClockPlan:
        return view.issued_plans[-1] if view.issued_plans else baseline_plan()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Runs policies on one job, and compares them with the plans of a planner that knows the true tables."""

    job: TrueJob
    planner: OfflinePlanner
    max_slowdown_ratio: float
    num_iterations: int

    def full_speed(self) -> Achieved:
        return _achieved(self._run(_FullSpeed()))

    def result(self, name: str, policy: ClockPolicy, full_speed: Achieved) -> PolicyResult:
        run = self._run(policy)
        own = _achieved(run)
        return PolicyResult(
            policy=name,
            energy_j=own.energy_j,
            iteration_time_s=own.iteration_time_s,
            saving_ratio=1 - own.energy_j / full_speed.energy_j,
            slowdown_ratio=own.iteration_time_s / full_speed.iteration_time_s - 1,
            regret_ratio=own.energy_j / (self._best_energy_ratio(own, full_speed) * full_speed.energy_j) - 1,
            total_saving_ratio=1 - own.total_energy_j / full_speed.total_energy_j,
            num_plans=len(
                {plan_id for _, _, plan_id in run.history if plan_id is not None} - {baseline_plan().plan_id}
            ),
            failure=run.policy_failure,
        )

    def _run(self, policy: ClockPolicy) -> VirtualTraining:
        run = self.job.training(policy, JobRules(), max_slowdown_ratio=self.max_slowdown_ratio, levers=frozenset(Lever))
        run.run(self.num_iterations)
        return run

    def _best_energy_ratio(self, own: Achieved, full_speed: Achieved) -> float:
        """Return the ratio of the energy of the best plan of equal time to that at full speed, from the true tables.

        Its clocks change at once, and nothing is random. Both energies include the step after the pipeline, which no
        plan changes, at the power of a GPU that waits at the highest clock.
        """
        model, step_s = self.job.model, VirtualTraining.step_overhead_s
        points = ((mhz, blocking_power_w(model, mhz)) for mhz in self.job.clocks_mhz)
        pipeline_ratio = (own.iteration_time_s - step_s) / (full_speed.iteration_time_s - step_s)
        plan = self.planner(
            OfflineRequest(
                name="evaluate",
                profile=with_waiting_power(self.job.profile(), waiting_power(points, where=model.key)),
                schedule=self.job.schedule,
                graph=dependency_graph(self.job.schedule, communication_latency_s=COMMUNICATION_LATENCY_S),
                target=PerformanceTarget(max_slowdown_ratio=max(0.0, pipeline_ratio - 1)),
            )
        )
        step_j = self.job.schedule.num_ranks * step_s * blocking_power_w(model, model.max_sm_clock_mhz)
        return (plan.energy_j + step_j) / (plan.baseline_energy_j + step_j)


def _achieved(run: VirtualTraining) -> Achieved:
    """Return the means of the last iterations, without those that the daemon ran at full speed for comparison."""
    in_blocks = {
        command.apply_at_iteration + k
        for command in run.commands
        if isinstance(command, SendPlan) and command.num_iterations is not None
        for k in range(command.num_iterations)
    }
    last = [iteration for index, iteration in enumerate(run.history) if index not in in_blocks][-NUM_MEASURED:]
    return Achieved(
        energy_j=fmean(energy_j for _, energy_j, _ in last),
        iteration_time_s=fmean(time_s for time_s, _, _ in last),
        total_energy_j=sum(energy_j for _, energy_j, _ in run.history),
    )
