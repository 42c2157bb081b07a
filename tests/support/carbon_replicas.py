"""Two replicas of one training, each a pipeline across hosts led by a daemon with a carbon service of its own.

As in `straggling_pipelines.py`, an iteration lasts as long as the slower replica takes. What the training was slowed
down is known: full speed is the longest time of both without any plan.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpuenergyd.daemon.across_hosts.pipeline_leader import PipelineLeader
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.daemon.ports import PolicyPort
from gpuenergyd_policies.uniform import Uniform
from tests.support.carbon_host import CarbonHost
from tests.support.straggling_pipelines import StragglingPipelines
from tests.support.virtual_pipeline import at, leaders_in_virtual_time


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
        self.sites = [
            None if own is None else self._site(folder / str(dp), own, hour_s, dp) for dp, own in enumerate(values)
        ]
        self.silent: set[int] = set()
        """Replicas whose leading rank has stopped to exchange, as after the death of its daemon."""

    def _site(self, folder: Path, values: Sequence[float], hour_s: float, dp_rank: int) -> CarbonHost:
        folder.mkdir(exist_ok=True)
        return CarbonHost(
            folder,
            values,
            hour_s=hour_s,
            now=lambda: at(self.now_s),
            policy=Uniform(),
            leader=lambda: self._leading(dp_rank),
        )

    def _leading(self, dp_rank: int) -> PipelineLeader:
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

    def slowdown_ratio(self, begin: int, end: int) -> float:
        """Return the slowdown of the whole training in some iterations, against its usual time at full speed."""
        times_s = [iteration.time_s for iteration in self.history[begin:end]]
        return sum(times_s) / (len(times_s) * self.full_speed_s) - 1

    @property
    def full_speed_s(self) -> float:
        """Mean time of the iterations in which no rank followed a plan."""
        plain = [i.time_s for i in self.history if all(own == "baseline" for ids in i.plan_ids for own in ids)]
        return sum(plain) / len(plain)
