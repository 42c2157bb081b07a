"""Unit tests of policies: a view of a job, and a simulated job that runs plans instantly and without noise.

    job = SimulatedJob(one_forward_one_backward(4, 8), max_slowdown_ratio=0.05)
    plan = job.run_policy(MyPolicy(), 20)
    assert job.observations[-1].energy_j < job.baseline.energy_j

Clocks take effect at once. The daemon's handling of a policy (time limits, guard, blocks at full speed) is not
included; `gpuenergyd demo --policy NAME` has all of that.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from gpuenergyd.core.measurement.observation import (
    ClockShare,
    InstructionSample,
    IterationObservation,
    RankEnergy,
    TimeAtClock,
)
from gpuenergyd.core.pipeline.graph import (
    Instruction,
    InstructionClass,
    InstructionKind,
    Schedule,
    dependency_graph,
    one_forward_one_backward,
)
from gpuenergyd.core.pipeline.plan import ClockPlan, baseline_plan, check_plan
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile, instruction_profile
from gpuenergyd.core.pipeline.reorder import OrderAdvice
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd.core.policy_api.policy import BaselineView, ClockPolicy, GpuView, JobView, ReorderView
from gpuenergyd.core.policy_api.target import PerformanceTarget

A100_SM_CLOCKS_MHZ = tuple(range(1410, 195, -15))
"""The SM clocks of an A100, highest first."""
BASELINE_ITERATIONS = 10
_SWITCH_LATENCY_S = 0.001
_BLOCKING_POWER_W = 80.0
_TIMES_S = {InstructionKind.F: 0.01, InstructionKind.B: 0.02, InstructionKind.I: 0.01, InstructionKind.W: 0.01}
"""Time of each instruction at the highest clock, for a stage of scale 1."""
_MEMORY_SHARE = 0.3
_STATIC_POWER_W, _DYNAMIC_POWER_W = 120.0, 280.0
_SCALES = (1.0, 0.9, 1.0, 1.1)


def job_view(
    schedule: Schedule | None = None,
    *,
    supported_sm_clocks_mhz: Sequence[int] = A100_SM_CLOCKS_MHZ,
    max_slowdown_ratio: float = 0.0,
    baseline_time_s: float = 1.0,
    baseline_energy_j: float | None = 100.0,
    observations: Iterable[IterationObservation] = (),
    issued_plans: Iterable[ClockPlan] = (),
) -> JobView:
    """Return the view of a job on identical GPUs, by default two stages with four microbatches.

    Other fields are set with `dataclasses.replace`.
    """
    schedule = schedule or one_forward_one_backward(2, 4)
    return JobView(
        job_id="job",
        schedule=schedule,
        gpus=tuple(
            GpuView(f"GPU-{rank}", "simulated", tuple(supported_sm_clocks_mhz), _SWITCH_LATENCY_S)
            for rank in range(schedule.num_ranks)
        ),
        target=PerformanceTarget(max_slowdown_ratio=max_slowdown_ratio),
        baseline=BaselineView(baseline_time_s, baseline_energy_j, BASELINE_ITERATIONS),
        observations=tuple(observations),
        issued_plans=tuple(issued_plans),
    )


def pipeline_profile(
    schedule: Schedule, *, scales: Sequence[float] = _SCALES, sm_clocks_mhz: Sequence[int] = A100_SM_CLOCKS_MHZ
) -> PipelineProfile:
    """Return time and energy of every instruction of a schedule at each clock.

    Rank r has `scales[r]` times the work of a rank of scale 1 (repeated for more ranks). 30 % of the time does not
    depend on the clock; power rises with the cube of the clock, from 120 W to 400 W.
    """
    top = max(sm_clocks_mhz)

    def option(key: InstructionClass, mhz: int) -> ClockOption:
        full_speed_s = _TIMES_S[key.kind] * scales[key.pp_rank % len(scales)]
        time_s = full_speed_s * (_MEMORY_SHARE + (1.0 - _MEMORY_SHARE) * top / mhz)
        return ClockOption(mhz, time_s, time_s * (_STATIC_POWER_W + _DYNAMIC_POWER_W * (mhz / top) ** 3))

    classes = {i.instruction_class for order in schedule.orders for i in order}
    return PipelineProfile(
        {key: instruction_profile((option(key, mhz) for mhz in sm_clocks_mhz), where=str(key)) for key in classes},
        _BLOCKING_POWER_W,
    )


class SimulatedJob:
    """A job whose iterations take the times and energies of a profile; its first ten run at full speed."""

    def __init__(
        self,
        schedule: Schedule,
        profile: PipelineProfile | None = None,
        *,
        max_slowdown_ratio: float = 0.0,
        measures_energy: bool = True,
    ) -> None:
        self.schedule = schedule
        self.profile = profile or pipeline_profile(schedule)
        self.target = PerformanceTarget(max_slowdown_ratio=max_slowdown_ratio)
        self.plans: list[ClockPlan] = []
        """The plans issued until now; the first is the baseline."""
        self.observations: list[IterationObservation] = []
        self._measures_energy = measures_energy
        self._order_advice: OrderAdvice | None = None
        self._graph = dependency_graph(schedule)
        self._clocks_mhz = tuple(
            tuple(option.sm_clock_mhz for option in self.profile[order[0].instruction_class].options)
            for order in schedule.orders
        )
        self.run(baseline_plan(), BASELINE_ITERATIONS)
        first = self.observations[0]
        self.baseline = BaselineView(first.iteration_time_s, first.energy_j, BASELINE_ITERATIONS)

    def view(self) -> JobView:
        """Return the job as a policy sees it now."""
        return JobView(
            job_id="job",
            schedule=self.schedule,
            gpus=tuple(
                GpuView(f"GPU-{rank}", "simulated", clocks_mhz, _SWITCH_LATENCY_S)
                for rank, clocks_mhz in enumerate(self._clocks_mhz)
            ),
            target=self.target,
            baseline=self.baseline,
            observations=tuple(self.observations),
            issued_plans=tuple(self.plans),
            reorder=ReorderView(advice=self._order_advice),
        )

    def run_policy(self, policy: ClockPolicy, num_iterations: int) -> ClockPlan:
        """Run iterations, asking the policy for a plan before each one; return the last plan.

        Raises:
            PlanError: a plan does not fit the pipeline or its GPUs; the daemon would refuse it.
        """
        plan = self.plans[-1]
        for _ in range(num_iterations):
            plan = policy.next_plan(self.view())
            self.run(plan)
        return plan

    def run(
        self, plan: ClockPlan, num_iterations: int = 1, *, delay_ratio: float = 0.0, is_regular: bool = True
    ) -> None:
        """Run iterations under a plan; `delay_ratio` makes them that much longer than their instructions.

        Raises:
            PlanError: the plan does not fit the pipeline or its GPUs; the daemon would refuse it.
        """
        check_plan(plan, self.schedule, self._clocks_mhz)
        self._order_advice = plan.order_advice or self._order_advice
        if not self.plans or self.plans[-1].plan_id != plan.plan_id:
            self.plans.append(plan)
        for _ in range(num_iterations):
            self.observations.append(self._iteration(plan, delay_ratio, is_regular=is_regular))

    def _iteration(self, plan: ClockPlan, delay_ratio: float, *, is_regular: bool) -> IterationObservation:
        clocks_mhz = self._clocks_of(plan)
        options = {i: self.profile[i.instruction_class].at_clock(mhz) for i, mhz in clocks_mhz.items()}
        drawn = timeline(self._graph, [options[i].time_s for i in self._graph.instructions])
        time_s = drawn.iteration_time_s * (1.0 + delay_ratio)
        ran: dict[InstructionClass, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for instruction, mhz in clocks_mhz.items():
            ran[instruction.instruction_class][mhz] += 1
        samples = tuple(
            InstructionSample(
                key.pp_rank,
                key.kind,
                (ClockShare(mhz, self.profile[key].at_clock(mhz).time_s),),
                count,
                key.chunk_index,
            )
            for key, counts in ran.items()
            for mhz, count in counts.items()
        )
        return IterationObservation(
            iteration_index=len(self.observations),
            plan_id=plan.plan_id,
            iteration_time_s=time_s,
            instruction_samples=samples,
            ranks=tuple(
                self._rank_energy(rank, [options[i] for i in order], samples, time_s)
                for rank, order in enumerate(self.schedule.orders)
            ),
            is_regular=is_regular,
        )

    def _clocks_of(self, plan: ClockPlan) -> dict[Instruction, int]:
        """Return the clock of every instruction; None in a plan keeps the clock of the instruction before."""
        of_rank = {rank.pp_rank: rank.sm_clocks_mhz for rank in plan.ranks}
        found: dict[Instruction, int] = {}
        for pp_rank, order in enumerate(self.schedule.orders):
            clock_mhz = self._clocks_mhz[pp_rank][0]
            for instruction, planned_mhz in zip(order, of_rank.get(pp_rank, (None,) * len(order)), strict=True):
                clock_mhz = planned_mhz or clock_mhz
                found[instruction] = clock_mhz
        return found

    def _rank_energy(
        self, pp_rank: int, options: Sequence[ClockOption], samples: Sequence[InstructionSample], time_s: float
    ) -> RankEnergy:
        own = [sample for sample in samples if sample.pp_rank == pp_rank]
        waiting_s = time_s - sum(option.time_s for option in options)
        energy_j = sum(option.energy_j for option in options) + self.profile.blocking_power_w * waiting_s
        time_at = [
            TimeAtClock(sample.kind, share.sm_clock_mhz, sample.count * share.time_s, sample.chunk_index)
            for sample in own
            for share in sample.shares
        ]
        waiting = TimeAtClock(None, options[-1].sm_clock_mhz, waiting_s)
        return RankEnergy(pp_rank, time_s, energy_j if self._measures_energy else None, (waiting, *time_at))
