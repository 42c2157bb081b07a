"""A pipeline that spans hosts changes its order of instructions with its plan: all hosts in one iteration, and back."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from statistics import median

import pytest

from gpuenergyd.core.job.messages import OrdersRefused
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.pipeline.reorder import DELAYED_WEIGHTS, SPLIT_IN_PLACE
from gpuenergyd.store.records import ORDER_ADVICE, ControlEventRecord
from gpuenergyd_across_hosts.rules.plan_windows import AHEAD_ITERATIONS
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from tests.support.reordered_pipeline import GIB, ROOMY, ReorderedPipeline

NUM_STAGES = 3
MOST_ITERATIONS = 220
SETTLED = 8
LONGEST_GAP = 8
"""Iterations in 1F1B that a plan with an order may have: a block at full speed, and some before its next window."""
LONGEST_WAY_BACK = 14
"""Iterations until all hosts are back: those that are reported and decided, and the rest of the plan's window."""


@dataclass
class Ran:
    """A training, run until it has been in an order of its own for a while."""

    pipeline: ReorderedPipeline

    async def run_until_in_order(self) -> None:
        """Train until a tuned plan with an order has run for some iterations."""
        pipeline = self.pipeline
        num_before = 0
        while num_before < SETTLED:
            assert len(pipeline.is_split) < MOST_ITERATIONS, pipeline.leader.job.notices
            await pipeline.train(1)
            is_tuned = pipeline._purpose(pipeline.followed[-1][0]) is PlanPurpose.TUNED
            num_before = num_before + 1 if is_tuned and all(pipeline.is_split[-1]) else 0

    async def run_until_back(self) -> int:
        """Train until no host runs split backwards any more; return after how many iterations that is."""
        num_until_last = 0
        for number in range(MOST_ITERATIONS):
            await self.pipeline.train(1)
            if any(self.pipeline.is_split[-1]):
                num_until_last = number + 1
            elif number - num_until_last >= LONGEST_GAP:
                return num_until_last
        raise AssertionError(self.pipeline.leader.job.notices)

    def assert_all_or_none(self) -> None:
        """In each iteration all hosts ran split backwards or none did: no message was late."""
        assert all(len(set(by_host)) == 1 for by_host in self.pipeline.is_split)


def train(then: Callable[[Ran], Awaitable[None]]) -> Ran:
    """Train until the pipeline is in its order, do something, and end."""
    ran = Ran(ReorderedPipeline(NUM_STAGES, BubbleAware()))

    async def run() -> None:
        await ran.run_until_in_order()
        await then(ran)
        await ran.pipeline.close()

    asyncio.run(run())
    return ran


@pytest.mark.thorough
def test_a_pipeline_across_hosts_changes_its_order_together_and_saves_more() -> None:
    advice: list[str] = []
    orders: list[object] = []

    async def look(ran: Ran) -> None:
        await ran.pipeline.train(30)
        fields = ran.pipeline.leader.status_fields()
        advice.append(fields["order_advice"])
        orders.append(fields["order"])

    ran = train(look)
    pipeline = ran.pipeline

    ran.assert_all_or_none()
    baseline_s, baseline_j = pipeline.truth("baseline")
    tuned = [ids[0] for ids, split in zip(pipeline.followed, pipeline.is_split, strict=True) if split[0]][-SETTLED:]
    time_s, energy_j = (median(own) for own in zip(*(pipeline.truth(plan_id) for plan_id in tuned), strict=True))
    assert 1 - energy_j / baseline_j >= 0.20
    assert time_s <= 1.01 * baseline_s
    assert orders[0] in {SPLIT_IN_PLACE, DELAYED_WEIGHTS}
    assert "measured" in advice[0]
    events = [r for r in pipeline.histories[0].records if isinstance(r, ControlEventRecord)]
    assert any(event.action == ORDER_ADVICE for event in events)
    split = [k for k, by_host in enumerate(pipeline.is_split) if by_host[0]]
    blocks = [k for k in range(split[-1] - 25, split[-1]) if not pipeline.is_split[k][0]]
    assert len(blocks) <= 10  # one block at full speed in 1F1B, and the agreement after it


@pytest.mark.thorough
def test_all_hosts_are_back_in_1f1b_soon_after_split_backwards_became_expensive() -> None:
    found: list[int] = []

    async def slow_down(ran: Ran) -> None:
        ran.pipeline.split_backwards(1.5)
        found.append(await ran.run_until_back())
        await ran.pipeline.train(20)

    ran = train(slow_down)

    ran.assert_all_or_none()
    assert found[0] <= LONGEST_WAY_BACK
    assert not any(map(any, ran.pipeline.is_split[-20:]))
    # The policy looks at split backwards, the guard at iterations: whichever sees it first.
    assert any("become slower" in r.reason or "s are allowed" in r.reason for r in events_of(ran))


@pytest.mark.thorough
@pytest.mark.parametrize("is_refused", [False, True])
def test_all_hosts_go_back_when_memory_is_tight_or_one_rank_refuses(is_refused: bool) -> None:  # noqa: FBT001  a parameter of the test
    found: list[int] = []

    async def fill_memory(ran: Ran) -> None:
        if is_refused:
            (rank,) = ran.pipeline.hosts[1].ranks
            assert rank.runner is not None
            rank.runner.handle(OrdersRefused("a GPU ran out of memory in another order than 1F1B"))
        else:
            ran.pipeline.report_memory(replace(ROOMY, free_in_order_bytes=GIB), pp_rank=1)
        found.append(await ran.run_until_back())
        await ran.pipeline.train(70)

    ran = train(fill_memory)

    ran.assert_all_or_none()
    assert found[0] <= LONGEST_WAY_BACK
    assert not any(map(any, ran.pipeline.is_split[-70:]))
    why = "ran out of memory" if is_refused else "too little memory was left on rank 1"
    assert any(why in r.reason for r in events_of(ran))


@pytest.mark.thorough
def test_a_host_that_is_cut_off_is_back_when_its_window_ends_and_all_others_follow() -> None:
    found: list[int] = []

    async def cut(ran: Ran) -> None:
        ran.pipeline.cut_hosts.add(2)
        found.append(await ran.run_until_back())
        await ran.pipeline.train(30)

    ran = train(cut)

    pipeline = ran.pipeline
    mixed = [k for k, by_host in enumerate(pipeline.is_split) if len(set(by_host)) > 1]
    assert len(mixed) <= 2 * AHEAD_ITERATIONS  # what the last extension, of which the host has not heard, added
    assert found[0] <= LONGEST_WAY_BACK
    assert not any(map(any, pipeline.is_split[-30:]))


def events_of(ran: Ran) -> list[ControlEventRecord]:
    return [r for r in ran.pipeline.histories[0].records if isinstance(r, ControlEventRecord)]
