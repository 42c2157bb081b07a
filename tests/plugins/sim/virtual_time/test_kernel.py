"""Tasks of virtual processes run in an order that nothing outside decides, and a killed process leaves nothing."""

import os
import select
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd_sim.virtual_time.kernel import TIMED_OUT, DeadlockError, Process, VirtualKernel
from tests.support.examples import examples

SECOND_NS = 1_000_000_000


def kernel_of_tests() -> VirtualKernel:
    return VirtualKernel(mono_ns=SECOND_NS, utc_ns=1_000 * SECOND_NS)


def run(kernel: VirtualKernel, main: Callable[[], object]) -> Process:
    process = kernel.start_process("main", main)
    kernel.run_until(process)
    return process


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=20))
@settings(max_examples=examples(100))
def test_sleepers_wake_in_the_order_of_their_instants_and_of_their_calls(pauses_s: list[float]) -> None:
    kernel = kernel_of_tests()
    woken: list[tuple[int, int]] = []

    def sleep(number: int) -> None:
        kernel.sleep(pauses_s[number])
        woken.append((kernel.now_ns, number))

    def main() -> None:
        for number in range(len(pauses_s)):
            kernel.start_task(f"sleeper {number}", partial(sleep, number))
        kernel.sleep(2e6)

    run(kernel, main)
    assert woken == sorted((SECOND_NS + round(pause_s * 1e9), number) for number, pause_s in enumerate(pauses_s))


def test_the_clock_advances_only_when_all_wait_and_when_it_is_read() -> None:
    kernel = kernel_of_tests()
    read: list[int] = []

    def main() -> None:
        read.extend([kernel.now_ns, kernel.now_ns, kernel.read_mono_ns(), kernel.read_mono_ns()])
        kernel.sleep(5.0)
        read.append(kernel.now_ns)

    run(kernel, main)
    assert read[0] == read[1] < read[2] < read[3]
    assert read[4] == read[3] + 5 * SECOND_NS


def test_who_waits_for_a_descriptor_runs_before_the_clock_jumps() -> None:
    kernel, (reading, writing) = kernel_of_tests(), os.pipe()
    found: list[tuple[bytes, int]] = []

    def read() -> None:
        kernel.wait(until_ns=kernel.deadline_ns(60.0), fd=reading, events=select.POLLIN)
        found.append((os.read(reading, 10), kernel.now_ns))

    def main() -> None:
        kernel.start_task("reader", read)
        kernel.sleep(1.0)
        os.write(writing, b"x")
        kernel.record_write()
        kernel.sleep(1.0)

    run(kernel, main)
    os.close(reading)
    os.close(writing)
    assert found == [(b"x", 2 * SECOND_NS)]


def test_a_wait_ends_once_by_the_first_event() -> None:
    kernel = kernel_of_tests()
    results: list[object] = []

    def main() -> None:
        wait = kernel.new_wait()
        kernel.start_task("waker", lambda: results.append(kernel.wake(wait, "woken")))
        results.append(kernel.await_wait(wait, until_ns=kernel.deadline_ns(1.0)))
        results.append(kernel.wake(wait, "too late"))
        results.append(kernel.wait(until_ns=kernel.deadline_ns(1.0)) is TIMED_OUT)

    run(kernel, main)
    assert results == [True, "woken", False, True]


def test_tasks_that_all_wait_for_each_other_are_an_error() -> None:
    kernel = kernel_of_tests()

    with pytest.raises(DeadlockError, match="nothing will happen any more"):
        run(kernel, kernel.wait)


def test_a_killed_process_runs_no_further_and_loses_its_locks_and_descriptors() -> None:
    kernel = kernel_of_tests()
    done: list[object] = []
    key = (1, 2, 3)

    def victim() -> None:
        try:
            kernel.lock_file(key, 7, blocks=True)
            kernel.current.process.descriptors[reading] = os.fstat(reading).st_ino
            kernel.sleep(100.0)
        finally:
            done.append("cleanup of the killed process")

    reading, writing = os.pipe()

    def main() -> None:
        process = kernel.start_process("victim", victim)
        kernel.sleep(1.0)
        done.append(kernel.lock_file(key, 8, blocks=False))
        process.kill()
        done.append(process.exit_status)
        done.append(kernel.lock_file(key, 8, blocks=False))
        done.append(bool(select.select([process.ended_fd], [], [], 0)[0]))
        kernel.sleep(200.0)

    run(kernel, main)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)
    os.close(writing)
    assert done == [False, -9, True, True]


def test_a_task_waits_for_a_locked_file_until_its_holder_lets_go() -> None:
    kernel = kernel_of_tests()
    locked_ns: list[int] = []
    key = (1, 2, 3)

    def second() -> None:
        kernel.lock_file(key, 8, blocks=True)
        locked_ns.append(kernel.now_ns)

    def main() -> None:
        kernel.lock_file(key, 7, blocks=True)
        kernel.start_task("second", second)
        kernel.sleep(3.0)
        kernel.unlock_file(key, 7)
        kernel.sleep(1.0)

    run(kernel, main)
    assert locked_ns == [4 * SECOND_NS]


def test_a_signal_runs_the_handler_of_its_process_or_kills_it() -> None:
    kernel = kernel_of_tests()
    heard: list[object] = []

    def main() -> None:
        polite = kernel.start_process("polite", lambda: kernel.sleep(10.0))
        rude = kernel.start_process("rude", lambda: kernel.sleep(10.0))
        polite.signal_handlers[15] = lambda number, _frame: heard.append(number)
        kernel.sleep(1.0)
        polite.signal(15)
        rude.signal(15)
        heard.extend([polite.is_alive, rude.is_alive, rude.exit_status])

    run(kernel, main)
    assert heard == [15, True, False, -15]


def test_a_process_has_the_exit_status_of_its_first_task(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("no such thing")

    def leave() -> None:
        raise SystemExit(3)

    assert run(kernel_of_tests(), lambda: None).exit_status == 0
    assert run(kernel_of_tests(), lambda: 4).exit_status == 4
    assert run(kernel_of_tests(), leave).exit_status == 3
    assert run(kernel_of_tests(), fail).exit_status == 1
    assert "ValueError: no such thing" in capsys.readouterr().err


def test_each_process_has_its_own_value_of_an_own_attribute() -> None:
    class Module:
        world = "shared"

    kernel, module = kernel_of_tests(), Module()
    seen: list[str] = []
    kernel.add_own_attribute(module, "world", lambda: "new")

    def other() -> None:
        seen.append(module.world)
        module.world = "of the other"
        kernel.sleep(2.0)
        seen.append(module.world)

    def main() -> None:
        module.world = "of the main process"
        kernel.start_process("other", other)
        kernel.sleep(1.0)
        seen.append(module.world)
        kernel.sleep(5.0)

    run(kernel, main)
    assert seen == ["new", "of the main process", "of the other"]
