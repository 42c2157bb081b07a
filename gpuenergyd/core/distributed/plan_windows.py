"""Which plan all ranks of a pipeline follow in which iteration, when they sit on several hosts: no I/O, no clock.

Theory of operation. Messages between hosts may be late, lost or the last ones ever, so that all ranks know of a plan
can never be certain to all of them. What can be held is that an iteration never sees two plans: a plan is followed for
a *term*, iterations [begin, end), and only while its term is known to last. The leader

1. proposes a plan; each member fetches its slice, has its own daemon check and install it, and says so;
2. once all have, gives it a term that begins a few iterations ahead, so that all hear of it before;
3. prolongs the term again and again while every member is heard of and still has the plan;
4. lets another plan begin only where the term before ends, and never prolongs a term whose successor it has given;
   one that waits for its successor to be installed, or to be decided, is only kept from running out;
5. gives a plan that is only tried (profiling) a brief term: further iterations of it would cost, and tell nothing.

Terms of different plans are therefore disjoint, whoever hears of them when. A member that has heard late, or nothing
for so long that its term is over, runs at full speed: it may waste energy, but neither slows the others nor follows an
old plan beside their new one. The leader's death, a cut link and a lost store need no message: terms just end.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

AHEAD_ITERATIONS = 2
"""How far ahead of the newest iteration a term begins, at least; it lasts twice that, unless it is prolonged."""
BRIEF_ITERATIONS = 2
"""The term of a plan that is only tried: one of them may be disturbed by clocks on their way."""
MAX_AHEAD_ITERATIONS = 256


@dataclass(frozen=True, slots=True)
class PlanWindow:
    """The iterations [begin, end) for which a plan is agreed."""

    plan_id: str
    begin_iteration: int
    end_iteration: int

    def covers(self, iteration_index: int) -> bool:
        """Return whether the plan is to be followed in an iteration."""
        return self.begin_iteration <= iteration_index < self.end_iteration


@dataclass(frozen=True, slots=True)
class MemberState:
    """What a member said last: the iteration it runs, and the plans that its own daemon has installed."""

    iteration_index: int
    installed: frozenset[str]


@dataclass(slots=True)
class PlanWindowFollower:
    """A member's view: terms as it has heard of them, in any order and any number of times."""

    _terms: dict[str, PlanWindow] = field(default_factory=dict)

    def hear(self, terms: Iterable[PlanWindow]) -> None:
        """Take what the leader says; of one plan the longer term is the later word."""
        for term in terms:
            known = self._terms.get(term.plan_id)
            if known is None or term.end_iteration > known.end_iteration:
                self._terms[term.plan_id] = term

    def plan_for(self, iteration_index: int) -> str | None:
        """Return the plan agreed for an iteration, None: full speed. Iterations only ever grow; ended terms go."""
        for plan_id in [p for p, term in self._terms.items() if term.end_iteration <= iteration_index]:
            del self._terms[plan_id]
        return next((t.plan_id for t in self._terms.values() if t.covers(iteration_index)), None)

    def drop(self, plan_id: str) -> None:
        """Follow a plan no more, whatever was agreed."""
        self._terms.pop(plan_id, None)

    def forget(self) -> None:
        """Follow nothing that was agreed so far."""
        self._terms.clear()


