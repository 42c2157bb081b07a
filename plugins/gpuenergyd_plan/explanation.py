"""Explanation of each instruction's clock: its slack, the neighbouring clock options and what limits it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile
from gpuenergyd.core.pipeline.timeline import Span, timeline


class ClockReason(StrEnum):
    """Reason why an instruction does not run slower."""

    CHEAPEST = "cheapest"
    """A slower clock would use more energy than it saves, however much slack there is."""
    CRITICAL = "critical"
    """The instruction is on the critical path: a slower clock would lengthen the iteration."""
    NO_ROOM = "no-room"
    """The slack is shorter than the extra time of the next slower clock."""
    ROOM_LEFT = "room-left"
    """The next slower clock would fit, but the plan uses the time elsewhere or avoids a clock change."""


@dataclass(frozen=True, slots=True)
class ClockExplanation:
    """Explanation of one instruction's clock.

    `slower` and `faster` are the neighbouring Pareto options, None at the ends. `price_w` is the energy that one more
    second of slack would save here; None if the planner does not compute it.
    """

    span: Span
    option: ClockOption
    slower: ClockOption | None
    faster: ClockOption | None
    reason: ClockReason
    price_w: float | None

    @property
    def instruction(self) -> Instruction:
        return self.span.instruction

    def sentence(self, blocking_power_w: float) -> str:
        slack_ms = 1e3 * self.span.slack_s
        if self.slower is None:
            return "this is the cheapest clock: a slower one saves less than waiting for the same time costs"
        longer_ms = 1e3 * (self.slower.time_s - self.option.time_s)
        saved_j = self.option.effective_energy_j(blocking_power_w) - self.slower.effective_energy_j(blocking_power_w)
        next_mhz = f"{self.slower.sm_clock_mhz} MHz would save {saved_j:.3g} J and take {longer_ms:.3g} ms more"
        if self.reason is ClockReason.CRITICAL:
            return f"on the critical path: {next_mhz}, which would lengthen the iteration"
        if self.reason is ClockReason.NO_ROOM:
            return f"{next_mhz}; the slack is only {slack_ms:.3g} ms"
        return f"{next_mhz} of {slack_ms:.3g} ms slack, used by other instructions or left to save clock changes"


def explain_clocks(
    graph: DependencyGraph,
    profile: PipelineProfile,
    sm_clocks_mhz: Mapping[Instruction, int],
    prices_w: Mapping[Instruction, float],
) -> tuple[ClockExplanation, ...]:
    """Return the explanations of all nodes of a graph, in node order."""
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
