"""Instructions, schedules and the dependency graph between instructions."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ScheduleError


class InstructionKind(StrEnum):
    """Kind of computation, named as in torch.distributed.pipelining; C, O and D are phases of plain training loops."""

    F = "F"
    """Forward."""
    B = "B"
    """Full backward: input and weight gradient together."""
    I = "I"  # noqa: E741  torch's own name
    """Input gradient alone."""
    W = "W"
    """Weight gradient alone."""
    FB = "FB"
    """A forward and the full backward of an earlier microbatch, overlapped so that they cannot be told apart."""
    C = "C"
    """Gradient communication after a backward while nothing computes, including waits for other ranks."""
    O = "O"  # noqa: E741  one letter, as the others
    """Optimizer step."""
    D = "D"
    """Wait for the next batch, from the end of an iteration to the start of the next."""

    __hash__ = str.__hash__  # that of Enum is in Python, and instructions are looked up millions of times

    @property
    def is_wait(self) -> bool:
        """Whether the GPU waits during this phase, so that its time hardly depends on the clock."""
        return self in {InstructionKind.C, InstructionKind.D}

    @property
    def waits_for_ranks(self) -> bool:
        """Whether the time includes waiting for other ranks, so that it does not measure the rank's own work."""
        return self is InstructionKind.C


LOOP_SCHEDULE = "loop"
"""Name of the schedule of a training loop without pipeline stages."""
_CHUNKS_PER_PAIR = 64
"""Maximum number of chunks per rank whose forwards and backwards can be combined."""


@dataclass(frozen=True, slots=True, order=True)
class InstructionClass:
    """Key of instructions with equal cost at equal clock; they share one profile."""

    pp_rank: int
    kind: InstructionKind
    chunk_index: int = 0


@dataclass(frozen=True, slots=True, order=True)
class Instruction:
    """One computation of one microbatch on one chunk of one pipeline rank.

    A combined instruction (FB) has the microbatch index of its backward; its chunk index encodes two chunks.
    """

    pp_rank: int
    kind: InstructionKind
    microbatch_index: int
    chunk_index: int = 0

    @property
    def instruction_class(self) -> InstructionClass:
        """Class whose profile this instruction uses."""
        return InstructionClass(self.pp_rank, self.kind, self.chunk_index)

    @property
    def forward_chunk_index(self) -> int:
        """Chunk of the forward in a combined instruction; for any other instruction, its chunk."""
        return self.chunk_index // _CHUNKS_PER_PAIR if self.kind is InstructionKind.FB else self.chunk_index

    @property
    def backward_chunk_index(self) -> int:
        """Chunk of the backward in a combined instruction; for any other instruction, its chunk."""
        return self.chunk_index % _CHUNKS_PER_PAIR if self.kind is InstructionKind.FB else self.chunk_index

    def __str__(self) -> str:
        name = chunk_name(self.kind, self.chunk_index)
        return f"{self.kind}{self.microbatch_index}{name and '.' + name}@{self.pp_rank}"


def chunk_name(kind: InstructionKind, chunk_index: int) -> str:
    """Return the name of an instruction's chunk, or of both chunks if combined; empty for the first chunk."""
    if kind is InstructionKind.FB:
        return "{}+{}".format(*divmod(chunk_index, _CHUNKS_PER_PAIR))
    return f"{chunk_index or ''}"


def combined_chunk_index(forward_chunk_index: int, backward_chunk_index: int) -> int:
    """Return the chunk index of a combined instruction with these two chunks.

    Raises:
        ScheduleError: a chunk is out of range.
    """
    if not (0 <= forward_chunk_index < _CHUNKS_PER_PAIR and 0 <= backward_chunk_index < _CHUNKS_PER_PAIR):
        raise ScheduleError(
            f"combined forward of chunk {forward_chunk_index} and backward of chunk {backward_chunk_index}:"
            f" at most {_CHUNKS_PER_PAIR} chunks per rank can be combined"
        )
    return forward_chunk_index * _CHUNKS_PER_PAIR + backward_chunk_index


