"""PP 4 x DP 2 over two hosts in network namespaces, each with its own daemon: one plan, and five ways to lose it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host_trainer import rank_index
from tests.support.two_hosts import NUM_RANKS, NoNetworkNamespaceError, TwoHosts, two_hosts
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.torch, pytest.mark.kill]

LIMIT_S = 90.0
SILENCE_LIMIT_S = 1.5


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    try:
        with two_hosts(
            tmp_path,
            policy="uniform",
            warmup_iterations=0,
            baseline_iterations=2,
            silence_limit_s=SILENCE_LIMIT_S,
        ) as hosts:
            yield hosts
    except NoNetworkNamespaceError as error:
        pytest.skip(f"no network namespaces here: {error}")


def wait_for_lowered(hosts: TwoHosts) -> None:
    wait_until(lambda: hosts.lowered() == [4, 4], LIMIT_S)


def all_at_full_speed(hosts: TwoHosts) -> bool:
    return hosts.lowered() == [0, 0]


@pytest.mark.fault(29)
def test_every_fault_leaves_training_as_without_us_and_no_clock_lowered(hosts: TwoHosts) -> None:
    # Without us: what a killed rank does to such a training.
    hosts.start_training(is_managed=False, microbatches=2)
    hosts.wait_for_progress(2, LIMIT_S)
    os.kill(hosts.pids()[rank_index(1, 2)], signal.SIGKILL)
    statuses_without_us = hosts.wait_for_end(LIMIT_S)

    hosts.start_training(microbatches=2)
    wait_for_lowered(hosts)
    phases = {pipeline["pipeline_id"]: pipeline["num_pp_ranks"] for pipeline in hosts.pipelines()}
    assert sorted(phases.values()) == [4, 4], "one plan for each of both pipelines, made by the leading host"

    hosts.set_link("down")
    wait_until(hosts.is_as_found, LIMIT_S)
    assert hosts.lowered() == [0, 0]
    hosts.set_link("up")
    hosts.wait_for_progress(3, LIMIT_S)
    wait_for_lowered(hosts)

    stopped = hosts.pids()[rank_index(0, 3)]
    os.kill(stopped, signal.SIGSTOP)
    wait_until(hosts.is_as_found, LIMIT_S)
    os.kill(stopped, signal.SIGCONT)
    hosts.wait_for_progress(3, LIMIT_S)
    wait_for_lowered(hosts)

    for host in (1, 0):  # a daemon, then that of rank 0, which plans
        daemon = hosts.daemons[host]
        os.kill(daemon.pid, signal.SIGKILL)
        assert daemon.process is not None
        daemon.process.wait(10)
        wait_until(daemon.is_as_found, LIMIT_S)
        wait_until(lambda: all_at_full_speed(hosts), LIMIT_S)
        hosts.wait_for_progress(3, LIMIT_S)
        assert hosts.lowered() == [0, 0], "nobody follows a plan that a daemon of its pipeline has lost"
        daemon.start()
        wait_for_lowered(hosts)

    os.kill(hosts.pids()[rank_index(1, 2)], signal.SIGKILL)
    assert hosts.wait_for_end(LIMIT_S) == statuses_without_us
    wait_until(hosts.is_as_found, LIMIT_S)
    assert len(hosts.pids()) == NUM_RANKS
