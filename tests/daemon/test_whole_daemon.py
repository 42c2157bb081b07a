"""The whole daemon with real processes: a job from registration to report, and the death of each process.

No simulated GPU stays at a lowered clock, whichever process is killed.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.gpu.restore.command import restore
from gpuenergyd.store import open_history
from gpuenergyd_sim.driver.world_kinds import WorldKind
from tests.support.daemon_process import DaemonProcess, running_daemon, training, wait_for_death
from tests.support.processes import child_pids
from tests.support.stopping import stop_between_driver_calls
from tests.support.thorough import thorough
from tests.support.waiting import LIMIT_S, wait_until

UNIFORM = ("--policy", "uniform")


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")


def wait_until_lowered(daemon: DaemonProcess) -> None:
    wait_until(daemon.is_lowered, log=lambda: f"{daemon.status()}\n{daemon.log}")


@pytest.mark.parametrize(
    ("policy", "first", "kind"),
    [("uniform", PlanPurpose.TRIAL, WorldKind.KIND), *thorough(("bubble-aware", PlanPurpose.TUNED, WorldKind.UNKIND))],
)
def test_a_job_runs_from_registration_to_report(
    tmp_path: Path, policy: str, first: PlanPurpose, kind: WorldKind
) -> None:
    with running_daemon(tmp_path, kind=kind) as daemon:
        # Iterations of 0.2 s: a counter that changes every 0.1 s measures them well enough on a busy machine, too.
        with training(daemon, arguments=("--microbatches", "8", "--policy", policy)) as run:
            job = daemon.wait_for_phase("tuned", timeout_s=300)
            wait_until_lowered(daemon)
            wait_until(lambda: bool(daemon.status()["jobs"][0][f"num_{first}_iterations"]))
            assert run.finish() == 0
        wait_until(lambda: daemon.job() is None)
        wait_until(daemon.is_as_found)
        (ended,) = daemon.status()["ended_jobs"]
        assert daemon.stop() == 0

    with open_history(daemon.database_path) as history:
        (summary,) = history.job_summaries()
        iterations = history.iterations(summary.job_id)
        plans = history.plans(summary.job_id)
        timeline = history.spans(summary.job_id, history.iterations_with_spans(summary.job_id)[-1])
        actions = {event.action for event in history.control_events(summary.job_id)}
        seconds = history.rollups(bucket_s=1, job_id=summary.job_id)
    assert (job["num_ranks"], job["num_microbatches"], job["policy"]) == (4, 8, policy)
    assert (summary.job_name, summary.is_simulated, summary.num_ranks) == ("fake", True, 4)
    assert summary.end_reason is not None
    assert "released" in summary.end_reason
    assert summary.num_iterations == len(iterations) >= 3 + 3  # at least three for the baseline
    assert summary.num_baseline_iterations >= 3
    assert summary.num_profile_iterations == 0
    assert summary.baseline_energy_j is not None
    assert (ended["baseline_time_s"], ended["baseline_energy_j"]) == (
        summary.baseline_time_s,
        summary.baseline_energy_j,
    )
    assert (ended["saving_ratio"], ended["slowdown_ratio"]) == (summary.saving_ratio, summary.slowdown_ratio)
    assert ended["saving_interval"] == (list(summary.saving_interval) if summary.saving_interval else None)
    assert summary.energy_j is not None
    assert {row.plan_purpose for row in iterations} >= {PlanPurpose.BASELINE, first}
    assert any(row.plan.ranks for row in plans)
    assert {span.pp_rank for span in timeline} == {0, 1, 2, 3}
    assert {"phase", "lease", "plan", "restore"} <= actions
    assert {rollup.gpu_uuid for rollup in seconds} == set(summary.gpu_uuids)
    assert any(rollup.energy_j is not None for rollup in seconds)


def test_an_observing_daemon_measures_and_changes_nothing(tmp_path: Path) -> None:
    with running_daemon(tmp_path, mode="observe") as daemon:
        wait_until(lambda: all(gpu["state"] == "observe_only" for gpu in daemon.status()["gpus"]))
        status = daemon.status()
        with training(daemon) as run:
            wait_until(lambda: (daemon.job() or {}).get("predicted_saving_ratio") is not None)
            job = daemon.job() or {}
            assert run.finish() == 0
        wait_until(lambda: daemon.job() is None)
        assert daemon.stop() == 0

    with open_history(daemon.database_path) as history:
        (summary,) = history.job_summaries()
        assert {row.plan.purpose for row in history.plans(summary.job_id)} == {PlanPurpose.PREDICTED}
    assert job["predicted_saving_low_ratio"] <= job["predicted_saving_ratio"] <= job["predicted_saving_high_ratio"]
    assert "assumed" in job["predicted_saving_basis"] == summary.predicted_saving_basis
    assert (job["saving_ratio"], summary.saving_ratio) == (None, None)
    shown = ("predicted_saving_ratio", "predicted_saving_low_ratio", "predicted_saving_high_ratio")
    assert [getattr(summary, name) for name in shown] == [job[name] for name in shown]
    assert summary.baseline_energy_j is not None
    assert daemon.is_as_found()
    assert (status["is_degraded"], status["degraded_reasons"]) == (False, [])


@pytest.mark.fault(1)
@pytest.mark.kill
def test_clocks_are_restored_when_a_trainer_is_killed(tmp_path: Path) -> None:
    with running_daemon(tmp_path, kind=WorldKind.KIND) as daemon, training(daemon, arguments=UNIFORM):
        wait_until_lowered(daemon)
        job = daemon.job()
        assert job is not None

        os.kill(job["ranks"][1]["pid"], signal.SIGKILL)
        wait_until(lambda: not daemon.is_lowered())

        wait_until(lambda: daemon.job() is None)
        wait_until(daemon.is_as_found)
        assert daemon.stop() == 0
    with open_history(daemon.database_path) as history:
        (summary,) = history.job_summaries()
    assert summary.end_reason is not None
    assert "rank 1 was lost: process" in summary.end_reason


@pytest.mark.kill
def test_a_stopped_daemon_restores_clocks_and_training_continues(tmp_path: Path) -> None:
    with running_daemon(tmp_path, kind=WorldKind.KIND) as daemon, training(daemon, arguments=UNIFORM) as run:
        wait_until_lowered(daemon)

        status = daemon.stop()

        assert status == 0
        assert daemon.is_as_found()
        assert not daemon.socket_path.exists()
        assert run.process.poll() is None


@pytest.mark.fault(4)
@pytest.mark.kill
def test_the_worker_restores_clocks_when_the_daemon_is_killed(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, kind=WorldKind.KIND).start()
    with training(daemon, arguments=UNIFORM):
        wait_until_lowered(daemon)
        children = [daemon.status()[name]["pid"] for name in ("worker", "policy_host")]

        os.kill(daemon.pid, signal.SIGKILL)
        daemon.stop()

        wait_until(daemon.is_as_found)
        for pid in children:
            wait_for_death(pid)
    assert restore(daemon.journal_path) == ()


@pytest.mark.fault(4)
@pytest.mark.kill
def test_a_daemon_waits_for_the_worker_of_a_killed_one_and_uses_its_own(tmp_path: Path) -> None:
    """The other worker is one that was still starting when its daemon was killed, and has not noticed it."""
    daemon = DaemonProcess(tmp_path)
    run_folder = tmp_path / "run"
    run_folder.mkdir(mode=0o700)
    command = [sys.executable, "-I", "-m", "gpuenergyd.gpu.worker.main", "--exit-with-daemon"]
    command += ["--link", str(run_folder / "worker.sock"), "--journal", str(daemon.journal_path)]
    command += ["--driver", "simulated", "--world", str(daemon.world_path)]
    with subprocess.Popen(command) as earlier:
        wait_until((run_folder / "worker.sock").is_socket)
        daemon.start()
        assert earlier.wait(LIMIT_S) == 0
        worker = daemon.status()["worker"]
        assert (worker["is_alive"], worker["num_restarts"]) == (True, 0)
        assert worker["pid"] in child_pids(daemon.pid)
        assert daemon.stop() == 0


@pytest.mark.fault(40)
@pytest.mark.kill
def test_training_returns_to_a_daemon_restarted_after_a_kill(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, kind=WorldKind.KIND).start()
    with training(daemon, arguments=UNIFORM):
        wait_until_lowered(daemon)
        with open_history(daemon.database_path) as history:
            wait_until(lambda: len(history.job_summaries()) == 1)
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.stop()

        with running_daemon(tmp_path) as successor:
            wait_until(lambda: successor.job() is not None)
            job = successor.job()
            assert job is not None
            wait_until(lambda: len((successor.job() or job)["ranks"]) == 4)
            assert successor.stop() == 0

    with open_history(daemon.database_path) as history:
        first = history.job_summaries()[0]
    assert first.end_reason == "the daemon stopped before the job"


@pytest.mark.fault(4)
@pytest.mark.kill
def test_a_killed_worker_is_restarted_clocks_restored_and_the_job_tuned_again(tmp_path: Path) -> None:
    with running_daemon(tmp_path, kind=WorldKind.KIND) as daemon, training(daemon, arguments=UNIFORM):
        wait_until_lowered(daemon)
        worker_pid = daemon.status()["worker"]["pid"]

        os.kill(worker_pid, signal.SIGKILL)

        wait_until(lambda: daemon.status()["worker"]["pid"] not in {None, worker_pid})
        wait_until(daemon.is_as_found)
        job = daemon.job()
        assert job is not None
        assert job["phase"] in {"fallback", "trial", "tuned"}
        wait_until_lowered(daemon)
        status = daemon.status()
        assert status["worker"]["num_restarts"] == 1
        assert not status["is_degraded"], status["degraded_reasons"]


@pytest.mark.fault(5)
@pytest.mark.kill
def test_a_hung_worker_is_restarted_and_the_clocks_restored(tmp_path: Path) -> None:
    with running_daemon(tmp_path, kind=WorldKind.KIND) as daemon, training(daemon, arguments=UNIFORM):
        wait_until_lowered(daemon)
        worker_pid = daemon.status()["worker"]["pid"]

        os.kill(worker_pid, signal.SIGSTOP)

        wait_for_death(worker_pid)
        wait_until(daemon.is_as_found)


@pytest.mark.kill
def test_a_killed_policy_host_only_delays_the_job(tmp_path: Path) -> None:
    with running_daemon(tmp_path, kind=WorldKind.KIND) as daemon, training(daemon, arguments=UNIFORM):
        daemon.wait_for_phase("trial", "tuned")
        first = daemon.status()["policy_host"]["pid"]
        assert "tests.support.fork_server" in command_of(first)

        os.kill(first, signal.SIGKILL)

        wait_until(lambda: daemon.status()["policy_host"]["num_restarts"] == 1)
        assert daemon.wait_for_phase("trial", "tuned")["num_ranks"] == 4
        wait_until(lambda: daemon.status()["policy_host"]["pid"] is not None)
        assert "gpuenergyd.daemon.processes.policy_host" in command_of(daemon.status()["policy_host"]["pid"])


@pytest.mark.fault(6)
@pytest.mark.kill
def test_when_all_processes_are_killed_the_restore_command_restores_every_gpu(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, kind=WorldKind.KIND).start()
    with training(daemon, arguments=UNIFORM) as run:
        wait_until_lowered(daemon)
        status = daemon.status()
        children = [status["worker"]["sentinel_pid"], status["worker"]["pid"], status["policy_host"]["pid"]]
        for pid in (*children, daemon.pid):
            os.kill(pid, signal.SIGKILL)
        run.kill()
        daemon.stop()
        for pid in children:
            wait_for_death(pid)
        assert not daemon.is_as_found()

        outcomes = restore(daemon.journal_path)

    assert len(outcomes) == 4
    assert daemon.is_as_found()
    assert restore(daemon.journal_path) == ()


@pytest.mark.fault(3)
@pytest.mark.kill
def test_a_silent_job_runs_at_full_speed_until_its_next_report(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path, kind=WorldKind.KIND, silence_limit_s=0.5) as daemon,
        training(daemon, arguments=UNIFORM) as run,
    ):
        wait_until_lowered(daemon)
        job = daemon.job()
        assert job is not None

        stop_between_driver_calls(child_pids(run.process.pid), daemon.world_path)
        wait_until(daemon.is_as_found)
        wait_until(lambda: (silent := daemon.job()) is not None and silent["is_suspended"])
        silent = daemon.job()
        os.killpg(run.process.pid, signal.SIGCONT)

        assert silent is not None
        assert silent["job_id"] == job["job_id"]
        wait_until(lambda: (now := daemon.job()) is not None and not now["is_suspended"])


@pytest.mark.thorough
@pytest.mark.kill
def test_random_kills_of_trainers_never_leave_a_gpu_at_a_lowered_clock(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        for round_number in range(4):
            with training(daemon, arguments=(*UNIFORM, "--run-key", str(round_number))):
                wait_until_lowered(daemon)
                job = daemon.job()
                assert job is not None
                os.kill(job["ranks"][round_number]["pid"], signal.SIGKILL)
                wait_until(lambda: not daemon.is_lowered())
                wait_until(lambda: daemon.job() is None)
                wait_until(daemon.is_as_found)
        assert daemon.status()["worker"]["num_restarts"] == 0


@pytest.mark.kill
def test_after_the_restore_command_a_job_goes_to_full_speed_and_leases_again(tmp_path: Path) -> None:
    with running_daemon(tmp_path, kind=WorldKind.KIND) as daemon, training(daemon, arguments=UNIFORM):
        wait_until_lowered(daemon)

        outcomes = restore(daemon.journal_path)

        assert len(outcomes) == 4
        wait_until(lambda: "fallback (GPU " in daemon.log)
        wait_until_lowered(daemon)
        # A GPU counts as degraded until its own clock is set again.
        wait_until(lambda: not daemon.status()["is_degraded"])


@pytest.mark.fault(18)
@pytest.mark.kill
def test_a_daemon_keeps_control_while_its_database_is_unwritable(tmp_path: Path) -> None:
    blocker = tmp_path / "blocker"
    blocker.write_text("a file where the folder should be")
    with (
        running_daemon(tmp_path / "daemon", kind=WorldKind.KIND, state_dir=str(blocker)) as daemon,
        training(daemon, arguments=UNIFORM),
    ):
        wait_until_lowered(daemon)
        job = daemon.job()
        status = daemon.status()
        assert job is not None

        os.kill(job["ranks"][0]["pid"], signal.SIGKILL)
        wait_until(lambda: not daemon.is_lowered())

        wait_until(daemon.is_as_found)
        assert status["is_degraded"]
        assert any(reason.startswith("history: ") for reason in status["degraded_reasons"])
        assert daemon.stop() == 0
