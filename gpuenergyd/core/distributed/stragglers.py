"""Which replica of a training holds up the others, and the iteration time that it imposes on each of them.

Replicas meet once per iteration, so whoever is faster than the slowest waits for it, and may as well run slower and
save energy: at once when a straggler shows, and at full speed again at once when it has recovered. What is compared is
what each replica would take by itself at full speed (`core/distributed/pace.py`): one that our own plans
have slowed down, or that waits, imposes nothing. Without that, two replicas that have slowed down for a third would
hold each other there for ever.

Paces come from jobs of this daemon, and from clients that know of replicas elsewhere. Time is an argument, in host
monotonic seconds: whoever falls silent stops to count.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StragglerRules:
    """When a slower replica counts; ratios are of the waiting replica's own pace."""

    enter_ratio: float = 0.03
    """Slower by more than this, it is a straggler: below, drift and chance."""
    enter_readings: int = 2
    """So many readings in a row: one may be a stall."""
    leave_ratio: float = 0.015
    """Slower by less than this in one reading, it has recovered."""
    change_ratio: float = 0.01
    """Another pace by more than this is followed: down at the first reading, up after as many as it takes to enter."""
    silent_s: float = 10.0
    silent_iterations: float = 5.0
    """A pace counts for so many of its own iterations, and for `silent_s` at least."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What a replica takes by itself for an iteration, who says so, and when that was so."""

    own_time_s: float
    of: str
    at_mono_s: float


@dataclass(frozen=True, slots=True)
class Imposed:
    """What a straggler imposes on a job from now on; `pace` is None when nothing is imposed any more."""

    job_id: str
    pace: Pace | None
    reason: str


@dataclass(slots=True)
class _Waiting:
    """One replica as one that may have to wait."""

    imposed: Pace | None = None
    readings: list[Pace] = field(default_factory=list)


@dataclass(slots=True)
class ReplicaGroup:
    """The replicas of one training; what they say goes in, changes of what is imposed on them come out."""

    rules: StragglerRules = field(default_factory=StragglerRules)
    _paces: dict[str, Pace] = field(default_factory=dict)
    _elsewhere: dict[str, Pace] = field(default_factory=dict)
    """By job: the slowest of the replicas that its client knows elsewhere."""
    _waiting: dict[str, _Waiting] = field(default_factory=dict)

    @property
    def job_ids(self) -> frozenset[str]:
        """Everybody in it."""
        return frozenset(self._waiting)

    def join(self, job_id: str) -> None:
        """Take a replica in, which is ours to tell what is imposed on it."""
        self._waiting.setdefault(job_id, _Waiting())

    def leave(self, job_id: str, now_mono_s: float) -> tuple[Imposed, ...]:
        """Let a replica go: it holds up nobody any more."""
        self._waiting.pop(job_id, None)
        self._paces.pop(job_id, None)
        self._elsewhere.pop(job_id, None)
        return self.look_after(now_mono_s)

    def note(self, pace: Pace) -> tuple[Imposed, ...]:
        """Take what a replica of ours takes by itself now."""
        self._paces[pace.of] = pace
        mine = self._judged((pace.of,), pace.at_mono_s, reading=None)
        return mine + self._judged(self._waiting.keys() - {pace.of}, pace.at_mono_s, reading=pace)

    def note_elsewhere(
        self, job_id: str, pace: Pace | None, now_mono_s: float, *, is_news: bool = True
    ) -> tuple[Imposed, ...]:
        """Take from a replica of ours what the slowest of those elsewhere takes; None when none is known any more.

        What is no news keeps the pace alive, and is no further reading of it.
        """
        if pace is None:
            self._elsewhere.pop(job_id, None)
        else:
            self._elsewhere[job_id] = pace
        return self._judged((job_id,), now_mono_s, reading=pace if is_news else None)

    def look_after(self, now_mono_s: float) -> tuple[Imposed, ...]:
        """Withdraw what those impose who have fallen silent."""
        return self._judged(tuple(self._waiting), now_mono_s, reading=None)

    def _judged(self, job_ids: Iterable[str], now_mono_s: float, *, reading: Pace | None) -> tuple[Imposed, ...]:
        changes = (self._judge(job_id, now_mono_s, reading) for job_id in sorted(job_ids))
        return tuple(change for change in changes if change is not None)

    def _judge(self, job_id: str, now_mono_s: float, reading: Pace | None) -> Imposed | None:
        waiting, own = self._waiting.get(job_id), self._paces.get(job_id)
        if waiting is None or own is None:
            return None
        slowest = self._slowest_of_others(job_id, now_mono_s)
        slower_ratio = slowest.own_time_s / own.own_time_s - 1 if slowest is not None else 0.0
        if slowest is None or slower_ratio < self.rules.leave_ratio:
            waiting.readings.clear()
            was, waiting.imposed = waiting.imposed, None
            if was is None:
                return None
            why = "has fallen silent or left" if slowest is None else f"takes {slowest.own_time_s:.4g} s now"
            return Imposed(job_id, None, f"no straggler any more: {was.of} {why}, this replica {own.own_time_s:.4g} s")
        if slowest is reading:
            waiting.readings = [*waiting.readings, slowest][-self.rules.enter_readings :]
        before = waiting.imposed
        now = self._imposed(waiting, slowest, own)
        if now is before or now is None:
            return None
        waiting.imposed = now
        return Imposed(
            job_id,
            now,
            f"straggler: {now.of} takes {now.own_time_s:.4g} s for an iteration, this replica {own.own_time_s:.4g} s",
        )

    def _imposed(self, waiting: _Waiting, slowest: Pace, own: Pace) -> Pace | None:
        """Return what is imposed from now on: never more than every one of the last readings says."""
        before, rules = waiting.imposed, self.rules
        least = min(waiting.readings, key=lambda pace: pace.own_time_s, default=slowest)
        is_settled = len(waiting.readings) >= rules.enter_readings
        if before is None:
            return least if is_settled and least.own_time_s > own.own_time_s * (1 + rules.enter_ratio) else None
        if slowest.own_time_s < before.own_time_s * (1 - rules.change_ratio):
            return slowest
        if is_settled and least.own_time_s > before.own_time_s * (1 + rules.change_ratio):
            return least
        return before

    def _slowest_of_others(self, job_id: str, now_mono_s: float) -> Pace | None:
        others = [pace for other, pace in self._paces.items() if other != job_id]
        if job_id in self._elsewhere:
            others.append(self._elsewhere[job_id])
        alive = [pace for pace in others if now_mono_s - pace.at_mono_s <= self.counts_for_s(pace)]
        return max(alive, key=lambda pace: pace.own_time_s, default=None)

    def counts_for_s(self, pace: Pace) -> float:
        """Return for how long a pace counts."""
        return max(self.rules.silent_s, self.rules.silent_iterations * pace.own_time_s)
