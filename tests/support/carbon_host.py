"""The carbon service of a host in virtual time, with made-up intensities, for the pipeline that it leads."""

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from gpuenergyd.core.carbon.intensity import HOUR
from gpuenergyd.core.policy_api.policy import ClockPolicy
from gpuenergyd.daemon.processes.target_queries import TargetQuery, TargetReply, answer_target
from gpuenergyd.daemon.settings import load_settings
from gpuenergyd.store.records import TargetRecord
from gpuenergyd_across_hosts.host.pipeline_leader import PipelineLeader
from gpuenergyd_carbon.feed import CarbonFeed
from gpuenergyd_carbon.policy.target import CarbonTarget
from gpuenergyd_carbon.rules.grid_clock import GridClock
from gpuenergyd_carbon.targets import CarbonTargets
from tests.support.virtual_pipeline import FIRST_AT, KeptRecords

HISTORY_DAYS = 9
WINDOW_H = 12.0
HOST_POWER_W = 50.0


class CarbonHost:
    """Settings, feed and targets of a host, and the real target policy; intensities are known for `HISTORY_DAYS`."""

    def __init__(
        self,
        folder: Path,
        values: Sequence[float],
        *,
        hour_s: float,
        now: Callable[[], datetime],
        policy: ClockPolicy,
        leader: Callable[[], PipelineLeader],
        begun_at: datetime | None = None,
        window_h: float = WINDOW_H,
    ) -> None:
        """Make the host; `begun_at` is when the replay of intensities began, of a daemon that is started again."""
        path = folder / "XX_made-up_2024.csv"
        rows = [f"{FIRST_AT + k * HOUR:%Y-%m-%dT%H:%M:%SZ},{value:.3f}" for k, value in enumerate(values)]
        path.write_text("timestamp_utc,carbon_intensity_g_per_kwh\n" + "\n".join(rows) + "\n")
        (folder / "config.toml").touch()
        begin_at = FIRST_AT + HISTORY_DAYS * 24 * HOUR
        settings = load_settings(
            folder / "config.toml", driver="simulated", world_path=folder / "world", runtime_dir=folder,
            state_dir=folder, target="carbon", carbon_signal=str(path), carbon_replay_from=begin_at,
            carbon_replay_hour_s=hour_s, carbon_window_h=window_h, carbon_host_power_w=HOST_POWER_W,
        )  # fmt: skip
        self.policy, self.history, self._leader = policy, KeptRecords(), leader
        grid = GridClock(begun_at or now(), begin_at, hour_s)
        self.feed = CarbonFeed(settings, grid, self.history, now)
        self.targets = CarbonTargets(settings, grid, self.feed, self.next_target, self.history, now)

    async def next_target(self, job_id: str, query: TargetQuery) -> TargetReply:
        """Return the real target policy's reply."""
        leader = self._leader()
        assert job_id == leader.job_id
        return answer_target(CarbonTarget(), query, self.policy, leader.job.view())

    async def decide(self, leaders: Sequence[PipelineLeader]) -> None:
        """Read the intensities, and decide the targets."""
        await self.feed.read()
        await self.targets.decide(leaders, None)

    def pipeline_targets(self) -> list[TargetRecord]:
        records = (r for r in self.history.records if isinstance(r, TargetRecord))
        return [r for r in records if r.job_id.endswith("-whole")]
