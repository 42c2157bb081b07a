"""Figures of a tuned plan, from which its successors start."""

from enum import StrEnum


class Figure(StrEnum):
    """Figures of a tuned plan, from which its successors start."""

    CAUTION = "caution_ratio"
    SWITCH_LATENCY = "switch_latency_s"
    """The longest latency of a change to a faster clock that the plan was made with."""
    TARGET = "target_time_ratio"
    """The target that the plan was made for, in baseline iteration times."""
    CALL_STALL = "call_stall_s"
    """For how long a call that sets a clock stops the GPU's work, as learned from this job."""
    CLOCK_DELAY = "clock_delay_s"
    """How much later than reported clocks take effect, as learned from this job."""
    DECIDED_AFTER = "decided_after_iteration"
    """The newest iteration observed when a plan with an order of its own, or none at all, was decided on."""
