"""What a pipeline leader has received from each stage: its facts, and observations of incomplete iterations."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpuenergyd.core.job.description import stage_gpu
from gpuenergyd.core.job.measurements.reordering import common_offer, least_room
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import Instruction, InstructionClass
from gpuenergyd.core.pipeline.reorder import RankMemory, ReorderOffer
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.daemon.registration import checked_kind
from gpuenergyd.errors import JobError, ProtocolError
from gpuenergyd_across_hosts.host.host_stage import stage_classes
from gpuenergyd_across_hosts.host.validation import check_gpu, check_memory, check_observation
from gpuenergyd_across_hosts.messages.compact_observations import unpack
from gpuenergyd_across_hosts.messages.patterns import from_blocks
from gpuenergyd_across_hosts.messages.pipeline_messages import PIPELINE_VERSION, StageFacts, StageReport
from gpuenergyd_across_hosts.rules.merge import MemberKey, merge_observations, merge_siblings

_MAX_INCOMPLETE = 64
"""Most iterations kept while some stage has not reported them."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The ranks of one stage on one host."""

    facts: StageFacts
    order: tuple[Instruction, ...]
    classes: tuple[InstructionClass, ...]


@dataclass(slots=True)
class StageParts:
    """The parts of all stages of one pipeline; a stage has several parts if it spans hosts."""

    num_pp_ranks: int
    num_tp_ranks: int
    merged_iteration: int = -1
    """Index of the newest complete iteration."""
    _parts: dict[MemberKey, _Part] = field(default_factory=dict)
    """The parts, by pipeline rank and the tensor-parallel rank that reports for it."""
    _incomplete: dict[int, dict[MemberKey, IterationObservation]] = field(default_factory=lambda: defaultdict(dict))

    def add_facts(self, facts: StageFacts) -> None:
        """Add or replace the facts of a part, and drop older parts that include any of its ranks.

        Raises:
            ProtocolError: a number is out of range, or the message is of another version.
        """
        where = f"pipeline rank {facts.pp_rank}"
        if facts.version != PIPELINE_VERSION:
            raise ProtocolError(
                f"{where}: version {facts.version} of pipeline messages; this daemon speaks version {PIPELINE_VERSION}:"
                " all hosts of a job must run the same version of gpuenergyd"
            )
        tp_ranks = facts.tp_ranks
        is_sorted = bool(tp_ranks) and list(tp_ranks) == sorted(set(tp_ranks))
        if not is_sorted or not (tp_ranks[0] >= 0 and tp_ranks[-1] < self.num_tp_ranks):
            raise ProtocolError(f"{where}: tp_ranks {list(tp_ranks)} must ascend within [0, {self.num_tp_ranks})")
        if not 0 <= facts.pp_rank < self.num_pp_ranks:
            raise ProtocolError(f"{where}: must be in [0, {self.num_pp_ranks})")
        check_gpu(where, facts.gpu)
        if facts.memory is not None:
            check_memory(where, facts.memory)
        rows = from_blocks(facts.order)
        order = tuple(Instruction(facts.pp_rank, checked_kind(k), microbatch, c) for (k, c), microbatch in rows)
        self._parts = {
            key: part
            for key, part in self._parts.items()
            if key[0] != facts.pp_rank or not set(part.facts.tp_ranks) & set(tp_ranks)
        }
        self._parts[facts.pp_rank, tp_ranks[0]] = _Part(facts, order, stage_classes(order, facts.reorder))

    def add(self, pp_rank: int, carrier: int, report: StageReport) -> bool:
        """Add the new observations of a part; if its facts are unknown, ignore the report and return False.

        Raises:
            ProtocolError: the observations are malformed, or out of range.
        """
        part = self._parts.get((pp_rank, carrier))
        if part is None or part.facts.facts_id != report.facts_id:
            return False
        for observation in unpack(report.observations, part.classes, report.plan_ids):
            check_observation(f"pipeline rank {pp_rank}", observation)
            if observation.iteration_index > self.merged_iteration:
                self._incomplete[observation.iteration_index][pp_rank, carrier] = observation
        return True

    @property
    def carbon_zones(self) -> frozenset[str]:
        """Zones of carbon intensities that the hosts have reported."""
        zones = (part.facts.carbon_zone for part in self._parts.values())
        return frozenset(zone for zone in zones if zone is not None)

    @property
    def is_complete(self) -> bool:
        """Whether the facts of all ranks are known."""
        return self._covers_all(self._parts)

    def order(self, pp_rank: int) -> tuple[Instruction, ...]:
        """Return the order of a stage.

        Raises:
            JobError: its hosts run different ones.
        """
        orders = [part.order for part in self._of_stage(pp_rank)]
        if any(order != orders[0] for order in orders):
            raise JobError(f"the hosts of pipeline rank {pp_rank} run different orders")
        return orders[0]

    def changed_order(self, pp_rank: int, known: tuple[Instruction, ...]) -> tuple[Instruction, ...] | None:
        """Return a stage's new order if all parts agree on one other than `known`, as after a ramp-up; else None."""
        orders = {part.order for part in self._of_stage(pp_rank)}
        return orders.pop() if len(orders) == 1 and known not in orders else None

    def gpu(self, pp_rank: int) -> GpuView:
        """Return the GPU that a stage is planned for.

        Raises:
            JobError: its GPUs are on several hosts, or have no clock in common.
        """
        return stage_gpu(pp_rank, [part.facts.gpu for part in self._of_stage(pp_rank)])

    def reordering(self, pp_rank: int) -> tuple[ReorderOffer, str, RankMemory | None]:
        """Return a stage's reordering offer, the reason if it now refuses other orders, and its memory if known."""
        facts = [part.facts for part in self._of_stage(pp_rank)]
        refusal = next((stage.order_refusal for stage in facts if stage.order_refusal), "")
        return common_offer([stage.reorder for stage in facts]), refusal, least_room([stage.memory for stage in facts])

    def complete_iterations(self) -> Iterable[IterationObservation]:
        """Yield the iterations that all ranks have reported by now, oldest first; older ones are dropped."""
        for index in sorted(self._incomplete):
            if self._covers_all(self._incomplete.get(index, {})):
                found = self._incomplete[index]
                self.merged_iteration = index
                for older in [i for i in self._incomplete if i <= index]:
                    del self._incomplete[older]
                of_stage: dict[int, list[IterationObservation]] = defaultdict(list)
                for (pp_rank, _), observation in sorted(found.items()):
                    of_stage[pp_rank].append(observation)
                yield merge_observations([merge_siblings(of_stage[pp]) for pp in range(self.num_pp_ranks)])
        for stale in sorted(self._incomplete)[:-_MAX_INCOMPLETE]:
            del self._incomplete[stale]

    def _of_stage(self, pp_rank: int) -> list[_Part]:
        return [part for (pp, _), part in sorted(self._parts.items()) if pp == pp_rank]

    def _covers_all(self, keys: Iterable[MemberKey]) -> bool:
        """Return whether these parts hold all ranks of the pipeline."""
        parts = [self._parts[key] for key in keys if key in self._parts]
        return sum(len(part.facts.tp_ranks) for part in parts) == self.num_pp_ranks * self.num_tp_ranks
