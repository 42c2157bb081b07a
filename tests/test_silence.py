"""Silence: a process that waits for a CPU is not silent; one that hangs is, after its limit."""

import os

import pytest

from gpuenergyd.silence import Silence, cpu_wait_s


class Host:
    """A process on a host whose clock and CPU the test moves."""

    def __init__(self, pid: int | None = 4711) -> None:
        self.now_s = 100.0
        self.waited_s = 50.0
        self.num_reads = 0
        self.silence = Silence(pid, 6.0, lambda: self.now_s, self.read)

    def read(self, pid: int) -> float:
        """Return for how long the process has waited."""
        assert pid == 4711
        self.num_reads += 1
        return self.waited_s

    def go_on(self, elapsed_s: float, *, waited_s: float = 0.0) -> None:
        """Let time pass, in part of which the process waits for a CPU."""
        self.now_s += elapsed_s
        self.waited_s += waited_s


@pytest.mark.fault(5)
def test_a_process_that_does_not_run_although_it_could_is_silent_after_the_limit() -> None:
    host = Host()
    host.go_on(9.9)
    before_s = host.silence.left_s(10.0)
    host.go_on(0.2)

    assert before_s == pytest.approx(0.1)
    assert host.silence.left_s(10.0) <= 0


@pytest.mark.fault(61)
def test_time_that_a_process_waits_for_a_cpu_does_not_count() -> None:
    host = Host()
    host.go_on(12.0, waited_s=9.0)
    starved_s = host.silence.left_s(10.0)
    host.go_on(7.0)

    assert starved_s == pytest.approx(7.0)
    assert host.silence.left_s(10.0) == pytest.approx(0.0)


@pytest.mark.fault(61)
def test_on_a_starved_host_too_a_process_is_given_up_after_a_multiple_of_the_limit() -> None:
    host = Host()
    host.go_on(59.0, waited_s=59.0)
    before_s = host.silence.left_s(10.0)
    host.go_on(2.0, waited_s=2.0)

    assert before_s > 0
    assert host.silence.left_s(10.0) <= 0


def test_without_a_pid_all_time_counts() -> None:
    host = Host(None)
    host.go_on(10.0, waited_s=10.0)

    assert host.silence.left_s(10.0) <= 0
    assert host.num_reads == 0


def test_many_messages_read_the_waiting_time_once_a_second() -> None:
    host = Host()
    for _ in range(100):
        host.go_on(0.1, waited_s=0.05)
        host.silence.begin()

    assert host.num_reads <= 11
    host.go_on(10.0)
    assert host.silence.left_s(10.0) == pytest.approx(0.0, abs=0.06 * 10)


def test_the_waiting_time_of_a_real_process_is_known_and_that_of_none_is_0() -> None:
    assert cpu_wait_s(os.getpid()) >= 0.0
    assert cpu_wait_s(2**22 + 1) == 0.0
