"""Periodic tasks: a failure is logged once and repeated, and a stop is no failure."""

import asyncio
import logging

import pytest

from gpuenergyd.daemon.periodic import Periodic


def test_a_task_that_is_stopped_in_the_middle_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    began = asyncio.Event()

    async def scenario() -> None:
        async def work() -> None:
            began.set()
            await asyncio.Event().wait()

        periodic = Periodic()
        periodic.every(60.0, "forecast", work)
        periodic.start()
        await began.wait()
        periodic.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())

    assert caplog.records == []


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
