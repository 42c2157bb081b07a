"""How ranks leave, in the words of the log, the history and the last message: real clients and a real daemon."""

import asyncio
import io
import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd.cli.main import run as run_command
from gpuenergyd.daemon.jobs.runner import JobRunner
from gpuenergyd.daemon.jobs.sessions import RankSession, RankSessions
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.daemon.runtime.process_end import ProcessEnd, process_end
from gpuenergyd.store import open_history
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.world_kinds import WorldKind
from tests.support.daemon_process import DaemonProcess, running_daemon, training
from tests.support.waiting import LIMIT_S, wait_until

LOOP = """
import os, signal, sys, time
from gpuenergyd.client import rank, reporter
from gpuenergyd.client.loop import job
from gpuenergyd.client.rank import RankClient

def main():
    with job("ddp", phases=False) as own:
        train(own)

def train(own):
    num_joined = 0
    for number in range(10_000):
        with own.iteration():
            time.sleep(0.002)
        num_joined += own._client.rank_token is not None
        if number > 20 and num_joined > 4:
            break

def end_without_leaving():
    RankClient.release = lambda self, **_: None
    main()
"""
PROGRAMS = {
    # A busy machine may take longer than a program waits for its last line.
    "leaves": LOOP + "rank._RELEASE_LIMIT_NS = 10**11; reporter._RELEASE_LIMIT_S = 100.0; main()",
    "exits": LOOP + "end_without_leaving(); os._exit(0)",
    "fails": LOOP + "end_without_leaving(); os._exit(3)",
    "is killed": LOOP + "end_without_leaving(); os.kill(os.getpid(), signal.SIGKILL)",
    "is a child": LOOP
    + """
def forgets_to_leave():
    globals()["own"] = job("ddp", phases=False)
    train(own)

if __name__ == "__main__":
    import multiprocessing
    child = multiprocessing.get_context("spawn").Process(target=forgets_to_leave)
    child.start()
    child.join()
""",
}
UNIFORM = ("--policy", "uniform", "--ranks", "2")


def run_program(daemon: DaemonProcess, folder: Path, how: str, **variables: str) -> str:
    """Run a loop of one process until it ends in some way; return what it prints for its user."""
    program = folder / "program.py"
    program.write_text(PROGRAMS[how])
    host = SimulatedHost.open(daemon.world_path)
    gpu_uuid = host.identities()[0].gpu_uuid
    host.close()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GPUENERGYD_")}
    environ |= {"GPUENERGYD_SOCKET": str(daemon.socket_path), "GPUENERGYD_GPU_UUID": gpu_uuid, **variables}
    return subprocess.run(
        [sys.executable, str(program)], env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
    ).stderr


def end_of(daemon: DaemonProcess) -> str:
    """Return why the job has ended, as the history keeps it."""
    wait_until(lambda: bool(daemon.status()["ended_jobs"]))
    wait_until(lambda: not daemon.status()["store"]["num_records_waiting"])
    with open_history(daemon.database_path) as history:
        (summary,) = history.job_summaries()
    assert summary.end_reason is not None
    return summary.end_reason


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("leaves", r"rank 0 was released"),
        ("exits", r"rank 0 ended without leaving the job \(process \d+( exited with status 0)?\)"),
        ("fails", r"rank 0 was lost: process \d+ exited with status 3"),
        ("is killed", r"rank 0 was lost: process \d+ was killed by SIGKILL"),
        ("is a child", r"rank 0 was released"),
    ],
)
def test_a_rank_has_left_ended_or_failed_as_its_process_did(tmp_path: Path, how: str, reason: str) -> None:
    with running_daemon(tmp_path, kind=WorldKind.KIND) as daemon:
        run_program(daemon, tmp_path, how)

        assert re.fullmatch(reason, end_of(daemon))
        assert "died" not in daemon.log
        assert daemon.stop() == 0


def test_the_iterations_of_the_last_line_are_those_of_the_report_and_replicas_have_their_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The job is measuring its baseline however many iterations the program runs until it has joined.
    with running_daemon(tmp_path, kind=WorldKind.KIND, baseline_iterations=10_000) as daemon:
        printed = run_program(daemon, tmp_path, "leaves", RANK="0", WORLD_SIZE="2")
        end_of(daemon)
        status = daemon.status()["ended_jobs"][0]
        run(["status", "--socket", str(daemon.socket_path)])
        shown = capsys.readouterr().out
        assert daemon.stop() == 0
    run(["report", "--database", str(daemon.database_path), "--json"])
    (job,) = json.loads(capsys.readouterr().out)["jobs"]
    run(["report", "--database", str(daemon.database_path)])
    table = capsys.readouterr().out

    found = re.search(r"\) ended .*, after (\d+) iterations", printed)
    assert found is not None, printed
    number = found[1]
    assert int(number) == job["num_iterations"] > 0
    assert f"after {number} iterations" in job["outcome_reason"]
    assert (status["job_name"], status["replica_name"]) == ("ddp", "ddp rank 0")
    assert "ddp rank 0 (" in shown
    assert table.startswith(f"ddp rank 0: loop, 1 GPU, 1 microbatch, policy bubble-aware, {number} iterations\n")


