"""EnvPipe's planner (Choi et al., USENIX ATC'23), for comparison: full speed on the envelope, lower clocks inside.

Theory of operation. The *valley* of a stage is the clock with the least energy per iteration. The *outer envelope* of a
pipeline consists of the instructions that cannot be slowed down without a longer iteration if all stages are alike:
everything on the last stage, and the first forward and the last backward of every other stage. They run at full speed,
all others at their stage's valley. That is too slow, so *reconfiguration* walks back along the critical path and speeds
it up until the path lies on the envelope. *Balanced* raises all of its slowest instructions a little; *greedy* raises
its latest instruction below full speed a lot. Clocks only ever rise. The published planner measures waits of a running
job; this one computes them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from gpuenergyd.core.pipeline.graph import DependencyGraph, InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd_policies.planning.plan_evaluation import PlanEvaluation, evaluate_options

VALLEY_STEP_MHZ = 90
"""Valleys are searched among multiples of this clock."""
BALANCED_STEP_MHZ = 30
GREEDY_STEP_MHZ = 90
NO_WAIT_S = 1e-9


class EnvelopeMode(StrEnum):
    """Stages of EnvPipe's planner."""

    UNIFORM = "uniform"
    """Every stage at its valley, the clock of least energy; slower than full speed."""
    ENVELOPE = "envelope"
    """Full speed on the envelope, valleys inside; less slow than UNIFORM, but slower than full speed everywhere."""
    BALANCED = "balanced"
    """Reconfigured evenly until as fast as full speed."""
    GREEDY = "greedy"
    """Reconfigured instruction by instruction until as fast as full speed."""


@dataclass(frozen=True, slots=True)
class EnvelopePlan:
    """Clocks with their time and energy, and the number of reconfigurations (iterations of a running job)."""

    evaluation: PlanEvaluation
    num_steps: int


def profiled_clocks(profile: PipelineProfile, step_mhz: int = VALLEY_STEP_MHZ) -> list[int]:
    """Return the clocks of a profiling run: multiples of `step_mhz` common to all classes, and the highest clock."""
    common = set.intersection(*({o.sm_clock_mhz for o in p.options} for p in profile.classes.values()))
    return sorted({mhz for mhz in common if mhz % step_mhz == 0} | ({max(common)} if common else set()))


def valleys(graph: DependencyGraph, profile: PipelineProfile, clocks_mhz: Iterable[int]) -> tuple[int, ...]:
    """Return, per rank, the clock of least energy for that rank when all ranks run at the same clock."""
    best: list[tuple[float, int]] = [(float("inf"), 0)] * graph.num_ranks
    for mhz in clocks_mhz:
        options = [profile[i.instruction_class].interpolated(mhz) for i in graph.instructions]
        evaluated = evaluate_options(graph, profile, options)
        energies_j = [profile.blocking_power_w * evaluated.iteration_time_s] * graph.num_ranks
        for instruction, option in zip(graph.instructions, options, strict=True):
            energies_j[instruction.pp_rank] += option.effective_energy_j(profile.blocking_power_w)
        best = [min(known, (energy_j, mhz)) for known, energy_j in zip(best, energies_j, strict=True)]
    return tuple(mhz for _, mhz in best)


