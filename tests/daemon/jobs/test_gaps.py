"""A rank whose next iteration is late runs at full speed until its next request; on a loop whose time jumps."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from gpuenergyd.daemon.jobs.clock_requests import Admission
from gpuenergyd.daemon.jobs.sessions import GapWatch
from tests.support.job_stage import CLOCKS_MHZ, Stage, plan

NS_PER_S = 1_000_000_000
TOP = ("GPU-0", CLOCKS_MHZ[0], 0)


class _JumpingLoop(asyncio.SelectorEventLoop):
    """A loop whose time goes on only where nothing is left to do before its next timer."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 1000.0

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        own: Any = self
        if not own._ready:
            waiting = [handle._when for handle in own._scheduled if not handle._cancelled]
            self._now_s = max(self._now_s, min(waiting, default=self._now_s))
        super()._run_once()  # type: ignore[misc]  # asyncio's own


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await scenario()

    with asyncio.Runner(loop_factory=_JumpingLoop) as runner:
        runner.run(run())


async def tuned_stage() -> Stage:
    """Return a job under a plan whose first rank has requested a low clock."""
    stage = Stage(plan("t", 1200))
    await stage.begin(times=3)
    await stage.iterate(plan_epoch=1)
    assert stage.send(plan_epoch=1) is Admission.FORWARDED
    return stage


def test_a_late_iteration_raises_the_clock_once_and_the_next_request_lowers_it() -> None:
    async def scenario() -> None:
        stage = await tuned_stage()
        before = list(stage.worker.requested_clocks)
        await asyncio.sleep(30.0)
        raised = stage.worker.requested_clocks[len(before) :]
        seen_mhz = stage.gpus["GPU-0"].requested_sm_clock_mhz
        await stage.iterate(plan_epoch=1)
        stage.send(plan_epoch=1)

        assert before == [("GPU-0", 1200, 0)]
        assert sorted(raised) == [TOP, ("GPU-1", CLOCKS_MHZ[0], 0)]
        assert seen_mhz == CLOCKS_MHZ[0]
        assert stage.worker.requested_clocks[-1] == ("GPU-0", 1200, 0)

    play(scenario)


def test_a_gap_after_a_late_iteration_that_lowered_the_clock_again_is_raised_too() -> None:
    async def scenario() -> None:
        stage = await tuned_stage()
        await asyncio.sleep(30.0)
        stage.send(plan_epoch=1)
        await asyncio.sleep(30.0)

        of_rank = [request for request in stage.worker.requested_clocks if request[0] == "GPU-0"]
        assert of_rank == [("GPU-0", 1200, 0), TOP, ("GPU-0", 1200, 0), TOP]

    play(scenario)


def test_nothing_is_raised_without_a_lease_or_after_the_rank_has_left() -> None:
    async def scenario() -> None:
        observed = Stage()
        observed.join()
        await observed.iterate(times=3)
        await asyncio.sleep(30.0)
        left = await tuned_stage()
        await left.jobs.close("test over")
        await asyncio.sleep(30.0)

        assert not observed.worker.requested_clocks
        assert left.worker.requested_clocks == [("GPU-0", 1200, 0)]

    play(scenario)


def test_iterations_in_time_raise_nothing_and_a_reported_pause_raises_at_once() -> None:
    raised: list[str] = []

    async def scenario() -> None:
        watch = GapWatch(lambda: raised.append("gap"))
        for number in range(20):
            watch.reported(number * NS_PER_S, (number + 1) * NS_PER_S)
            await asyncio.sleep(1.0 if number % 5 else 1.5)
        assert not raised
        watch.reported(20 * NS_PER_S, 0)
        assert raised == ["gap"]
        await asyncio.sleep(30.0)

    play(scenario)
    assert raised == ["gap"]


def test_requests_show_that_short_iterations_go_on_until_their_report_comes() -> None:
    raised: list[str] = []

    async def scenario() -> None:
        watch = GapWatch(lambda: raised.append("gap"))
        for number in range(40):
            await asyncio.sleep(0.06)
            watch.requested()
            for _ in range(24 * (number % 2)):
                watch.reported(0, NS_PER_S // 200)
        assert not raised
        await asyncio.sleep(30.0)

    play(scenario)
    assert raised == ["gap"]


def test_one_long_iteration_does_not_hide_the_next_gap() -> None:
    async def scenario() -> None:
        watch = GapWatch(lambda: None)
        limits_s = []
        for duration_s in (1, 1, 30, 30):
            watch.reported(0, duration_s * NS_PER_S)
            limits_s.append(watch.limit_s or 0.0)
        watch.stop()

        unknown_s, usual_s, after_one_s, after_two_s = limits_s
        assert unknown_s == 0.0
        assert 1.0 < after_one_s == usual_s < 2.0
        assert after_two_s > 30.0

    play(scenario)
