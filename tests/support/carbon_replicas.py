"""Two replicas of one training, each a pipeline across hosts led by a daemon with a carbon service of its own.

As in `straggling_pipelines.py`, an iteration lasts as long as the slower replica takes. What the training was slowed
down is known: full speed is the longest time of both without any plan.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.daemon.ports import PolicyPort
from gpuenergyd_across_hosts.host.pipeline_leader import PipelineLeader
from gpuenergyd_other_policies.uniform import Uniform
from tests.support.carbon_host import CarbonHost
from tests.support.straggling_pipelines import StragglingPipelines
from tests.support.virtual_pipeline import at, leaders_in_virtual_time

WINDOW_H = 12.0
"""Hours in which a budget is kept."""


class CarbonReplicas(StragglingPipelines):
    """The replicas; `values` are the hourly intensities of each one's host, None where it has no carbon service."""

    def __init__(
        self, folder: Path, values: Sequence[Sequence[float] | None], *, hour_s: float, max_slowdown_ratio: float
    ) -> None:
        super().__init__(
            Uniform,
            num_replicas=len(values),
            noise_ratio=0.001,
            max_slowdown_ratio=max_slowdown_ratio,
            thinking_rounds=0,
        )
        self.folder, self.values, self.hour_s, self.begun_at = folder, values, hour_s, at(self.now_s)
        self.sites = [self._site(dp_rank) for dp_rank in range(len(values))]

    def _site(self, dp_rank: int) -> CarbonHost | None:
        folder, values = self.folder / str(dp_rank), self.values[dp_rank]
        folder.mkdir(exist_ok=True)
        if values is None:
            return None
        return CarbonHost(
            folder,
            values,
            hour_s=self.hour_s,
            now=lambda: at(self.now_s),
            policy=Uniform(),
            leader=lambda: self.leading(dp_rank),
            begun_at=self.begun_at,
            window_h=WINDOW_H,
        )

    async def restart_leader(self, dp_rank: int) -> None:
        """Let the daemon that leads a replica die and start again: it knows its account only, from its disk."""
        site, host = self.sites[dp_rank], self.hosts[dp_rank * self.size.num_pp_ranks]
        if site is not None:
            await site.targets.accounts.save([self.leading(dp_rank)])
        self.sites[dp_rank] = again = self._site(dp_rank)
        host.members._leaders.clear()
        jobs = host.members.jobs
        jobs.services = replace(jobs.services, watcher=again.targets if again is not None else None)

    def leading(self, dp_rank: int) -> PipelineLeader:
        """Return the leader of a replica, which must have joined."""
        leader = self.leader(dp_rank)
        assert leader is not None
        return leader

    def _jobs(self, name: str, policy: PolicyPort) -> Jobs:
        jobs = super()._jobs(name, policy)
        dp_rank, _, pp_rank = name.partition("-")
        site = self.sites[int(dp_rank)] if pp_rank == "0" else None
        watcher = site.targets if site is not None else None
        return replace(jobs, services=replace(jobs.services, watcher=watcher))

    async def train(self, num_iterations: int) -> None:
        """Train, and let each host decide its targets after each iteration."""
        with leaders_in_virtual_time(lambda: self.now_s):
            for _ in range(num_iterations):
                await self.run_iterations(1)
                self.iteration_s = self.history[-1].time_s
                for dp_rank, site in enumerate(self.sites):
                    leader = self.leader(dp_rank)
                    if site is not None and leader is not None:
                        await site.decide([leader])

    def status(self, dp_rank: int) -> dict[str, Any]:
        """Return the status of a replica's target; empty where its host has no carbon service."""
        site = self.sites[dp_rank]
        target: dict[str, Any] = site.targets.status(self.leading(dp_rank))["target"] if site is not None else {}
        return target

    def slowdown_ratio(self) -> float:
        """Return the slowdown of the whole training so far, against its usual time at full speed."""
        times_s = [iteration.time_s for iteration in self.history]
        return sum(times_s) / (len(times_s) * self.full_speed_s) - 1

    def planned_share(self, dp_rank: int) -> float:
        """Return the share of iterations in which a replica followed a plan."""
        followed = [iteration.plan_ids[dp_rank][0] for iteration in self.history]
        return sum(own != "baseline" for own in followed) / len(followed)

    @property
    def full_speed_s(self) -> float:
        """Mean time of the iterations in which no rank followed a plan."""
        plain = [i.time_s for i in self.history if all(own == "baseline" for ids in i.plan_ids for own in ids)]
        return sum(plain) / len(plain)
