"""Plans with perfect knowledge of a virtual training, and their energy: the optimum that policies are compared with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd.core.policy_api.policy import ClockPolicy, JobView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd_policies.bubble_aware.model import PipelineModel
from gpuenergyd_policies.bubble_aware.planning import plan_from_model
from gpuenergyd_policies.learning.calls import CallCost
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import CLOCKS_MHZ, a100_waiting_power_w

LOWEST_CLOCK_RATIO = 0.5
WAITING_CLOCKS_MHZ = (1410, 1110)
"""Clocks of waiting GPUs: power depends on them, but a planner uses one value, so both ends are evaluated."""


def true_profile(
    run: VirtualTraining,
    slowness: Callable[[int], float],
    waiting_clock_mhz: int,
    *,
    ceiling_mhz: Callable[[int], int] = lambda _: CLOCKS_MHZ[0],
) -> PipelineProfile:
    """Return the true times and energies of a virtual pipeline, with a slowness factor per rank."""
    clocks_mhz = [mhz for mhz in CLOCKS_MHZ if mhz >= LOWEST_CLOCK_RATIO * CLOCKS_MHZ[0]]
    classes = {}
    for (rank, kind), work in run.work.items():
        options = []
        for mhz in clocks_mhz:
            reached_mhz = min(mhz, ceiling_mhz(rank))
            time_s = work.time_s(reached_mhz) * slowness(rank)
            if mhz in {reached_mhz, CLOCKS_MHZ[0]}:
                options.append(ClockOption(mhz, time_s, time_s * work.power_w(reached_mhz)))
        classes[InstructionClass(rank, kind)] = InstructionProfile(tuple(options))
    return PipelineProfile(classes, a100_waiting_power_w(waiting_clock_mhz))


@dataclass
class Informed:
    """A policy with perfect knowledge, which replans when its target changes."""

    profile: PipelineProfile
    target: PerformanceTarget | None = None
    calls: CallCost = field(default_factory=CallCost.none)
    max_segments: tuple[int, ...] | None = None

    def next_plan(self, view: JobView) -> ClockPlan:
        """Return the plan from the true profile, and keep it until the target changes."""
        if view.issued_plans and view.target == self.target:
            return view.issued_plans[-1]
        self.target = view.target
        return plan_from_model(
            view,
            PipelineModel.of(view, self.profile, self.calls),
            caution_ratio=0.0,
            number=view.num_issued() + 1,
            why="planned from the true profile",
            max_segments=self.max_segments,
        )


def least_energy_j(
    make: Callable[[ClockPolicy], VirtualTraining],
    slowness: Callable[[int], float] = lambda _: 1.0,
    *,
    ceiling_mhz: Callable[[int], int] = lambda _: CLOCKS_MHZ[0],
) -> float:
    """Return the energy of an iteration under a plan from perfect knowledge, measured by running it.

    Args:
        make: returns an undisturbed training of the pipeline under a policy.
        slowness: factor on all times of a rank.
        ceiling_mhz: highest clock of a rank's GPU.
    """
    found = []
    for waiting_clock_mhz in WAITING_CLOCKS_MHZ:
        run = make(Informed(PipelineProfile({}, 0.0)))
        run.policy = Informed(true_profile(run, slowness, waiting_clock_mhz, ceiling_mhz=ceiling_mhz))
        run.slowdown_of = lambda rank, _: slowness(rank)
        run.ceiling_of = lambda rank, _: ceiling_mhz(rank)
        run.run(22)
        found.append(median(energy_j for _, energy_j, plan in run.history[-6:] if plan == "tuned-1"))
    return float(min(found))
