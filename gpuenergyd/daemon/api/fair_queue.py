"""Fair queueing of requests: each turn of the event loop serves the users who have used the least CPU time.

Theory of operation. Each turn starts requests worth at most `turn_s` of CPU time and leaves the rest waiting, so that a
flood from any number of users delays timers and other sockets by about one turn. A user's tag is the CPU time that its
requests have used, divided by the user's weight; the user with the lowest tag is next. A user's weight is its number of
ranks. All users without a rank together weigh as much as one rank: forty of them must not crowd out one who trains. A
user who was idle gets the tag of the request that started last, so that nobody saves up time, and nobody waits for what
others used before (start-time fair queueing; Goyal, Vin and Cheng, 1996).
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

TURN_S = 0.001
REQUEST_S = 0.0002
"""CPU time of a request outside its handler: to parse it and to send the reply."""
_MAX_KNOWN_USERS = 1024


@dataclass(slots=True)
class _User:
    tag_s: float
    cost_s: float = REQUEST_S
    """Expected CPU time of the next request."""
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


@dataclass(slots=True)
class FairQueue:
    """Starts requests within a CPU time per turn of the event loop, and charges each to its user."""

    turn_s: float = TURN_S
    cpu_s: Callable[[], float] = time.thread_time
    num_ranks_of: Callable[[int], int] = lambda _: 0
    _users: dict[int, _User] = field(default_factory=dict)
    _num_waiting: int = 0
    _num_without_ranks: int = 1
    """Number of users without a rank that waited when this turn began, at least 1."""
    _started_s: float = 0.0
    """Expected CPU time of the requests that this turn has started."""
    _last_tag_s: float = 0.0
    _highest_tag_s: float = 0.0
    _is_turn_scheduled: bool = False

    async def run(self, uid: int, handle: Callable[[], Awaitable[T]]) -> T:
        """Handle a user's request when its turn comes; charge its CPU time, not the time that it waits."""
        user = await self._turn_of(uid)
        expected_s, used_s = user.cost_s, REQUEST_S

        def charge(step_s: float) -> None:
            nonlocal used_s
            used_s += step_s

        try:
            return await _Metered(handle(), self.cpu_s, charge)
        finally:
            user.tag_s += (used_s - expected_s) / self._weight_of(uid)
            user.cost_s = used_s
            self._highest_tag_s = max(self._highest_tag_s, user.tag_s)

    async def _turn_of(self, uid: int) -> _User:
        user = self._user(uid)
        if self._num_waiting or not self._has_room_for(user):
            future = asyncio.get_running_loop().create_future()
            user.waiting.append(future)
            self._num_waiting += 1
            self._schedule_turn()
            await future
        else:
            self._start(uid, user)
            self._schedule_turn()
        return user

    def _user(self, uid: int) -> _User:
        if len(self._users) > _MAX_KNOWN_USERS:
            last_s = self._last_tag_s
            self._users = {u: known for u, known in self._users.items() if known.waiting or known.tag_s > last_s}
        user = self._users.setdefault(uid, _User(self._last_tag_s))
        if not user.waiting:
            user.tag_s = max(user.tag_s, self._last_tag_s)
        return user

    def _has_room_for(self, user: _User) -> bool:
        return self._started_s == 0.0 or self._started_s + user.cost_s <= self.turn_s

    def _start(self, uid: int, user: _User) -> None:
        self._last_tag_s = max(self._last_tag_s, user.tag_s)
        user.tag_s += user.cost_s / self._weight_of(uid)
        self._started_s += user.cost_s

    def _weight_of(self, uid: int) -> float:
        return float(self.num_ranks_of(uid)) or 1.0 / self._num_without_ranks

    def _schedule_turn(self) -> None:
        if not self._is_turn_scheduled:
            self._is_turn_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._is_turn_scheduled = False
        self._started_s = 0.0
        waiting = [uid for uid, known in self._users.items() if known.waiting]
        self._num_without_ranks = max(1, sum(not self.num_ranks_of(uid) for uid in waiting))
        while self._num_waiting:
            _, uid = min((known.tag_s, uid) for uid, known in self._users.items() if known.waiting)
            user = self._users[uid]
            if not self._has_room_for(user):
                break
            future = user.waiting.popleft()
            self._num_waiting -= 1
            if not future.done():  # else the client disconnected
                self._start(uid, user)
                future.set_result(None)
        if self._started_s:
            self._schedule_turn()
        else:  # nobody waits, so what each has used no longer matters
            self._last_tag_s = self._highest_tag_s


@dataclass(frozen=True, slots=True)
class _Metered(Awaitable[T]):
    """Awaitable wrapper that reports the CPU time of each step of `work`."""

    work: Awaitable[T]
    cpu_s: Callable[[], float]
    charge: Callable[[float], None]

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self.work.__await__()
        thrown: BaseException | None = None
        while True:
            begin_s = self.cpu_s()
            try:
                pending = next(steps) if thrown is None else steps.throw(thrown)
            except StopIteration as ended:
                result: T = ended.value
                return result
            finally:
                self.charge(self.cpu_s() - begin_s)
            thrown = None
            try:
                yield pending
            except BaseException as error:  # noqa: BLE001  thrown into the work
                thrown = error
