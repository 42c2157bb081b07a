"""What measurements mean is said in sentences, and nothing is said of what did not show."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from gpuenergyd.core.host.energy_scope import EnergyScope
from gpuenergyd.core.host.measured_gpu import MeasuredGpu, StateMeans, TimedCall, meanings

H200 = MeasuredGpu(
    model_name="NVIDIA H200",
    driver_version="580.159.04",
    is_simulated=False,
    measured_at=datetime(2026, 11, 27, tzinfo=UTC),
    max_sm_clock_mhz=1980,
    power_limit_w=700.0,
    calls=(TimedCall("energy", 100, 2.4e-3, 16e-3, 2.4e-3),),
    counter_period_s=0.1,
    is_counter_read_apart=True,
    power_refresh_s=0.1,
    clock_refresh_s=0.1,
    worker_cpu_ratio=0.011,
    states=(
        StateMeans("idle", 80.0, 345.0, 0.0),
        StateMeans("waiting", 126.0, 1980.0, 0.0),
        StateMeans("loaded", 695.0, 1450.0, 0.8),
    ),
    run_ahead_s=0.034,
    step_s=0.0176,
    not_measured=(),
)


def test_a_card_with_kept_values_and_a_costly_counter() -> None:
    assert meanings(H200) == (
        "clocks are read up to 100 ms late: a switch latency is known after about 50 changes of its kind",
        (
            "an energy reading uses 2.4 ms of CPU time: the counter is read about once a second, and energies of single"
            " iterations shorter than that are estimated"
        ),
        "the energy counter moves every 100.0 ms",
        "readings by the daemon take 1.1 % of a core for each such GPU",
        (
            "a full load is at its power limit 80 % of the time and runs at 1450 MHz on average: clocks above that save"
            " little time"
        ),
        "a GPU that waits draws 126 W, 18 % of its power limit",
        "a training loop runs 34 ms ahead of the GPU (1.9 iterations)",
    )


@pytest.mark.parametrize(
    ("power_s", "clock_s", "text"),
    [
        (0.1, 0.003, "clocks are read up to 3 ms late: a switch latency is known after a dozen changes of its kind"),
        (0.02, 0.4, "clocks hardly changed: how late they are read did not show"),
        (0.02, None, "clocks hardly changed: how late they are read did not show"),
        (None, None, "clocks hardly changed: how late they are read did not show"),
    ],
)
def test_how_late_clocks_are_read_is_reported_only_where_they_changed_often_enough(
    power_s: float | None, clock_s: float | None, text: str
) -> None:
    assert meanings(replace(H200, power_refresh_s=power_s, clock_refresh_s=clock_s))[0] == text


def test_a_gpu_without_a_counter_and_a_module_are_called_what_they_are() -> None:
    found = meanings(replace(H200, calls=(), counter_period_s=None, energy_scope=EnergyScope.MODULE))

    assert found[1][:32] == "the GPU has no energy counter: e"
    assert [s for s in found if "module" in s or "wait" in s] == ["powers are the module's: GPU, processor and memory"]


def test_what_did_not_show_is_not_claimed() -> None:
    bare = replace(
        H200, clock_refresh_s=None, counter_period_s=None, is_counter_read_apart=False, states=(),
        run_ahead_s=None, not_measured=("loaded: torch finds no CUDA GPU",)
    )  # fmt: skip

    assert meanings(bare) == (
        (
            "power is renewed every 100 ms; clocks hardly changed, and are taken to be as late: a switch latency is"
            " known after about 50 changes of its kind"
        ),
        "the energy counter's period could not be learned: energies of short iterations are inexact or unknown",
        "readings by the daemon take 1.1 % of a core for each such GPU",
        "not measured: loaded: torch finds no CUDA GPU",
    )
