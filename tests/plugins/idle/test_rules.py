"""Decisions on idle GPUs: when one is lowered and lifted, what its wakes may cost, and what lowering saves."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd_idle.account_file import opened_account, read_accounts, save_accounts
from gpuenergyd_idle.rules.control import IdleGpu, Order
from gpuenergyd_idle.rules.idle_spans import IdleSpans
from gpuenergyd_idle.rules.lost_time import DAY_S, LostTimeAccount
from gpuenergyd_idle.rules.saving import ModelSaving
from gpuenergyd_idle.rules.use import GpuUse, UseReading, use_of

FULL_MHZ, LOW_MHZ = 1980, 345
FULL_W, LOW_W, EMPTY_W = 126.0, 78.0, 80.0
AFTER_S = 30.0


@dataclass
class Card:
    """A GPU read every 0.1 s whose clock follows orders at once; power follows the clock by `falls`."""

    acts: bool = True
    falls: bool = True
    now_s: float = 1000.0
    is_low: bool = False
    orders: list[tuple[float, Order]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.account = LostTimeAccount(1 - LOW_MHZ / FULL_MHZ, self.now_s)
        self.saving = ModelSaving()
        self.idle = IdleGpu(LOW_MHZ, self.account, IdleSpans(AFTER_S, self.now_s), self.saving, acts=self.acts)

    def read(self, num_readings: int, **values: object) -> None:
        """Read it so often, with these values beside those of an idle context."""
        for _ in range(num_readings):
            self.now_s += 0.1
            power_w = LOW_W if self.is_low and self.falls else FULL_W
            clock_mhz = LOW_MHZ if self.is_low else FULL_MHZ
            given = {"utilization_ratio": 0.0, "power_w": power_w, "sm_clock_mhz": clock_mhz, "num_processes": 1}
            obstacle = values.pop("obstacle", None)
            order = self.idle.observe(UseReading(self.now_s, **{**given, **values}), obstacle=obstacle)  # type: ignore[arg-type]
            if order is not None:
                self.orders.append((self.now_s, order))
                self.is_low = order is Order.LOWER

    def idle_for(self, time_s: float, **values: object) -> None:
        self.read(round(time_s * 10), **values)


def lowered() -> Card:
    """Return a card that has just been lowered for lack of work."""
    card = Card()
    card.read(5, utilization_ratio=0.5)
    card.idle_for(AFTER_S + 1)
    assert card.orders == [], "before it has a history, a pause of 30 s is none"
    card.idle_for(600)
    assert [order for _, order in card.orders][:1] == [Order.LOWER]
    card.orders.clear()
    while not card.is_low:
        card.read(1)
    card.orders.clear()
    return card


@pytest.mark.parametrize(
    ("values", "use"),
    [
        ((0.4, 1, True), GpuUse.JOB),
        ((0.01, 1, False), GpuUse.OTHER_WORK),
        ((0.01, 0, False), GpuUse.OTHER_WORK),
        ((0.0, 2, False), GpuUse.IDLE_CONTEXT),
        ((0.0, 1, True), GpuUse.IDLE_CONTEXT),
        ((0.0, 0, False), GpuUse.IDLE_EMPTY),
        ((0.0, None, False), GpuUse.UNKNOWN),
        ((None, 1, False), GpuUse.UNKNOWN),
    ],
    ids=str,
)
def test_use_is_defined_by_utilization_processes_and_job(values: tuple[float, int, bool], use: GpuUse) -> None:
    utilization_ratio, num_processes, has_job = values
    assert use_of(UseReading(0.0, utilization_ratio, 100.0, 1410, num_processes, has_job=has_job)) is use


@pytest.mark.parametrize(
    "sign",
    [
        {"utilization_ratio": 0.02},
        {"power_w": 150.0},
        {"num_processes": 2},
        {"num_processes": 0},
        {"has_job": True},
        {"utilization_ratio": None},
        {"obstacle": "another program has locked its clock"},
    ],
    ids=str,
)
def test_the_first_sign_of_work_or_of_an_obstacle_lifts(sign: dict[str, object]) -> None:
    card = lowered()
    card.idle_for(10)
    card.read(1, **sign)
    assert [order for _, order in card.orders] == [Order.LIFT]


@pytest.mark.parametrize(
    "values", [{"num_processes": 0}, {"num_processes": None}, {"has_job": True}, {"obstacle": "MIG"}], ids=str
)
def test_a_gpu_without_a_context_or_with_an_owner_is_never_lowered(values: dict[str, object]) -> None:
    card = Card()
    for _ in range(7200):
        card.read(1, **values)
    assert not card.orders


def test_a_wake_is_charged_for_the_time_until_the_clock_has_risen() -> None:
    card = lowered()
    card.idle_for(5)
    card.read(1, utilization_ratio=1.0)
    card.read(3, utilization_ratio=1.0, sm_clock_mhz=LOW_MHZ)
    assert card.account.num_wakes == 0
    card.read(1, utilization_ratio=1.0)
    assert card.account.num_wakes == 1
    assert card.account.lost_s == pytest.approx(0.4 * (1 - LOW_MHZ / FULL_MHZ), abs=0.01)


def test_only_time_at_the_lower_clock_counts_as_lowered() -> None:
    card = lowered()
    before_s = card.idle.lowered_s
    card.idle_for(30, sm_clock_mhz=FULL_MHZ)
    assert card.idle.is_lowered
    assert card.idle.lowered_s == before_s
    card.idle_for(10)
    assert card.idle.lowered_s - before_s == pytest.approx(10)


def test_an_empty_account_is_the_reason_for_a_full_clock() -> None:
    card = Card()
    card.account.lost_s = 10.0
    card.idle_for(AFTER_S + 10)
    assert card.idle.reason == "the account of lost time does not cover another wake"


def test_lowerings_are_a_minute_apart() -> None:
    card = Card()
    card.account.working_s = 1e6  # the account pays everything
    for _ in range(20):
        card.idle_for(AFTER_S + 5)
        card.read(2, utilization_ratio=1.0)
    at_s = [at_s for at_s, order in card.orders if order is Order.LOWER]
    assert len(at_s) > 5
    assert all(later - earlier >= 60 for earlier, later in pairwise(at_s))


def test_a_saving_is_measured_by_brackets_within_one_idle_span() -> None:
    card = lowered()
    card.idle_for(4 * 3600)
    measured = card.saving.measured
    assert measured is not None
    assert measured.mean_w == pytest.approx(FULL_W - LOW_W)
    raised_s = sum(after - before for (before, _), (after, _) in zip(card.orders[::2], card.orders[1::2], strict=False))
    assert raised_s < 0.02 * 4 * 3600
    assert card.account.lost_s == 0


def test_a_lower_clock_that_is_not_in_force_says_nothing_of_the_model() -> None:
    card = lowered()
    card.idle_for(4 * 3600, sm_clock_mhz=FULL_MHZ, power_w=FULL_W)
    assert len([order for _, order in card.orders if order is Order.LIFT]) > 4
    assert card.saving.measured is None
    assert not card.saving.has_no_effect


def test_work_within_a_bracket_costs_nothing_and_ends_it() -> None:
    card = lowered()
    while not card.idle.is_raised:
        card.read(1)
    card.read(20, utilization_ratio=1.0)
    assert not card.idle.is_lowered
    assert card.account.lost_s == 0
    assert card.orders[-1][1] is Order.LIFT


def test_where_lowering_changes_nothing_it_stops_and_says_so() -> None:
    card = Card(falls=False)
    card.idle_for(3 * 3600)
    assert card.saving.has_no_effect
    assert not card.is_low
    assert card.idle.reason == "lower clocks change nothing on this model while it is idle"
    num_orders = len(card.orders)
    card.idle_for(3600)
    assert len(card.orders) == num_orders


def test_an_observed_gpu_gets_the_same_decisions_and_is_not_measured() -> None:
    card = Card(acts=False)
    card.idle_for(3600, sm_clock_mhz=FULL_MHZ, power_w=FULL_W)
    assert card.idle.lowered_s == pytest.approx(3600, abs=600)
    assert card.saving.measured is None
    assert card.saving.estimate() is not None


@given(gaps_s=st.lists(st.floats(1, 5000), min_size=5, max_size=60), lift_s=st.floats(0.05, 0.9))
def test_lost_time_never_exceeds_its_allowance(gaps_s: list[float], lift_s: float) -> None:
    account, spans, at_s = LostTimeAccount(0.8, 0.0), IdleSpans(AFTER_S, 0.0), 0.0
    for gap_s in gaps_s:
        at_s += gap_s
        if gap_s >= spans.threshold_s(at_s, account) and account.can_pay_wake(at_s):
            account.charge(lift_s)
        spans.record(at_s, gap_s)
        assert account.lost_s <= account.allowed_s(at_s)


def test_frequent_wakes_leave_the_allowance_to_the_longest_spans() -> None:
    account, spans, rng = LostTimeAccount(0.8, 0.0), IdleSpans(AFTER_S, 0.0), random.Random(5)
    at_s = 0.0
    for _ in range(1000):
        length_s = rng.expovariate(1 / 60)
        at_s += length_s + 1
        spans.record(at_s, length_s)
    busy_s = spans.threshold_s(at_s, account)
    assert 180 < busy_s < 600
    assert IdleSpans(AFTER_S, 0.0).threshold_s(30 * DAY_S, account) == AFTER_S


def test_accounts_survive_a_restart_and_damage(tmp_path: Path) -> None:
    path = tmp_path / "accounts.json"
    assert read_accounts(path) == {}
    save_accounts(path, {"GPU-0": (3.0, 500.0, 1.5 * DAY_S)})
    account = opened_account(read_accounts(path)["GPU-0"], 0.8, 100.0)
    assert account.allowed_s(100.0) == pytest.approx(4.5)
    assert account.lost_s == 3.0
    for damage in ("", "[]", '{"GPU-0": [1]}', '{"GPU-0": ["x", 1, 2]}'):
        path.write_text(damage)
        assert read_accounts(path) == {}
    save_accounts(tmp_path / "none" / "accounts.json", {})


def estimates() -> Iterator[ModelSaving]:
    """Yield a model that was never idle, and one that was with and then without a context."""
    saving = ModelSaving()
    yield saving
    saving.observe_idle(3600.0, FULL_W, has_context=True)
    yield saving
    saving.observe_idle(3600.0, EMPTY_W, has_context=False)
    yield saving


def test_an_estimate_names_its_basis_and_has_a_range() -> None:
    never, table, both = (saving.estimate() for saving in estimates())
    assert never is None
    assert table is not None
    assert both is not None
    assert table.basis == "126 W with a context, and a V100's table"
    assert both.basis == "126 W with and 80 W without a context, and a V100's table"
    for own in (table, both):
        assert 0 < own.low_w < own.mean_w < own.high_w
    assert both.text().startswith("51 W (23 to 67), ")
