"""PP 4 x DP 2 over two hosts, each with its own daemon: one plan for both, and training that nothing of ours can stop.

Eight processes with the real client and the job's real store train on simulated GPUs in two network namespaces. What
each fault did to the clocks is read from the GPUs themselves.
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
from tests.support.straggling import Episode, provoke
from tests.support.two_hosts import NoNetworkNamespaceError, TwoHosts, two_hosts
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.torch, pytest.mark.kill]
LIMIT_S = 60.0
VICTIM = rank_index(1, 2)
STOPPED = rank_index(0, 3)
SILENCE_LIMIT_S = 1.5
POLL_S = 0.2
"""Two daemons, eight ranks and the test share the machine's cores: each status request costs training time."""
STRAGGLER_RATIO = 1.3


@contextmanager
def hosts_or_skip(folder: Path, **overrides: Any) -> Iterator[TwoHosts]:
    """Run two hosts; skip where nobody may make network namespaces."""
    try:
        with two_hosts(folder, silence_limit_s=SILENCE_LIMIT_S, **overrides) as hosts:
            yield hosts
    except NoNetworkNamespaceError as error:
        pytest.skip(f"no network namespaces here: {error}")


def end_by_a_dead_rank(hosts: TwoHosts) -> list[int]:
    """Kill one rank; return how both hosts' shares of the run ended."""
    os.kill(hosts.pids()[VICTIM], signal.SIGKILL)
    return hosts.wait_for_end(LIMIT_S)


def wait_until_followed(hosts: TwoHosts) -> None:
    """Return once GPUs of both hosts are slowed down."""
    wait_until(lambda: all(hosts.lowered()), LIMIT_S, poll_s=POLL_S)


def wait_until_as_found(hosts: TwoHosts) -> None:
    """Return once no GPU of any host is locked."""
    wait_until(hosts.is_as_found, LIMIT_S, poll_s=POLL_S)


def replace_daemon(hosts: TwoHosts, host: int, rule: str) -> None:
    """Kill a host's daemon, look that no clock stays lowered anywhere while training goes on, and start it again."""
    hosts.kill_daemon(host)
    wait_until(hosts.daemons[host].is_as_found, LIMIT_S, poll_s=POLL_S)
    wait_until(lambda: is_at_full_speed(hosts), LIMIT_S, poll_s=POLL_S)
    hosts.wait_for_progress(2, LIMIT_S)
    assert is_at_full_speed(hosts), rule
    hosts.start_daemon(host)


def is_at_full_speed(hosts: TwoHosts) -> bool:
    return sum(hosts.lowered()) == 0


def check(episode: Episode) -> None:
    """The other replica slowed down for the straggler, saved energy by it, as its daemon says, and is back."""
    assert episode.straggler_ratio > 1.1
    assert episode.busy_ratio > 1.03
    assert episode.saving_ratio is not None
    assert episode.saving_ratio > 0.02
    assert episode.reported_saving_ratio > 0.02


@pytest.mark.fault(46)
def test_a_straggler_is_followed_across_hosts_and_a_cut_link_ends_the_plan_on_both(tmp_path: Path) -> None:
    """Under bubble-aware; how many iterations it takes is measured by benchmarks/runs/two_hosts.py."""
    with hosts_or_skip(tmp_path, policy="bubble-aware") as hosts:
        hosts.start_training()
        hosts.wait_for_plan(LIMIT_S)

        check(provoke(hosts, STRAGGLER_RATIO, LIMIT_S))

        wait_until_followed(hosts)
        hosts.set_link("down")
        wait_until_as_found(hosts)


@pytest.mark.fault(46)
def test_replicas_that_sit_whole_on_a_host_each_follow_a_straggler_on_the_other_host(tmp_path: Path) -> None:
    with hosts_or_skip(tmp_path, policy="bubble-aware") as hosts:
        hosts.start_training(are_replicas_whole=True, duration_scale=1.5)
        hosts.wait_for_plan(LIMIT_S)

        check(provoke(hosts, STRAGGLER_RATIO, LIMIT_S))

        hosts.set_link("down")
        wait_until_as_found(hosts)


@pytest.mark.fault(29)
def test_whatever_dies_training_goes_on_and_no_clock_stays_lowered_on_any_host(tmp_path: Path) -> None:
    """Under a policy that plans after few iterations: what is held here does not depend on what was planned."""
    with hosts_or_skip(tmp_path, policy="uniform") as hosts:
        hosts.start_training(is_managed=False)
        hosts.wait_for_progress(1, LIMIT_S)
        ended_without_us = end_by_a_dead_rank(hosts)

        hosts.start_training()
        wait_until_followed(hosts)

        hosts.set_link("down")
        wait_until_as_found(hosts)
        hosts.set_link("up")
        hosts.wait_for_progress(2, LIMIT_S)
        wait_until_followed(hosts)

        stop_between_driver_calls([hosts.pids()[STOPPED]], *(daemon.world_path for daemon in hosts.daemons))
        wait_until_as_found(hosts)
        os.kill(hosts.pids()[STOPPED], signal.SIGCONT)
        hosts.wait_for_progress(2, LIMIT_S)
        wait_until_followed(hosts)

        replace_daemon(hosts, 1, "nobody follows a plan that a daemon of its pipeline has lost")
        wait_until_followed(hosts)

        replace_daemon(hosts, 0, "nobody follows a plan whose maker is gone")
        wait_until(lambda: any(hosts.lowered()), LIMIT_S, poll_s=POLL_S)

        ended_with_us = end_by_a_dead_rank(hosts)
        wait_until_as_found(hosts)

    assert ended_with_us == ended_without_us
