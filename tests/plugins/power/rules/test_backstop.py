"""The backstop: within a second below the budget, whatever the curves, and no longer lowered than it must be."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.clock_request import Ceiling
from gpuenergyd_power.rules.backstop import Backstop, GpuPower
from tests.support.examples import examples

CLOCKS_MHZ = tuple(range(1410, 195, -15))
RANGE_W = (100.0, 400.0)
PERIOD_S = 0.1


@dataclass
class Gpus:
    """GPUs whose power follows a law that the backstop does not know, sampled each tenth of a second."""

    exponent: float = 2.0
    idle_w: float = 60.0
    full_w: tuple[float, ...] = (350.0,) * 4
    plan_mhz: dict[int, int] = field(default_factory=dict)
    can_set_clocks: bool = True
    limits: tuple[float, float] | None = RANGE_W
    backstop: Backstop = field(default_factory=Backstop)
    now_s: float = 100.0
    over_s: float = 0.0
    longest_s: float = 0.0
    _run_s: float = 0.0

    def power_w(self, k: int) -> float:
        ceiling = self.backstop.ceilings.get(f"GPU-{k}", Ceiling())
        mhz = min(self.plan_mhz.get(k, 1410), ceiling.sm_clock_mhz or 1410)
        power_w = self.idle_w + (self.full_w[k] - self.idle_w) * math.pow(mhz / 1410, self.exponent)
        return min(power_w, ceiling.power_limit_w or 1e9)

    @property
    def total_w(self) -> float:
        return sum(self.power_w(k) for k in range(len(self.full_w)))

    def run(self, seconds: float, budget_w: float | None, *, plans_fit: bool = False, host_w: float = 0.0) -> None:
        for _ in range(round(seconds / PERIOD_S)):
            is_over = budget_w is not None and self.total_w + host_w > budget_w * 1.02
            self._run_s = self._run_s + PERIOD_S if is_over else 0.0
            self.over_s += PERIOD_S * is_over
            self.longest_s = max(self.longest_s, self._run_s)
            readings = {
                f"GPU-{k}": GpuPower(
                    self.power_w(k),
                    min(
                        self.plan_mhz.get(k, 1410),
                        self.backstop.ceilings.get(f"GPU-{k}", Ceiling()).sm_clock_mhz or 1410,
                    ),
                    CLOCKS_MHZ,
                    self.limits,
                    can_set_clocks=self.can_set_clocks,
                )
                for k in range(len(self.full_w))
            }
            self.backstop.observe(self.now_s, readings, budget_w=budget_w, host_power_w=host_w, plans_fit=plans_fit)
            self.now_s += PERIOD_S


def test_nothing_is_lowered_within_the_budget() -> None:
    gpus = Gpus()
    gpus.run(10.0, 1400.0)
    gpus.run(1.0, None)
    assert gpus.backstop.ceilings == {}
    assert gpus.backstop.num_cuts == 0


@settings(max_examples=examples(60))
@given(
    st.floats(1.0, 3.0),
    st.floats(20.0, 90.0),
    st.floats(0.45, 0.99),
    st.lists(st.floats(150.0, 390.0), min_size=1, max_size=8),
)
def test_a_budget_below_the_power_is_in_force_within_a_second(
    exponent: float, idle_w: float, ratio: float, full_w: list[float]
) -> None:
    gpus = Gpus(exponent, idle_w, tuple(full_w))
    gpus.run(2.0, sum(full_w) * 2)
    floor_w = max(RANGE_W[0], idle_w) * len(full_w)
    budget_w = max(ratio * sum(full_w), floor_w * 1.05)
    gpus.run(30.0, budget_w)
    assert gpus.longest_s <= 1.0
    assert gpus.total_w <= budget_w * 1.02


def test_a_foreign_job_that_appears_is_lowered_within_a_second_and_a_sample() -> None:
    gpus = Gpus(full_w=(300.0, 300.0, 60.0))
    gpus.run(5.0, 700.0)
    assert not gpus.backstop.is_cutting
    gpus.full_w = (300.0, 300.0, 380.0)
    gpus.run(20.0, 700.0)
    assert gpus.longest_s <= 1.0 + PERIOD_S
    assert gpus.backstop.num_cuts == 1


def test_without_clocks_power_limits_hold_the_budget() -> None:
    gpus = Gpus(can_set_clocks=False)
    gpus.run(20.0, 1000.0)
    assert all(ceiling.sm_clock_mhz is None for ceiling in gpus.backstop.ceilings.values())
    assert gpus.total_w <= 1000.0
    assert gpus.longest_s <= 1.0


def test_power_limits_come_last_and_hold_what_the_lowest_clock_does_not() -> None:
    gpus = Gpus(exponent=0.2)
    gpus.run(20.0, 900.0)
    assert gpus.total_w <= 900.0 * 1.02
    assert any(ceiling.power_limit_w for ceiling in gpus.backstop.ceilings.values())
    assert gpus.longest_s <= 1.0


def test_ceilings_rise_while_power_is_left_and_vanish_without_a_budget() -> None:
    gpus = Gpus()
    gpus.run(3.0, 1000.0)
    lowest_w = gpus.total_w
    gpus.full_w = (150.0,) * 4
    gpus.run(60.0, 1000.0)
    assert gpus.backstop.ceilings == {}
    gpus.full_w = (350.0,) * 4
    gpus.run(60.0, 1000.0)
    assert gpus.total_w >= lowest_w
    assert gpus.total_w <= 1020.0
    gpus.run(0.1, None)
    assert gpus.backstop.ceilings == {}


def test_plans_that_fit_are_trusted_at_once() -> None:
    gpus = Gpus()
    gpus.run(2.0, 1000.0)
    gpus.plan_mhz = dict.fromkeys(range(4), 1000)
    gpus.run(2.0, 1000.0, plans_fit=True)
    assert gpus.backstop.ceilings == {}
    assert gpus.total_w <= 1000.0


def test_a_policy_that_lies_is_trusted_ever_more_rarely() -> None:
    gpus = Gpus()
    gpus.run(240.0, 1000.0, plans_fit=True)
    assert gpus.longest_s <= 1.0 + PERIOD_S
    assert gpus.backstop.num_cuts <= 10
    assert gpus.over_s <= 8.0
    before = gpus.backstop.num_cuts
    gpus.run(110.0, 1000.0, plans_fit=True)
    assert gpus.backstop.num_cuts <= before + 1


def test_a_gpu_that_is_not_read_counts_with_what_it_may_draw() -> None:
    backstop = Backstop()
    lost = {"GPU-0": GpuPower(None, None, CLOCKS_MHZ, RANGE_W)}
    for k in range(20):
        backstop.observe(k * PERIOD_S, lost, budget_w=300.0)
    assert backstop.measured_w == 400.0 or backstop.is_cutting


@pytest.mark.parametrize("bad", [float("nan"), -5.0, float("inf")])
def test_impossible_readings_are_no_readings(bad: float) -> None:
    backstop = Backstop()
    backstop.observe(0.0, {"GPU-0": GpuPower(200.0, 1410, CLOCKS_MHZ, RANGE_W)}, budget_w=300.0)
    backstop.observe(0.1, {"GPU-0": GpuPower(bad, 1410, CLOCKS_MHZ, RANGE_W)}, budget_w=300.0)
    assert backstop.measured_w == 200.0


def test_a_gpu_that_cannot_be_changed_is_left_alone_and_the_others_make_up_for_it() -> None:
    backstop = Backstop()
    readings = {
        "GPU-0": GpuPower(300.0, 1410, CLOCKS_MHZ, RANGE_W, can_change=False),
        "GPU-1": GpuPower(300.0, 1410, CLOCKS_MHZ, RANGE_W),
    }
    backstop.observe(0.0, readings, budget_w=450.0)
    assert set(backstop.ceilings) == {"GPU-1"}


def test_power_that_rises_after_the_budget_fell_is_cut_at_once() -> None:
    gpus = Gpus()
    gpus.run(2.0, 1400.0)
    gpus.full_w = (200.0,) * 4
    gpus.run(1.0, 1000.0)
    assert gpus.backstop.ceilings == {}
    gpus.full_w = (350.0,) * 4  # a wave of the iteration, before plans that fit are followed
    gpus.run(3 * PERIOD_S, 1000.0)
    assert gpus.backstop.num_cuts == 1
    assert gpus.longest_s <= 2 * PERIOD_S


def test_power_that_rises_after_plans_fit_has_the_usual_patience() -> None:
    gpus = Gpus(full_w=(200.0,) * 4)
    gpus.run(1.0, 1000.0, plans_fit=True)
    gpus.full_w = (350.0,) * 4
    gpus.run(4 * PERIOD_S, 1000.0, plans_fit=True)
    assert gpus.backstop.num_cuts == 0
    gpus.run(1.0, 1000.0, plans_fit=True)
    assert gpus.backstop.num_cuts == 1
    assert gpus.longest_s <= 1.0


def test_a_budget_that_falls_again_while_gpus_are_lowered_is_no_error() -> None:
    gpus = Gpus()
    gpus.run(2.0, 1000.0)
    assert gpus.backstop.is_cutting

    gpus.run(3.0, 0.999 * 1000.0)

    assert gpus.total_w <= 999.0 * 1.02
