"""Actuators' records of the locks in force, while calls of the driver are held at chosen instants."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuenergyd.core.clock_request import ClockRequest, TimedClock
from gpuenergyd.gpu.link.messages import AcquireLease, ClockChangeReport
from gpuenergyd.gpu.restore.journal import Control, Journal
from gpuenergyd.gpu.restore.policy import RestoreRules
from gpuenergyd.gpu.worker.driver_requests import DriverRequests
from gpuenergyd.gpu.worker.threads.actuator import Actuator
from gpuenergyd.gpu.worker.threads.driver_turns import DriverTurns
from gpuenergyd_sim.driver.host import SimulatedHost
from tests.support.waiting import LIMIT_S, wait_until
from tests.support.worker_site import OWNER


class HeldDriver(SimulatedHost):
    """A simulated host whose next call that locks a clock waits, its lock installed, until it is released."""

    is_holding = False

    def hold_next_call(self) -> None:
        self.has_installed, self.may_return = threading.Event(), threading.Event()
        self.is_holding = True

    def lock_sm_clock(self, gpu_uuid: str, sm_clock_mhz: int) -> None:
        """Lock the clock, then wait if the call is to be held."""
        super().lock_sm_clock(gpu_uuid, sm_clock_mhz)
        if self.is_holding:
            self.is_holding = False
            self.has_installed.set()
            assert self.may_return.wait(LIMIT_S)


class Rig:
    """The actuators of three GPUs with journal entries, and the changes that they made."""

    def __init__(self, folder: Path, turn_limit_s: float = LIMIT_S) -> None:
        self.driver = HeldDriver.create(folder / "world", ["a100-sxm"] * 3, sleep=lambda _: None)
        self.gpus = tuple(i.gpu_uuid for i in self.driver.identities())
        self.gpu = self.gpus[0]
        for gpu in self.gpus:
            self.driver.attach_process(gpu, os.getpid())
        self.journal = Journal(folder / "journal.json")
        requests = DriverRequests(self.driver, self.journal, "simulated", folder / "world", RestoreRules())
        for gpu in self.gpus:
            requests.open_lease(AcquireLease("L1", self.gpus, OWNER), gpu)
        self.changes: list[ClockChangeReport] = []
        self.turns = DriverTurns(turn_limit_s)  # a held call keeps its turn
        self.actuators = [
            Actuator(self.driver, self.journal, own, self.turns, on_set=self.changes.append, on_health=lambda *_: None)
            for own in self.driver.identities()
        ]
        self.actuator = self.actuators[0]
        for actuator in self.actuators:
            actuator.start()

    def close(self) -> None:
        """End the threads."""
        for actuator in self.actuators:
            actuator.close(LIMIT_S)
        self.driver.close()

    def request(self, sm_clock_mhz: int, *, gpu_index: int = 0, due_mono_ns: int | None = None) -> None:
        """Request a clock from an instant, or from now on."""
        due_ns = time.monotonic_ns() if due_mono_ns is None else due_mono_ns
        self.actuators[gpu_index].request_clock(ClockRequest(sm_clock_mhz, due_ns))

    def set_clock(self, sm_clock_mhz: int, *, gpu_index: int = 0) -> None:
        """Request a clock and wait until it is set."""
        num_before = len(self.changes)
        self.request(sm_clock_mhz, gpu_index=gpu_index)
        wait_until(lambda: len(self.changes) > num_before)

    def run_task(self) -> None:
        """Wait until every task submitted before has run."""
        done = threading.Event()
        self.actuator.submit(done.set)
        assert done.wait(LIMIT_S)

    def restore_during_a_call(self, sm_clock_mhz: int) -> None:
        """Restore the GPU, as the supervisor does, while a call that locks a clock is in progress."""
        self.driver.hold_next_call()
        self.request(sm_clock_mhz)
        assert self.driver.has_installed.wait(LIMIT_S)
        self.actuator.drop_requests()
        self.actuator.submit(lambda: self.driver.reset_sm_clock(self.gpu))
        self.driver.may_return.set()
        self.run_task()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Yield a rig; its thread ends afterwards."""
    made = Rig(tmp_path)
    yield made
    made.close()


