"""Reads shared by concurrent requests: one at a time per key, whatever the number of requests."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class SharedReads(Generic[T]):
    """Reads a value by key; a request joins the next read that has not begun, so that it sees every earlier change."""

    read: Callable[[str], Awaitable[T]]
    monotonic_s: Callable[[], float] = time.monotonic
    _last: dict[str, tuple[T, float]] = field(default_factory=dict)
    """The last value read and when that read began, by key."""
    _num_changes: int = 0
    _waiting: dict[str, asyncio.Task[T]] = field(default_factory=dict)
    _running: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))

    async def value(self, key: str) -> T:
        """Return a value read after this call, or raise what the read raises."""
        task = self._waiting.get(key)
        if task is None:
            task = self._waiting[key] = asyncio.create_task(self._read_next(key))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def recent_value(self, key: str, max_age_s: float) -> T:
        """Return a value read at most `max_age_s` ago and after the last declared change, else read it now.

        Raises what the read raises.
        """
        last = self._last.get(key)
        if last is not None and self.monotonic_s() - last[1] <= max_age_s:
            return last[0]
        return await self.value(key)

    def declare_change(self) -> None:
        """Discard all values read before this call."""
        self._last.clear()
        self._num_changes += 1

    async def _read_next(self, key: str) -> T:
        async with self._running[key]:
            del self._waiting[key]
            begin_s, num_changes = self.monotonic_s(), self._num_changes
            value = await self.read(key)
            if num_changes == self._num_changes:
                self._last[key] = value, begin_s
            return value
