"""Plan windows: how the ranks of a pipeline across hosts agree on the plan of each iteration. No I/O, no clock.

Theory of operation. A plan has clocks and, where the program allows another one, an order of instructions; without a
plan a rank runs at full speed in its registered order. Messages between hosts may be late or lost, so no protocol can
make all ranks certain that all of them know of a plan. The protocol guarantees less: an iteration never runs under two
plans, except under two that may be mixed. A plan is valid for a *window*, the iterations [begin, end), and a rank
follows it only within the windows that it has received. The leader

1. proposes a plan; each member fetches its slice, has its own daemon validate and install it, and reports that;
2. once all have installed it, grants a window that begins a few iterations ahead, so that all receive it in time;
3. extends the window again and again while every member reports and still has the plan installed, and the leader's
   daemon evaluates the iterations: only the leader guards the plan;
4. lets the next plan begin only where the previous window ends, and never extends a window whose successor is granted;
   while a successor is being installed or decided on, the window is only kept from expiring;
5. grants a trial a short window: further iterations of it would cost energy and yield no information;
6. inserts a full-speed block by granting the plan its next window a few iterations after the end of the present one:
   nothing has to be installed for the block, and it ends at the same iteration on all ranks;
7. replaces a plan at once where a mix of both is not slower than the next one (`plan_mix`): the message that grants
   the next plan a window from the next iteration on also revokes the old plan. Each member changes as soon as it
   reads the message; until then it follows the old plan, at most to the end of its window.

Windows of different plans are therefore disjoint in whatever order messages arrive, except when a plan is replaced at
once. A member that receives a window late, or nothing until its window has expired, runs at full speed. It may waste
energy, but it follows no outdated plan and does not slow the others down, unless they run an order in which they need
its gradients sooner than it has them. A dead leader, a cut link or a lost store need no message: windows
expire.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

AHEAD_ITERATIONS = 2
"""Minimum number of iterations from the newest one to a window's begin; a window lasts twice that unless extended."""
SHORT_WINDOW_ITERATIONS = 2
"""Length of a trial's window: one of its two iterations may be disturbed by clock changes."""
MAX_AHEAD_ITERATIONS = 256
_DROPPED_KEPT = 8
"""Number of dropped plans that a follower remembers, so that a delayed message cannot restore them."""
UNGUARDED_ITERATIONS = 32
"""Iterations that a plan may run unseen by the guard: energy counters may update less often than iterations end."""


@dataclass(frozen=True, slots=True)
class PlanWindow:
    """The iterations [begin, end) in which all ranks follow a plan."""

    plan_id: str
    begin_iteration: int
    end_iteration: int

    def covers(self, iteration_index: int) -> bool:
        return self.begin_iteration <= iteration_index < self.end_iteration


@dataclass(frozen=True, slots=True)
class MemberState:
    """Last report of a member: its current iteration and the plans that its own daemon has installed.

    A combined report of several members has the iteration of the slowest one, and in `farthest_index` of the fastest.
    """

    iteration_index: int
    installed: frozenset[str]
    farthest_index: int = -1
    """Iteration of the member farthest ahead, if it differs."""

    @property
    def newest_index(self) -> int:
        """The newest iteration that has begun."""
        return max(self.iteration_index, self.farthest_index)


@dataclass(slots=True)
class PlanWindowFollower:
    """A member's side: the windows received so far, in any order and any number of times."""

    _windows: dict[tuple[str, int], PlanWindow] = field(default_factory=dict)
    """Keyed by plan and begin: a plan may have another window after a block at full speed."""
    _dropped: deque[str] = field(default_factory=lambda: deque(maxlen=_DROPPED_KEPT))

    def update(self, windows: Iterable[PlanWindow]) -> None:
        """Add windows from the leader; between windows of equal plan and begin, the one that ends later is newer."""
        for window in windows:
            if window.plan_id in self._dropped:
                continue
            key = window.plan_id, window.begin_iteration
            known = self._windows.get(key)
            if known is None or window.end_iteration > known.end_iteration:
                self._windows[key] = window

    def plan_for(self, iteration_index: int) -> str | None:
        """Return the plan of an iteration, None for full speed; drop expired windows, so iterations must increase."""
        for key in [key for key, window in self._windows.items() if window.end_iteration <= iteration_index]:
            del self._windows[key]
        return next((window.plan_id for window in self._windows.values() if window.covers(iteration_index)), None)

    def drop(self, plan_id: str) -> None:
        """Stop following a plan at once, and for good."""
        if plan_id not in self._dropped:
            self._dropped.append(plan_id)
        self._windows = {key: window for key, window in self._windows.items() if window.plan_id != plan_id}

    def clear(self) -> None:
        """Stop following all plans."""
        self._windows.clear()


