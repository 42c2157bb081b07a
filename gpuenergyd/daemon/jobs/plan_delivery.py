"""Plans on their way to the ranks that follow them: what each has not been given yet, and what it was given last."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpuenergyd.core.job.messages import SendPlan
from gpuenergyd.core.measurement.telemetry import RankIteration
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.wire.messages import PlanSlice


@dataclass(slots=True)
class PlanSlices:
    """The slices of one job: `waiting[r]` has rank r not been given yet, `given[r]` is the newest that it was given."""

    last_epoch: int = 0
    """Of the plan sent last."""
    waiting: dict[int, list[PlanSlice]] = field(default_factory=dict)
    given: dict[int, PlanSlice] = field(default_factory=dict)

    def add(self, command: SendPlan, gpus: Mapping[int, GpuView], *, is_part: bool) -> None:
        """Cut a plan into slices, one for each rank."""
        plan = command.plan
        self.last_epoch = command.plan_epoch
        for pp_rank, gpu in gpus.items():
            changes = tuple(
                (
                    str(change.instruction.kind),
                    change.instruction.microbatch_index,
                    change.instruction.chunk_index,
                    round(change.offset_s * 1e9),
                    change.sm_clock_mhz,
                )
                for change in plan.changes_of(pp_rank)
            )
            top_mhz = gpu.supported_sm_clocks_mhz[0] if is_part else 0
            plan_slice = PlanSlice(plan.plan_id, command.plan_epoch, command.apply_at_iteration, changes, top_mhz)
            self.waiting.setdefault(pp_rank, []).append(plan_slice)

    def end(self, pp_ranks: Iterable[int]) -> None:
        """Have ranks that are still there follow nothing any more."""
        for pp_rank in pp_ranks:
            self.waiting[pp_rank] = [PlanSlice("ended", self.last_epoch + 1, 0, ())]

    def take(self, pp_rank: int) -> tuple[PlanSlice, ...]:
        """Give a rank what it has not been given yet, oldest first."""
        new = tuple(self.waiting.pop(pp_rank, ()))
        if new:
            self.given[pp_rank] = new[-1]
        return new

    def for_reply_to(self, iteration: RankIteration) -> tuple[PlanSlice, ...]:
        """Return what the reply to a rank's report carries.

        A reply may be lost on its way. So the newest plan that was given is given again to a rank that ran an iteration
        of it by an older one; taking a plan twice changes nothing.
        """
        given = self.given.get(iteration.pp_rank)
        new = self.take(iteration.pp_rank)
        is_lost = (
            given is not None
            and iteration.plan_epoch < given.plan_epoch
            and iteration.iteration_index >= given.apply_at_iteration
        )
        return (given, *new) if given is not None and is_lost else new
