"""Times that all others of a job contradict are dropped; times that differ for a reason are not."""

import pytest

from gpuenergyd_policies.learning.curves import CurveModel
from gpuenergyd_policies.learning.deviations import TIME
from gpuenergyd_policies.learning.evidence import without_outliers
from gpuenergyd_policies.learning.seen import TimeSeen
from gpuenergyd_policies.learning.shape import GENERIC
from tests.policies.learning.test_job_curves import KEYS, classes, time_s

MODEL = CurveModel(GENERIC.time, TIME)
SHARE = 0.9


def seen(key_number: int, clock: int, *, real_clock: int | None = None, share: float = SHARE) -> TimeSeen:
    key = KEYS[key_number]
    return TimeSeen(key, ((clock, time_s(key, real_clock or clock, share)),), 0.004)


def all_at(*clocks: int) -> list[TimeSeen]:
    return [seen(k, clock) for k in range(len(KEYS)) for clock in clocks]


@pytest.mark.parametrize("clock", [1095, 915])
def test_a_time_at_a_clock_that_was_not_in_force_is_dropped(clock: int) -> None:
    honest = [own for own in all_at(1275, 1095) if (own.key, own.clocks_mhz) != (KEYS[3], (clock,))]
    wrong = seen(3, clock, real_clock=1410)

    assert without_outliers([*honest, wrong], [classes()], MODEL) == honest


def test_a_class_that_differs_from_all_others_at_every_clock_is_kept() -> None:
    times = [own for own in all_at(1275, 1095, 915) if own.key != KEYS[3]]
    times += [seen(3, clock, share=0.3) for clock in (1275, 1095, 915)]

    assert without_outliers(times, [classes()], MODEL) == times


def test_a_time_that_one_of_the_possible_full_speed_clocks_explains_is_kept() -> None:
    times = [*all_at(1275), seen(3, 915, real_clock=1410)]
    capped = [own if own.key != KEYS[3] else classes(900.0)[3] for own in classes()]

    assert times[-1] not in without_outliers(times, [classes()], MODEL)
    assert times[-1] in without_outliers(times, [classes(), capped], MODEL)


def test_without_times_below_full_speed_nothing_is_dropped() -> None:
    times = all_at(1410)

    assert without_outliers(times, [classes()], MODEL) == times
    assert without_outliers([], [classes()], MODEL) == []
