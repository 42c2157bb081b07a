"""The lines for the user: at joining, at the end, and while the daemon does not answer."""

import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpuenergyd
from gpuenergyd.client.daemon_answers import SILENCE_REPORTED_AFTER_S
from gpuenergyd.client.plans import PlanQueue
from gpuenergyd.client.rank import RankClient, RankDescription
from gpuenergyd.client.reporter import FinishedIteration, Reporter
from gpuenergyd.client.timing.recorder import HostRecorder
from gpuenergyd.wire import PROTOCOL_VERSION
from gpuenergyd.wire.messages import RankRegistration
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon
from tests.support.waiting import wait_until

LINES = [
    "gpuenergyd: job gpt (job-1) joined the daemon at {socket}: policy p, nothing can be saved",
    "gpuenergyd: job gpt (job-1) ended: 12.0 % less energy",
]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path) as fake:
        fake.joined_message, fake.ended_message = "policy p, nothing can be saved", "12.0 % less energy"
        yield fake


def run_rank(daemon: FakeDaemon, *, is_first: bool = True) -> None:
    rank = RankDescription(
        job_name="gpt", run_key="1", gpu_uuid="GPU-1", schedule_name="loop", num_microbatches=1, is_first=is_first
    )
    client = RankClient(rank, order=(("F", 0, 0),), socket_path=daemon.socket_path)
    for _ in range(2):
        client.begin_iteration()
        client.end_instruction(client.begin_instruction("F", 0))
        client.end_iteration()
    daemon.reports.get(timeout=WAIT_LIMIT_S)
    client.release()


def test_a_program_that_logs_no_information_gets_both_lines_on_stderr(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = ""

    def has_both() -> bool:
        nonlocal printed
        printed += capsys.readouterr().err
        return len(printed.splitlines()) >= len(LINES)

    run_rank(daemon)
    wait_until(has_both)

    assert printed.splitlines() == [line.format(socket=daemon.socket_path) for line in LINES]


def test_a_program_that_logs_information_gets_both_lines_in_its_log(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="gpuenergyd.client"):
        run_rank(daemon)
        wait_until(lambda: "ended" in caplog.text)

    logged = [record.getMessage() for record in caplog.records]
    assert [line for line in logged if "joined" in line or "ended" in line] == [
        line.format(socket=daemon.socket_path) for line in LINES
    ]
    assert capsys.readouterr().err == ""


def test_other_ranks_print_nothing(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    run_rank(daemon, is_first=False)
    daemon.releases.get(timeout=WAIT_LIMIT_S)

    assert capsys.readouterr().err == ""


def test_a_job_that_ended_early_is_announced_once(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.ended_message = "ended while trying settings, after 20 iterations"
    printed = ""

    def has_ended() -> bool:
        nonlocal printed
        printed += capsys.readouterr().err
        return "while trying settings" in printed

    run_rank(daemon)
    wait_until(has_ended)

    assert printed.splitlines()[-1] == "gpuenergyd: job gpt (job-1) ended while trying settings, after 20 iterations"


class IdleTimer(HostRecorder):
    """A timer that knows when the reporter's thread has handled all that was queued, and waits for more."""

    def __init__(self) -> None:
        super().__init__()
        self.is_idle = threading.Event()

    @property
    def reads_late(self) -> bool:
        """Whether times may become known without a mark: no."""
        self.is_idle.set()
        return False


class ReportingRank:
    """A rank whose clock a test sets, and whose reports are handled one by one."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.now_s = 1000.0
        registration = RankRegistration(
            protocol_version=PROTOCOL_VERSION, job_name="gpt", run_key="1", pp_rank=2, num_pp_ranks=4, dp_rank=0,
            schedule_name="1f1b", num_microbatches=1, num_chunks=1, order=(("F", 0, 0),), gpu_uuid="GPU-1",
        )  # fmt: skip
        self._timer = IdleTimer()
        self.reporter = Reporter(
            registration,
            PlanQueue(),
            socket_path=daemon.socket_path,
            is_first=False,
            timer=self._timer,
            mono_s=lambda: self.now_s,
        )
        assert self._timer.is_idle.wait(WAIT_LIMIT_S)

    def report_after(self, seconds: float) -> None:
        """Have the clock go on and an iteration reported; return when the reporter has handled it."""
        self.now_s += seconds
        self._timer.begin_iteration(None)
        recorded = self._timer.end_iteration()
        assert recorded is not None
        times = recorded.times()
        recorded.free()
        self._timer.is_idle.clear()
        self.reporter.put(FinishedIteration(0, 0, 0, 0, ""), times, launched_iteration_index=0)
        assert self._timer.is_idle.wait(WAIT_LIMIT_S)

    def close(self) -> None:
        """Leave the job."""
        self.reporter.stop(limit_s=WAIT_LIMIT_S)


def test_a_silent_daemon_is_reported_once_after_30_s_and_its_return_once(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    rank = ReportingRank(daemon)

    def lines_after(seconds: float) -> list[str]:
        caplog.clear()
        rank.report_after(seconds)
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    for _ in range(30):  # a daemon that is away for a moment, again and again
        daemon.stop()
        assert lines_after(1.0) == []
        daemon.start()
        assert lines_after(40.0) == []
    daemon.stop()
    assert lines_after(1.0) == []
    assert lines_after(SILENCE_REPORTED_AFTER_S - 1.0) == []
    (silent,) = lines_after(1.0)
    assert lines_after(300.0) == []
    daemon.start()
    (answers,) = lines_after(60.0)
    assert lines_after(1.0) == []
    rank.close()

    assert silent.startswith(
        f"gpuenergyd: job gpt, rank 2: the daemon at {daemon.socket_path} has not answered for 30 s, since "
    )
    assert silent.endswith("; training continues")
    assert answers == f"gpuenergyd: job gpt, rank 2: the daemon at {daemon.socket_path} answers again, after 390 s"


def test_a_handler_that_raises_and_an_interpreter_without_arguments_do_not_stop_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError(record)

    monkeypatch.setattr(logging.getLogger("gpuenergyd"), "handlers", [Handler()])
    monkeypatch.delattr(sys, "argv")
    with FakeDaemon(tmp_path) as daemon:
        for socket_path in (daemon.socket_path, str(tmp_path / "none"), "\0"):
            with gpuenergyd.job(gpu_uuid="GPU-1", socket_path=socket_path) as job, job.iteration():
                pass
        registration = daemon.registrations.get(timeout=WAIT_LIMIT_S)

    assert registration["job_name"] == "python"


def test_what_prevents_joining_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with gpuenergyd.job("a\nb", socket_path="a\nb\0") as job:
        for _ in range(2):
            with job.iteration():
                pass

    (record,) = caplog.records
    assert "cannot join the daemon (ValueError('embedded null byte'))" in record.getMessage()
    assert "\n" not in record.getMessage()
