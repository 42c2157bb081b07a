"""The installed units under a real systemd in its own namespaces, with simulated GPUs.

Time limits here are generous; `benchmarks/runs/systemd_faults.py` measures them.
"""

import contextlib
import hashlib
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.errors import DaemonNotRunningError
from gpuenergyd_install.installation import compile_command
from gpuenergyd_policies.planning.compiled import cache_folder
from tests.support.installed_daemon import CORE, WORKER, InstalledDaemon, installed_daemon
from tests.support.systemd_host import INSTALLED, why_not
from tests.support.thorough import thorough
from tests.support.waiting import LIMIT_S, wait_until

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
ALL_CAPABILITIES_GONE = "0000000000000000"
FETCHER = "gpuenergyd-carbon.service"
SYS_ADMIN_ALONE = "0000000000200000"
HERE = Path(__file__).resolve().parents[2] / "policies" / "gpuenergyd_policies" / "planning"
PLANNING = Path("/opt/tree/policies/gpuenergyd_policies/planning")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InstalledDaemon]:
    """A host on which the daemon is installed and runs."""
    folder = tmp_path_factory.mktemp("systemd")
    for parent in (folder, folder.parent, folder.parent.parent):
        parent.chmod(0o755)
    # Longer than a busy host delays a process that does not hang.
    with installed_daemon(folder, watchdog_s=15.0) as made:
        yield made


@pytest.fixture(autouse=True)
def _whole_before_each(daemon: InstalledDaemon) -> None:
    daemon.host.systemctl("reset-failed")
    wait_until(lambda: daemon.is_ready() and daemon.is_as_found())


def capabilities(daemon: InstalledDaemon, unit: str) -> str:
    """Return the effective capabilities of a unit's main process."""
    status = daemon.host.run("cat", f"/proc/{daemon.host.main_pid(unit)}/status")
    return next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))


def test_every_process_is_ready_with_only_the_rights_it_needs(daemon: InstalledDaemon) -> None:
    assert daemon.host.property_of(CORE, "ActiveState") == "active"
    assert daemon.host.property_of(WORKER, "ActiveState") == "active"
    assert capabilities(daemon, CORE) == ALL_CAPABILITIES_GONE
    assert capabilities(daemon, WORKER) == SYS_ADMIN_ALONE
    assert daemon.host.property_of(CORE, "User") == "gpuenergyd"
    assert daemon.host.run("stat", "-c", "%U %G %a", "/run/gpuenergyd/gpuenergyd.sock").split() == [
        *("gpuenergyd", "gpuenergy", "660")
    ]


def test_a_policy_runs_in_its_own_unit_that_ends_with_the_daemon(daemon: InstalledDaemon) -> None:
    with daemon.lowered():

        def num_running() -> int:
            units = daemon.host.systemctl("list-units", "--no-legend", "--plain", "gpuenergyd-policy@*.service")
            return units.count("running")

        def num_expected() -> int:
            """One for plans; forecasts have their own from the first full hour of intensities on."""
            return 1 if daemon.status()["carbon"]["forecast_model"] is None else 2

        # On a busy host a policy may exceed its time limit: its unit ends while the next one runs already.
        wait_until(
            lambda: num_running() == num_expected(), log=lambda: f"{num_running()} units run\n{daemon.log[-10_000:]}"
        )


def test_the_carbon_fetcher_unit_starts_with_the_daemon(daemon: InstalledDaemon) -> None:
    wait_until(lambda: daemon.status()["carbon"]["basis"] == "fixed")
    grid = daemon.status()["carbon"]

    assert (grid["zone"], grid["source"], grid["value"]) == ("XX", "fixed", 321.0)
    assert daemon.host.property_of(FETCHER, "ActiveState") == "active"
    assert capabilities(daemon, FETCHER) == ALL_CAPABILITIES_GONE
    assert daemon.host.property_of(FETCHER, "User") == "gpuenergyd-carbon"


@pytest.mark.fault(4)
def test_clocks_are_restored_when_the_daemon_is_killed(daemon: InstalledDaemon) -> None:
    """The worker restores at once by itself, before systemd stops it because the daemon failed."""
    with daemon.lowered():
        num_printed = len(daemon.log)

        daemon.seconds_until_restored(daemon.kill(CORE))

        restored = re.compile(r"^\S+Z gpuenergyd-worker: .* sm_clock_lock restored", re.MULTILINE)
        wait_until(lambda: len(restored.findall(daemon.log[num_printed:])) == daemon.num_gpus)
    wait_until(daemon.is_ready)


@pytest.mark.thorough
@pytest.mark.fault(4)
def test_clocks_are_restored_when_the_worker_is_killed(daemon: InstalledDaemon) -> None:
    with daemon.lowered():
        daemon.seconds_until_restored(daemon.kill(WORKER))
    wait_until(daemon.is_ready)


@pytest.mark.fault(5)
@pytest.mark.parametrize("unit", thorough(WORKER, CORE))
def test_clocks_are_restored_when_a_process_hangs(daemon: InstalledDaemon, unit: str) -> None:
    with daemon.lowered():
        daemon.seconds_until_restored(daemon.kill(unit, signal.SIGSTOP))
    wait_until(daemon.is_ready)


