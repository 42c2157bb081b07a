"""The lower bound on swings is below what every plan of small pipelines reaches."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.worlds.swing_bound import least_band_energy_w2
from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.power_swing import band_energy_w2
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd_policies.planning.power_waves import wave_of
from tests.support.examples import examples


@settings(max_examples=examples(20), deadline=None)
@given(
    times_s=st.lists(st.floats(0.05, 0.2), min_size=4, max_size=4),
    powers_w=st.lists(st.floats(200.0, 400.0), min_size=4, max_size=4),
    extra_ratio=st.floats(0.0, 0.05),
)
def test_no_plan_is_flatter_than_the_bound(times_s: list[float], powers_w: list[float], extra_ratio: float) -> None:
    keys = [InstructionClass(rank, kind) for rank in range(2) for kind in (InstructionKind.F, InstructionKind.B)]
    classes = {
        key: InstructionProfile(
            tuple(ClockOption(mhz, time_s * slower, time_s * slower * power_w / slower**2)
                  for mhz, slower in ((1400, 1.0), (1000, 1.3)))
        )
        for key, time_s, power_w in zip(keys, times_s, powers_w, strict=True)
    }  # fmt: skip
    graph, profile = dependency_graph(one_forward_one_backward(2, 2)), PipelineProfile(classes, 80.0)
    own = [profile[i.instruction_class].options for i in graph.instructions]
    period_s = wave_of(graph, profile, [options[0] for options in own]).iteration_time_s
    waves = [wave_of(graph, profile, chosen) for chosen in itertools.product(*own)]
    in_time = [wave for wave in waves if wave.iteration_time_s <= period_s * (1 + 1e-9)]
    limit_j = min(wave.energy_j for wave in in_time) * (1 + extra_ratio)
    flattest = min((w for w in in_time if w.energy_j <= limit_j * (1 + 1e-9)), key=band_energy_w2)

    bound_w2 = least_band_energy_w2(graph, profile, flattest, limit_j=limit_j, num_slots=60)

    assert bound_w2 <= band_energy_w2(flattest) * (1 + 1e-6)


def test_without_any_freedom_the_bound_is_the_swing() -> None:
    powers_w = {InstructionKind.F: 200.0, InstructionKind.B: 400.0}
    classes = {
        InstructionClass(0, kind): InstructionProfile((ClockOption(1400, 0.1, 0.1 * power_w),))
        for kind, power_w in powers_w.items()
    }
    graph, profile = dependency_graph(one_forward_one_backward(1, 2)), PipelineProfile(classes, 80.0)
    wave = wave_of(graph, profile, [profile[i.instruction_class].options[0] for i in graph.instructions])

    bound_w2 = least_band_energy_w2(graph, profile, wave, limit_j=wave.energy_j * (1 + 1e-9), num_slots=20)

    assert bound_w2 == pytest.approx(band_energy_w2(wave), rel=1e-5)


def test_an_energy_that_no_plan_has_is_refused() -> None:
    options = tuple(ClockOption(mhz, 0.1 * slower, 30.0) for mhz, slower in ((1400, 1.0), (1000, 1.4)))
    classes = {
        InstructionClass(0, kind): InstructionProfile(options) for kind in (InstructionKind.F, InstructionKind.B)
    }
    graph, profile = dependency_graph(one_forward_one_backward(1, 2)), PipelineProfile(classes, 80.0)
    wave = wave_of(graph, profile, [options[0]] * len(graph.instructions))
    with pytest.raises(ValueError, match="no bound on the swing"):
        least_band_energy_w2(graph, profile, wave, limit_j=10.0, num_slots=20)
