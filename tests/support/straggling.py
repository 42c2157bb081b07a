"""A straggler episode of two replicas on two hosts, measured in iterations from the simulated GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tests.support.host_trainer import Done
from tests.support.two_hosts import TwoHosts
from tests.support.waiting import wait_until

_POLL_S = 0.2
SETTLED_ITERATIONS = 6
LEFT_RATIO = 0.2
"""Share of the slowdown that may be left once a straggler is no longer followed."""
LEAST_BUSY_RATIO = 1.04
"""Smallest increase of busy time that counts as slowing down, in the median of three iterations: others differ by less.

Plans for a straggler lengthen it by 8 to 20 %, and may lengthen it further once the straggler itself has a plan again.
"""
_FOLLOWED_ITERATIONS = 3


@dataclass(frozen=True, slots=True)
class Episode:
    """Response of the other replica to a straggler; energies are exact, from the simulated GPUs."""

    iterations_until_followed: int | None
    """Iterations in which the other replica only waited; None if it never followed."""
    iterations_until_recovered: int | None
    """Iterations in which it was still slow after the straggler had recovered; None if it never followed."""
    straggler_ratio: float
    """Iteration time relative to that before the straggler."""
    busy_ratio: float
    """Busy time of the other replica's GPUs while following, relative to that before."""
    waiting_energy_j: float
    following_energy_j: float | None
    reported_saving_ratio: float
    """Saving reported by its daemon from energy counters; of an earlier straggler if this one was not followed."""

    @property
    def saving_ratio(self) -> float | None:
        """Saving against waiting; None if the straggler was not followed."""
        return None if self.following_energy_j is None else 1 - self.following_energy_j / self.waiting_energy_j


def provoke(hosts: TwoHosts, ratio: float, limit_s: float, *, slow_iterations: int = SETTLED_ITERATIONS) -> Episode:
    """Make replica 1 slower until replica 0 has followed it for some iterations, then let it recover.

    The daemon still reports the saving of an earlier straggler; if there was one, `slow_iterations` must leave enough
    time to follow this one.
    """
    hosts.wait_for_progress(slow_iterations, limit_s)
    hosts.set_straggler(ratio)
    wait_until(lambda: is_straggler_known(hosts), limit_s)
    wait_until(lambda: _saving_ratio(hosts) is not None, limit_s)
    hosts.wait_for_progress(slow_iterations, limit_s)
    reported = _saving_ratio(hosts)
    assert reported is not None
    hosts.set_straggler(None)
    wait_until(lambda: not is_forced(hosts), limit_s)
    hosts.wait_for_progress(SETTLED_ITERATIONS, limit_s)
    return counted(hosts.done(0), hosts.done(1), reported)


def is_forced(hosts: TwoHosts) -> bool:
    """Return whether a straggler sets replica 0's pace, or its state is unknown."""
    state = hosts.replica(0)
    return state is None or state["straggler_time_s"] is not None


def is_straggler_known(hosts: TwoHosts) -> bool:
    """Return whether a straggler sets replica 0's pace."""
    state = hosts.replica(0)
    return state is not None and state["straggler_time_s"] is not None


def _saving_ratio(hosts: TwoHosts) -> float | None:
    state: dict[str, Any] | None = hosts.replica(0)
    return state["extrinsic_saving_ratio"] if state is not None else None


def counted(others: list[list[Done]], stragglers: list[list[Done]], reported_saving_ratio: float) -> Episode:
    """Return the episode of the last iterations in which a replica was slower.

    Whether a replica has slowed down is decided from the busy time of its GPUs, not from daemons or plans.
    """
    length = min(len(rank) for rank in others + stragglers)
    is_slow = [any(rank[i].slower > 1 for rank in stragglers) for i in range(length)]
    end = max(i for i, slow in enumerate(is_slow) if slow) + 1
    begin = max((i + 1 for i in range(end) if not is_slow[i]), default=0)
    busy_s = [sum(rank[i].busy_s for rank in others) for i in range(length)]
    time_s = [median(rank[i].time_s for rank in others) for i in range(length)]
    energy_j = [sum(rank[i].energy_j for rank in others) for i in range(length)]
    followed, left = response(busy_s, begin, end)
    usual_s, slow_s = (median(busy_s[i - SETTLED_ITERATIONS : i]) for i in (begin, end))
    usual_time_s, slow_time_s = (median(time_s[i - SETTLED_ITERATIONS : i]) for i in (begin, end))
    num_waited = followed if followed is not None else end - begin
    return Episode(
        iterations_until_followed=followed,
        iterations_until_recovered=left,
        straggler_ratio=slow_time_s / usual_time_s,
        busy_ratio=slow_s / usual_s,
        waiting_energy_j=median(energy_j[begin + 1 : begin + num_waited] or energy_j[begin : begin + 1]),
        following_energy_j=median(energy_j[end - SETTLED_ITERATIONS : end]) if followed is not None else None,
        reported_saving_ratio=reported_saving_ratio,
    )


def response(busy_s: Sequence[float], begin: int, end: int) -> tuple[int | None, int | None]:
    """Return after how many iterations a straggler was followed and, after it, left; None if it was never followed.

    Args:
        busy_s: time that the waiting replica takes by itself, by iteration.
        begin: first iteration of the straggler.
        end: first iteration after it.
    """
    usual_s, slow_s = (median(busy_s[i - SETTLED_ITERATIONS : i]) for i in (begin, end))
    followed_s, left_s = LEAST_BUSY_RATIO * usual_s, usual_s + LEFT_RATIO * (slow_s - usual_s)
    longer = (i for i in range(begin, end) if median(busy_s[i : i + _FOLLOWED_ITERATIONS]) >= followed_s <= busy_s[i])
    followed = next(longer, None)
    if followed is None or slow_s < followed_s:
        return None, None
    left = next((i for i in range(end, len(busy_s)) if busy_s[i] <= left_s), len(busy_s))
    return followed - begin, left - end