def extra_warm_up(
    profile: PipelineProfile, valleys_mhz: Sequence[int], *, num_microbatches: int, caps: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return EnvPipe's extra in-flight microbatches per rank: forwards that fit into backwards of later ranks."""
    num_ranks = len(valleys_mhz)
    counts = []
    for r, valley_mhz in enumerate(valleys_mhz):
        backward_s = profile[InstructionClass(r, InstructionKind.B)].at_max_clock.time_s
        forward_s = profile[InstructionClass(r, InstructionKind.F)].interpolated(valley_mhz).time_s
        count = int(backward_s * (num_ranks - r - 1) / forward_s)
        count = min(count, max(0, num_microbatches - (num_ranks - r)))
        counts.append(count if caps is None else min(count, caps[r]))
    for r in range(num_ranks - 1):
        if counts[r] < counts[r + 1] and counts[r] + (num_ranks - r) != num_microbatches:
            counts[r + 1] = counts[r]
    return tuple(counts)


def plan_envelope(
    graph: DependencyGraph,
    profile: PipelineProfile,
    valleys_mhz: Sequence[int],
    *,
    mode: EnvelopeMode = EnvelopeMode.BALANCED,
    step_mhz: int | None = None,
) -> EnvelopePlan:
    """Return EnvPipe's clocks for a pipeline whose valleys are known."""
    top = [profile[i.instruction_class].at_max_clock.sm_clock_mhz for i in graph.instructions]
    on_envelope = envelope_flags(graph)
    clocks = [
        top[v] if on_envelope[v] and mode is not EnvelopeMode.UNIFORM else min(top[v], valleys_mhz[i.pp_rank])
        for v, i in enumerate(graph.instructions)
    ]
    clocks_of = {key: sorted(o.sm_clock_mhz for o in profile[key].options) for key in graph.classes}
    keys = [graph.classes[number] for number in graph.class_of]
    option_at = cache(lambda key, sm_clock_mhz: profile[key].interpolated(sm_clock_mhz))
    num_steps = 0
    if mode in {EnvelopeMode.BALANCED, EnvelopeMode.GREEDY}:
        step = step_mhz or (BALANCED_STEP_MHZ if mode is EnvelopeMode.BALANCED else GREEDY_STEP_MHZ)
        choose: Callable[[Sequence[int], Sequence[int], Sequence[int]], list[int]]
        choose = slowest_on_path if mode is EnvelopeMode.BALANCED else latest_on_path
        while True:
            path = critical_walk(graph, [option.time_s for option in map(option_at, keys, clocks)])
            if all(on_envelope[v] for v in path) or all(clocks[v] >= top[v] for v in path):
                break
            for v in choose(path, clocks, top):
                clocks[v] = next_clock(clocks_of[keys[v]], clocks[v] + step)
            num_steps += 1
    return EnvelopePlan(evaluate_options(graph, profile, map(option_at, keys, clocks)), num_steps)


def next_clock(measured_mhz: Sequence[int], wanted_mhz: int) -> int:
    """Return the lowest measured clock of at least `wanted_mhz`, or the highest; `measured_mhz` is ascending."""
    return next((mhz for mhz in measured_mhz if mhz >= wanted_mhz), measured_mhz[-1])


def envelope_flags(graph: DependencyGraph) -> list[bool]:
    """Return, for each instruction, whether it is on the envelope: at full speed, so that others can be stretched."""
    last_rank = graph.num_ranks - 1
    last_microbatch = max(i.microbatch_index for i in graph.instructions)
    return [
        i.pp_rank == last_rank
        or (i.kind is InstructionKind.F and i.microbatch_index == 0)
        or (i.kind is not InstructionKind.F and i.microbatch_index == last_microbatch)
        for i in graph.instructions
    ]


def slowest_on_path(path: Sequence[int], clocks: Sequence[int], top: Sequence[int]) -> list[int]:
    """Return the operations of a path with the lowest clock among those below their top clock."""
    below = [v for v in path if clocks[v] < top[v]]
    lowest = min(clocks[v] for v in below)
    return [v for v in below if clocks[v] == lowest]


def latest_on_path(path: Sequence[int], clocks: Sequence[int], top: Sequence[int]) -> list[int]:
    """Return the latest operation of a path that is below its top clock; the path runs backwards in time."""
    return [next(v for v in path if clocks[v] < top[v])]


def critical_walk(graph: DependencyGraph, durations_s: Sequence[float]) -> list[int]:
    """Return the critical path back from rank 0's last backward: along the rank, or to the operation waited for."""
    n = len(graph.instructions)
    finish_s = [0.0] * n
    start_s = [0.0] * n
    for v in graph.topological_order:
        start_s[v] = max((finish_s[u] + latency_s for u, latency_s in graph.predecessors[v]), default=0.0)
        finish_s[v] = start_s[v] + durations_s[v]
    v = max(w for w, i in enumerate(graph.instructions) if i.pp_rank == 0)
    path = [v]
    while graph.predecessors[v]:
        before = v - 1
        is_same_rank = before >= 0 and graph.instructions[before].pp_rank == graph.instructions[v].pp_rank
        if is_same_rank and start_s[v] - finish_s[before] <= NO_WAIT_S:
            v = before
        else:
            others = [(finish_s[u] + latency_s, u) for u, latency_s in graph.predecessors[v]]
            v = max(others)[1]
        path.append(v)
    return path
