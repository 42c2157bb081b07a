import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.world import World
from tests.support.processes import finished
from tests.support.waiting import LIMIT_S

# Writes paired values as fast as it can: a torn record would show a pair that differs.
WRITER = """
import sys
from pathlib import Path
from gpuenergyd_sim.driver.host import InstructionWork, SimulatedHost
host = SimulatedHost(Path(sys.argv[1]), sleep=lambda s: None)
gpus = [i.gpu_uuid for i in host.identities()]
print("ready", flush=True)
n = 0
while True:
    n += 1
    for gpu in gpus:
        host.begin_work(gpu, InstructionWork(n * 1e-3, n * 1e-3, n * 1e-3))
        host.lock_sm_clock(gpu, 1410 if n % 2 else 1110)
"""


@pytest.mark.kill
def test_killed_writers_never_corrupt_a_record_or_keep_a_lock(tmp_path: Path) -> None:
    host = SimulatedHost.create(tmp_path / "world", ["a100-sxm", "a40"], seed=1)
    world = World(tmp_path / "world")
    rng = random.Random(5)
    for _ in range(25):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "world")], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            threading.Event().wait(rng.uniform(0.0, 0.02))
            writer.send_signal(signal.SIGKILL)
        for index in range(2):
            with world.gpu(index) as record:
                state = record.state
                stretch = state.work_memory_s / state.work_w_per_mhz if state.work_w_per_mhz else 1.0
                assert state.work_memory_s == state.work_compute_s
                assert 0.98 < stretch < 1.02
                assert state.locked_mhz in {0, 1110, 1410}
    world.close()
    host.close()


def test_forked_child_and_parent_exclude_each_other(tmp_path: Path) -> None:
    """Locks on an inherited file description would exclude nobody, so updates would be lost."""
    script = """
import os, sys
from pathlib import Path
from gpuenergyd_sim.driver.host import SimulatedHost
host = SimulatedHost.create(Path(sys.argv[1]), ["a100-sxm"], sleep=lambda s: None)
gpu = host.identities()[0].gpu_uuid
children = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        for _ in range(200):
            host.lock_sm_clock(gpu, 1200)
        os._exit(0)
    children.append(pid)
for _ in range(200):
    host.reset_sm_clock(gpu)
for pid in children:
    assert os.waitpid(pid, 0)[1] == 0
print(host.num_clock_sets(gpu))
"""
    done = finished([sys.executable, "-c", script, str(tmp_path / "world")], timeout=LIMIT_S, check=True)

    assert done.stdout.strip() == "800"


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    host = SimulatedHost.create(tmp_path / "world", ["a100-sxm"], sleep=lambda _: None)
    gpu = host.identities()[0].gpu_uuid

    def work() -> None:
        for _ in range(200):
            host.lock_sm_clock(gpu, 1200)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert host.num_clock_sets(gpu) == 800
    host.close()


def test_world_file_of_another_boot_has_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = SimulatedHost.create(tmp_path / "world", ["a40"], sleep=lambda _: None)
    gpu = host.identities()[0].gpu_uuid
    host.lock_sm_clock(gpu, 900)
    host.close()
    monkeypatch.setattr("gpuenergyd_sim.driver.world.read_boot_id", lambda: "another-boot")

    after = SimulatedHost.open(tmp_path / "world")

    assert after.locked_sm_clock_mhz(gpu) is None
    after.close()