@dataclass(slots=True)
class PlanWindowGrantor:
    """The leader's side: collects the members' reports, proposes plans and grants windows."""

    members: frozenset[str]
    _states: dict[str, MemberState] = field(default_factory=dict)
    _proposed: str | None = None
    _proposed_at: int = 0
    _is_proposed_short: bool = False
    _replaceable: frozenset[str] = frozenset()
    """Plans that the proposed plan may replace at once."""
    _others_until: int = 0
    """Before this iteration some member may still follow a plan other than the current one."""
    _is_short: bool = False
    _previous: PlanWindow | None = None
    _current: PlanWindow | None = None
    _is_expiring: bool = False
    _block_iterations: int = 0
    """Length of the block at full speed that follows the current window; 0 without one."""
    revoked: str | None = None
    """Plan that members must stop following before its window ends."""
    is_change_near: bool = False
    """Whether another plan is expected soon; the current window is then kept short, so that the plan can begin soon."""
    guarded_index: int | None = None
    """Newest iteration that the guard has seen; None while no guard is active."""

    @property
    def is_proposing(self) -> bool:
        """Whether a plan is being installed that has no window yet."""
        return self._proposed is not None

    @property
    def plan_to_install(self) -> str | None:
        """The plan that members should have installed: the proposed one, otherwise the current one."""
        if self._proposed is not None or self._current is None or self._is_expiring:
            return self._proposed
        return self._current.plan_id

    @property
    def windows(self) -> tuple[PlanWindow, ...]:
        """The windows to send to the members: the current and the previous one, without that of a revoked plan."""
        granted = (self._previous, self._current)
        return tuple(window for window in granted if window is not None and window.plan_id != self.revoked)

    @property
    def newest_iteration(self) -> int:
        """The highest iteration that any member has reported."""
        return max((state.newest_index for state in self._states.values()), default=-1)

    def update(self, states: Mapping[str, MemberState]) -> None:
        """Record members' reports; reports of unknown members and outdated ones are ignored."""
        for member, state in states.items():
            known = self._states.get(member)
            if member in self.members and (known is None or state.iteration_index >= known.iteration_index):
                self._states[member] = state

    def propose(self, plan_id: str, *, is_short: bool = False, replaces: frozenset[str] = frozenset()) -> None:
        """Propose a plan; it replaces an earlier proposal that has no window yet.

        `is_short` is for trials; `replaces` are plans that it may be mixed with.
        """
        self._proposed, self._proposed_at, self._is_proposed_short = plan_id, self.newest_iteration, is_short
        self._replaceable, self._block_iterations = replaces, 0

    def request_block(self, num_iterations: int) -> None:
        """Let all members run at full speed for some iterations, then follow the current plan again."""
        self._block_iterations = num_iterations

    def let_expire(self) -> None:
        """Stop extending the current window: the daemon that made its plan no longer knows it."""
        self._proposed, self._is_expiring, self._block_iterations = None, True, 0

    def revoke(self) -> None:
        """Revoke the current plan at once; the next one begins no earlier than the end of its window."""
        self.revoked = self._current.plan_id if self._current is not None else None
        self.let_expire()

    def grant(self, ahead: int = AHEAD_ITERATIONS) -> bool:
        """Grant or extend a window where necessary; return whether `windows` has changed.

        `ahead` is an upper bound on the iterations that pass until all members have received a window.
        """
        ahead = min(max(ahead, AHEAD_ITERATIONS), MAX_AHEAD_ITERATIONS)
        if not self._are_reports_complete(ahead):
            return False
        newest, current = self.newest_iteration, self._current
        if self._proposed is not None and self._is_installed(self._proposed):
            self._begin(self._proposed, ahead)
            return True
        if current is None or not self._may_extend(current, ahead):
            return False
        if self._block_iterations and current.begin_iteration <= newest < current.end_iteration:
            begin = current.end_iteration + self._block_iterations
            self._previous, self._current = current, PlanWindow(current.plan_id, begin, begin + ahead)
            self._block_iterations = 0
            return True
        return self._extend(current, ahead)

    def _begin(self, plan_id: str, ahead: int) -> None:
        """Grant the proposed plan its first window, at once if it may be mixed with the only plan in use."""
        newest, current = self.newest_iteration, self._current
        is_alone = self._others_until <= newest + 1
        if current is not None:
            self._others_until = max(self._others_until, current.end_iteration)
        if current is not None and current.plan_id in self._replaceable and is_alone:
            begin, self.revoked = newest + 1, current.plan_id
        else:
            begin = max(newest + ahead, self._others_until)
        self._is_short = self._is_proposed_short
        self._previous, self._current = current, PlanWindow(plan_id, begin, begin + self._length(ahead))
        self._proposed, self._is_expiring = None, False

    def _extend(self, current: PlanWindow, ahead: int) -> bool:
        """Extend the current window if it ends soon; return whether it was extended."""
        newest = self.newest_iteration
        if self._is_short and newest < current.end_iteration + 2 * ahead:
            return False  # a trial; if all members had run it, another plan would follow soon
        kept = ahead if self._proposed is not None or self.is_change_near else 2 * ahead
        if newest + kept <= current.end_iteration:
            return False
        # After the end of the window members run at full speed; all of them resume the plan at the same iteration.
        is_ended = newest >= current.end_iteration
        begin = newest + ahead if is_ended else current.begin_iteration
        end = begin + self._length(ahead) if is_ended else max(newest, begin) + kept
        self._current = PlanWindow(current.plan_id, begin, end)
        return True

    def _length(self, ahead: int) -> int:
        return SHORT_WINDOW_ITERATIONS if self._is_short else 2 * ahead

    def _are_reports_complete(self, ahead: int) -> bool:
        """Return whether every member has reported a recent iteration."""
        if set(self._states) != self.members:
            return False
        oldest = min(state.iteration_index for state in self._states.values())
        return self.newest_iteration - oldest <= 2 * ahead

    def _may_extend(self, current: PlanWindow, ahead: int) -> bool:
        """Return whether a window may be extended: its plan is installed and guarded, and no proposal is stuck.

        While a proposal is stuck, the current plan is not guarded, because the guard evaluates the proposed one.
        """
        newest = self.newest_iteration
        is_stuck = self._proposed is not None and newest - self._proposed_at > 4 * ahead
        guarded = newest if self.guarded_index is None else self.guarded_index
        is_unguarded = newest - guarded > UNGUARDED_ITERATIONS + 4 * ahead
        return self._is_installed(current.plan_id) and not (is_stuck or is_unguarded or self._is_expiring)

    def _is_installed(self, plan_id: str) -> bool:
        return all(plan_id in state.installed for state in self._states.values())
