"""Timetable of a captured CUDA graph: a plan's clock changes at fixed instants after the start of a replay.

A plan ties each change to the start of an instruction. No code of the program runs during a replay, so the start times
are predicted from recent replays. If these differ, a clock rises at the earliest time and falls at the latest, since a
raise that is too early or a reduction that is too late costs a little energy but no time.
"""

from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

ONE_CLOCK, TIMETABLE = "one clock", "timetable"
CAPTURED = frozenset({ONE_CLOCK, TIMETABLE})
"""How the clocks of a captured graph are set: one clock per replay, or a timetable of changes within it."""

InstructionKey = tuple[str, int, int]
"""Kind, microbatch index, chunk index."""


class PlannedChange(NamedTuple):
    """A clock change at a delay after the start of an instruction."""

    instruction: InstructionKey
    delay_ns: int
    sm_clock_mhz: int


class TimetableEntry(NamedTuple):
    """A clock that applies from an instant on, in ns after the start of a replay."""

    offset_ns: int
    sm_clock_mhz: int


def replay_timetable(
    changes: Sequence[PlannedChange], replays: Sequence[Mapping[InstructionKey, int]], *, max_entries: int
) -> tuple[TimetableEntry, ...]:
    """Return the timetable of the next replay, sorted by time; empty if an instruction has not been observed.

    Args:
        changes: the changes of one iteration on one GPU.
        replays: the start of each instruction in recent replays, in ns after the start of the replay.
        max_entries: maximum number of entries; to meet it, the shortest slow segments are dropped.
    """
    if not replays or any(change.instruction not in replay for change in changes for replay in replays):
        return ()
    typical = sorted((median_low([r[c.instruction] for r in replays]) + c.delay_ns, k) for k, c in enumerate(changes))
    in_order = [changes[k] for _, k in typical]
    entries: list[TimetableEntry] = []
    at_begin_mhz = before_mhz = in_order[-1].sm_clock_mhz if in_order else 0  # iterations repeat
    for change in in_order:
        begins_ns = [replay[change.instruction] for replay in replays]
        is_raise = change.sm_clock_mhz > before_mhz
        offset_ns = max(0, (min if is_raise else max)(begins_ns) + change.delay_ns)
        before_mhz = change.sm_clock_mhz
        fall_ns = offset_ns
        while entries and entries[-1].offset_ns >= offset_ns:  # the raise precedes the start of the slow segment
            fall_ns = max(fall_ns, entries.pop().offset_ns)
        if change.sm_clock_mhz < (entries[-1].sm_clock_mhz if entries else at_begin_mhz):
            offset_ns = fall_ns  # without the slow segment it is not a raise
        if not entries or entries[-1].sm_clock_mhz != change.sm_clock_mhz:
            entries.append(TimetableEntry(offset_ns, change.sm_clock_mhz))
    return tuple(_without_shortest(entries, max_entries))


def _without_shortest(entries: list[TimetableEntry], max_entries: int) -> list[TimetableEntry]:
    """Drop the shortest low-clock segments, merging each into its neighbours' higher clock."""
    kept = list(entries)
    while len(kept) > max_entries:
        # A segment slower than its predecessor can be dropped without losing time: the predecessor's clock continues.
        slow = [k for k in range(1, len(kept) - 1) if kept[k].sm_clock_mhz < kept[k - 1].sm_clock_mhz]
        if not slow:
            break
        k = min(slow, key=lambda k: kept[k + 1].offset_ns - kept[k].offset_ns)
        del kept[k]
        if kept[k].sm_clock_mhz == kept[k - 1].sm_clock_mhz:
            del kept[k]
    highest_mhz = max((entry.sm_clock_mhz for entry in kept), default=0)
    return kept if len(kept) <= max_entries else [TimetableEntry(0, highest_mhz)]
