"""Energy of processors by zeusd's /cpu routes: wraps, a limited rate, and the unmodified package zeus as client."""

import asyncio
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from gpuenergyd_zeusd import cpus, routes
from gpuenergyd_zeusd.cpus import Cpus
from tests.daemon.gpus.test_host_energy import RANGE_UJ, powercap, set_counter
from tests.support.tools_environment import tools_environment

READ = """
import json, os
from zeus.device.cpu import get_cpus, rapl
rapl.RAPL_DIR = os.environ["RAPL_DIR"]
from zeus.monitor import ZeusMonitor
from zeus.utils.zeusd import ZeusdClient
client = ZeusdClient()
monitor = ZeusMonitor(gpu_indices=[], cpu_indices=[0, 1])
monitor.begin_window("epoch")
for zone, used_uj in (("intel-rapl:0", 5_000_000), ("intel-rapl:0:1", 2_000_000), ("intel-rapl:1", 3_000_000)):
    path = f"{os.environ['COUNTERS']}/{zone}/energy_uj"
    counted = int(open(path).read())
    open(path, "w").write(str(counted + used_uj))
window = monitor.end_window("epoch")
power = client.get_cpu_power([1]).power_mw[1]
print(json.dumps([client.can_read_cpu, window.cpu_energy, window.dram_energy, [power.cpu_mw, power.dram_mw]]))
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    counters = {
        "intel-rapl:0": ("package-0", RANGE_UJ - 1_000_000),
        "intel-rapl:0:0": ("core", 1),
        "intel-rapl:0:1": ("dram", 2_000_000),
        "intel-rapl:1": ("package-1", 7_000_000),
    }
    return powercap(tmp_path / "powercap", counters)


def test_a_counter_goes_on_after_a_wrap(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "PERIOD_S", 0.0)
    cpu = Cpus(root).by_index[0]
    set_counter(root, "intel-rapl:0", 500_000)

    assert cpu.energies_uj() == (RANGE_UJ + 500_000, 2_000_000)


def test_no_client_sees_a_counter_change_within_a_period(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "PERIOD_S", 1e9)
    cpu = Cpus(root).by_index[1]
    set_counter(root, "intel-rapl:1", 9_000_000)

    assert cpu.energies_uj() == (7_000_000, None)


def test_a_host_whose_counters_cannot_all_be_read_offers_none(root: Path) -> None:
    (root / "intel-rapl:1" / "energy_uj").write_text("secret")

    assert Cpus(root).by_index == {}


@pytest.fixture
def socket_path(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Serve the routes of a daemon without GPUs on a socket."""
    monkeypatch.setattr(routes, "Cpus", lambda: Cpus(root))
    monkeypatch.setattr(cpus, "PERIOD_S", 0.0)
    services: Any = SimpleNamespace(gpus=(), is_observing=True, leases=None, worker=None, on_change=[])
    app = web.Application()
    routes.ZeusdRoutes(services).add_to(app)
    loop, runner, is_served = asyncio.new_event_loop(), web.AppRunner(app), threading.Event()

    async def serve() -> None:
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "zeusd.sock")).start()
        is_served.set()

    thread = threading.Thread(target=lambda: (loop.create_task(serve()), loop.run_forever()))
    thread.start()
    is_served.wait()
    yield tmp_path / "zeusd.sock"
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_zeus_measures_a_window_of_processors_and_memory(root: Path, socket_path: Path) -> None:
    for index in range(2):  # Zeus looks which zones there are, and asks for all of them
        (root / "tree" / f"intel-rapl:{index}").mkdir(parents=True)
    environ = {"ZEUSD_SOCK_PATH": str(socket_path), "RAPL_DIR": str(root / "tree"), "COUNTERS": str(root)}
    command = [str(tools_environment() / "python"), "-W", "ignore", "-c", READ]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)

    assert done.stdout, done.stderr
    assert json.loads(done.stdout) == [True, {"0": 5.0, "1": 3.0}, {"0": 2.0}, [0, None]]
