"""Profiles made for planning tests."""

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile, instruction_profile

F, B = InstructionKind.F, InstructionKind.B


def forward_backward_profile(weights: list[float]) -> PipelineProfile:
    """Return stages of these weights, at eight clocks: part of the time does not shrink, power grows with f squared."""
    return PipelineProfile(
        {
            InstructionClass(rank, kind): instruction_profile(
                (
                    ClockOption(mhz, weight * work * (0.3 + 0.7 * 1400 / mhz), weight * work * (100 + mhz * mhz / 8000))
                    for mhz in range(1400, 600, -100)
                ),
                where="test",
            )
            for rank, weight in enumerate(weights)
            for kind, work in ((F, 1.0), (B, 2.0))
        },
        blocking_power_w=80.0,
    )
