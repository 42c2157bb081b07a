"""Start times of the instructions in a rank's captured CUDA graph, from its recent replays."""

from collections import deque

from gpuenergyd.client.plans import PreparedPlan
from gpuenergyd.client.timing.recorder import IterationTimes
from gpuenergyd.core.clock_request import MAX_LATER_CLOCKS, TimedClock
from gpuenergyd.core.pipeline.timetable import InstructionKey, TimetableEntry, replay_timetable

_NUM_REPLAYS = 5
"""Few, so that a drift is followed; several, so that a timetable covers the usual variation."""


class ReplayTimetables:
    """Replays of one rank; used by one thread, the timer's."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, dict[InstructionKey, int]]] = deque(maxlen=_NUM_REPLAYS)

    def add_replay(self, plan_epoch: int, times: IterationTimes) -> None:
        begins = {(kind, m, chunk): begin - times.begin_mono_ns for kind, m, chunk, begin, _ in times.instructions}
        self._recent.append((plan_epoch, begins))

    def clocks(self, plan: PreparedPlan, begin_mono_ns: int) -> tuple[TimedClock, ...]:
        """Return the clocks of a replay that begins at an instant; its highest one while the begins are not known.

        Replays under the same plan count, or else the newest one.
        """
        same_plan = [begins for epoch, begins in self._recent if epoch == plan.plan_epoch]
        replays = same_plan or [begins for _, begins in self._recent][-1:]
        entries = replay_timetable(plan.changes, replays, max_entries=MAX_LATER_CLOCKS)
        if not entries:
            entries = (TimetableEntry(0, max(change.sm_clock_mhz for change in plan.changes)),)
        return tuple(TimedClock(mhz, begin_mono_ns + offset_ns) for offset_ns, mhz in entries)
