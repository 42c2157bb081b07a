"""Power budgets of a real daemon: only administrators set them, hostile requests change nothing, status tells all."""

import json
import os
import pwd
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.client.connection import HttpConnection
from gpuenergyd.errors import ProtocolError
from tests.support.client_process import daemon_for_everybody
from tests.support.daemon_process import DaemonProcess, running_daemon, training
from tests.support.processes import finished
from tests.support.waiting import LIMIT_S, wait_until

NOBODY = pwd.getpwnam("nobody").pw_uid
PATH = "/v1/power-budget"
PUT_AS_NOBODY = """
import http.client, json, os, socket, sys

path, uid = sys.argv[1:3]
os.setgroups([])
os.setgid(int(uid))
os.setuid(int(uid))
answers = []
for method, body in (("PUT", '{"power_budget_w": 100.0}'), ("PUT", '{"power_budget_w": null}'), ("GET", None)):
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(path)
    connection.request(method, "/v1/power-budget", body)
    response = connection.getresponse()
    answers.append([response.status, json.loads(response.read())])
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with daemon_for_everybody() as daemon:
        yield daemon


def _put(daemon: DaemonProcess, body: object) -> dict[str, Any]:
    with closing(daemon.client()) as client:
        return client.put(PATH, body)


def _get(daemon: DaemonProcess) -> dict[str, Any]:
    with closing(daemon.client()) as client:
        return client.get(PATH)


def test_a_status_measures_the_power_beside_the_budget(daemon: DaemonProcess) -> None:
    _put(daemon, {"power_budget_w": 5000.0})
    wait_until(lambda: (daemon.status()["power"]["measured_w"] or 0) > 100)
    assert _put(daemon, {"power_budget_w": None})["power_budget_w"] is None


@pytest.mark.fault(32)
@pytest.mark.parametrize(
    "body",
    [
        b'{"power_budget_w": NaN}',
        b'{"power_budget_w": -100}',
        b'{"power_budget_w": 0}',
        b'{"power_budget_w": 1e300}',
        b'{"power_budget_w": "100"}',
        b'{"power_budget_w": true}',
        b'{"power_budget_w": 100, "lifetime_s": -1}',
        b'{"power_budget_w": 100, "lifetime_s": 1e999}',
        b'{"power_budget_w": 100, "reason": "a\\nb"}',
        b'{"power_budget_w": 100, "reason": 5}',
        b'{"power_budget_w": 100, "fallback": [{"power_budget_w": 50, "begin_s": 0, "end_s": 9}]}',
        b'{"power_budget_w": 100, "lifetime_s": 5, "fallback": [{"power_budget_w": -1, "begin_s": 0, "end_s": 9}]}',
        b'{"power_budget_w": 100, "lifetime_s": 5, "fallback": [{"power_budget_w": 50, "begin_s": 9, "end_s": 0}]}',
        b'{"power_budget_w": 100, "lifetime_s": 5, "fallback": {}}',
        b"{}",
        b"[]",
        b"",
        b"[" * 60_000,
    ],
)
def test_impossible_requests_change_nothing(daemon: DaemonProcess, body: bytes) -> None:
    connection = HttpConnection(str(daemon.socket_path))
    status, answer = connection.request("PUT", PATH, body, limit_s=LIMIT_S)
    connection.close()
    assert status == 400, answer
    assert "\n" not in json.loads(answer)["error"]
    assert daemon.status()["power"]["power_budget_w"] is None


def test_only_administrators_change_it_and_everybody_sees_it(daemon: DaemonProcess) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    asked = finished([sys.executable, "-I", "-c", PUT_AS_NOBODY, str(daemon.socket_path), str(NOBODY)], check=True)
    first, second, shown = json.loads(asked.stdout)
    for status, answer in (first, second):
        assert status == 403
        assert "may not set the power budget of this host; allowed: root" in answer["error"]
    assert shown[0] == 200
    assert daemon.status()["power"]["power_budget_w"] is None


def test_a_flood_leaves_the_daemon_alive_and_its_idle_gpus_as_found(tmp_path: Path) -> None:
    with running_daemon(tmp_path, max_requests_per_user_per_s=50) as daemon:
        connection = HttpConnection(str(daemon.socket_path))
        statuses = [
            connection.request("PUT", PATH, json.dumps({"power_budget_w": 4000 + k}).encode(), limit_s=LIMIT_S)[0]
            for k in range(90)
        ]
        connection.close()
        assert set(statuses) <= {200, 429}
        assert 200 in statuses

        def has_budget() -> bool:
            with suppress(ProtocolError):  # while the flood is above the rate
                return _get(daemon)["power_budget_w"] is not None
            return False

        wait_until(has_budget)
        assert daemon.is_as_found()


def test_a_budget_below_idle_power_is_reported_and_all_is_restored_when_it_is_withdrawn(tmp_path: Path) -> None:
    with running_daemon(tmp_path, power_budget_w=50.0) as daemon:
        wait_until(lambda: daemon.status()["power"]["is_cutting"])
        wait_until(daemon.is_lowered)
        _put(daemon, {"power_budget_w": 1e6})
        wait_until(daemon.is_as_found)
        assert daemon.status()["power"]["num_cuts"] >= 1


@pytest.mark.thorough
def test_a_real_job_is_held_within_a_budget_and_released_from_it(tmp_path: Path) -> None:
    # Iterations far longer than the steps of an energy counter: else chance decides which clock is the cheapest.
    with running_daemon(tmp_path, policy="uniform", warmup_iterations=1, baseline_iterations=6) as daemon:
        shown: dict[str, Any] = {}

        def is_divided(budget_w: float) -> bool:
            shown.update(_get(daemon))
            is_within = bool(shown["jobs"]) and shown["predicted_w"] <= budget_w
            return is_within and shown["jobs"][0]["speed_ratio"] is not None and shown["measured_w"] <= 1.02 * budget_w

        def iteration_time_s() -> object:
            return shown["jobs"][0]["iteration_time_s"]

        with training(daemon, arguments=["--microbatches", "12"]):
            daemon.wait_for_phase("tuned")
            _put(daemon, {"power_budget_w": 1e6})
            wait_until(lambda: is_divided(1e6) and iteration_time_s() is None, log=lambda: str(shown))
            full_w, least_w = shown["predicted_w"], shown["least_w"]
            assert least_w < 0.95 * full_w

            budget_w = (full_w + least_w) / 2
            _put(daemon, {"power_budget_w": budget_w})
            wait_until(lambda: is_divided(1.001 * budget_w) and iteration_time_s() is not None, log=lambda: str(shown))

            assert _put(daemon, {"power_budget_w": None})["jobs"] == []
        wait_until(daemon.is_as_found)