def test_clock_whose_call_ends_after_a_restore_began_is_not_in_force(rig: Rig) -> None:
    rig.restore_during_a_call(900)

    assert rig.driver.locked_sm_clock_mhz(rig.gpu) is None
    assert rig.actuator.lock_in_force() is None


def test_same_clock_is_set_again_after_a_restore_during_its_call(rig: Rig) -> None:
    rig.restore_during_a_call(900)

    rig.set_clock(900)

    assert rig.driver.locked_sm_clock_mhz(rig.gpu) == 900
    assert rig.actuator.num_skipped == 0


def test_no_lock_is_in_force_while_a_call_changes_it(rig: Rig) -> None:
    """The driver has raised the clock, and the call has not returned: the clock above the old lock is ours."""
    rig.set_clock(900)
    rig.driver.hold_next_call()
    rig.request(1410)
    assert rig.driver.has_installed.wait(LIMIT_S)

    during = rig.actuator.lock_in_force()
    rig.driver.may_return.set()
    rig.run_task()

    assert during is None
    lock = rig.actuator.lock_in_force()
    assert lock is not None
    assert lock.sm_clock_mhz == 1410


def test_lock_is_not_in_force_once_the_driver_was_reloaded_during_its_call(rig: Rig) -> None:
    rig.driver.hold_next_call()
    rig.request(900)
    assert rig.driver.has_installed.wait(LIMIT_S)
    rig.actuator.forget_lock()
    rig.driver.may_return.set()
    rig.run_task()

    assert rig.actuator.lock_in_force() is None
    assert rig.journal.holds(rig.gpu, Control.SM_CLOCK_LOCK)


@pytest.mark.fault(16, 55)
def test_a_doubtful_lock_stays_ours_and_the_same_clock_is_set_again(rig: Rig) -> None:
    rig.set_clock(900)
    assert rig.actuator.doubt_lock()
    during = rig.actuator.lock_in_force()

    rig.set_clock(900)

    assert during is not None
    assert rig.actuator.num_skipped == 0
    assert not rig.actuator.is_lock_doubtful()


def test_a_lock_that_the_gpu_has_shown_since_is_not_set_again(rig: Rig) -> None:
    rig.set_clock(900)
    rig.actuator.doubt_lock()
    rig.actuator.trust_lock(shown_since_mono_ns=0)
    assert rig.actuator.is_lock_doubtful()  # a clock that the driver kept from before
    rig.actuator.trust_lock(shown_since_mono_ns=time.monotonic_ns())

    rig.request(900)
    wait_until(lambda: rig.actuator.num_skipped == 1)

    assert len(rig.changes) == 1


def test_without_a_lock_there_is_nothing_to_doubt(rig: Rig) -> None:
    assert not rig.actuator.doubt_lock()


def test_a_raise_goes_before_a_reduction_that_has_waited_longer(rig: Rig) -> None:
    for index in range(2):
        rig.set_clock(1200, gpu_index=index)
    rig.driver.hold_next_call()
    rig.request(900, gpu_index=2)
    assert rig.driver.has_installed.wait(LIMIT_S)
    now_ns = time.monotonic_ns()
    rig.request(900, gpu_index=1, due_mono_ns=now_ns - 50_000_000)
    rig.request(1410, gpu_index=0, due_mono_ns=now_ns)
    wait_until(lambda: rig.turns.num_waiting == 2)
    rig.driver.may_return.set()
    wait_until(lambda: len(rig.changes) == 5)

    order = [(c.gpu_uuid, c.requested_sm_clock_mhz) for c in rig.changes[3:]]
    assert order == [(rig.gpus[0], 1410), (rig.gpus[1], 900)]


def test_waiting_for_calls_of_other_gpus_does_not_count_as_latency(rig: Rig) -> None:
    due_ns = time.monotonic_ns()
    rig.driver.hold_next_call()
    rig.request(900, gpu_index=0, due_mono_ns=due_ns)
    assert rig.driver.has_installed.wait(LIMIT_S)
    rig.request(900, gpu_index=1, due_mono_ns=due_ns)
    rig.driver.may_return.set()
    wait_until(lambda: len(rig.changes) == 2)

    first, second = rig.changes
    assert first.blocked_ns == 0
    assert second.blocked_ns == first.returned_mono_ns - first.called_mono_ns > 0


