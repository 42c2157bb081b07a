"""Concurrent requests share a read, and none gets a value from before it asked."""

import asyncio

import pytest

from gpuenergyd.daemon.runtime.shared_reads import SharedReads


class Counter:
    """A value that changes while it is read."""

    def __init__(self) -> None:
        self.value = 0
        self.num_reads = 0
        self.fails = False
        self.is_reading = asyncio.Event()

    async def read(self, key: str) -> str:
        """Take two turns to return the value at the begin."""
        self.num_reads += 1
        self.is_reading.set()
        found = f"{key}{self.value}"
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if self.fails:
            raise OSError(found)
        return found


@pytest.mark.fault(36)
async def test_a_hundred_requests_cost_two_reads_and_see_what_changed_before_them() -> None:
    counter = Counter()
    reads = SharedReads(counter.read)
    early = asyncio.create_task(reads.value("a"))
    await counter.is_reading.wait()
    counter.value = 1
    late = [asyncio.create_task(reads.value("a")) for _ in range(100)]
    other = asyncio.create_task(reads.value("b"))
    late[0].cancel()

    assert await asyncio.gather(early, *late[1:], other) == ["a0", *["a1"] * 99, "b1"]
    assert counter.num_reads == 3


async def test_an_error_reaches_each_request_and_the_next_one_reads_again() -> None:
    counter = Counter()
    counter.fails = True
    reads = SharedReads(counter.read)
    found = await asyncio.gather(reads.value("a"), reads.value("a"), return_exceptions=True)
    counter.fails = False

    assert [type(each) for each in found] == [OSError, OSError]
    assert await reads.value("a") == "a0"


async def test_a_recent_value_is_used_again_until_it_is_too_old_or_a_change_is_declared() -> None:
    counter, now_s = Counter(), 5.0
    reads = SharedReads(counter.read, monotonic_s=lambda: now_s)
    assert await reads.recent_value("a", 0.2) == "a0"
    counter.value = 1
    now_s = 5.125

    assert await reads.recent_value("a", 0.2) == "a0"
    assert await reads.value("a") == "a1"
    counter.value = 2
    reads.declare_change()
    assert await reads.recent_value("a", 0.2) == "a2"
    counter.value = 3
    now_s = 5.5
    assert await reads.recent_value("a", 0.2) == "a3"


async def test_a_value_from_before_a_change_is_not_used_after_it() -> None:
    counter = Counter()
    reads = SharedReads(counter.read, monotonic_s=lambda: 5.0)
    early = asyncio.create_task(reads.recent_value("a", 0.2))
    await counter.is_reading.wait()
    counter.value = 1
    reads.declare_change()

    assert await early == "a0"
    assert await reads.recent_value("a", 0.2) == "a1"
