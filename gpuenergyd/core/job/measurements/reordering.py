"""Reordering of a job: whether its instruction order may change, the memory for it, and the policy's advice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuenergyd.core.measurement.telemetry import RankIteration
from gpuenergyd.core.pipeline.reorder import OrderAdvice, RankMemory, ReorderOffer
from gpuenergyd.core.policy_api.policy import ReorderView


@dataclass(frozen=True, slots=True)
class ReorderingSnapshot:
    """All state of `Reordering`."""

    offers: Mapping[int, ReorderOffer] = field(default_factory=dict)
    memory: Mapping[int, RankMemory] = field(default_factory=dict)
    barred: str = ""
    advice: OrderAdvice | None = None


@dataclass(slots=True)
class Reordering:
    """Offers and memory of a job's ranks by `JobDescription.rank_index`, and the policy's last advice."""

    offers: dict[int, ReorderOffer] = field(default_factory=dict)
    memory: dict[int, RankMemory] = field(default_factory=dict)
    barred: str = ""
    """Why no other order may be tried any more, for example after one ran out of memory; empty if it may."""
    advice: OrderAdvice | None = None

    def record(self, index: int, report: RankIteration, *, is_plain: bool) -> None:
        """Record a rank's memory in an iteration, in the registered order (`is_plain`) or another one.

        Allocators report the peak since the program started, so values for the registered order are no longer updated
        once another order has run.
        """
        now, known = report.memory, self.memory.get(index)
        if now is None:
            return
        if known is None:
            self.memory[index] = now
        elif not is_plain:
            before = now.free_bytes if known.free_in_order_bytes is None else known.free_in_order_bytes
            self.memory[index] = replace(known, free_in_order_bytes=min(before, now.free_bytes))
        elif known.free_in_order_bytes is None:
            self.memory[index] = replace(
                known,
                free_bytes=min(known.free_bytes, now.free_bytes),
                microbatch_bytes=max(known.microbatch_bytes, now.microbatch_bytes),
            )

    def record_stage(self, index: int, memory: RankMemory | None) -> None:
        """Replace a stage's memory by the value from the stage's own daemon; None if unknown."""
        if memory is None:
            self.memory.pop(index, None)
        else:
            self.memory[index] = memory

    def bar(self, reason: str) -> bool:
        """Forbid other orders from now on; return whether they were allowed before."""
        is_new, self.barred = not self.barred, self.barred or reason
        return is_new

    def view(self, num_ranks: int, num_stage_ranks: int) -> ReorderView:
        """Return the view for a policy; a stage's memory is that of its rank with the least room."""
        offer = common_offer(tuple(self.offers.values()))
        return ReorderView(
            is_allowed=offer.is_allowed,
            refusal=self.barred or offer.refusal,
            memory=tuple(self._stage_memory(r * num_stage_ranks, num_stage_ranks) for r in range(num_ranks)),
            advice=self.advice,
        )

    def _stage_memory(self, first: int, count: int) -> RankMemory | None:
        return least_room([self.memory.get(index) for index in range(first, first + count)])

    def snapshot(self) -> ReorderingSnapshot:
        """Return a copy of all state."""
        return ReorderingSnapshot(dict(self.offers), dict(self.memory), self.barred, self.advice)

    def restore(self, snapshot: ReorderingSnapshot) -> None:
        """Replace all state."""
        self.offers, self.memory = dict(snapshot.offers), dict(snapshot.memory)
        self.barred, self.advice = snapshot.barred, snapshot.advice


def common_offer(offers: Sequence[ReorderOffer]) -> ReorderOffer:
    """Return the combined offer of ranks: reordering is allowed if all allow it; otherwise the first refusal."""
    refusal = next((offer.refusal for offer in offers if offer.refusal), "")
    return ReorderOffer(bool(offers) and all(offer.is_allowed for offer in offers), refusal)


def least_room(memory_of_ranks: Sequence[RankMemory | None]) -> RankMemory | None:
    """Return the memory of the rank with the least room in a stage; None if that of any rank is unknown."""
    known = [memory for memory in memory_of_ranks if memory is not None]
    if len(known) < len(memory_of_ranks):
        return None
    return min(known, key=lambda memory: memory.free_bytes / max(1, memory.microbatch_bytes), default=None)
