"""Sharing the event loop's turns: whoever asks much waits behind itself, not others behind it."""

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field

REQUESTS_PER_TURN = 4


@dataclass(slots=True)
class FairQueue:
    """Lets a few requests of each user begin per turn of the event loop; the rest wait in the order they came.

    Many connections, or many requests sent ahead on one, would otherwise be answered in a single turn, and everybody
    else would wait for all of them.
    """

    max_per_turn: int = REQUESTS_PER_TURN
    _begun: Counter[int] = field(default_factory=Counter)
    _waiting: dict[int, deque[asyncio.Future[None]]] = field(default_factory=dict)
    _is_turn_due: bool = False

    async def take(self, uid: int) -> None:
        """Wait until one more request of a user may begin."""
        queue = self._waiting.get(uid)
        if queue is None and self._begun[uid] < self.max_per_turn:
            self._begun[uid] += 1
            self._expect_turn()
            return
        if queue is None:
            queue = self._waiting[uid] = deque()
        future = asyncio.get_running_loop().create_future()
        queue.append(future)
        self._expect_turn()
        await future

    def _expect_turn(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._is_turn_due = False
        self._begun.clear()
        for uid, queue in list(self._waiting.items()):
            while queue and self._begun[uid] < self.max_per_turn:
                future = queue.popleft()
                if not future.done():  # else its client left
                    future.set_result(None)
                    self._begun[uid] += 1
            if not queue:
                del self._waiting[uid]
        if self._begun:
            self._expect_turn()
