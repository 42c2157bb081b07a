"""One GPU's energy counter as the sampler follows it: read with all other values, or apart where that costs much.

A costly counter that moves too often for its updates to be predicted is read each second and dated half a period back.
"""

from dataclasses import dataclass, field

from gpuenergyd.gpu.device import EnergyReading
from gpuenergyd.gpu.worker.threads.counter_edges import EnergyEdges
from gpuenergyd.gpu.worker.threads.grid_learning import GridLearner
from gpuenergyd.gpu.worker.threads.predicted_edges import DATE_EVERY_NS, PredictedEdges

_COSTLY_CPU_NS = 1_000_000
"""CPU time of an energy reading from which ten a second for each of some GPUs are too many."""
_NUM_COSTLY = 5
"""Costly readings in a row: a single one may have met a busy host."""
_POSTPONED_NS = 500_000_000
_FAILED_NS = 5_000_000_000
"""Pause of a counter whose grid could not be learned."""


@dataclass(slots=True)
class FollowedCounter:
    """The newest dated update of a counter, and when it is to be read alone."""

    call_ns: int = 0
    """Duration of the last call that read the energy counter alone."""
    edges: EnergyEdges = field(default_factory=EnergyEdges)
    """Follows a counter that is cheap to read."""
    learner: GridLearner | None = None
    """Learns the update times of a counter that is costly to read."""
    predicted: PredictedEdges | None = None
    """Follows a costly counter whose update times are known."""
    _num_costly: int = 0
    _rare_read_ns: int = 0
    """Next reading of a costly counter that is not predicted; 0 if there is none."""

    @property
    def is_read_apart(self) -> bool:
        """Whether periodic readings leave the energy out."""
        return self.learner is not None or self.predicted is not None or self._rare_read_ns > 0

    @property
    def next_read_ns(self) -> int:
        """Instant of the next reading of the energy alone; 0 when the periodic readings are enough."""
        if self.predicted is not None:
            return self.predicted.next_read_ns
        return self._rare_read_ns or (self.edges.next_read_ns if self.learner is None else self.learner.next_read_ns)

    @property
    def newest_edge(self) -> tuple[int, float] | None:
        """Instant and value of the newest update that could be dated."""
        source = self.edges if self.predicted is None else self.predicted
        if source.edge_mono_ns is None or source.edge_energy_j is None:
            return None
        return source.edge_mono_ns, source.edge_energy_j

    @property
    def period_ns(self) -> float:
        """Time between two updates; 0 while it is unknown, or predicted and no update was where it should be."""
        if self.predicted is None:
            return self.edges.period_ns
        return 0.0 if self.predicted.edge_mono_ns is None else self.predicted.period_ns

    @property
    def is_learning(self) -> bool:
        """Whether the counter is read often now."""
        return self.edges.is_learning if self.learner is None else self.learner.is_learning

    @property
    def learning_since_ns(self) -> int:
        """Instant at which learning began; 0 for a counter that costs little."""
        return 0 if self.learner is None else self.learner.begin_ns

    def postpone_learning(self, now_ns: int) -> None:
        """Learn later: another counter is being read often now."""
        if self.learner is None:
            self.edges.postpone_learning(now_ns)
        else:
            self.learner = GridLearner(now_ns + _POSTPONED_NS)

    def forget(self, now_ns: int) -> None:
        """Learn again when the counter is updated."""
        if self.is_read_apart:
            self.learner, self.predicted, self._rare_read_ns = GridLearner(now_ns), None, 0
        self.edges = EnergyEdges()

    def read_soon(self, now_ns: int) -> None:
        """Read a counter that is read apart soon: the energy so far is to be told from what follows."""
        if self.predicted is not None:
            self.predicted.read_soon(now_ns)

    def observe_alone(self, reading: EnergyReading) -> None:
        self.call_ns = reading.took_ns
        self._num_costly = self._num_costly + 1 if reading.cpu_ns >= _COSTLY_CPU_NS else 0
        if self.is_read_apart:
            self._observe_apart(reading)
            return
        self.observe(reading)
        if self._num_costly >= _NUM_COSTLY:
            self.learner = GridLearner(reading.read_mono_ns)
            self.edges = EnergyEdges()

    def observe(self, reading: EnergyReading) -> None:
        """Process a reading of a counter that costs little."""
        self.edges.observe(reading.read_mono_ns, reading.total_energy_j, took_ns=reading.took_ns)

    def _observe_apart(self, reading: EnergyReading) -> None:
        called_ns = reading.read_mono_ns - reading.took_ns // 2
        returned_ns, energy_j = called_ns + reading.took_ns, reading.total_energy_j
        if self._rare_read_ns:
            self._rare_read_ns = returned_ns + DATE_EVERY_NS
            self.observe(reading)
            if not self.edges.is_fast:
                self.forget(returned_ns)
        elif energy_j is None:
            self.learner, self.predicted = GridLearner(returned_ns + _FAILED_NS), None
        elif self.predicted is not None:
            self.predicted.observe(called_ns, returned_ns, energy_j, cpu_ns=reading.cpu_ns)
            if self.predicted.is_lost:
                self.forget(returned_ns)
        elif self.learner is not None:
            self.predicted = self.learner.observe(called_ns, returned_ns, energy_j)
            if self.predicted is not None:
                self.learner = None
            elif self.learner.has_failed:
                if period_ns := self.learner.short_period_ns:
                    self.learner, self._rare_read_ns = None, returned_ns
                    self.edges = EnergyEdges(period_ns=period_ns, is_fast=True, _last_j=energy_j)
                else:
                    self.learner = GridLearner(returned_ns + _FAILED_NS)
