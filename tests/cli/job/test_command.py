"""`gpuenergyd job` on a daemon with real processes, and malformed changes by HTTP."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd.client.connection import HttpConnection
from gpuenergyd_sim.driver.world_kinds import WorldKind
from tests.support.daemon_process import DaemonProcess, running_daemon, training
from tests.support.registration import one_stage_registration
from tests.support.waiting import LIMIT_S, wait_until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with running_daemon(tmp_path_factory.mktemp("operators"), policy="uniform") as daemon:
        yield daemon


def job(daemon: DaemonProcess, *arguments: str) -> int:
    return run(["job", *arguments, "--socket", str(daemon.socket_path)])


def test_a_running_job_is_paused_survives_a_killed_daemon_and_is_planned_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_daemon(tmp_path, kind=WorldKind.KIND, policy="uniform") as daemon, training(daemon) as run_of_job:
        wait_until(daemon.is_lowered, log=lambda: daemon.log)
        assert job(daemon, "pause", "fake") == 0
        wait_until(daemon.is_as_found)
        assert "is_paused no -> yes" in capsys.readouterr().out
        assert daemon.wait_for_phase("paused")["orders"]["is_paused"] is True

        assert daemon.process is not None
        daemon.process.kill()
        daemon.process.wait(LIMIT_S)
        daemon.start()
        again = daemon.wait_for_phase("paused")
        assert again["phase_reason"] == "paused by an operator"

        assert job(daemon, "set", again["job_id"], "--max-slowdown", "0.3", "--policy", "uniform") == 0
        assert job(daemon, "resume", "fake", "--json") == 0
        reply = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert reply["jobs"][0]["changes"] == ["is_paused yes -> no"]
        wait_until(daemon.is_lowered, log=lambda: daemon.log)
        assert (daemon.job() or {})["max_slowdown_source"] == "operator"
        assert job(daemon, "release", "fake") == 0
        assert (daemon.job() or {})["max_slowdown_ratio"] == 0.5  # as the program registered it
        assert run_of_job.finish() == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("pause", "nobody"), "no job 'nobody' runs here; running: "),
        (("set", "nobody"), "give --policy, --max-slowdown or --priority"),
        (("set", "nobody", "--max-slowdown", "7"), "--max-slowdown 7: must be a ratio"),
        (("set", "nobody", "--priority", "11"), "less than or equal to 9"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], text: str
) -> None:
    assert job(daemon, *arguments) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_hostile_changes_are_refused_in_one_line_while_iterations_are_reported(daemon: DaemonProcess) -> None:
    connection = HttpConnection(str(daemon.socket_path))
    try:
        gpu_uuid = daemon.status()["gpus"][0]["gpu_uuid"]
        body = json.dumps(one_stage_registration(gpu_uuid)).encode()
        registered = json.loads(connection.request("POST", "/v1/ranks", body, limit_s=LIMIT_S)[1])
        path = f"/v1/jobs/{registered['job_id']}"
        for body, expected in (
            (b"", 400),
            (b"{", 400),
            (b"[]", 400),
            (b"{}", 400),
            (b'{"policy": "' + b"x" * 5000 + b'"}', 400),
            (b'{"policy": "no\\u0000pe"}', 400),
            (b'{"policy": "../../etc/passwd"}', 400),
            (b'{"max_slowdown_ratio": -1}', 400),
            (b'{"max_slowdown_ratio": 1e308}', 400),
            (b'{"priority": 99999999999999999999}', 400),
            (b'{"is_paused": "yes"}', 400),
            (b'{"job_id": "other"}', 400),
            (b" " * 70_000, 413),
        ):
            status, answer = connection.request("PATCH", path, body, limit_s=LIMIT_S)
            assert status == expected, (body[:40], answer)
            assert "\n" not in json.loads(answer)["error"]
        status, answer = connection.request("PATCH", "/v1/jobs/%2e%2e", b'{"is_paused": true}', limit_s=LIMIT_S)
        assert status == 404
        own = daemon.job()
        assert own is not None
        assert (own["policy"], own["is_paused"], own["priority"]) == ("uniform", False, 0)
        assert own["ranks"][0]["pid"] == os.getpid()
    finally:
        connection.close()
    wait_until(lambda: daemon.status()["worker"]["is_alive"])