@dataclass(slots=True)
class PlanWindowGrantor:
    """The leader's side: hears of the members, proposes plans and gives terms."""

    members: frozenset[str]
    _news: dict[str, MemberState] = field(default_factory=dict)
    _proposed: str | None = None
    _proposed_at: int = 0
    _is_proposed_briefly: bool = False
    _is_brief: bool = False
    _before: PlanWindow | None = None
    _current: PlanWindow | None = None
    _is_abandoned: bool = False
    released: str | None = None
    """A plan that members shall follow no more, at once: full speed is owed before its term is over."""
    is_change_near: bool = False
    """Whether another plan is likely to be asked for: the present term is then kept short, so that it soon begins."""

    @property
    def wanted(self) -> str | None:
        """The plan that members shall have installed: the proposed one, else the one in force."""
        if self._proposed is not None or self._current is None or self._is_abandoned:
            return self._proposed
        return self._current.plan_id

    @property
    def proposed(self) -> str | None:
        """The plan that members shall install; None when there is none to install."""
        return self._proposed

    @property
    def terms(self) -> tuple[PlanWindow, ...]:
        """What members shall hear: the present term, and the one it follows; none of a plan that was taken back."""
        given = (self._before, self._current)
        return tuple(term for term in given if term is not None and term.plan_id != self.released)

    @property
    def newest_iteration(self) -> int:
        """The furthest that any member is known to be."""
        return max((news.iteration_index for news in self._news.values()), default=-1)

    def hear(self, news: Mapping[str, MemberState]) -> None:
        """Take what members say; those that are none are ignored, and what is older than what was heard before."""
        for member, said in news.items():
            known = self._news.get(member)
            if member in self.members and (known is None or said.iteration_index >= known.iteration_index):
                self._news[member] = said

    def propose(self, plan_id: str, *, is_brief: bool = False) -> None:
        """Ask all members to install a plan, to try it or to stay, in place of one that was proposed and not agreed."""
        self._proposed, self._proposed_at, self._is_proposed_briefly = plan_id, self.newest_iteration, is_brief

    def abandon(self) -> None:
        """Let the present term run out: whoever made its plan has forgotten it."""
        self._proposed, self._is_abandoned = None, True

    def release(self) -> None:
        """Take the present plan back at once; the next one begins no earlier than if the term had lasted."""
        self.released = self._current.plan_id if self._current is not None else None
        self.abandon()

    def give(self, ahead: int = AHEAD_ITERATIONS) -> bool:
        """Give or prolong a term if that is due; return whether `terms` changed.

        `ahead` is how many iterations a word takes to be heard by all, with room to spare.
        """
        ahead = min(max(ahead, AHEAD_ITERATIONS), MAX_AHEAD_ITERATIONS)
        if not self._hears_all(ahead):
            return False
        newest, current = self.newest_iteration, self._current
        if self._proposed is not None and self._is_installed(self._proposed):
            begin = newest + ahead if current is None else max(newest + ahead, current.end_iteration)
            self._is_brief = self._is_proposed_briefly
            self._before, self._current = current, PlanWindow(self._proposed, begin, begin + self._lasting(ahead))
            self._proposed, self._is_abandoned = None, False
            return True
        if current is None or not self._may_go_on(current, ahead):
            return False
        if self._is_brief and newest < current.end_iteration + 2 * ahead:
            return False  # it was tried; had all seen it, there would soon be another
        kept = ahead if self._proposed is not None or self.is_change_near else 2 * ahead
        if newest + kept <= current.end_iteration:
            return False
        # Who is at full speed since the term ended shall take the plan up together with the others.
        is_ended = newest >= current.end_iteration
        begin = newest + ahead if is_ended else current.begin_iteration
        end = begin + self._lasting(ahead) if is_ended else max(newest, begin) + kept
        self._current = PlanWindow(current.plan_id, begin, end)
        return True

    def _lasting(self, ahead: int) -> int:
        return BRIEF_ITERATIONS if self._is_brief else 2 * ahead

    def _hears_all(self, ahead: int) -> bool:
        if set(self._news) != self.members:
            return False
        oldest = min(news.iteration_index for news in self._news.values())
        return self.newest_iteration - oldest <= 2 * ahead

    def _may_go_on(self, current: PlanWindow, ahead: int) -> bool:
        """Return whether a plan may be followed on: nobody has given it up, and no proposal is stuck beside it.

        A plan whose successor is not agreed is watched by nobody: the daemons' guards judge the successor.
        """
        is_stuck = self._proposed is not None and self.newest_iteration - self._proposed_at > 4 * ahead
        return self._is_installed(current.plan_id) and not is_stuck and not self._is_abandoned

    def _is_installed(self, plan_id: str) -> bool:
        return all(plan_id in news.installed for news in self._news.values())
