"""The lines for the user at joining and at the end: once per training, in the program's log or on stderr."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuenergyd.client.rank import RankClient, RankDescription
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
    daemon.ended_message = "ended while profiling, after 20 iterations"
    printed = ""

    def has_ended() -> bool:
        nonlocal printed
        printed += capsys.readouterr().err
        return "while profiling" in printed

    run_rank(daemon)
    wait_until(has_ended)

    assert printed.splitlines()[-1] == "gpuenergyd: job gpt (job-1) ended while profiling, after 20 iterations"
