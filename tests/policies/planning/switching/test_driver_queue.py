"""Order and waits of clock changes at a driver that serves one call at a time."""

from dataclasses import replace

import pytest

from gpuenergyd_policies.planning.switching.driver_queue import QueuedClockCall, driver_waits_s, longest_busy_s


def lower(due_s: float, call_s: float = 4.0, gpu: int = 0) -> QueuedClockCall:
    return QueuedClockCall(due_s, call_s, gpu, is_raise=False)


def rise(due_s: float, call_s: float = 4.0, gpu: int = 0) -> QueuedClockCall:
    return QueuedClockCall(due_s, call_s, gpu, is_raise=True)


@pytest.mark.parametrize(
    ("calls", "waits_s"),
    [
        ([], []),
        ([lower(3.0)], [0.0]),
        ([lower(0.0), lower(4.0)], [0.0, 0.0]),
        ([lower(0.0), lower(3.0), lower(5.0)], [0.0, 1.0, 3.0]),
        ([lower(5.0), lower(0.0), lower(3.0)], [3.0, 0.0, 1.0]),
        ([lower(0.0), lower(1.0), rise(2.0)], [0.0, 7.0, 2.0]),  # a raise goes before what has waited longer
        ([lower(0.0), rise(3.0), rise(1.0)], [0.0, 5.0, 3.0]),  # and of two the one that was due first
        ([lower(0.0), lower(1.0), rise(4.0)], [0.0, 7.0, 0.0]),  # due just when the driver is free
        ([lower(0.0), lower(1.0), rise(4.1)], [0.0, 3.0, 3.9]),  # due just after it took another
        ([rise(1.0), rise(1.0)], [0.0, 4.0]),
        ([lower(0.0, 1.0), lower(10.0, 1.0), lower(10.5, 1.0)], [0.0, 0.0, 0.5]),  # idle in between
    ],
)
def test_raises_go_first_then_what_has_been_due_longest(calls: list[QueuedClockCall], waits_s: list[float]) -> None:
    assert driver_waits_s(calls) == pytest.approx(waits_s)


def test_a_stage_waits_until_the_last_of_its_gpus_is_set() -> None:
    eight = replace(rise(0.0), num_calls=8)

    assert driver_waits_s([eight]) == [28.0]
    assert driver_waits_s([eight, rise(1.0, gpu=1)]) == [28.0, 31.0]
    assert driver_waits_s([replace(lower(0.0), num_calls=2), rise(1.0, gpu=1)]) == [8.0, 3.0]  # in between


def test_drivers_of_different_hosts_do_not_wait_for_each_other() -> None:
    calls = [replace(rise(0.0, gpu=k), num_calls=2, host=host) for k, host in enumerate(("a", "b", "a"))]

    assert driver_waits_s(calls) == [4.0, 4.0, 12.0]
    assert longest_busy_s(calls) == 16.0
    assert longest_busy_s([]) == 0.0
