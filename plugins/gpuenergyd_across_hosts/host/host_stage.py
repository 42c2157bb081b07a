"""This host's part of one stage of a pipeline across hosts: its tensor-parallel ranks, merged into one report."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from gpuenergyd.core.job.description import stage_gpu
from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.measurements.reordering import common_offer, least_room
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import Instruction, InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.pipeline.reorder import ReorderOffer
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.errors import JobError
from gpuenergyd.wire.daemon_codec import encode
from gpuenergyd_across_hosts.messages.compact_observations import MAX_CLASSES, pack, plans_of
from gpuenergyd_across_hosts.messages.patterns import to_blocks
from gpuenergyd_across_hosts.messages.pipeline_messages import MemberQuery, PlanAgreement, StageFacts, StageReport
from gpuenergyd_across_hosts.rules.merge import merge_siblings

_OBSERVATIONS_SENT = 6
_RECENT = 2 * _OBSERVATIONS_SENT
"""Newest observations of each sibling searched for iterations that all have reported; siblings may be a few apart."""
LEADER_BYTES_PER_ITERATION = 24_576
"""Limit of the average size of all stages' observations of one iteration; the leader's host receives them all."""
_FACTS_ID_CHARS = 12


@dataclass(frozen=True, slots=True)
class Sibling:
    """What is known of one tensor-parallel rank."""

    job: Job
    gpu: GpuView
    iteration_index: int
    installed: frozenset[str]


@dataclass(slots=True)
class HostStage:
    """The tensor-parallel ranks of one stage on this host; the lowest-numbered one sends their joint report."""

    pp_rank: int
    num_pp_ranks: int
    num_tp_ranks: int
    carbon_zone: str | None = None
    agreement: PlanAgreement | None = None
    siblings: dict[int, Sibling] = field(default_factory=dict)
    """The stage's jobs on this host, by tensor-parallel rank."""
    _merged: dict[int, IterationObservation] = field(default_factory=dict)
    _facts: StageFacts | None = None
    _facts_of: tuple[object, ...] = ()
    _classes: tuple[InstructionClass, ...] = ()
    _detail_every: int = 1

    @property
    def tp_ranks(self) -> tuple[int, ...]:
        """The ranks whose jobs already know their schedule."""
        return tuple(tp for tp, rank in sorted(self.siblings.items()) if rank.job.ranks.schedule is not None)

    @property
    def carrier(self) -> int | None:
        """The rank that sends the joint report; None while no rank can."""
        return min(self.tp_ranks, default=None)

    @property
    def is_changing(self) -> bool:
        """Whether its ranks differ in the number of microbatches, as when a batch-size ramp-up reaches some first."""
        return len({self.siblings[tp].job.description.num_microbatches for tp in self.tp_ranks}) > 1

    @property
    def is_ended(self) -> bool:
        """Whether the jobs of all its ranks have ended."""
        return all(rank.job.is_ended for rank in self.siblings.values())

    def update(self, tp_rank: int, query: MemberQuery, job: Job, gpu: GpuView) -> None:
        """Record the state that a rank has sent, and drop ranks whose jobs have ended."""
        self.siblings = {tp: rank for tp, rank in self.siblings.items() if not rank.job.is_ended}
        self.siblings[tp_rank] = Sibling(job, gpu, query.iteration_index, frozenset(query.installed))
        if query.agreement is not None and tp_rank == self.carrier:
            self.agreement = query.agreement

    def facts(self) -> StageFacts:
        """Return the facts of the stage, rebuilt if the ranks or their data have changed.

        Raises:
            JobError: the ranks run different orders, or their GPUs have no clock in common.
        """
        own = [self.siblings[tp] for tp in self.tp_ranks]
        orders = [self._order_of(sibling) for sibling in own]
        known = [sibling.job.knowledge.reordering for sibling in own]
        offer = common_offer([reordering.offers.get(0, ReorderOffer()) for reordering in known])
        refusal = next((reordering.barred for reordering in known if reordering.barred), "")
        memory = least_room([reordering.memory.get(0) for reordering in known])
        key = (self.tp_ranks, *(sibling.gpu for sibling in own), *map(id, orders), offer, refusal, memory)
        if self._facts is None or key != self._facts_of:
            for tp_rank, order in zip(self.tp_ranks, orders, strict=True):
                if order != orders[0]:
                    raise JobError(f"tensor-parallel rank {tp_rank} of pipeline rank {self.pp_rank} runs another order")
            self._classes = stage_classes(orders[0], offer)
            if len(self._classes) > MAX_CLASSES:
                what = f"{len(self._classes)} kinds of instruction; at most {MAX_CLASSES} are accepted"
                raise JobError(f"pipeline rank {self.pp_rank}: {what}")
            blocks = to_blocks([((str(i.kind), i.chunk_index), i.microbatch_index) for i in orders[0]])
            gpu = stage_gpu(self.pp_rank, [sibling.gpu for sibling in own])
            num_microbatches = own[0].job.description.num_microbatches
            facts = StageFacts(
                "", self.pp_rank, self.tp_ranks, gpu, blocks,
                carbon_zone=self.carbon_zone, num_microbatches=num_microbatches,
                reorder=offer, order_refusal=refusal, memory=memory,
            )  # fmt: skip
            self._facts = replace(facts, facts_id=hashlib.sha256(encode(facts)).hexdigest()[:_FACTS_ID_CHARS])
            self._facts_of, self._merged = key, {}  # merged iterations belong to the previous set of ranks
        return self._facts

    def report(self) -> StageReport:
        """Return the facts and observations that the pipeline's leader has not received yet.

        Raises:
            JobError, ProtocolError: the ranks of the stage do not fit together, or a number cannot be sent.
        """
        facts = self.facts()
        own = [self.siblings[tp] for tp in facts.tp_ranks]
        known = self.agreement.merged_iteration if self.agreement is not None else -1
        observations = self._new_observations(own, known)
        plan_ids = plans_of(observations)
        is_detailed = {o.iteration_index: self._is_detailed(own[0].job, o) for o in observations}
        text = self._packed(observations, plan_ids, is_detailed)
        iterations = [sibling.iteration_index for sibling in own]
        installed = frozenset.intersection(*(sibling.installed for sibling in own))
        if (agreed := self.agreement) is not None:
            installed &= {agreed.wanted, *(plan_id for plan_id, *_ in agreed.windows)}
        return StageReport(
            facts_id=facts.facts_id,
            tp_ranks=facts.tp_ranks,
            oldest_iteration=min(iterations),
            newest_iteration=max(iterations),
            installed=tuple(sorted(installed)),
            plan_ids=plan_ids,
            observations=text,
        )

    def _new_observations(self, own: Iterable[Sibling], known: int) -> list[IterationObservation]:
        """Return the merged iterations after `known` that all ranks have observed, oldest first."""
        found = [{o.iteration_index: o for o in sibling.job.observations[-_RECENT:]} for sibling in own]
        common = sorted(set.intersection(*(set(seen) for seen in found)))
        # The leader cannot use iterations from before the number of microbatches changed.
        known = max(known, *(sibling.job.knowledge.changed_at - 1 for sibling in own))
        wanted = [index for index in common if index > known][-_OBSERVATIONS_SENT:]
        self._merged = {
            index: self._merged.get(index) or merge_siblings([seen[index] for seen in found]) for index in wanted
        }
        return [self._merged[index] for index in wanted]

    def _is_detailed(self, job: Job, observation: IterationObservation) -> bool:
        """Return whether the leader gets an iteration's instruction times; under a tuned plan, it gets only some.

        Profiling and the baseline need all of them. A tuned plan is evaluated by iteration time and energy alone.
        """
        purpose = job.knowledge.plans.purpose_of(observation.plan_id)
        return purpose is not PlanPurpose.TUNED or observation.iteration_index % self._detail_every == 0

    def _packed(
        self, observations: list[IterationObservation], plan_ids: tuple[str, ...], is_detailed: dict[int, bool]
    ) -> str:
        text = pack(observations, self._classes, plan_ids, is_detailed=is_detailed)
        if len(observations) == 1 and is_detailed[observations[0].iteration_index]:
            # A power of two, so that all stages send the details of the same iterations, whatever their own sizes.
            num_iterations = math.ceil(len(text) * self.num_pp_ranks / LEADER_BYTES_PER_ITERATION)
            self._detail_every = 1 << (num_iterations - 1).bit_length()
        return text

    @staticmethod
    def _order_of(sibling: Sibling) -> tuple[Instruction, ...]:
        schedule = sibling.job.ranks.schedule
        assert schedule is not None
        return schedule.orders[0]


def stage_classes(order: Sequence[Instruction], offer: ReorderOffer) -> tuple[InstructionClass, ...]:
    """Return the instruction classes of a stage in the order in which observations refer to them.

    A stage that accepts reordering may split its backward passes into two halves, input and weight gradients.
    """
    classes = {instruction.instruction_class for instruction in order}
    halves = (InstructionKind.I, InstructionKind.W) if offer.is_allowed and not offer.refusal else ()
    split = {replace(key, kind=kind) for key in classes if key.kind is InstructionKind.B for kind in halves}
    return tuple(sorted(classes | split))
