"""Fair queueing of requests: a few requests per user start in each iteration of the event loop."""

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field

REQUESTS_PER_TURN = 4


@dataclass(slots=True)
class FairQueue:
    """Starts a few requests of each user per turn of the event loop; further ones wait in order of arrival.

    Without it, many connections or pipelined requests of one user would all be answered in a single turn, and the
    requests of other users would wait for all of them.
    """

    max_per_turn: int = REQUESTS_PER_TURN
    _started: Counter[int] = field(default_factory=Counter)
    _waiting: dict[int, deque[asyncio.Future[None]]] = field(default_factory=dict)
    _is_turn_scheduled: bool = False

    async def wait(self, uid: int) -> None:
        """Wait until one more request of this user may start."""
        queue = self._waiting.get(uid)
        if queue is None and self._started[uid] < self.max_per_turn:
            self._started[uid] += 1
            self._schedule_turn()
            return
        if queue is None:
            queue = self._waiting[uid] = deque()
        future = asyncio.get_running_loop().create_future()
        queue.append(future)
        self._schedule_turn()
        await future

    def _schedule_turn(self) -> None:
        if not self._is_turn_scheduled:
            self._is_turn_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._is_turn_scheduled = False
        self._started.clear()
        for uid, queue in list(self._waiting.items()):
            while queue and self._started[uid] < self.max_per_turn:
                future = queue.popleft()
                if not future.done():  # else the client disconnected
                    future.set_result(None)
                    self._started[uid] += 1
            if not queue:
                del self._waiting[uid]
        if self._started:
            self._schedule_turn()
