"""Restart backoff: no delay while GPUs wait to be restored, otherwise a growing one."""

from gpuenergyd.daemon.processes.gpu_worker import RestartBackoff


def lost_early(backoff: RestartBackoff, *, was_ready: bool = True, is_urgent: bool = False) -> float:
    return backoff.next_delay_s(lifetime_s=1.0, was_ready=was_ready, is_urgent=is_urgent)


def test_the_first_restart_is_immediate_and_later_delays_grow_to_10_s() -> None:
    backoff = RestartBackoff()

    delays_s = [lost_early(backoff) for _ in range(12)]

    assert delays_s[:4] == [0.0, 0.1, 0.2, 0.4]
    assert delays_s == sorted(delays_s)
    assert delays_s[-1] == 10.0


def test_a_lifetime_above_30_s_resets_the_delay() -> None:
    backoff = RestartBackoff()
    for _ in range(6):
        lost_early(backoff)

    assert backoff.next_delay_s(lifetime_s=31.0, was_ready=True, is_urgent=False) == 0.0
    assert lost_early(backoff) == 0.1


def test_an_urgent_restart_has_no_delay_however_often_the_process_is_killed() -> None:
    backoff = RestartBackoff()

    assert {lost_early(backoff, is_urgent=True) for _ in range(50)} == {0.0}


def test_repeated_failed_starts_are_delayed_even_if_urgent() -> None:
    backoff = RestartBackoff()

    delays_s = [lost_early(backoff, was_ready=False, is_urgent=True) for _ in range(10)]

    assert delays_s[:2] == [0.0, 0.0]
    assert delays_s[-1] == 10.0


def test_a_successful_start_makes_urgent_restarts_immediate_again() -> None:
    backoff = RestartBackoff()
    for _ in range(6):
        lost_early(backoff, was_ready=False, is_urgent=True)

    assert lost_early(backoff, was_ready=True, is_urgent=True) == 0.0