@pytest.mark.parametrize("is_reaped", [False, True])
@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("import sys; sys.exit(3)", ProcessEnd("exited with status 3", is_failure=True)),
        ("import os; os.kill(os.getpid(), 9)", ProcessEnd("was killed by SIGKILL", is_failure=True, is_cause=True)),
        ("import os; os.kill(os.getpid(), 15)", ProcessEnd("was killed by SIGTERM", is_failure=True)),
    ],
)
def test_the_status_of_an_ended_process_is_found_where_the_kernel_keeps_it(
    program: str, end: ProcessEnd, *, is_reaped: bool
) -> None:
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        pidfd = os.pidfd_open(process.pid)
        select.select([pidfd], [], [])
        if is_reaped:
            process.wait()
        found = process_end(process.pid, pidfd)
        os.close(pidfd)

    assert found in ([end, ProcessEnd("", is_failure=False)] if is_reaped else [end])  # Linux before 6.15 forgets it


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_processes_that_have_ended_the_one_that_was_killed_first_is_the_reason(first: int) -> None:
    """Launchers terminate the other ranks when one is gone; a busy daemon sees both ends at once."""
    programs = ("import os; os.kill(os.getpid(), 15)", "import os; os.kill(os.getpid(), 9)")
    processes = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    pidfds = [os.pidfd_open(process.pid) for process in processes]
    for pidfd in pidfds:
        select.select([pidfd], [], [])
    ended: list[tuple[int, ProcessEnd]] = []
    all_ended = asyncio.Event()

    def on_end(session: RankSession, end: ProcessEnd) -> None:
        ended.append((session.pp_rank, end))
        if len(ended) == len(processes):
            all_ended.set()

    sessions = RankSessions(on_end, lambda _session: None)
    description = SimpleNamespace(rank_index=lambda rank, _: rank, rank_name=lambda rank, _: f"rank {rank}")
    leases = SimpleNamespace(pidfds={})
    runner = SimpleNamespace(job=SimpleNamespace(description=description), job_id="job-1", leases=leases, pids={})

    async def both_end() -> None:
        for rank in (first, 1 - first):
            peer = PeerCredentials(pid=processes[rank].pid, uid=0, gid=0)
            sessions.add(
                RankSession(bytes([rank]), cast("JobRunner", runner), rank, "GPU-1", peer, pidfds[rank], frozenset())
            )
        await all_ended.wait()

    asyncio.run(both_end())
    for process in processes:
        process.wait()

    assert [(rank, end.text) for rank, end in ended] == [(1, "was killed by SIGKILL"), (0, "was killed by SIGTERM")]


def shown(daemon: DaemonProcess, *options: str) -> str:
    """Return what `gpuenergyd status` prints."""
    text = io.StringIO()
    with redirect_stdout(text):
        run_command(["status", "--socket", str(daemon.socket_path), *options])
    return text.getvalue()


def noticed(daemon: DaemonProcess, job_id: str, what: str) -> Callable[[], bool]:
    """Return whether the job's last notice matches, or one that another has followed since."""
    return lambda: any(
        re.search(what, reason) for reason in ((daemon.job() or {}).get("last_notice") or "", *recorded(daemon, job_id))
    )


def recorded(daemon: DaemonProcess, job_id: str) -> list[str]:
    with open_history(daemon.database_path) as history:
        return [event.reason for event in history.control_events(job_id)]


@pytest.mark.thorough
def test_a_pause_another_order_and_a_larger_batch_are_shown_and_recorded(tmp_path: Path) -> None:
    causes = {name: tmp_path / name for name in ("pause", "swap", "slow")}
    arguments = (*UNIFORM, *(part for name, path in causes.items() for part in (f"--{name}-while", str(path))))
    found: list[tuple[str, str, dict[str, Any]]] = []
    with running_daemon(tmp_path / "daemon") as daemon:
        with training(daemon, arguments=arguments) as run:
            job_id = daemon.wait_for_phase("tuned")["job_id"]
            for name, what in (
                ("pause", r"s passed between iterations \d+ and \d+ \(evaluation"),
                ("swap", "in another order, than were registered"),
                ("slow", "the job changed: .* times as long as before"),
            ):
                causes[name].touch()
                wait_until(noticed(daemon, job_id, what))
                found.append((what, shown(daemon), json.loads(shown(daemon, "--json"))["jobs"][0]))
                if name != "slow":
                    causes[name].unlink()
                    daemon.wait_for_phase("tuned", "trial")
            assert run.finish() == 0
        wait_until(lambda: daemon.job() is None)
        assert daemon.stop() == 0

    reasons = recorded(daemon, job_id)
    for what, text, job in found:
        assert any(re.search(what, reason) for reason in reasons), what
        assert job["last_notice"] in reasons
        assert job["last_notice_iterations_ago"] >= 0
        assert re.search(r"\d iterations? ago:", text)
