"""Supervision of the carbon fetcher: settings that it refuses are named once, and tried again slowly."""

import asyncio
import logging
from pathlib import Path

import pytest

from gpuenergyd.daemon.settings import SIMULATED, Settings
from gpuenergyd_carbon.fetching import fetcher_process
from gpuenergyd_carbon.fetching.fetcher_process import CarbonFetcher


class ScriptedFetcher(CarbonFetcher):
    """A fetcher whose process exits with the given statuses and refusals, then runs until it is closed."""

    def __init__(self, settings: Settings, *exits: tuple[int, str]) -> None:
        super().__init__(settings)
        self.exits = list(exits)
        self.is_running = asyncio.Event()

    async def _run_once(self) -> tuple[int, str]:
        if self.exits:
            return self.exits.pop(0)
        self.is_running.set()
        await asyncio.Event().wait()
        raise AssertionError


def test_a_refusal_is_logged_once_and_forgotten_when_the_fetcher_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fetcher_process, "_MAX_DELAY_S", 0.001)
    monkeypatch.setattr(fetcher_process, "_FIRST_DELAY_S", 0.001)
    caplog.set_level(logging.INFO)
    settings = Settings(
        driver=SIMULATED, world_path=tmp_path / "world", runtime_dir=tmp_path, state_dir=tmp_path, carbon_zone="XX"
    )

    async def scenario() -> ScriptedFetcher:
        fetcher = ScriptedFetcher(settings, *[(2, "zone 'XX' requires a source")] * 5, (1, ""))
        fetcher.start()
        await asyncio.wait_for(fetcher.is_running.wait(), 60)
        await fetcher.close()
        return fetcher

    fetcher = asyncio.run(scenario())

    refused, exited = caplog.messages
    assert refused.startswith("the carbon fetcher does not start: zone 'XX' requires a source; correct the setting")
    assert exited.startswith("the carbon fetcher exited (status 1)")
    assert fetcher.num_restarts == 1
    assert fetcher.refusal is None