@dataclass(frozen=True, slots=True)
class Schedule:
    """Order of instructions on every pipeline rank.

    `orders[r]` lists the instructions of rank r in program order. `extra_inflight[r]` is the number of microbatches
    that rank r keeps in flight beyond plain 1F1B (empty: none).
    """

    name: str
    num_microbatches: int
    orders: tuple[tuple[Instruction, ...], ...]
    num_chunks: int = 1
    extra_inflight: tuple[int, ...] = ()
    stage_of_chunk: tuple[tuple[int, ...], ...] = field(default=())
    """`stage_of_chunk[r][v]` is the model stage of chunk v of rank r; empty means stage = v * R + r."""
    sent_after: tuple[tuple[Instruction, Instruction], ...] = ()
    """Pairs (instruction, later): the output of `instruction` leaves its rank only after `later` has finished."""
    received_before: tuple[tuple[Instruction, Instruction], ...] = ()
    """Pairs (instruction, earlier): the inputs of `instruction` must have arrived before `earlier` starts."""

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks, R."""
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        """Number of model stages, R * V."""
        return self.num_ranks * self.num_chunks

    def stage_index(self, pp_rank: int, chunk_index: int) -> int:
        """Return the model stage of a chunk."""
        own = self.stage_of_chunk
        return own[pp_rank][chunk_index] if own else chunk_index * self.num_ranks + pp_rank

    def peak_inflight(self, pp_rank: int) -> int:
        """Return the maximum number of microbatch activations that a rank holds at once, summed over its chunks."""
        held = peak = 0
        for instruction in self.orders[pp_rank]:
            match instruction.kind:
                case InstructionKind.F:
                    held += 1
                    peak = max(peak, held)
                case InstructionKind.B | InstructionKind.W:
                    held -= 1
                case InstructionKind.FB:
                    peak = max(peak, held + 1)
        return peak

    def computations(self, pp_rank: int) -> Iterator[tuple[Instruction, tuple[Instruction, ...]]]:
        """Yield each instruction of a rank with its computations: a forward and a backward if combined, else itself.

        The forward in a combined instruction follows from the order, because a rank runs the forwards of a chunk in the
        order of microbatches.
        """
        num_forwards: Counter[int] = Counter()
        for instruction in self.orders[pp_rank]:
            chunk = instruction.forward_chunk_index
            if instruction.kind is InstructionKind.FB:
                forward = Instruction(pp_rank, InstructionKind.F, num_forwards[chunk], chunk)
                microbatch, backward_chunk = instruction.microbatch_index, instruction.backward_chunk_index
                yield instruction, (forward, Instruction(pp_rank, InstructionKind.B, microbatch, backward_chunk))
            else:
                yield instruction, (instruction,)
            num_forwards[chunk] += instruction.kind in {InstructionKind.F, InstructionKind.FB}


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return GPipe's order: all forwards, then all backwards (Huang et al., 2019)."""
    _require_sizes(num_ranks, num_microbatches)
    microbatches = range(num_microbatches)
    return Schedule(
        name="gpipe",
        num_microbatches=num_microbatches,
        orders=tuple(
            tuple(Instruction(r, InstructionKind.F, m) for m in microbatches)
            + tuple(Instruction(r, InstructionKind.B, m) for m in microbatches)
            for r in range(num_ranks)
        ),
    )


def one_forward_one_backward(num_ranks: int, num_microbatches: int, extra_inflight: Sequence[int] = ()) -> Schedule:
    """Return 1F1B, with `extra_inflight[r]` more warm-up forwards on rank r (EnvPipe, ATC'23, section 4.3).

    Raises:
        ScheduleError: the extra microbatches would deadlock; each rank must run ahead at least as far as the next.
    """
    _require_sizes(num_ranks, num_microbatches)
    extra = tuple(extra_inflight) or (0,) * num_ranks
    if len(extra) != num_ranks:
        raise ScheduleError(
            f"extra in-flight microbatches given for {count_text(len(extra), 'rank')}; the pipeline has {num_ranks}"
        )
    if min(extra) < 0 or extra[-1] != 0:
        raise ScheduleError(f"extra in-flight microbatches {list(extra)}: must be >= 0, and 0 on the last rank")
    plain = [min(num_ranks - 1 - r, num_microbatches) for r in range(num_ranks)]
    warmup = [
        plain[r] if extra[r] == 0 else max(plain[r], min(plain[r] + extra[r], num_microbatches - 1))
        for r in range(num_ranks)
    ]
    for r in range(num_ranks - 1):
        if warmup[r] < warmup[r + 1]:
            raise ScheduleError(
                f"extra in-flight microbatches {list(extra)} deadlock: rank {r} warms up with"
                f" {count_text(warmup[r], 'forward')}, rank {r + 1} waits for {warmup[r + 1]}"
            )
    orders = []
    for r in range(num_ranks):
        order = [Instruction(r, InstructionKind.F, m) for m in range(warmup[r])]
        for j in range(num_microbatches - warmup[r]):
            order.append(Instruction(r, InstructionKind.F, warmup[r] + j))
            order.append(Instruction(r, InstructionKind.B, j))
        order += [Instruction(r, InstructionKind.B, m) for m in range(num_microbatches - warmup[r], num_microbatches)]
        orders.append(tuple(order))
    return Schedule(
        name="1f1b", num_microbatches=num_microbatches, orders=tuple(orders), extra_inflight=extra if any(extra) else ()
    )


