"""The unmodified package zeus sets and reads GPUs through the daemon's socket; its changes end with its process."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.store import open_history
from tests.plugins.zeusd.conftest import environment_of_zeus, limits_w, nvml_daemon
from tests.support.daemon_process import DaemonProcess
from tests.support.tools_environment import tools_environment
from tests.support.waiting import LIMIT_S, wait_until

INTERPRETER = """
import json, sys
names = {}
for line in sys.stdin:
    try:
        *statements, last = json.loads(line)
        for statement in statements:
            exec(statement, names)
        answer = ["fine", eval(last, names)]
    except Exception as error:
        answer = [type(error).__name__, str(error)]
    print(json.dumps(answer), flush=True)
"""


class ZeusProgram:
    """A Python process that executes zeus statements sent to it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def run(self, *statements: str) -> Any:
        """Run statements and return the value of the last one, an expression."""
        outcome, value = self.attempt(*statements)
        assert outcome == "fine", value
        return value

    def attempt(self, *statements: str) -> tuple[str, Any]:
        """Run statements; return `fine` and a value, or the exception's name and text."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(statements) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the program died"
        outcome, value = json.loads(line)
        return outcome, value


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, fake_nvml_library: Path) -> Iterator[DaemonProcess]:
    with nvml_daemon(tmp_path_factory.mktemp("zeus"), fake_nvml_library, num_gpus=2) as made:
        yield made


@contextmanager
def zeus_program(daemon: DaemonProcess, fake_nvml_library: Path) -> Iterator[ZeusProgram]:
    """A program that reaches the GPUs through the daemon's socket, by Zeus' own settings."""
    process = subprocess.Popen(
        [str(tools_environment() / "python"), "-W", "ignore", "-c", INTERPRETER],
        env=environment_of_zeus(daemon, fake_nvml_library),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield ZeusProgram(process)
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def leases(daemon: DaemonProcess) -> list[dict[str, Any] | None]:
    return [gpu["zeusd_client_lease"] for gpu in daemon.status()["gpus"]]


def test_zeus_sets_and_reads_a_power_limit_and_locked_clocks_and_a_kill_leaves_nothing_changed(
    daemon: DaemonProcess, fake_nvml_library: Path
) -> None:
    found_w = limits_w(daemon)
    with zeus_program(daemon, fake_nvml_library) as program:
        kind = program.run("from zeus.device import get_gpus", "gpus = get_gpus()", "type(gpus.gpus[0]).__name__")
        limit_mw = program.run("gpus.set_power_management_limit(0, 300_000)", "gpus.get_power_management_limit(0)")
        program.run("gpus.set_memory_locked_clocks(1, 1593, 1593)", "gpus.set_gpu_locked_clocks(1, 1005, 1005)")
        during = (limits_w(daemon), daemon.locks_mhz(), leases(daemon))
        program.process.kill()
        wait_until(lambda: leases(daemon) == [None, None])

    assert kind == "ZeusdNVIDIAGPU"
    assert limit_mw == 300_000
    assert during[0] == [300.0, found_w[1]]
    assert during[1] == [None, 1005]
    assert [lease and lease["pid"] for lease in during[2]] == [program.process.pid] * 2
    assert limits_w(daemon) == found_w
    assert daemon.is_as_found()


def test_zeus_resets_what_it_set(daemon: DaemonProcess, fake_nvml_library: Path) -> None:
    found_w = limits_w(daemon)
    with zeus_program(daemon, fake_nvml_library) as program:
        program.run("from zeus.device import get_gpus", "gpus = get_gpus()", "1")
        program.run("gpus.set_gpu_locked_clocks(0, 900, 1200)", "gpus.set_power_management_limit(0, 250_000)", "1")
        locked = daemon.locks_mhz()[0]
        program.run("gpus.reset_gpu_locked_clocks(0)", "gpus.reset_memory_locked_clocks(0)")
        unlocked = daemon.locks_mhz()[0]
        program.run("gpus.reset_power_management_limit(0)")
        limits_after = limits_w(daemon)
    wait_until(lambda: leases(daemon) == [None, None])

    assert (locked, unlocked) == (1200, 1410)
    assert limits_after == found_w
    assert daemon.is_as_found()


def test_the_frequency_controller_of_zeus_sets_clocks_from_a_process_of_its_own(
    daemon: DaemonProcess, fake_nvml_library: Path
) -> None:
    with zeus_program(daemon, fake_nvml_library) as program:
        program.run(
            "import pathlib, runpy, zeus",  # its package imports torch, which this file does not need
            "path = 'optimizer/pipeline_frequency/frequency_controller.py'",
            "module = runpy.run_path(str(pathlib.Path(zeus.__file__).parent / path))",
            "controller = module['FrequencyController'](0)",
            "controller.set_frequency(1005)",
            "controller.set_frequency(0)",  # means no change
            "1",
        )
        wait_until(lambda: daemon.locks_mhz()[0] == 1005)
        lease = leases(daemon)[0]
        controller_pid = program.run("controller._proc.pid")
        program.run("controller.end()", f"controller._proc.join({LIMIT_S})", "1")
        wait_until(lambda: leases(daemon) == [None, None])

    assert lease is not None
    assert lease["pid"] == controller_pid != program.process.pid
    assert daemon.is_as_found()


def test_every_read_of_the_client_returns_the_drivers_value(daemon: DaemonProcess, fake_nvml_library: Path) -> None:
    with zeus_program(daemon, fake_nvml_library) as program:
        offered = program.run(
            "from zeus.utils.zeusd import ZeusdClient",
            "client = ZeusdClient()",
            "[client.gpu_ids, client.can_read_gpu, client.can_control_gpu, client.can_read_cpu, client.auth_required]",
        )
        mode = program.run("client.get_persistence_mode([0])")
        program.run("client.set_persistence_mode([0], True, True)")
        power_mw = program.run("client.get_gpu_power().power_mw")
        energies_mj = [program.run("client.get_gpu_energy([1])")["1"] for _ in range(2)]
        driver_mj = program.run(
            "import pynvml",
            "pynvml.nvmlInit()",
            "pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(1))",
        )

    assert offered == [[0, 1], True, True, False, False]
    assert mode == {"0": True}
    assert set(power_mw) == {"0", "1"}
    assert all(20_000 < mw < 200_000 for mw in power_mw.values())
    assert energies_mj[0] <= energies_mj[1] <= driver_mj


def test_power_streams_to_the_client(daemon: DaemonProcess, fake_nvml_library: Path) -> None:
    with zeus_program(daemon, fake_nvml_library) as program:
        readings = program.run(
            "import time",
            "from zeus.monitor.power_streaming import PowerStreamingClient",
            "from zeus.utils.zeusd import ZeusdConfig",
            "client = PowerStreamingClient([ZeusdConfig.from_env()])",
            f"deadline = time.monotonic() + {LIMIT_S}",
            "while not (found := client.get_power()) and time.monotonic() < deadline: time.sleep(0.05)",
            "[sorted(r.gpu_power_w) for r in found.values()]",
        )
        program.run("client.stop()")

    assert readings == [[0, 1]]


def test_refused_zeus_requests_name_the_reason(daemon: DaemonProcess, fake_nvml_library: Path) -> None:
    with zeus_program(daemon, fake_nvml_library) as first, zeus_program(daemon, fake_nvml_library) as second:
        for program in (first, second):
            program.run("from zeus.device import get_gpus", "gpus = get_gpus()", "1")
        first.run("gpus.set_power_management_limit(0, 300_000)")
        taken = second.attempt("gpus.set_power_management_limit(0, 200_000)")
        impossible = second.attempt("gpus.set_power_management_limit(1, 20_000)")
        absurd = second.attempt("gpus.set_gpu_locked_clocks(1, 9000, 9000)")
        limit_w = limits_w(daemon)[0]
        owner = first.process.pid
    wait_until(lambda: leases(daemon) == [None, None])

    assert f"leased to the zeusd-client, uid {os.geteuid()} pid {owner}" in taken[1]
    assert "20 W is out of range; GPU" in impossible[1]
    assert "9000 MHz is out of range; GPU" in absurd[1]
    assert limit_w == 300.0


def test_changes_by_zeus_are_in_the_history(daemon: DaemonProcess, fake_nvml_library: Path) -> None:
    with zeus_program(daemon, fake_nvml_library) as program:
        program.run("from zeus.device import get_gpus", "gpus = get_gpus()", "1")
        program.run("gpus.set_gpu_locked_clocks(1, 1005, 1005, block=True)")
        wait_until(lambda: daemon.locks_mhz()[1] == 1005)
        pid = program.process.pid
    wait_until(lambda: leases(daemon) == [None, None])

    def events() -> list[tuple[str, str, str]]:
        with open_history(daemon.database_path) as history:
            actor = f"zeusd-client uid {os.geteuid()} pid {pid}"
            return [(e.action, e.before, e.after) for e in history.control_events() if e.actor == actor]

    wait_until(lambda: len(events()) == 2)
    assert events() == [("lock", "no MHz", "1005 MHz"), ("restore", "leased", f"process {pid} ended")]
