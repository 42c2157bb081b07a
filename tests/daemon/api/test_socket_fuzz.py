"""Thousands of mutated messages to a real daemon's sockets: each response is valid, and no resource leaks.

`make fuzz` sends FUZZ_MESSAGES of them, the suite fewer: one half to a daemon as a user without any rights, the other
half to a second daemon as a user whose jobs run at full speed.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.client_process import daemon_for_everybody, needs_root
from tests.support.daemon_process import ROOT, DaemonProcess
from tests.support.socket_fuzzer import Settings
from tests.support.waiting import wait_until

NUM_MESSAGES = int(os.environ.get("FUZZ_MESSAGES", "1000")) // 2
STRANGER = 12_345
COUNT_TASKS = """
import asyncio, pathlib, signal, sys
def count_tasks(number, frame):
    try:
        print(f"tasks: {len(asyncio.all_tasks())}", file=sys.stderr, flush=True)
    except RuntimeError:
        pass
signal.signal(signal.SIGUSR2, count_tasks)
"""
LIMITS: dict[str, Any] = {"max_requests_per_user_per_s": 1e9, "policy": "full-speed"}
MAX_GROWTH_KIB = 20_000


def fuzz(daemon: DaemonProcess, *, seed: int, uid: int | None = None, asks_for_changes: bool = False) -> dict[str, Any]:
    """Run the fuzzer; return its results."""
    settings = Settings(
        socket_path=str(daemon.socket_path),
        clock_socket_path=str(daemon.clock_socket_path),
        gpu_uuids=tuple(gpu["gpu_uuid"] for gpu in daemon.status()["gpus"]),
        num_messages=NUM_MESSAGES,
        seed=seed,
        uid=uid,
        asks_for_changes=asks_for_changes,
    )
    command = [sys.executable, "-m", "tests.support.socket_fuzzer", json.dumps(asdict(settings))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    outcome: dict[str, Any] = json.loads(done.stdout)
    sys.stdout.write(done.stdout)
    return outcome


def num_tasks(daemon: DaemonProcess) -> int:
    """Return the number of tasks of the daemon's event loop."""
    num_before = daemon.log.count("tasks: ")
    os.kill(daemon.pid, signal.SIGUSR2)
    wait_until(lambda: daemon.log.count("tasks: ") > num_before)
    return int(daemon.log.rpartition("tasks: ")[2].split()[0])


def num_descriptors(daemon: DaemonProcess) -> int:
    """Return the number of open file descriptors of the daemon."""
    return len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))


def memory_kib(daemon: DaemonProcess) -> int:
    """Return the daemon's resident memory."""
    status = Path(f"/proc/{daemon.pid}/status").read_text(encoding="utf-8")
    return int(status.partition("VmRSS:")[2].split()[0])


def check_nothing_is_left(daemon: DaemonProcess, before: tuple[int, int, int]) -> None:
    """Check that the daemon is as it was before: descriptors, tasks, memory, jobs, clocks."""
    tasks, descriptors, memory = before
    wait_until(lambda: daemon.status()["jobs"] == [])
    wait_until(lambda: num_descriptors(daemon) <= descriptors)
    wait_until(lambda: num_tasks(daemon) <= tasks)
    assert memory_kib(daemon) < memory + MAX_GROWTH_KIB
    assert all(gpu["requested_sm_clock_mhz"] is None for gpu in daemon.status()["gpus"])
    assert daemon.is_as_found()
    assert "Traceback" not in daemon.log


def warmed_up(daemon: DaemonProcess) -> tuple[int, int, int]:
    """Return tasks, descriptors and memory of a daemon that has served once."""
    for _ in range(3):
        daemon.status()
    wait_until(lambda: daemon.status()["policy_host"]["is_alive"])
    return num_tasks(daemon), num_descriptors(daemon), memory_kib(daemon)


@pytest.mark.fault(32)
def test_arbitrary_requests_of_a_stranger_get_valid_responses_and_change_nothing() -> None:
    needs_root()
    with daemon_for_everybody(prologue=COUNT_TASKS, **LIMITS) as daemon:
        daemon.clock_socket_path.chmod(0o666)
        before = warmed_up(daemon)

        outcome = fuzz(daemon, seed=5, uid=STRANGER, asks_for_changes=True)

        assert outcome["num_answers"] >= outcome["num_sent"] - outcome["num_raw"] > 0.8 * NUM_MESSAGES
        assert outcome["num_raw_answered"] > outcome["num_raw"] / 4
        assert outcome["statuses"].get("403", 0) > NUM_MESSAGES / 100
        assert outcome["num_registered"] == 0
        check_nothing_is_left(daemon, before)


@pytest.mark.fault(47)
def test_arbitrary_requests_of_a_rank_get_valid_responses_and_change_no_clock() -> None:
    with daemon_for_everybody(prologue=COUNT_TASKS, **LIMITS) as daemon:
        before = warmed_up(daemon)

        outcome = fuzz(daemon, seed=6)

        assert outcome["num_answers"] >= outcome["num_sent"] - outcome["num_raw"] > 0.8 * NUM_MESSAGES
        assert outcome["num_raw_answered"] > outcome["num_raw"] / 4
        assert outcome["statuses"].get("200", 0) > NUM_MESSAGES / 20
        assert outcome["num_registered"] > 0
        assert outcome["num_kinds_of_refusal"] > 20
        check_nothing_is_left(daemon, before)
