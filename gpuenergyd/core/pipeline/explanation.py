"""Why an instruction runs at its clock: its slack, what its neighbours in the table would cost, and what bounds it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile
from gpuenergyd.core.pipeline.timeline import Span, timeline


class ClockReason(StrEnum):
    """What keeps an instruction from running slower."""

    CHEAPEST = "cheapest"
    """Slower costs more than it saves, however much time there is."""
    CRITICAL = "critical"
    """It is on the critical path: slower would lengthen the iteration."""
    NO_ROOM = "no-room"
    """It has slack, but less than the next slower clock takes."""
    ROOM_LEFT = "room-left"
    """The next slower clock would fit: the plan spends the time elsewhere, or keeps its number of changes low."""


@dataclass(frozen=True, slots=True)
class ClockExplanation:
    """One instruction of a plan; `slower` and `faster` are the next options worth considering, None at the ends.

    `price_w` is what one more second of room here would save, None when the planner does not know.
    """

    span: Span
    option: ClockOption
    slower: ClockOption | None
    faster: ClockOption | None
    reason: ClockReason
    price_w: float | None

    @property
    def instruction(self) -> Instruction:
        """Which one."""
        return self.span.instruction

    def sentence(self, blocking_power_w: float) -> str:
        """Return the reason in words, with its numbers."""
        slack_ms = 1e3 * self.span.slack_s
        if self.slower is None:
            return "no clock costs less here than this one: slower saves less than the same time of waiting costs"
        longer_ms = 1e3 * (self.slower.time_s - self.option.time_s)
        saved_j = self.option.effective_energy_j(blocking_power_w) - self.slower.effective_energy_j(blocking_power_w)
        next_mhz = f"{self.slower.sm_clock_mhz} MHz would save {saved_j:.3g} J and take {longer_ms:.3g} ms more"
        if self.reason is ClockReason.CRITICAL:
            return f"on the critical path: {next_mhz}, and lengthen the iteration"
        if self.reason is ClockReason.NO_ROOM:
            return f"{next_mhz}; only {slack_ms:.3g} ms are free"
        return f"{next_mhz} of {slack_ms:.3g} ms free, which other instructions use or few clock changes leave"


def explain_clocks(
    graph: DependencyGraph,
    profile: PipelineProfile,
    sm_clocks_mhz: Mapping[Instruction, int],
    prices_w: Mapping[Instruction, float],
) -> tuple[ClockExplanation, ...]:
    """Return an explanation for every node of a graph, in node order."""
    options = [profile[i.instruction_class].at_clock(sm_clocks_mhz[i]) for i in graph.instructions]
    spans = timeline(graph, [option.time_s for option in options]).spans
    return tuple(
        _explanation(span, option, profile, prices_w.get(span.instruction))
        for span, option in zip(spans, options, strict=True)
    )


def _explanation(span: Span, option: ClockOption, profile: PipelineProfile, price_w: float | None) -> ClockExplanation:
    worthwhile = profile[span.instruction.instruction_class].pareto(profile.blocking_power_w)
    slower = next((o for o in worthwhile if o.time_s > option.time_s), None)
    faster = next((o for o in reversed(worthwhile) if o.time_s < option.time_s), None)
    if slower is None:
        reason = ClockReason.CHEAPEST
    elif span.is_critical:
        reason = ClockReason.CRITICAL
    elif slower.time_s - option.time_s > span.slack_s:
        reason = ClockReason.NO_ROOM
    else:
        reason = ClockReason.ROOM_LEFT
    return ClockExplanation(span, option, slower, faster, reason, price_w)
