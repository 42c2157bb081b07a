"""A successor comes at once where GPUs wait for it, and otherwise later each time."""

from gpuenergyd.daemon.processes.restart_backoff import RestartBackoff


def lost_early(succession: RestartBackoff, *, came_up: bool = True, is_awaited: bool = False) -> float:
    return succession.next_delay_s(lived_s=1.0, came_up=came_up, is_awaited=is_awaited)


def test_the_first_successor_comes_at_once_and_the_others_ever_later() -> None:
    succession = RestartBackoff()

    pauses = [lost_early(succession) for _ in range(12)]

    assert pauses[:4] == [0.0, 0.1, 0.2, 0.4]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 10.0


def test_a_long_life_clears_the_record() -> None:
    succession = RestartBackoff()
    for _ in range(6):
        lost_early(succession)

    assert succession.next_delay_s(lived_s=31.0, came_up=True, is_awaited=False) == 0.0
    assert lost_early(succession) == 0.1


def test_gpus_that_wait_are_never_kept_waiting_however_often_their_worker_is_killed() -> None:
    succession = RestartBackoff()

    assert {lost_early(succession, is_awaited=True) for _ in range(50)} == {0.0}


def test_a_worker_that_cannot_come_up_is_not_started_in_a_loop_even_then() -> None:
    succession = RestartBackoff()

    pauses = [lost_early(succession, came_up=False, is_awaited=True) for _ in range(10)]

    assert pauses[:2] == [0.0, 0.0]
    assert pauses[-1] == 10.0


def test_one_that_came_up_earns_a_prompt_successor_again() -> None:
    succession = RestartBackoff()
    for _ in range(6):
        lost_early(succession, came_up=False, is_awaited=True)

    assert lost_early(succession, came_up=True, is_awaited=True) == 0.0
