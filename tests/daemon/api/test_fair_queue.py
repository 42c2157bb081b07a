"""Fair queueing: a flood, of one user or of many, does not delay the requests of another."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from gpuenergyd.daemon.api.fair_queue import REQUEST_S, FairQueue

TURN_S = 10.5 * REQUEST_S


class Requests:
    """Requests of users on a CPU whose time only they use up."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_ranks: Counter[int] = Counter()
        self.queue = FairQueue(TURN_S, cpu_s=lambda: self.now_s, num_ranks_of=lambda uid: self.num_ranks[uid])
        self.begun: list[str] = []

    def ask(self, uid: int, name: str, cost_s: float = 0.0) -> asyncio.Task[str]:
        """Send a request, which keeps the CPU busy for so long besides what each request costs."""

        async def handle() -> str:
            self.begun.append(name)
            self.now_s += cost_s
            return name

        return asyncio.create_task(self.queue.run(uid, handle))


def play(scenario: Callable[[Requests], Awaitable[None]]) -> Requests:
    requests = Requests()

    async def run() -> None:
        await scenario(requests)

    asyncio.run(run())
    return requests


def test_the_requests_of_a_turn_need_a_limited_cpu_time_and_start_in_order() -> None:
    per_turn: list[int] = []

    async def scenario(requests: Requests) -> None:
        tasks = [requests.ask(1, str(number)) for number in range(50)]
        while not all(task.done() for task in tasks):
            before = len(requests.begun)
            await asyncio.sleep(0)
            per_turn.append(len(requests.begun) - before)

    requests = play(scenario)

    assert requests.begun == [str(number) for number in range(50)]
    assert max(per_turn) == 10


@pytest.mark.fault(36)
def test_another_user_does_not_wait_behind_a_flood() -> None:
    async def scenario(requests: Requests) -> None:
        flood = [requests.ask(1, "flood", TURN_S) for _ in range(100)]
        await asyncio.gather(*flood[:20])
        requests.begun.clear()
        await requests.ask(2, "other")
        await asyncio.gather(*flood)

    requests = play(scenario)

    assert requests.begun.index("other") <= 2
    assert requests.begun.count("flood") >= 75


@pytest.mark.fault(36)
def test_a_user_among_40_who_flood_waits_for_one_turn_not_for_each_of_them() -> None:
    async def scenario(requests: Requests) -> None:
        flood = [requests.ask(uid, "flood", 5 * TURN_S) for uid in range(40) for _ in range(10)]
        await asyncio.gather(*flood[:200])
        requests.begun.clear()
        await requests.ask(99, "other")
        await asyncio.gather(*flood)

    requests = play(scenario)

    assert requests.begun.index("other") <= 2


def test_users_get_equal_cpu_time_not_equal_numbers_of_requests() -> None:
    async def scenario(requests: Requests) -> None:
        dear = [requests.ask(1, "dear", 9 * REQUEST_S) for _ in range(100)]
        cheap = [requests.ask(2, "cheap") for _ in range(1000)]
        await asyncio.gather(*dear, *cheap)

    requests = play(scenario)

    begun = requests.begun[:500]
    assert begun.count("cheap") / begun.count("dear") == pytest.approx(10, rel=0.2)


@pytest.mark.fault(36)
@pytest.mark.parametrize("num_ranks", [1, 16])
def test_all_users_without_a_rank_together_weigh_as_much_as_one_rank(num_ranks: int) -> None:
    async def scenario(requests: Requests) -> None:
        requests.num_ranks[99] = num_ranks
        flood = [requests.ask(uid, "flood") for uid in range(40) for _ in range(20)]
        ranks = [requests.ask(99, "rank") for _ in range(400)]
        await asyncio.gather(*flood, *ranks)

    begun = play(scenario).begun[40:440]

    assert begun.count("rank") / len(begun) == pytest.approx(num_ranks / (num_ranks + 1), rel=0.2)


def test_a_user_who_was_idle_has_not_saved_up_cpu_time() -> None:
    async def scenario(requests: Requests) -> None:
        await requests.ask(2, "early")
        for _ in range(100):
            await requests.ask(1, "busy", TURN_S)
        requests.begun.clear()
        both = [requests.ask(2 - k % 2, ("two", "one")[k % 2]) for k in range(200)]
        await asyncio.gather(*both)

    requests = play(scenario)

    assert requests.begun[:60].count("one") >= 20


def test_what_a_request_waits_for_is_not_charged() -> None:
    async def scenario(requests: Requests) -> None:
        gate = asyncio.Event()

        async def handle() -> None:
            requests.now_s += REQUEST_S
            await gate.wait()
            requests.now_s += REQUEST_S

        waiting = asyncio.create_task(requests.queue.run(1, handle))
        await asyncio.sleep(0)
        await requests.ask(2, "other", 50 * REQUEST_S)
        gate.set()
        await waiting
        (user, _) = requests.queue._users.values()

        assert user.cost_s == pytest.approx(3 * REQUEST_S)

    play(scenario)


def test_errors_and_cancellation_reach_the_request_and_its_caller() -> None:
    seen: list[str] = []

    async def scenario(requests: Requests) -> None:
        async def fails() -> None:
            raise ValueError("no")

        async def waits() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        with pytest.raises(ValueError, match="no"):
            await requests.queue.run(1, fails)
        waiting = asyncio.create_task(requests.queue.run(1, waits))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    play(scenario)

    assert seen == ["cancelled"]


def test_a_cancelled_request_frees_its_place() -> None:
    async def scenario(requests: Requests) -> None:
        tasks = [requests.ask(1, str(number), TURN_S) for number in range(10)]
        await asyncio.sleep(0)
        for task in tasks[2:8]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    assert [name for name in play(scenario).begun if name in "089"] == ["0", "8", "9"]
    assert not {"3", "4", "5"} & set(play(scenario).begun)


def test_users_without_requests_are_forgotten() -> None:
    async def scenario(requests: Requests) -> None:
        for uid in range(3000):
            await requests.ask(uid, "once")

        assert len(requests.queue._users) <= 1100

    play(scenario)