@pytest.mark.fault(40)
def test_a_restart_keeps_lease_and_plan_of_a_running_job(daemon: InstalledDaemon) -> None:
    with daemon.lowered():
        wait_until(lambda: (job := daemon.job()) is not None and job["phase"] == "tuned")
        before = daemon.job()
        assert before is not None
        taken_over = f"job {before['job_id']}: taken over in phase tuned with plan always-low"
        restart = subprocess.Popen(daemon.host.command("systemctl", "restart", CORE))
        locks = [daemon.locks_mhz()]
        while restart.poll() is None and taken_over not in daemon.log:  # from then on the guard may find it too slow
            locks.append(daemon.locks_mhz())
        restart.wait(LIMIT_S)
        wait_until(daemon.is_ready)
        after = daemon.job()

        assert after is not None
        assert restart.returncode == 0
        assert all(lock is not None for each in locks for lock in each), daemon.log[-3000:]
        assert taken_over in daemon.log
        assert after["job_id"] == before["job_id"]
        assert after["ranks"] == before["ranks"]
        wait_until(lambda: (job := daemon.job()) is not None and job["num_iterations"] > after["num_iterations"])


@pytest.mark.thorough
def test_a_changed_mode_takes_effect_with_a_restart_of_the_daemon(daemon: InstalledDaemon) -> None:
    """Without that, the GPU worker, which outlives the restart, would refuse what the daemon may do now."""

    def restart_in(mode: str) -> None:
        daemon.host.run("sed", "-i", f's/^mode = .*/mode = "{mode}"/', "/etc/gpuenergyd/config.toml")
        daemon.host.systemctl("restart", CORE)
        wait_until(lambda: daemon.is_ready() and daemon.status()["mode"] == mode, 60)

    restart_in("observe")
    with daemon.training("--policy", "always-low", "--max-slowdown", "1"):
        wait_until(lambda: (job := daemon.job()) is not None and job["num_iterations"] > 10, 60)
        daemon.host.systemctl("restart", WORKER)
        wait_until(lambda: {gpu["state"] for gpu in daemon.status()["gpus"]} == {"observe_only"}, 60)

        restart_in("control")

        wait_until(daemon.is_lowered, 120)


@pytest.mark.fault(40)
def test_no_client_is_refused_while_the_daemon_restarts(daemon: InstalledDaemon) -> None:
    num_answers = 0
    with subprocess.Popen(daemon.host.command("systemctl", "restart", CORE)) as restart:
        while restart.poll() is None or num_answers == 0:
            daemon.status()  # raises if the connection is refused
            num_answers += 1

    assert restart.returncode == 0


def test_a_connection_starts_the_daemon(daemon: InstalledDaemon) -> None:
    daemon.host.systemctl("stop", CORE)
    # The worker stops after the daemon, and its job may still be queued.
    wait_until(lambda: daemon.host.property_of(WORKER, "ActiveState") in {"inactive", "deactivating"})

    status: list[dict[str, Any]] = []

    def is_answered() -> bool:  # retries after the request's time limit
        with contextlib.suppress(DaemonNotRunningError):
            status.append(daemon.status())
        return bool(status)

    wait_until(is_answered)
    assert status[0]["mode"] == "control"
    wait_until(lambda: daemon.host.property_of(CORE, "ActiveState") == "active")  # the daemon answers before READY=1


def numba_folder(planning: Path, package: str) -> str:
    """Return the name of numba's cache folder of a package, which it derives from the path of the source."""
    return f"{package}_{hashlib.sha1(str(planning / package).encode(), usedforsecurity=False).hexdigest()}"


def copy_compiled_kernels(daemon: InstalledDaemon, *, without: str) -> None:
    """Copy the kernels that are compiled here, without one, to where the host compiles them: all take 20 s."""
    own, given = cache_folder(), daemon.host.shared / "kernels"
    assert own is not None
    for folder in own.iterdir():
        package = folder.name.rpartition("_")[0]
        if folder.name != numba_folder(HERE, package):
            continue  # of a checkout that was moved
        # Files under ".tmp." are being written by other processes, and have another name soon.
        ignored = shutil.ignore_patterns(f"*.{without}-*", "*.tmp.*")
        shutil.copytree(folder, given / own.name / numba_folder(PLANNING, package), ignore=ignored)
    owned = "find /var/cache/gpuenergyd -type d -exec chown gpuenergyd-policy {} +"
    daemon.host.run("sh", "-c", f"cp -r /mnt/kernels/. /var/cache/gpuenergyd && {owned}")


@pytest.mark.thorough
def test_the_policy_host_uses_the_planner_that_the_installation_compiled(daemon: InstalledDaemon) -> None:
    """Without that, the first job of an installation waits for its plan for 20 s longer."""
    copy_compiled_kernels(daemon, without="round_down")
    compiled = daemon.host.run(*compile_command(INSTALLED / "bin" / "python"), timeout_s=300)
    files = daemon.host.run("find", "/var/cache/gpuenergyd", "-name", "*.nbc", "-printf", "%p %u %T@\\n")
    num_printed = len(daemon.log)
    with daemon.training("--policy", "bubble-aware"):
        wait_until(lambda: (job := daemon.job()) is not None and job["phase"] == "tuned")

    assert ", in /var/cache/gpuenergyd/kernels-" in compiled
    assert re.search(r"\.round_down-.* gpuenergyd-policy ", files)
    assert "compiling the planner" not in daemon.log[num_printed:]
    assert daemon.host.run("find", "/var/cache/gpuenergyd", "-name", "*.nbc", "-printf", "%p %u %T@\\n") == files


@pytest.mark.thorough
def test_a_stop_restores_clocks_and_ends_daemon_and_worker(daemon: InstalledDaemon) -> None:
    with daemon.lowered():
        started_ns = time.monotonic_ns()
        daemon.host.systemctl("stop", "gpuenergyd.socket", CORE)
        daemon.seconds_until_restored(started_ns)

        assert daemon.host.property_of(CORE, "ActiveState") == "inactive"
        wait_until(lambda: daemon.host.property_of(WORKER, "ActiveState") == "inactive")
    daemon.host.systemctl("start", "gpuenergyd.socket", CORE)
