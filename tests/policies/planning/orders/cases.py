"""Profiles and tasks for tests of orders."""

from collections.abc import Sequence

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile, instruction_profile
from gpuenergyd_policies.planning.plan_evaluation import baseline

POWER_W = 80.0
CLOCKS_MHZ = range(1400, 600, -100)


def split_profile(
    weights: Sequence[float], *, input_share: float = 0.5, overhead: float = 0.0, clocks_mhz: Sequence[int] = CLOCKS_MHZ
) -> PipelineProfile:
    """Return stages of these weights with whole and split backwards; splitting adds an overhead to the backward."""
    works = {"F": 1.0, "B": 2.0, "I": 2 * input_share * (1 + overhead), "W": 2 * (1 - input_share) * (1 + overhead)}
    return PipelineProfile(
        {
            InstructionClass(rank, InstructionKind(kind)): instruction_profile(
                (
                    ClockOption(mhz, weight * work * (0.3 + 0.7 * 1400 / mhz), weight * work * (100 + mhz * mhz / 8000))
                    for mhz in clocks_mhz
                ),
                where="test",
            )
            for rank, weight in enumerate(weights)
            for kind, work in works.items()
        },
        POWER_W,
    )


def full_speed_time_s(profile: PipelineProfile, num_ranks: int, num_microbatches: int, latency_s: float = 0.0) -> float:
    """Return the iteration time of plain 1F1B at full speed."""
    graph = dependency_graph(one_forward_one_backward(num_ranks, num_microbatches), communication_latency_s=latency_s)
    return baseline(graph, profile).iteration_time_s
