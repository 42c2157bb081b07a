"""Unmodified tools of other projects read the same values as the daemon, through the fake driver library."""

import json
import os
import threading
import time
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd_sim.driver.device_parameters import A40, A100_SXM, V100_SXM2
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.world import create_world
from tests.support.fake_nvml.control import FakeNvmlControl
from tests.support.processes import finished
from tests.support.tools_environment import KERNEL_TUNER, tools_environment
from tests.support.waiting import LIMIT_S, wait_until

SAME = 0.02
_WINDOW_NS = 400_000_000


@pytest.fixture(scope="session")
def tools() -> Path:
    """A virtual environment with the tools, created once per list of versions."""
    return tools_environment()


@dataclass(slots=True)
class Watch:
    """A world whose exact energy is recorded continuously, for comparison with the tools' values."""

    host: SimulatedHost
    environment: dict[str, str]
    bin_folder: Path
    is_over: threading.Event = field(default_factory=threading.Event)
    notes: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    @property
    def gpus(self) -> list[str]:
        """The GPUs' UUIDs in order of their index."""
        return [i.gpu_uuid for i in self.host.identities()]

    def run(self) -> None:
        """Record energies until the end."""
        while not self.is_over.wait(0.01):
            for gpu in self.gpus:
                before_ns = time.monotonic_ns()
                energy_j = self.host.exact_energy_j(gpu)
                at_ns = (before_ns + time.monotonic_ns()) // 2
                self.notes.setdefault(gpu, []).append((at_ns, energy_j))

    def energy_j(self, gpu: str, begin_ns: int, end_ns: int) -> float:
        """Return the exact energy between two instants."""
        return self._at(gpu, end_ns) - self._at(gpu, begin_ns)

    def power_w(self, gpu: str, at_ns: int) -> float:
        """Return the exact power around an instant."""
        return self.energy_j(gpu, at_ns - _WINDOW_NS, at_ns) / (_WINDOW_NS / 1e9)

    def python(self, code: str) -> Any:
        """Run code in the tools' environment and return the JSON value that it prints last."""
        return json.loads(self.command("python", "-W", "ignore", "-c", code).splitlines()[-1])

    def command(self, name: str, *arguments: str) -> str:
        """Run a tool and return its output."""
        done = finished([str(self.bin_folder / name), *arguments], env=self.environment, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _at(self, gpu: str, at_ns: int) -> float:
        notes = self.notes[gpu]
        k = min(max(1, bisect(notes, (at_ns, 0.0))), len(notes) - 1)
        (t0, e0), (t1, e1) = notes[k - 1], notes[k]
        return e0 + (e1 - e0) * (at_ns - t0) / (t1 - t0)


@pytest.fixture
def watch(tmp_path: Path, tools: Path, fake_nvml_library: Path) -> Iterator[Watch]:
    """Three GPUs that wait for a peer, with noise-free sensors for comparing tools."""
    models = [replace(model, power_noise_ratio=0.0) for model in (A100_SXM, A40, V100_SXM2)]
    create_world(tmp_path / "world", models, seed=6, now_ns=time.monotonic_ns())
    host = SimulatedHost.open(tmp_path / "world")
    for identity in host.identities():
        host.attach_process(identity.gpu_uuid, os.getpid())
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(fake_nvml_library),
        "GPUENERGYD_FAKE_NVML_WORLD": str(host.path),
        "PATH": f"{fake_nvml_library / 'bin'}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "TERM": "xterm",
    }
    with FakeNvmlControl(host.path) as control:
        control.set_privileged(True)
        made = Watch(host, environment, tools)
        thread = threading.Thread(target=made.run)
        thread.start()
        yield made
        made.is_over.set()
        thread.join()
    host.close()


def assert_same_energy(watch: Watch, gpu: str, energy_j: float, instants_ns: list[int]) -> None:
    """Compare an energy between two readings, of which each was taken between two instants, however far apart."""
    before_first, after_first, before_last, after_last = instants_ns
    at_least_j = watch.energy_j(gpu, after_first, before_last)
    at_most_j = watch.energy_j(gpu, before_first, after_last)

    assert at_least_j * (1 - SAME) <= energy_j <= at_most_j * (1 + SAME)


def test_gpustat_shows_the_same_power(watch: Watch) -> None:
    shown = json.loads(watch.command("gpustat", "--json"))
    now_ns = time.monotonic_ns()

    assert [gpu["uuid"] for gpu in shown["gpus"]] == watch.gpus
    for gpu in shown["gpus"]:
        assert gpu["power.draw"] == pytest.approx(watch.power_w(gpu["uuid"], now_ns), rel=SAME)


