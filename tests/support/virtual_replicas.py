"""Several replicas of one training in virtual time: each a job of its own, all ending every iteration together."""

from dataclasses import dataclass, field

from gpuenergyd.core.messages import StragglerChanged
from gpuenergyd.core.stragglers import Imposed, Pace, ReplicaGroup
from tests.support.virtual_training import VirtualTraining


@dataclass
class VirtualReplicas:
    """Runs replicas in step; what a straggler imposes is told as the daemon would."""

    replicas: tuple[VirtualTraining, ...]
    changes: list[tuple[int, Imposed]] = field(default_factory=list)
    """What was imposed or withdrawn, and the iteration that ran meanwhile."""

    def __post_init__(self) -> None:
        self.group = ReplicaGroup()
        for number, replica in enumerate(self.replicas):
            self.group.join(self._name(number))
            replica.has_replicas = True

    @staticmethod
    def _name(number: int) -> str:
        return f"replica-{number}"

    def run(self, num_iterations: int) -> None:
        """Train for so many iterations."""
        for _ in range(num_iterations):
            end_s = max(replica.begin_iteration() for replica in self.replicas)
            for number, replica in enumerate(self.replicas):
                num_seen = len(replica.job.observations)
                replica.finish_iteration(end_s)
                others = (other.pace.overhead_s for other in self.replicas if other is not replica)
                replica.least_overhead_s = min((s for s in others if s is not None), default=None)
                if len(replica.job.observations) != num_seen or num_seen >= replica.rules.max_observations:
                    self._compare(number)

    def _compare(self, number: int) -> None:
        replica = self.replicas[number]
        own_time_s = replica.pace.own_time_s
        if own_time_s is None:
            return
        for change in self.group.note(Pace(own_time_s, self._name(number), replica.now_s)):
            self.changes.append((replica.iteration_index - 1, change))
            waiting = self.replicas[int(change.job_id.rsplit("-", 1)[1])]
            straggler_time_s = change.pace.own_time_s if change.pace is not None else None
            waiting.tell(StragglerChanged(straggler_time_s, change.reason))
