"""An SM clock for every instruction of an iteration, and the few clock changes that bring it about."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule
from gpuenergyd.errors import PlanError


class PlanPurpose(StrEnum):
    """Why a plan runs: what its iterations may be compared with."""

    BASELINE = "baseline"
    """Un-tuned: the reference of every saving."""
    PROFILE = "profile"
    """Tries clocks to learn what they cost."""
    TUNED = "tuned"
    """Saves energy at the owed iteration time."""
    PREDICTED = "would_be"
    """Never carried out: what a policy would aim for if it were allowed to set clocks."""


@dataclass(frozen=True, slots=True)
class ClockChange:
    """Ask for a clock `offset_s` after an instruction has begun.

    A slower clock is asked for when the slow instruction begins, a faster one ahead of need, during the instruction
    before: a late clock then costs a little energy and never time.
    """

    instruction: Instruction
    offset_s: float
    sm_clock_mhz: int


@dataclass(frozen=True, slots=True)
class RankClocks:
    """The clocks of one rank: `sm_clocks_mhz[k]` for the k-th instruction of its order; None runs un-tuned."""

    pp_rank: int
    sm_clocks_mhz: tuple[int | None, ...]
    changes: tuple[ClockChange, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanPrediction:
    """What the planner expects of its plan; `lower_bound_j` is proven for every plan with that iteration time."""

    iteration_time_s: float
    energy_j: float
    lower_bound_j: float | None = None
    baseline_time_s: float | None = None
    baseline_energy_j: float | None = None


@dataclass(frozen=True, slots=True)
class ClockPlan:
    """One iteration's clocks for all ranks of a pipeline; an empty `ranks` runs everything un-tuned."""

    plan_id: str
    purpose: PlanPurpose
    ranks: tuple[RankClocks, ...] = ()
    predicted: PlanPrediction | None = None
    reason: str = ""
    figures: tuple[tuple[str, float], ...] = ()
    """Numbers that a policy without memory wants to find again in `JobView.issued_plans`."""

    def figure(self, name: str) -> float | None:
        """Return one of the policy's own numbers."""
        return dict(self.figures).get(name)

    def changes_of(self, pp_rank: int) -> tuple[ClockChange, ...]:
        """Return the clock changes of one rank; none means un-tuned."""
        for rank in self.ranks:
            if rank.pp_rank == pp_rank:
                return rank.changes
        return ()

    def num_switches(self, pp_rank: int) -> int:
        """Return how often a rank's clock really changes in one iteration."""
        clocks = [change.sm_clock_mhz for change in self.changes_of(pp_rank)]
        return sum(a != b for a, b in pairwise(clocks))


BASELINE_PLAN_ID = "baseline"


def baseline_plan(plan_id: str = BASELINE_PLAN_ID, *, reason: str = "un-tuned") -> ClockPlan:
    """Return the plan that leaves every GPU as it was found."""
    return ClockPlan(plan_id=plan_id, purpose=PlanPurpose.BASELINE, reason=reason)


def full_speed_plan(
    plan_id: str, schedule: Schedule, supported_sm_clocks_mhz: Sequence[Sequence[int]], *, reason: str
) -> ClockPlan:
    """Return the plan that holds every GPU at its maximum clock: full speed without giving up the lease."""
    ranks = []
    for pp_rank, order in enumerate(schedule.orders):
        top = max(supported_sm_clocks_mhz[pp_rank])
        ranks.append(RankClocks(pp_rank, (top,) * len(order), constant_clock_changes(order, top)))
    return ClockPlan(plan_id, PlanPurpose.BASELINE, tuple(ranks), reason=reason)


def constant_clock_changes(order: Sequence[Instruction], sm_clock_mhz: int) -> tuple[ClockChange, ...]:
    """Return the one change that holds a rank at one clock for the whole iteration."""
    return (ClockChange(order[0], 0.0, sm_clock_mhz),)


def check_plan(plan: ClockPlan, schedule: Schedule, supported_sm_clocks_mhz: Sequence[Sequence[int]]) -> None:
    """Check that a plan fits its pipeline and its GPUs; `supported_sm_clocks_mhz[r]` belongs to rank r.

    Raises:
        PlanError: a rank, instruction or clock that does not exist, or an offset that is not a time; a plan that was
            made for nobody to follow.
    """
    if plan.purpose is PlanPurpose.PREDICTED:
        raise PlanError(f"plan {plan.plan_id!r} is a would-be plan: only where no clock may be set is one asked for")
    for rank in plan.ranks:
        if not 0 <= rank.pp_rank < schedule.num_ranks:
            raise PlanError(f"plan {plan.plan_id!r}: no rank {rank.pp_rank}; the pipeline has {schedule.num_ranks}")
        order = schedule.orders[rank.pp_rank]
        if len(rank.sm_clocks_mhz) != len(order):
            raise PlanError(
                f"plan {plan.plan_id!r}: {len(rank.sm_clocks_mhz)} clocks for rank {rank.pp_rank},"
                f" which runs {len(order)} instructions"
            )
        supported = set(supported_sm_clocks_mhz[rank.pp_rank])
        known = set(order)
        wanted = {clock for clock in rank.sm_clocks_mhz if clock is not None}
        wanted |= {change.sm_clock_mhz for change in rank.changes}
        if not wanted <= supported:
            raise PlanError(
                f"plan {plan.plan_id!r}: rank {rank.pp_rank} cannot run at {sorted(wanted - supported)} MHz;"
                f" supported: {min(supported)} to {max(supported)} MHz"
            )
        for change in rank.changes:
            if change.instruction not in known:
                raise PlanError(f"plan {plan.plan_id!r}: rank {rank.pp_rank} does not run {change.instruction}")
            if not 0.0 <= change.offset_s < 3600.0:
                raise PlanError(f"plan {plan.plan_id!r}: offset {change.offset_s} s must be in [0, 3600)")


def instruction_key(instruction: Instruction) -> tuple[InstructionKind, int, int]:
    """Return what identifies an instruction within its rank: kind, microbatch, chunk."""
    return instruction.kind, instruction.microbatch_index, instruction.chunk_index