def test_the_clocks_of_a_timetable_are_set_at_their_instants_until_another_request_replaces_it(rig: Rig) -> None:
    for gap_ms in (20, 200, 2_000, 20_000):  # on a busy machine, clocks that are too near become due together
        rig.changes.clear()
        now_ns = time.monotonic_ns()
        later = [TimedClock(mhz, now_ns + k * gap_ms * 1_000_000) for k, mhz in enumerate((900, 1305, 1200), start=1)]
        far = TimedClock(600, now_ns + 3_600_000_000_000)
        rig.actuator.request_clock(ClockRequest(1410, now_ns, (*later, far)))
        wait_until(lambda: bool(rig.changes) and rig.changes[-1].requested_sm_clock_mhz == 1200)
        if len(rig.changes) == 4:
            break
    rig.request(1395)  # a pause
    wait_until(lambda: len(rig.changes) == 5)
    rig.run_task()

    assert [c.requested_sm_clock_mhz for c in rig.changes] == [1410, 900, 1305, 1200, 1395]
    for change, clock in zip(rig.changes[1:4], later, strict=True):
        assert change.called_mono_ns >= clock.at_mono_ns
        assert change.due_mono_ns == clock.at_mono_ns


def test_of_the_clocks_of_a_timetable_that_became_due_together_only_the_last_is_set(rig: Rig) -> None:
    now_ns = time.monotonic_ns()
    passed = tuple(TimedClock(mhz, now_ns - 1_000_000 + k) for k, mhz in enumerate((900, 1305, 1200)))
    rig.actuator.request_clock(ClockRequest(0, now_ns - 2_000_000, passed))
    wait_until(lambda: bool(rig.changes))
    rig.run_task()

    assert [c.requested_sm_clock_mhz for c in rig.changes] == [1200]


def test_a_restore_drops_the_rest_of_a_timetable(rig: Rig) -> None:
    now_ns = time.monotonic_ns()
    later = tuple(TimedClock(mhz, now_ns + 100_000_000) for mhz in (900, 1305))
    rig.actuator.request_clock(ClockRequest(1410, now_ns, later))
    rig.actuator.drop_requests()

    assert rig.actuator._slot.now is None
    assert not rig.actuator._slot.later


def test_a_call_that_does_not_return_loses_its_turn_and_delays_no_task_of_another_gpu(tmp_path: Path) -> None:
    rig = Rig(tmp_path, turn_limit_s=0.01)
    rig.driver.hold_next_call()
    rig.request(900, gpu_index=0)
    assert rig.driver.has_installed.wait(LIMIT_S)

    rig.set_clock(1005, gpu_index=1)
    restored = threading.Event()
    rig.actuators[2].submit(restored.set)
    assert restored.wait(LIMIT_S)

    assert rig.actuators[0].call.gpu_uuid == rig.gpus[0]
    rig.driver.may_return.set()
    wait_until(lambda: len(rig.changes) == 2)
    rig.close()


def test_a_gpu_that_is_given_up_refuses_its_tasks_and_serves_those_after_the_return(rig: Rig) -> None:
    rig.driver.hold_next_call()
    rig.request(900)
    assert rig.driver.has_installed.wait(LIMIT_S)
    refused: list[str] = []
    rig.actuator.submit(lambda: pytest.fail("a dropped task ran"), refused.append)

    rig.actuator.give_up("its call hangs")

    assert refused == ["its call hangs"]
    rig.driver.may_return.set()
    rig.run_task()
    assert rig.actuator.lock_in_force() is None


def test_a_task_that_fails_in_an_unexpected_way_is_refused_and_ends_no_thread(rig: Rig) -> None:
    refused: list[str] = []

    def fail() -> None:
        raise ZeroDivisionError("of a driver")

    rig.actuator.submit(fail, refused.append)
    rig.run_task()

    assert refused == ["unexpected ZeroDivisionError('of a driver')"]
