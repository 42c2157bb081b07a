"""Waits of a plan: their energy at the clock in force, and lower clocks during waits that are long enough.

Theory of operation. A GPU keeps the previous instruction's clock during a wait. If power falls with the clock, a wait
is cheaper at the clock of least power, provided there is time to reach it and return before the next instruction
begins. The low clock is requested at the end of the instruction before the wait, and the next instruction's clock one
latency before it begins. The wait at the end of an iteration and the one at the start of the next are a single wait. A
lowered wait costs no time unless the next instruction begins earlier than planned, which is simulated.

In a running job (`WaitRules.of_running_job`) the clock is not lowered between two iterations, because optimizers and
other work outside the graph run there. The instruction after a lowered wait requests its clock again when it begins, in
case it begins earlier than planned. If a wait is too short to be lowered, a lower clock for the next instruction is
requested when the wait begins, so that the change and the stall of its call happen during the wait.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpuenergyd.core.pipeline.plan import ClockChange
from gpuenergyd.core.pipeline.switching import SwitchLatency
from gpuenergyd.core.pipeline.timeline import Span, Timeline
from gpuenergyd.core.pipeline.waiting import WaitingPower
from gpuenergyd.core.policy_api.policy import LoweredWait
from gpuenergyd_policies.planning.switching.requests import Latency, rank_latencies

_SHORTEST_S = 1e-9
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class WaitRules:
    """Which waits are lowered, and how early the clock is restored."""

    margin_ratio: float = 0.0
    """Share of a wait by which the clock is restored before the planned start of the next instruction."""
    margin_s: float = 0.0
    """Additional time by which the clock is restored early. In a running job also the delay after the planned start of
    a wait before it is lowered, so that the call does not stop an instruction that ends a little late."""
    least_saved_j: float = 0.0
    """Minimum energy that lowering a wait must save."""
    of_running_job: bool = False


@dataclass(frozen=True, slots=True)
class RankWait:
    """A wait of a rank between two instructions; the last one of an iteration continues in the next."""

    before: Span
    after: Span
    duration_s: float
    is_between_iterations: bool


def with_lowered_waits(
    planned: Timeline,
    changes: Sequence[Sequence[ClockChange]],
    power: WaitingPower,
    *,
    latency: Latency,
    rules: WaitRules = WaitRules(),
) -> tuple[tuple[tuple[ClockChange, ...], ...], tuple[LoweredWait, ...]]:
    """Return clock changes with waits lowered where that saves energy, and these waits.

    Requests that a plan makes during a lowered wait are replaced by one for the clock in use at its end.
    """
    result: list[tuple[ClockChange, ...]] = []
    all_lowered: list[LoweredWait] = []
    for rank, (own_changes, own_latency) in enumerate(
        zip(changes, rank_latencies(latency, planned.num_ranks), strict=True)
    ):
        start_s = {span.instruction: span.start_s for span in planned.rank_spans(rank)}
        moments = [(start_s[change.instruction] + change.offset_s, change) for change in own_changes]
        dropped: set[int] = set()
        added: list[tuple[float, ClockChange]] = []
        for wait in waits_of(planned, rank):
            if rules.of_running_job and wait.is_between_iterations:
                continue
            begin_s = wait.before.end_s
            end_s = begin_s + wait.duration_s
            # The wait at the end of an iteration continues in the next one.
            cyclic = [
                (moment_s + shift_s, k, change)
                for k, (moment_s, change) in enumerate(moments)
                for shift_s in (-planned.iteration_time_s, 0.0, planned.iteration_time_s)
                if moment_s + shift_s <= end_s
            ]
            if not cyclic:
                continue
            cyclic.sort(key=lambda entry: entry[0])
            held = [change for moment_s, _, change in cyclic if moment_s <= begin_s]
            if not held:
                continue
            held_mhz, in_use_mhz = held[-1].sm_clock_mhz, cyclic[-1][2].sm_clock_mhz
            found = lowered_wait(wait, held_mhz, in_use_mhz, power, own_latency, rules)
            late_s = rules.margin_s if rules.of_running_job else 0.0
            offset_s = wait.before.duration_s
            before = wait.before.instruction
            if found is None:
                if rules.of_running_job and in_use_mhz < held_mhz and wait.duration_s > late_s + own_latency.stall_s:
                    dropped |= {k for moment_s, k, _ in cyclic if begin_s < moment_s}
                    added.append((begin_s + late_s, ClockChange(before, offset_s + late_s, in_use_mhz)))
                continue
            dropped |= {k for moment_s, k, _ in cyclic if begin_s < moment_s < end_s}
            all_lowered.append(found)
            if rules.of_running_job and not any(moment_s == end_s for moment_s, _, _ in cyclic):
                added.append((end_s, ClockChange(wait.after.instruction, 0.0, in_use_mhz)))
            added.append((begin_s + late_s, ClockChange(before, offset_s + late_s, found.sm_clock_mhz)))
            added.append((begin_s + found.raised_s, ClockChange(before, offset_s + found.raised_s, in_use_mhz)))
        kept = [entry for k, entry in enumerate(moments) if k not in dropped]
        ordered = sorted([*kept, *added], key=lambda entry: entry[0])
        result.append(tuple(change for _, change in ordered))
    return tuple(result), tuple(all_lowered)


def waits_of(planned: Timeline, rank: int) -> Iterator[RankWait]:
    """Yield the waits of a rank; the last one continues into the next iteration."""
    spans = planned.rank_spans(rank)
    for k, before in enumerate(spans):
        after = spans[(k + 1) % len(spans)]
        is_last = k + 1 == len(spans)
        until_s = after.start_s + (planned.iteration_time_s if is_last else 0.0)
        if until_s - before.end_s > _SHORTEST_S:
            yield RankWait(before, after, until_s - before.end_s, is_last)


def lowered_wait(
    wait: RankWait, before_mhz: int, after_mhz: int, power: WaitingPower, latency: SwitchLatency, rules: WaitRules
) -> LoweredWait | None:
    """Return how a wait is lowered; None if it is too short or nothing would be saved."""
    low_mhz = power.cheapest_clock_mhz
    if low_mhz >= before_mhz or power.at(low_mhz) >= power.at(before_mhz):
        return None
    until_low_s, lead_s = latency.typical_s(before_mhz, low_mhz), latency.late_s(low_mhz, after_mhz)
    lead_s = max(lead_s, latency.stall_s) + rules.margin_ratio * wait.duration_s + rules.margin_s
    at_low_s = wait.duration_s - until_low_s - lead_s - (rules.margin_s if rules.of_running_job else 0.0)
    early_s = lead_s - latency.typical_s(low_mhz, after_mhz)
    saved_j = (power.at(before_mhz) - power.at(low_mhz)) * at_low_s
    lost_j = max(0.0, power.at(after_mhz) - power.at(before_mhz)) * max(0.0, early_s)
    if at_low_s <= 0.0 or saved_j <= lost_j or saved_j - lost_j < rules.least_saved_j:
        return None
    return LoweredWait(wait.before.instruction, low_mhz, wait.duration_s, wait.duration_s - lead_s)
