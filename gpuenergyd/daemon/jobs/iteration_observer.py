"""Matches reported iterations with GPU samples, as soon as the energy counters of all GPUs cover them."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gpuenergyd.core.job.description import JobRanks
from gpuenergyd.core.job.messages import Event, IterationObserved, ObserveIteration
from gpuenergyd.core.measurement.iteration_observation import observe_iteration
from gpuenergyd.core.measurement.stages import stage_clocks, stage_energy
from gpuenergyd.core.measurement.telemetry import RankIteration, iteration_window
from gpuenergyd.daemon.ports import JobServices, ReplicasPort, RunningJob

_MAX_PENDING = 64


@dataclass(frozen=True, slots=True)
class _Pending:
    """An iteration that waits until its GPUs' energy counters cover it."""

    command: ObserveIteration
    deadline_mono_ns: int


@dataclass(slots=True)
class IterationObserver:
    """The iterations of one job that are not observed yet; `handle` passes events to its state machine."""

    runner: RunningJob
    services: JobServices
    replicas: ReplicasPort
    handle: Callable[[Event], None]
    _pending: deque[_Pending] = field(default_factory=deque)
    _previous: tuple[RankIteration, ...] = ()
    """Reports of the iteration that was observed last."""

    def observe(self, command: ObserveIteration) -> None:
        """Observe an iteration as soon as its energy is known."""
        limit_ns = round(self.services.observation_limit_s * 1e9)
        self._pending.append(_Pending(command, time.monotonic_ns() + limit_ns))
        self.observe_one_if_covered()

    def observe_one_if_covered(self) -> bool:
        """Observe the oldest pending iteration if its energy is known or its time limit has passed."""
        if self._pending and (self._is_covered(self._pending[0]) or len(self._pending) > _MAX_PENDING):
            self.handle(self._observed(self._pending.popleft().command))
            return True
        return False

    def remaining(self) -> Iterator[IterationObserved]:
        """Yield the pending iterations, covered or not: the job has ended."""
        while self._pending:
            yield self._observed(self._pending.popleft().command)

    def drop_pending(self) -> None:
        """Drop the pending iterations: their measurements are incomplete."""
        self._pending.clear()

    @property
    def _ranks(self) -> JobRanks:
        return self.runner.job.ranks

    def _is_covered(self, pending: _Pending) -> bool:
        if time.monotonic_ns() >= pending.deadline_mono_ns:
            return True
        end_ns = iteration_window(pending.command.ranks[0]).end_ns
        return all(self.services.gpus[gpu_uuid].counter.covers(end_ns) for gpu_uuid in self._ranks.gpu_uuids)

    def _observed(self, command: ObserveIteration) -> IterationObserved:
        gpus = {
            pp_rank: [self.services.gpus[gpu_uuid] for gpu_uuid in gpu_uuids]
            for pp_rank, gpu_uuids in self._ranks.gpu_uuids_by_stage.items()
        }
        has_replicas = self.replicas.has_replicas(self.runner.job_id)
        follows = self._previous and self._previous[0].iteration_index + 1 == command.ranks[0].iteration_index
        observation, spans = observe_iteration(
            ranks=command.ranks,
            graph=self.runner.job.graph_under(command.plan_id),
            clocks={pp_rank: stage_clocks([gpu.clocks for gpu in own]) for pp_rank, own in gpus.items()},
            counters={pp_rank: stage_energy([gpu.counter for gpu in own]) for pp_rank, own in gpus.items()},
            plan_id=command.plan_id,
            is_regular=command.is_regular,
            has_replicas=has_replicas,
            previous=self._previous if follows else (),
        )
        self._previous = command.ranks
        least_overhead_s = self.replicas.least_overhead_s(self.runner) if has_replicas else None
        began_ns = iteration_window(command.ranks[0]).begin_ns
        return IterationObserved(observation, began_ns, spans, least_overhead_s)
