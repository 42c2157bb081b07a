"""PP 4 x DP 2 on two hosts, each with its own daemon: one plan for both, and training survives every failure.

Eight processes with the real client and the job's real store train on simulated GPUs in two network namespaces. The
effect of each fault on clocks is read from the simulated GPUs.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.host_trainer import rank_index
from tests.support.stopping import stop_between_driver_calls
from tests.support.straggling import is_forced, is_straggler_known
from tests.support.two_hosts import NoNetworkNamespaceError, TwoHosts, two_hosts
from tests.support.waiting import LIMIT_S, wait_until

pytestmark = [pytest.mark.torch, pytest.mark.kill]
VICTIM = rank_index(1, 2)
STOPPED = rank_index(0, 3)
SILENCE_LIMIT_S = 1.5
STRAGGLER_RATIO = 2.0
"""Far above the noise of iteration times on a loaded machine."""
MAX_SLOWDOWN_RATIO = 0.5
"""Enough for the policy to find clocks that save, whatever disturbs a measurement of them."""


@contextmanager
def hosts_or_skip(folder: Path, **overrides: Any) -> Iterator[TwoHosts]:
    """Run two hosts; skip where network namespaces are not permitted."""
    try:
        with two_hosts(folder, silence_limit_s=SILENCE_LIMIT_S, **overrides) as hosts:
            yield hosts
    except NoNetworkNamespaceError as error:
        pytest.skip(f"no network namespaces here: {error}")


def end_by_a_dead_rank(hosts: TwoHosts) -> list[int]:
    """Kill one rank; return the exit states of both hosts."""
    os.kill(hosts.pids()[VICTIM], signal.SIGKILL)
    return hosts.wait_for_end(LIMIT_S)


def wait_until_followed(hosts: TwoHosts) -> None:
    """Wait until GPUs of both hosts are slowed down."""
    wait_until(lambda: all(hosts.lowered()))


def wait_until_as_found(hosts: TwoHosts) -> None:
    """Wait until no GPU of any host is locked."""
    wait_until(hosts.is_as_found)


def replace_daemon(hosts: TwoHosts, host: int, rule: str) -> None:
    """Kill a host's daemon, assert that training continues and all clocks are restored, and restart it."""
    hosts.kill_daemon(host)
    wait_until(hosts.daemons[host].is_as_found)
    wait_until(lambda: is_at_full_speed(hosts))
    hosts.wait_for_progress(2)
    assert is_at_full_speed(hosts), rule
    hosts.start_daemon(host)


def is_at_full_speed(hosts: TwoHosts) -> bool:
    return sum(hosts.lowered()) == 0


@pytest.mark.thorough
@pytest.mark.fault(29)
def test_after_any_failure_training_continues_and_no_clock_stays_lowered(tmp_path: Path) -> None:
    """A policy that plans after few iterations: the rule does not depend on the plan.

    The straggler shows that paces reach the other replica through both daemons. What a policy makes of a straggler is
    tested in virtual time and measured by benchmarks/runs/two_hosts.py.
    """
    with hosts_or_skip(tmp_path, policy="uniform") as hosts:
        hosts.start_training(is_managed=False)
        hosts.wait_for_progress(1)
        ended_without_us = end_by_a_dead_rank(hosts)

        hosts.start_training(max_slowdown=MAX_SLOWDOWN_RATIO)
        wait_until_followed(hosts)

        hosts.set_straggler(STRAGGLER_RATIO)
        wait_until(lambda: is_straggler_known(hosts))
        hosts.set_straggler(None)
        wait_until(lambda: not is_forced(hosts))

        hosts.set_link("down")
        wait_until_as_found(hosts)
        hosts.set_link("up")
        hosts.wait_for_progress(2)
        wait_until_followed(hosts)

        stop_between_driver_calls([hosts.pids()[STOPPED]], *(daemon.world_path for daemon in hosts.daemons))
        wait_until_as_found(hosts)
        os.kill(hosts.pids()[STOPPED], signal.SIGCONT)
        hosts.wait_for_progress(2)
        wait_until_followed(hosts)

        replace_daemon(hosts, 1, "nobody follows a plan that a daemon of its pipeline has lost")
        wait_until_followed(hosts)

        replace_daemon(hosts, 0, "nobody follows a plan whose maker is gone")
        wait_until(lambda: any(hosts.lowered()))

        ended_with_us = end_by_a_dead_rank(hosts)
        wait_until_as_found(hosts)

    assert ended_with_us == ended_without_us