@dataclass(frozen=True, slots=True)
class DependencyGraph:
    """Instructions and their dependencies.

    Node i is `instructions[i]`: rank 0 first, each rank in program order. `predecessors[v]` lists (u, latency_s): node
    v starts at the earliest `latency_s` after node u has finished.
    """

    instructions: tuple[Instruction, ...]
    predecessors: tuple[tuple[tuple[int, float], ...], ...]
    successors: tuple[tuple[tuple[int, float], ...], ...]
    topological_order: tuple[int, ...]
    num_ranks: int
    epilogues_s: tuple[float, ...]
    """Time that each node needs after its end: the epilogue of a rank's last instruction, 0 for all others."""
    classes: tuple[InstructionClass, ...]
    class_of: tuple[int, ...]
    """Index of each node's class in `classes`; large pipelines have many nodes in few classes."""

    def with_epilogues(self, rank_epilogues_s: Sequence[float]) -> "DependencyGraph":
        """Return this graph with `rank_epilogues_s[r]` after the last instruction of each rank r.

        Raises:
            ScheduleError: an epilogue is negative or not a number, or their count is not the number of ranks.
        """
        if len(rank_epilogues_s) != self.num_ranks or not all(epilogue_s >= 0 for epilogue_s in rank_epilogues_s):
            raise ScheduleError(
                f"epilogues {list(rank_epilogues_s)} s: expected {count_text(self.num_ranks, 'value')} >= 0, one"
                " per rank"
            )
        last_of = {instruction.pp_rank: node for node, instruction in enumerate(self.instructions)}
        epilogues_s = [0.0] * len(self.instructions)
        for pp_rank, node in last_of.items():
            epilogues_s[node] = rank_epilogues_s[pp_rank]
        return replace(self, epilogues_s=tuple(epilogues_s))


def dependency_graph(
    schedule: Schedule, *, communication_latency_s: Callable[[int, int], float] | float = 0.0, launch_gap_s: float = 0.0
) -> DependencyGraph:
    """Return the dependency graph of a schedule.

    Order edges join consecutive instructions of a rank and take `launch_gap_s`. Data edges carry activations
    forward and input gradients backward; an edge between ranks takes `communication_latency_s` (seconds, or
    a function of the sending and the receiving rank) from the end of the instruction after which the data is sent.

    Raises:
        ScheduleError: the order has a cyclic dependency, or no rank computes the input of an instruction.
    """
    producer: dict[_DataKey, int] = {}
    computed = [entry for pp_rank in range(schedule.num_ranks) for entry in schedule.computations(pp_rank)]
    instructions = tuple(instruction for instruction, _ in computed)
    for node, (_, parts) in enumerate(computed):
        for part in parts:
            stage = schedule.stage_index(part.pp_rank, part.chunk_index)
            key = (part.kind, stage, part.microbatch_index)
            if key in producer:
                raise ScheduleError(f"duplicate instruction {part} in the schedule")
            producer[key] = node
    node_of = {instruction: node for node, instruction in enumerate(instructions)}
    sender_of = {node_of[u]: node_of[later] for u, later in schedule.sent_after if u in node_of and later in node_of}
    receiver_of = {
        node_of[v]: node_of[earlier] for v, earlier in schedule.received_before if v in node_of and earlier in node_of
    }
    edges = [(u, u + 1, launch_gap_s) for u, (a, b) in enumerate(pairwise(instructions)) if a.pp_rank == b.pp_rank]
    for v, (_, parts) in enumerate(computed):
        for part, keys in ((one, keys) for one in parts for keys in _inputs(schedule, one)):
            u = next((producer[key] for key in keys if key in producer), None)
            if u is None:
                kinds, (_, stage, microbatch) = "|".join(kind for kind, *_ in keys), keys[0]
                raise ScheduleError(f"{part} needs {kinds}{microbatch} of stage {stage}, which no rank computes")
            sender, receiver = instructions[u].pp_rank, part.pp_rank
            if sender == receiver:
                edges.append((u, v, 0.0))
                continue
            latency_s = communication_latency_s
            if callable(latency_s):
                latency_s = latency_s(sender, receiver)
            edges.append((sender_of.get(u, u), receiver_of.get(v, v), latency_s))
    return graph_from_edges(instructions, edges, num_ranks=schedule.num_ranks)


