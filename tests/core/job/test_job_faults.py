"""How long a job is left alone after a fault, and when a changed job has settled."""

import pytest

from gpuenergyd.core.job.control.faults import Faults
from gpuenergyd.core.job.control.recovery import is_settled
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.measurement.observation import IterationObservation

RULES = JobRules(fallback_iterations=5, max_faults=3, settling_iterations=12, settled_ratio=0.01)


def fell(faults: Faults, wait_from: int = 100, *, is_fault: bool = True, least_wait: int = 0) -> int | None:
    return faults.fell_back(at_iteration=90, wait_from=wait_from, is_fault=is_fault, least_wait=least_wait)


def test_each_fault_doubles_the_wait_until_there_are_too_many() -> None:
    faults = Faults(RULES)

    assert [fell(faults) for _ in range(4)] == [105, 110, 120, None]
    assert faults.fell_back_at == 90
    assert not faults.is_retry_due(10**6)


def test_a_fall_back_without_fault_waits_and_is_not_counted() -> None:
    faults = Faults(RULES)

    assert [fell(faults, is_fault=False) for _ in range(5)] == [105] * 5
    assert faults.num_faults == 0


def test_a_longer_minimum_wait_is_doubled_too() -> None:
    faults = Faults(RULES)

    assert [fell(faults, least_wait=8) for _ in range(2)] == [108, 116]
    assert fell(Faults(RULES), least_wait=3) == 105


def test_a_retry_is_due_from_the_returned_iteration_on() -> None:
    faults = Faults(RULES)

    assert not faults.is_retry_due(10**6)
    fell(faults)
    assert [faults.is_retry_due(index) for index in (104, 105, 106)] == [False, True, True]


def test_a_plan_that_holds_clears_all_faults() -> None:
    faults = Faults(RULES, num_faults=3, num_slow_plans=2)

    faults.redeem()

    assert (faults.num_faults, faults.num_slow_plans, faults.is_profile_in_doubt) == (0, 0, False)
    assert fell(faults) == 105


def test_consecutive_slow_plans_put_the_profile_in_doubt() -> None:
    slow = Faults(RULES, num_slow_plans=2)

    assert not Faults(RULES, num_slow_plans=1).is_profile_in_doubt
    assert slow.is_profile_in_doubt
    assert slow.relearning_reason() == "2 plans in a row were slow: beginning again"
    slow.begin_anew()
    assert not slow.is_profile_in_doubt


def run(*times_s: float) -> list[IterationObservation]:
    return [IterationObservation(k, "baseline", time_s, (), ()) for k, time_s in enumerate(times_s)]


@pytest.mark.parametrize(
    ("times_s", "settled"),
    [
        ([1.0] * 4, False),  # too few to tell
        ([1.0] * 5, True),
        ([1.0, 1.0, 1.0, 1.02, 1.02], False),
        ([1.0, 1.0, 1.0, 1.009, 1.009], True),
        ([5.0, 4.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0], True),  # only the newest five count
        ([1.0 + 0.1 * k for k in range(12)], False),
        ([1.0 + 0.1 * k for k in range(13)], True),  # in the end it is
    ],
)
def test_a_changed_job_has_settled_once_its_newest_iterations_agree_or_after_the_limit(
    times_s: list[float], *, settled: bool
) -> None:
    assert is_settled(run(*times_s), RULES) is settled


def test_by_default_a_changed_job_settles_within_1_percent_or_after_20_iterations() -> None:
    usual = JobRules()
    restless = [1.0 + 0.1 * k for k in range(21)]

    assert not is_settled(run(*restless[:20]), usual)
    assert is_settled(run(*restless), usual)
    assert is_settled(run(1.0, 1.0, 1.0, 1.0099, 1.0099), usual)
    assert not is_settled(run(1.0, 1.0, 1.0, 1.0101, 1.0101), usual)
    assert not is_settled(run(1.0, 1.0, 1.0, 1.0), usual)


def test_by_default_the_seventh_fault_is_the_last_and_two_slow_plans_raise_doubt() -> None:
    faults = Faults(JobRules())

    assert [fell(faults) for _ in range(7)] == [105, 110, 120, 140, 180, 260, None]
    assert not Faults(JobRules(), num_slow_plans=1).is_profile_in_doubt
    assert Faults(JobRules(), num_slow_plans=2).is_profile_in_doubt
