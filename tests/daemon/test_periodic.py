"""Periodic tasks: a failure is logged once and repeated, and a stop is no failure."""

import asyncio
import logging

import pytest

from gpuenergyd.daemon.periodic import Periodic


@pytest.mark.parametrize("num_passes", range(5))
def test_a_task_that_is_stopped_before_it_begins_or_in_the_middle_is_no_error(
    num_passes: int, caplog: pytest.LogCaptureFixture
) -> None:
    began = 0

    async def scenario() -> None:
        async def work() -> None:
            nonlocal began
            began += 1
            await asyncio.Event().wait()

        periodic = Periodic()
        periodic.every(60.0, "forecast", work)
        periodic.start()
        for _ in range(num_passes):  # of the event loop
            await asyncio.sleep(0)
        periodic.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())

    assert caplog.records == []
    assert began == (num_passes > 1)


def test_a_task_that_fails_is_named_with_its_reason() -> None:
    async def scenario() -> dict[str, str]:
        failed = asyncio.Event()

        async def work() -> None:
            failed.set()
            raise ValueError("no values")

        periodic = Periodic()
        periodic.every(60.0, "forecast", work)
        periodic.start()
        await failed.wait()
        await asyncio.sleep(0)
        failures = periodic.failures
        periodic.close()
        return failures

    assert asyncio.run(scenario()) == {"forecast": "ValueError: no values"}