_DataKey = tuple[InstructionKind, int, int]
"""Kind, model stage and microbatch of an instruction: identifies the data that it produces."""


def _inputs(schedule: Schedule, instruction: Instruction) -> Iterator[tuple[_DataKey, ...]]:
    """Yield the inputs of an instruction, each as a tuple of alternatives; a schedule contains exactly one of them."""
    kinds = InstructionKind
    stage = schedule.stage_index(instruction.pp_rank, instruction.chunk_index)
    microbatch = instruction.microbatch_index
    match instruction.kind:
        case kinds.F:
            if stage > 0:
                yield ((kinds.F, stage - 1, microbatch),)
        case kinds.B | kinds.I:
            yield ((kinds.F, stage, microbatch),)
            if stage < schedule.num_stages - 1:
                yield (kinds.B, stage + 1, microbatch), (kinds.I, stage + 1, microbatch)
        case kinds.W:
            yield ((kinds.I, stage, microbatch),)
        case kinds.C | kinds.O | kinds.D:
            pass  # phases of one rank, in program order
        case kinds.FB:
            raise AssertionError("a combined instruction is a forward and a backward here")


def graph_from_edges(
    instructions: Sequence[Instruction], edges: Iterable[tuple[int, int, float]], *, num_ranks: int
) -> DependencyGraph:
    """Return a graph from (u, v, latency_s) edges; duplicate edges are merged with the larger latency.

    Raises:
        ScheduleError: an edge names a node that does not exist, or the edges form a cycle.
    """
    n = len(instructions)
    merged: dict[tuple[int, int], float] = {}
    for u, v, latency_s in edges:
        if not (0 <= u < n and 0 <= v < n):
            raise ScheduleError(f"edge [{u}, {v}]: instructions are numbered 0 to {n - 1}")
        if not latency_s >= 0:
            raise ScheduleError(f"edge [{u}, {v}]: latency {latency_s} s must be >= 0")
        merged[u, v] = max(latency_s, merged.get((u, v), 0.0))
    predecessors: list[list[tuple[int, float]]] = [[] for _ in range(n)]
    successors: list[list[tuple[int, float]]] = [[] for _ in range(n)]
    for (u, v), latency_s in merged.items():
        predecessors[v].append((u, latency_s))
        successors[u].append((v, latency_s))
    waiting = [len(before) for before in predecessors]
    ready = [v for v in range(n) if waiting[v] == 0]
    order: list[int] = []
    while ready:
        u = ready.pop()
        order.append(u)
        for v, _ in successors[u]:
            waiting[v] -= 1
            if waiting[v] == 0:
                ready.append(v)
    if len(order) < n:
        stuck = next(v for v in range(n) if waiting[v] > 0)
        raise ScheduleError(f"the order cannot run: {instructions[stuck]} waits for itself (cyclic dependency)")
    classes: dict[InstructionClass, int] = {}
    class_of = tuple(classes.setdefault(instruction.instruction_class, len(classes)) for instruction in instructions)
    return DependencyGraph(
        instructions=tuple(instructions),
        predecessors=tuple(tuple(before) for before in predecessors),
        successors=tuple(tuple(after) for after in successors),
        topological_order=tuple(order),
        num_ranks=num_ranks,
        epilogues_s=(0.0,) * n,
        classes=tuple(classes),
        class_of=class_of,
    )


def _require_sizes(num_ranks: int, num_microbatches: int) -> None:
    for count, what in ((num_ranks, "pipeline ranks"), (num_microbatches, "microbatches")):
        if count < 1:
            raise ScheduleError(f"{count} {what}: must be >= 1")
