"""Clock policy that runs every GPU one clock step below its highest."""

from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, RankClocks, constant_clock_changes
from gpuenergyd.core.policy_api.policy import JobView


class OneStepDown:
    """Runs every GPU at its second-highest clock."""

    def next_plan(self, view: JobView) -> ClockPlan:
        """Return the same plan every time; repeating the current plan has no effect."""
        ranks = []
        for pp_rank, (gpu, order) in enumerate(zip(view.gpus, view.schedule.orders, strict=True)):
            sm_clock_mhz = gpu.supported_sm_clocks_mhz[1]  # highest first
            ranks.append(RankClocks(pp_rank, (sm_clock_mhz,) * len(order), constant_clock_changes(order, sm_clock_mhz)))
        return ClockPlan(
            plan_id=view.plan_id("one-step-down"),
            purpose=PlanPurpose.TUNED,
            ranks=tuple(ranks),
            reason=f"one step below the highest clock on {len(ranks)} GPUs",
        )