@pytest.mark.thorough
def test_nvitop_shows_the_same_power_clock_and_processes(watch: Watch) -> None:
    watch.host.lock_sm_clock(watch.gpus[0], 1110)
    locked_ns = time.monotonic_ns()
    wait_until(lambda: time.monotonic_ns() > locked_ns + 2 * _WINDOW_NS)

    shown = watch.python(
        "import json, time; from nvitop import Device\n"
        "print(json.dumps([[d.uuid(), d.power_usage() / 1000, d.sm_clock(), sorted(d.processes()),"
        " time.monotonic_ns()] for d in Device.all()]))"
    )
    screen = watch.command("nvitop", "--once", "--no-unicode")

    assert [row[0] for row in shown] == watch.gpus
    assert [row[2] for row in shown] == [1110, 1740, 1530]
    for uuid, power_w, _, processes, at_ns in shown:
        assert power_w == pytest.approx(watch.power_w(uuid, at_ns), rel=SAME)
        assert processes == [os.getpid()]
    assert str(os.getpid()) in screen


def test_zeus_measures_the_same_energy(watch: Watch) -> None:
    instants_ns, energies = watch.python(
        "import json, time\n"
        "from zeus.monitor import ZeusMonitor\n"
        "monitor = ZeusMonitor(gpu_indices=[2], cpu_indices=[])\n"
        "t = [time.monotonic_ns()]; monitor.begin_window('w', sync_execution=False); t.append(time.monotonic_ns())\n"
        "time.sleep(3)\n"
        "t.append(time.monotonic_ns()); window = monitor.end_window('w', sync_execution=False)\n"
        "t.append(time.monotonic_ns())\n"
        "print(json.dumps([t, window.gpu_energy]))"
    )

    assert_same_energy(watch, watch.gpus[2], energies["2"], instants_ns)


def test_clock_locked_by_zeus_is_visible_to_the_daemon(watch: Watch) -> None:
    watch.python(
        "import json\n"
        "from zeus.device import get_gpus\n"
        "gpus = get_gpus()\n"
        "gpus.set_gpu_locked_clocks(1, 210, 1200)\n"
        "print(json.dumps('done'))"
    )

    assert watch.host.locked_sm_clock_mhz(watch.gpus[1]) == 1200
    assert watch.host.locked_sm_clock_mhz(watch.gpus[0]) is None


KERNEL_TUNER_PROGRAM = """
import json, time
from types import SimpleNamespace
from kernel_tuner.observers.nvml import NVMLObserver
observer = NVMLObserver(["core_freq", "mem_freq", "temperature", "nvml_energy"], device=1, use_locked_clocks=True)
observer.register_device(SimpleNamespace())
observer.nvml.gr_clock = 1005

def just_updated():
    before = energy = observer.read_energy()
    while energy == before:
        since = time.monotonic_ns()
        energy = observer.read_energy()
    return [since, time.monotonic_ns()], energy

time.sleep(0.5)
begin, first = just_updated()
observer.before_start()
observer.after_start()
time.sleep(3)
observer.during()
observer.after_finish()
end, last = just_updated()
print(json.dumps([begin + end, last - first, {name: float(value) for name, value in observer.get_results().items()}]))
"""


def test_kernel_tuner_observes_clocks_and_energy_and_restores_the_clock_that_it_locks(watch: Watch) -> None:
    tuner = replace(watch, bin_folder=tools_environment(KERNEL_TUNER))

    instants_ns, energy_j, observed = tuner.python(KERNEL_TUNER_PROGRAM)

    assert (observed["core_freq"], observed["mem_freq"]) == (1005, A40.memory_clock_mhz)
    assert observed["temperature"] == pytest.approx(watch.host.read(watch.gpus[1]).temperature_celsius, abs=3)
    assert_same_energy(watch, watch.gpus[1], energy_j, instants_ns)
    assert watch.host.locked_sm_clock_mhz(watch.gpus[1]) is None


@pytest.mark.thorough
def test_codecarbon_measures_the_same_energy(watch: Watch) -> None:
    instants_ns, kwh = watch.python(
        "import json, time\n"
        "from codecarbon import OfflineEmissionsTracker\n"
        "tracker = OfflineEmissionsTracker(country_iso_code='DEU', measure_power_secs=1, gpu_ids=[2],"
        " save_to_file=False, log_level='critical')\n"
        "t = [time.monotonic_ns()]; tracker.start(); t.append(time.monotonic_ns())\n"
        "time.sleep(4)\n"
        "t.append(time.monotonic_ns()); tracker.stop(); t.append(time.monotonic_ns())\n"
        "print(json.dumps([t, tracker.final_emissions_data.gpu_energy]))"
    )

    assert_same_energy(watch, watch.gpus[2], kwh * 3.6e6, instants_ns)
