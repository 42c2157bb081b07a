"""Reads that concurrent requests share: one at a time per key, whatever the number of requests."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class SharedReads(Generic[T]):
    """Reads a value by key; a request joins the read that has not begun yet, so that it sees every earlier change."""

    read: Callable[[str], Awaitable[T]]
    _waiting: dict[str, asyncio.Task[T]] = field(default_factory=dict)
    _running: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))

    async def value(self, key: str) -> T:
        """Return a value read after this call, or raise what the read raises."""
        task = self._waiting.get(key)
        if task is None:
            task = self._waiting[key] = asyncio.create_task(self._read_next(key))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def _read_next(self, key: str) -> T:
        async with self._running[key]:
            del self._waiting[key]
            return await self.read(key)
