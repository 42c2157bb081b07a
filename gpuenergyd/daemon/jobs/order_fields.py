"""Status fields of a job's order of instructions: which one it runs, and what another one is predicted to save."""

from typing import Any

from gpuenergyd.core.job.job import Job
from gpuenergyd.core.pipeline.reorder import order_name


def order_fields(job: Job) -> dict[str, Any]:
    """Return the order of the plan in force, and the policy's advice; None where there is none."""
    plan, advice = job.current_plan, job.knowledge.reordering.advice
    return {
        "order": order_name(plan.orders) if plan.orders else None,
        "order_advice": advice.text if advice else None,
        "order_saving_ratio": advice.saving_ratio if advice else None,
        "plain_order_saving_ratio": advice.plain_saving_ratio if advice else None,
        "own_order_saving_ratio": advice.own_order_saving_ratio if advice else None,
        "order_held_microbatches": advice.held_microbatches if advice else None,
        "order_refusal": advice.refusal if advice else None,
    }
