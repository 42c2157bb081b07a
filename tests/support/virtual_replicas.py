"""Several replicas of one training in virtual time: each a job of its own, all ending every iteration together."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from gpuenergyd.core.distributed.stragglers import Pace, ReplicaGroup, StragglerChange
from gpuenergyd.core.job.messages import ReplicaBlockBegins, StragglerChanged
from gpuenergyd_across_hosts.ranks.replica_paces import ReplicaPaces
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from tests.support.memory_store import MemoryStore


@dataclass
class VirtualReplicas:
    """Runs replicas in step; what a straggler imposes is told as the daemon would."""

    replicas: tuple[VirtualTraining, ...]
    changes: list[tuple[int, StragglerChange]] = field(default_factory=list)
    """What was imposed or withdrawn, and the iteration that ran meanwhile."""

    def __post_init__(self) -> None:
        self.group = ReplicaGroup()
        for number, replica in enumerate(self.replicas):
            self.group.join(name(number))
            replica.has_replicas = True
            replica.on_block = partial(self._begin_block, number)

    def _begin_block(self, number: int, apply_at_iteration: int) -> None:
        for other, replica in enumerate(self.replicas):
            if other != number:
                replica.feed(ReplicaBlockBegins(apply_at_iteration))

    def run(self, num_iterations: int) -> None:
        """Train for so many iterations."""
        for _ in range(num_iterations):
            ends_s = self._begin()
            for number, replica in enumerate(self.replicas):
                num_seen = len(replica.job.observations)
                replica.finish_iteration(ends_s[number])
                others = (other.pace.overhead_s for other in self.replicas if other is not replica)
                replica.least_overhead_s = min((s for s in others if s is not None), default=None)
                if len(replica.job.observations) != num_seen or num_seen >= replica.rules.max_observations:
                    self._compare(number)

    def _begin(self) -> list[float]:
        """Run all pipelines once; return when each replica's iteration ends."""
        return [max(replica.begin_iteration() for replica in self.replicas)] * len(self.replicas)

    def _compare(self, number: int) -> None:
        replica = self.replicas[number]
        own_time_s = replica.pace.own_time_s
        if own_time_s is not None:
            own = Pace(own_time_s, name(number), replica.now_s, replica.pace.iteration_time_s)
            self.feed(self.group.update_pace(own))

    def feed(self, changes: Iterable[StragglerChange]) -> None:
        """Tell replicas what is imposed on them from now on."""
        for change in changes:
            waiting = self.replicas[int(change.job_id.rsplit("-", 1)[1])]
            self.changes.append((waiting.iteration_index - 1, change))
            straggler_time_s = change.pace.own_time_s if change.pace is not None else None
            waiting.feed(StragglerChanged(straggler_time_s, change.reason))


@dataclass
class ReplicasOnHosts(VirtualReplicas):
    """Each replica sits whole on a host with a daemon of its own: they hear of each other through the job's store."""

    def __post_init__(self) -> None:
        self.store = MemoryStore()
        self.groups = [ReplicaGroup() for _ in self.replicas]
        self.paces = [ReplicaPaces() for _ in self.replicas]
        self.own_ends_s: list[float] = []
        for number, replica in enumerate(self.replicas):
            self.groups[number].join(name(number))
            replica.has_replicas = True

    def run(self, num_iterations: int) -> None:
        """Train for so many iterations; what was observed while one ran is said and heard before it ends."""
        for _ in range(num_iterations):
            self.own_ends_s = [replica.begin_iteration() for replica in self.replicas]
            for number, replica in enumerate(self.replicas):
                replica.finish_iteration(max(self.own_ends_s))
                self._speak(number)
            for number in range(len(self.replicas)):
                self._hear(number)

    def _speak(self, number: int) -> None:
        replica, gauge = self.replicas[number], self.replicas[number].pace
        if gauge.own_time_s is not None:
            self.feed(self.groups[number].update_pace(Pace(gauge.own_time_s, name(number), replica.now_s)))
        self.paces[number].publish(
            self.store,
            gauge.own_time_s,
            num_readings=gauge.num_readings,
            iteration_index=replica.iteration_index,
            overhead_s=gauge.overhead_s,
        )

    def _hear(self, number: int) -> None:
        replica, others = self.replicas[number], self.paces[number].others(self.store, self.replicas[number].now_s)
        replica.least_overhead_s = others.least_overhead_s
        pace = None
        if others.slowest_time_s is not None:
            pace = Pace(others.slowest_time_s, "a replica elsewhere", replica.now_s)
        group = self.groups[number]
        self.feed(group.update_pace_elsewhere(name(number), pace, replica.now_s, is_news=others.is_news))


def name(number: int) -> str:
    return f"replica-{number}"
