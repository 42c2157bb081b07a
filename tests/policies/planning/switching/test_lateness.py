"""The expected lateness of plans whose raises rarely take far longer than usual."""

from dataclasses import replace

import pytest

from gpuenergyd.core.pipeline.graph import Instruction, InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.plan import ClockChange
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile, instruction_profile
from gpuenergyd.core.pipeline.switching import constant_latency
from gpuenergyd_policies.planning.switching.requests import expected_late_s

F = InstructionKind.F
PROFILE = PipelineProfile(
    {
        InstructionClass(rank, F): instruction_profile(
            [ClockOption(1000, 1.0, 100.0), ClockOption(800, 1.25, 80.0), ClockOption(500, 2.0, 60.0)], where="test"
        )
        for rank in (0, 1)
    },
    blocking_power_w=10.0,
)


def changes(*clocks_mhz: int) -> tuple[ClockChange, ...]:
    return tuple(ClockChange(Instruction(0, F, k), 0.0, clock) for k, clock in enumerate(clocks_mhz))


def test_each_raise_costs_the_excess_times_its_share_of_speed() -> None:
    latencies = [replace(constant_latency(0.02), excess_s=0.01), constant_latency(0.02)]

    late_s = expected_late_s([changes(1000, 500, 800), changes(1000, 500)], PROFILE, latencies)

    from_500_to_800, from_800_to_1000 = 1 - 1.25 / 2.0, 1 - 1.0 / 1.25
    assert late_s == pytest.approx(0.01 * (from_500_to_800 + from_800_to_1000))


def test_one_clock_for_the_whole_iteration_is_never_late() -> None:
    latencies = [replace(constant_latency(0.02), excess_s=0.01)] * 2

    assert expected_late_s([changes(800), ()], PROFILE, latencies) == 0.0
