"""Fair queueing: a flood of one user does not delay the requests of another."""

import asyncio

from gpuenergyd.daemon.api.fair_queue import FairQueue


def test_a_few_requests_per_user_start_per_turn_in_order() -> None:
    begun: list[int] = []
    per_turn: list[int] = []

    async def scenario() -> None:
        queue = FairQueue(max_per_turn=3)

        async def ask(number: int) -> None:
            await queue.wait(1)
            begun.append(number)

        tasks = [asyncio.create_task(ask(number)) for number in range(20)]
        while not all(task.done() for task in tasks):
            before = len(begun)
            await asyncio.sleep(0)
            per_turn.append(len(begun) - before)

    asyncio.run(scenario())

    assert begun == list(range(20))
    assert max(per_turn) == 3


def test_another_user_does_not_wait_behind_a_flood() -> None:
    begun: list[str] = []

    async def scenario() -> None:
        queue = FairQueue(max_per_turn=3)

        async def ask(uid: int, name: str) -> None:
            await queue.wait(uid)
            begun.append(name)

        flood = [asyncio.create_task(ask(1, "flood")) for _ in range(100)]
        await asyncio.gather(*flood, asyncio.create_task(ask(2, "other")))

    asyncio.run(scenario())

    assert begun.index("other") <= 3
    assert begun.count("flood") == 100


def test_a_cancelled_request_frees_its_place() -> None:
    async def scenario() -> list[int]:
        queue = FairQueue(max_per_turn=1)
        begun: list[int] = []

        async def ask(number: int) -> None:
            await queue.wait(1)
            begun.append(number)

        tasks = [asyncio.create_task(ask(number)) for number in range(10)]
        await asyncio.sleep(0)
        for task in tasks[2:8]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return begun

    assert asyncio.run(scenario()) == [0, 1, 8, 9]
