"""The HTTP API: status, registration, and one-line errors for malformed, incomplete and conflicting requests."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic_ns
from typing import Any

import pytest

from gpuenergyd.client.connection import HttpConnection
from gpuenergyd.core.clock_request import ClockRequest
from gpuenergyd.wire.clock_request import RankClockRequest
from tests.support.clock_requests import encode_clock_request
from tests.support.daemon_process import DaemonProcess, running_daemon
from tests.support.registration import one_stage_registration
from tests.support.waiting import LIMIT_S, wait_until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with running_daemon(tmp_path_factory.mktemp("server")) as daemon:
        yield daemon


@pytest.fixture
def connection(daemon: DaemonProcess) -> Iterator[HttpConnection]:
    connection = HttpConnection(str(daemon.socket_path))
    yield connection
    connection.close()


def call(connection: HttpConnection, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    status, answer = connection.request(method, path, data, limit_s=LIMIT_S)
    return status, json.loads(answer)


def gpu_uuids(daemon: DaemonProcess) -> list[str]:
    return [gpu["gpu_uuid"] for gpu in daemon.status()["gpus"]]


def report(token: str, **changes: Any) -> dict[str, Any]:
    now = monotonic_ns()
    return {
        "rank_token": token,
        "iteration_index": 0,
        "plan_epoch": 0,
        "begin_mono_ns": now - 3_000_000,
        "end_mono_ns": now - 1_000_000,
        "next_begin_mono_ns": now,
        "instructions": [["F", 0, 0, now - 3_000_000, now - 2_000_000], ["B", 0, 0, now - 2_000_000, now - 1_000_000]],
        **changes,
    }


@pytest.fixture
def token(daemon: DaemonProcess, connection: HttpConnection) -> Iterator[str]:
    """Return the token of a registered rank, and release it afterwards."""
    status, answer = call(connection, "POST", "/v1/ranks", one_stage_registration(gpu_uuids(daemon)[0]))
    assert status == 200, answer
    yield answer["rank_token"]
    call(connection, "POST", "/v1/release", {"rank_token": answer["rank_token"]})
    wait_until(lambda: not daemon.status()["jobs"])


def test_unknown_status_values_are_null_never_zero(
    daemon: DaemonProcess, connection: HttpConnection, token: str
) -> None:
    _, status = call(connection, "GET", "/v1/status")

    assert token
    (job,) = status["jobs"]
    assert status["driver"] == "simulated"
    assert not status["is_degraded"], status["degraded_reasons"]
    own = {"gpu_uuid": gpu_uuids(daemon)[0], "pid": os.getpid(), "uid": os.geteuid()}
    assert job["ranks"] == [{"pp_rank": 0, "stage_rank": 0, **own}]
    for name in ("baseline_time_s", "baseline_energy_j", "iteration_time_s", "energy_j", "saving_ratio"):
        assert job[name] is None
    assert job["last_report_age_s"] is None
    assert status["gpus"][0]["job_id"] == job["job_id"]
    assert status["gpus"][0]["requested_sm_clock_mhz"] is None
    assert status["gpus"][1]["job_id"] is None


def test_a_job_has_its_plan_and_last_timeline(connection: HttpConnection, token: str) -> None:
    job_id = call(connection, "GET", "/v1/status")[1]["jobs"][0]["job_id"]
    call(connection, "POST", "/v1/iterations", report(token))
    wait_until(lambda: call(connection, "GET", f"/v1/jobs/{job_id}")[1]["timeline"] != [])

    _, detail = call(connection, "GET", f"/v1/jobs/{job_id}")

    assert detail["plan"]["plan_id"] == "baseline"
    assert [span["kind"] for span in detail["timeline"]] == ["F", "B"]
    assert detail["timeline_iteration_index"] == 0


@pytest.mark.fault(32, 33)
@pytest.mark.parametrize(
    ("body", "status", "wrong"),
    [
        (b"{", 400, "malformed RankRegistration"),
        (b"", 400, "malformed RankRegistration"),
        (b"\xff\xfe", 400, "malformed RankRegistration"),
        (b"[" * 60_000, 400, "malformed RankRegistration"),
        (b'{"protocol_version": "one"}', 400, "Expected `int`"),
        (b"{}", 400, "missing required field"),
        (b" " * 65_537, 413, "too large"),
    ],
    ids=["half", "empty", "not utf-8", "deep", "mistyped", "incomplete", "too large"],
)
def test_a_malformed_message_is_refused_in_one_line(
    connection: HttpConnection, body: bytes, status: int, wrong: str
) -> None:
    got, answer = call(connection, "POST", "/v1/ranks", body)

    assert got == status
    assert wrong in answer["error"]
    assert "\n" not in answer["error"]


@pytest.mark.parametrize(
    ("changes", "status", "wrong"),
    [
        ({"protocol_version": 99}, 400, "protocol version 99; this daemon speaks version 1"),
        (
            {"policy": "nope"},
            400,
            (
                "no policy 'nope'; installed: bubble-aware, cost, envelope, frequency-file, full-speed, learning,"
                " power-limit, power-profile, uniform"
            ),
        ),
        ({"gpu_uuid": "GPU-nowhere"}, 404, "no GPU 'GPU-nowhere' on this host; GPUs: GPU-"),
        ({"pp_rank": 1}, 400, "pp_rank 1 must be in [0, 0]"),
        ({"num_pp_ranks": 10**9}, 400, "num_pp_ranks 1000000000 must be in"),
        ({"order": []}, 400, "order: "),
        ({"order": [["X", 0, 0]]}, 400, "instruction kind 'X'; known: F, B, I, W"),
        ({"order": [["B", 0, 0]]}, 409, "no rank computes"),
        ({"max_slowdown_ratio": -1.0}, 400, "max_slowdown_ratio -1: must be a ratio from 0 to 1"),
        ({"job_name": "x" * 257}, 400, "job_name: 257 characters; at most 256"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_invalid_registration_is_refused_without_effect(
    daemon: DaemonProcess, connection: HttpConnection, changes: dict[str, Any], status: int, wrong: str
) -> None:
    got, answer = call(connection, "POST", "/v1/ranks", one_stage_registration(gpu_uuids(daemon)[0], **changes))

    assert got == status
    assert wrong in answer["error"]
    assert daemon.status()["jobs"] == []
    assert daemon.status()["gpus"][0]["job_id"] is None


@pytest.mark.fault(28)
def test_a_gpu_in_use_is_refused_to_another_job_with_owner_job_and_age(
    daemon: DaemonProcess, connection: HttpConnection, token: str
) -> None:
    status, answer = call(
        connection, "POST", "/v1/ranks", one_stage_registration(gpu_uuids(daemon)[0], job_name="second", run_key="2")
    )

    assert token
    assert status == 409
    assert "'one stage'" in answer["error"]
    assert f"of uid {os.geteuid()} for 0 s" in answer["error"]


def test_a_repeated_registration_gets_the_same_token(
    daemon: DaemonProcess, connection: HttpConnection, token: str
) -> None:
    status, answer = call(connection, "POST", "/v1/ranks", one_stage_registration(gpu_uuids(daemon)[0]))

    assert status == 200
    assert answer["rank_token"] == token


def test_contradicting_ranks_are_refused_with_the_differing_field(
    daemon: DaemonProcess, connection: HttpConnection
) -> None:
    first, second, *_ = gpu_uuids(daemon)
    _, answer = call(connection, "POST", "/v1/ranks", one_stage_registration(first, num_pp_ranks=2))

    status, refusal = call(
        connection, "POST", "/v1/ranks", one_stage_registration(second, num_pp_ranks=2, pp_rank=1, num_microbatches=8)
    )
    call(connection, "POST", "/v1/release", {"rank_token": answer["rank_token"]})
    wait_until(lambda: not daemon.status()["jobs"])

    assert status == 409
    assert "num_microbatches 8 of rank 1 contradicts 1 of rank 0" in refusal["error"]


@pytest.mark.parametrize("unknown", ["", "00" * 16, "not hex at all", "ab" * 64])
def test_an_unknown_token_is_answered_with_register_again(connection: HttpConnection, unknown: str) -> None:
    reported, _ = call(connection, "POST", "/v1/iterations", report(unknown))
    released, _ = call(connection, "POST", "/v1/release", {"rank_token": unknown})

    assert (reported, released) == (404, 404)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"begin_mono_ns": 0}, "instants must be"),
        ({"end_mono_ns": 2**62}, "instants must be"),
        ({"iteration_index": -1}, "iteration_index -1"),
        ({"instructions": [["F", 0, 0, monotonic_ns(), monotonic_ns() - 1_000_000_000]]}, "must be of this host"),
        ({"instructions": [["F", -1, 0, monotonic_ns(), monotonic_ns()]]}, "the microbatch must be in"),
        ({"instructions": [["?", 0, 0, monotonic_ns(), monotonic_ns()]]}, "instruction kind '?'"),
    ],
)
def test_an_invalid_iteration_report_is_refused(
    connection: HttpConnection, token: str, changes: dict[str, Any], wrong: str
) -> None:
    status, answer = call(connection, "POST", "/v1/iterations", report(token, **changes))

    assert status == 400
    assert wrong in answer["error"]


def test_several_iterations_are_reported_in_one_message(connection: HttpConnection, token: str) -> None:
    several = [report(token, iteration_index=k) for k in range(3)]
    body = json.dumps(several).encode()
    status, reply = connection.request("POST", "/v1/iterations", body, limit_s=LIMIT_S)

    assert (status, json.loads(reply)["takes_several"]) == (200, True)
    _, body = connection.request("GET", "/v1/status", limit_s=LIMIT_S)
    assert json.loads(body)["jobs"][0]["num_iterations"] == 3
    for wrong, reason in (([], "0 reports"), ([{}], "malformed IterationReport"), ("x", "malformed IterationReport")):
        status, reply = connection.request("POST", "/v1/iterations", json.dumps(wrong).encode(), limit_s=LIMIT_S)
        assert status == 400
        assert reason in json.loads(reply)["error"]


def test_metrics_are_served(daemon: DaemonProcess, connection: HttpConnection) -> None:
    status, body = connection.request("GET", "/v1/metrics", limit_s=LIMIT_S)

    assert status == 200
    assert f'gpu_uuid="{gpu_uuids(daemon)[0]}"' in body.decode()


def test_unknown_paths_and_methods_are_refused_with_the_valid_ones(connection: HttpConnection) -> None:
    unknown_path = call(connection, "GET", "/v2/nothing")
    wrong_method = call(connection, "GET", "/v1/ranks")
    unknown_job = call(connection, "GET", "/v1/jobs/nope")

    assert unknown_path == (404, {"error": "no resource '/v2/nothing'; GET /v1/openapi.json lists all"})
    assert wrong_method == (405, {"error": "/v1/ranks allows POST, not GET"})
    assert unknown_job == (404, {"error": "no job 'nope'; running: none"})


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    "start",
    [
        b"GET /v1/sta",
        b"POST /v1/ranks HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"POST /v1/ranks HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    ],
    ids=["half a header", "half a body", "half a chunk"],
)
def test_an_incomplete_message_ends_in_a_disconnect(daemon: DaemonProcess, start: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as slow:
        slow.settimeout(LIMIT_S)
        slow.connect(str(daemon.socket_path))
        slow.sendall(start)
        received = b""
        try:
            while chunk := slow.recv(65_536):
                received += chunk
        except ConnectionResetError:
            pass

    assert received == b"" or b" 408 " in received.splitlines()[0]
    assert daemon.status()["worker"]["is_alive"]


@pytest.mark.fault(51)
def test_invalid_http_is_refused_without_flooding_the_log(daemon: DaemonProcess) -> None:
    for _ in range(5):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as noise:
            noise.settimeout(LIMIT_S)
            noise.connect(str(daemon.socket_path))
            noise.sendall(b"\x16\x03\x01\x02\x00\x01" * 50 + b"\r\n\r\n")
            first_line = noise.recv(65_536).splitlines()[0]
            assert b" 400 " in first_line

    before, _, traceback = daemon.log.partition("Traceback")
    assert traceback == "", before[-500:]


def hostile_requests(token: str) -> dict[str, bytes]:
    request = ClockRequest(1200, monotonic_ns())
    good = RankClockRequest(bytes.fromhex(token), 1, request)

    def with_request(**changes: Any) -> bytes:
        return encode_clock_request(good._replace(request=replace(request, **changes)))

    return {
        "rubbish": b"\0" * 48,
        "too short": encode_clock_request(good)[:47],
        "too long": encode_clock_request(good) + b"\0",
        "unknown token": encode_clock_request(good._replace(token=bytes(16))),
        "unsupported clock": with_request(sm_clock_mhz=1201),
        "epoch from nowhere": with_request(plan_epoch=7),
        "from the future": with_request(sent_mono_ns=2**63),
        "no clock": with_request(sm_clock_mhz=0),
        "replayed": encode_clock_request(good._replace(sequence=0)),
    }


@pytest.mark.fault(47)
@pytest.mark.parametrize("kind", list(hostile_requests("00" * 16)))
def test_hostile_clock_request_is_counted_closes_its_connection_and_changes_no_clock(
    daemon: DaemonProcess, token: str, kind: str
) -> None:
    before = daemon.status()["clock_requests"]["num_hostile"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hostile:
        hostile.settimeout(LIMIT_S)
        hostile.connect(str(daemon.clock_socket_path))
        hostile.send(hostile_requests(token)[kind])
        end = hostile.recv(1)

    assert end == b""
    assert daemon.status()["clock_requests"]["num_hostile"] == before + 1
    assert daemon.is_as_found()


def test_a_second_daemon_in_the_same_runtime_directory_exits_with_one_line(daemon: DaemonProcess) -> None:
    second = DaemonProcess(daemon.folder)
    log_before = daemon.log

    process = second.launch()

    assert process.wait(LIMIT_S) == 1
    assert (
        f"pid {daemon.pid} already uses the runtime directory {daemon.folder / 'run'}" in daemon.log[len(log_before) :]
    )
    assert daemon.status()["pid"] == daemon.pid


def test_a_file_at_the_socket_path_is_not_replaced(tmp_path: Path) -> None:
    blocked = DaemonProcess(tmp_path)
    blocked.socket_path.parent.mkdir()
    blocked.socket_path.write_text("precious")

    process = blocked.launch()

    assert process.wait(LIMIT_S) == 1
    assert "exists and is not a socket; remove it" in blocked.log
    assert blocked.socket_path.read_text() == "precious"


def test_sockets_are_accessible_to_the_group_only(daemon: DaemonProcess) -> None:
    modes = [path.stat().st_mode & 0o777 for path in (daemon.socket_path, daemon.clock_socket_path)]

    assert modes == [0o660, 0o660]


@pytest.mark.fault(42)
def test_a_user_outside_the_socket_group_cannot_connect(daemon: DaemonProcess) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    program = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "try:\n    s.connect(sys.argv[1])\n"
        "except PermissionError:\n    sys.exit(13)\n"
    )
    for folder in (daemon.folder, *daemon.folder.parents):
        if folder.stat().st_mode & 0o001 == 0 and str(folder) != "/":
            folder.chmod(folder.stat().st_mode | 0o011)

    result = subprocess.run([sys.executable, "-I", "-c", program, str(daemon.socket_path)], check=False)

    assert result.returncode == 13
