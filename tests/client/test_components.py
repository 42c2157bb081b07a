"""Components of the client: breaker, recorder, plan queue, environment, HTTP exchange, imports."""

import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import gpuenergyd
from gpuenergyd.client.connection import DaemonClient, HttpConnection, exchange
from gpuenergyd.client.daemon_answers import LONGEST_PAUSE_S, CircuitBreaker
from gpuenergyd.client.environment import (
    find_gpu_uuid,
    find_rank,
    find_run_key,
    find_socket_path,
    find_world_size,
    missing_gpu_reason,
)
from gpuenergyd.client.plans import NO_PLAN, PlannedClocks, PlanQueue, PreparedPlan, prepare
from gpuenergyd.client.timing.recorder import NOT_RECORDED, HostRecorder
from gpuenergyd.core.clock_request import MAX_LATER_CLOCKS
from gpuenergyd.errors import DaemonNotRunningError, ProtocolError
from gpuenergyd.wire.messages import PlanSlice
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon


def test_breaker_opens_after_three_failures_and_backs_off_to_half_a_minute() -> None:
    breaker = CircuitBreaker()
    pauses_s = []
    for _ in range(12):
        breaker.record_failure(100.0)
        pauses_s.append(max(0.0, breaker.closed_again_mono_s - 100.0))

    assert pauses_s[:5] == [0.0, 0.0, 1.0, 2.0, 4.0]
    assert pauses_s[-1] == LONGEST_PAUSE_S
    assert not breaker.may_try(100.0)
    assert breaker.may_try(100.0 + LONGEST_PAUSE_S)


def test_success_closes_the_breaker() -> None:
    breaker = CircuitBreaker()
    for _ in range(5):
        breaker.record_failure(0.0)
    breaker.record_success()

    assert breaker.may_try(0.0)


def test_recorder_does_not_reuse_a_buffer_before_it_is_freed() -> None:
    recorder = HostRecorder(capacity=4, num_buffers=2)
    recorder.begin_iteration(None)
    recorder.end(recorder.begin(("F", 0, 0)))
    first = recorder.end_iteration()
    recorder.begin_iteration(first)
    recorder.end(recorder.begin(("F", 1, 0)))

    assert recorder.end_iteration() is None  # the first is still being read
    assert first is not None
    times = first.times()
    assert [row[:3] for row in times.instructions] == [("F", 0, 0)]
    assert 0 < times.begin_mono_ns <= times.end_mono_ns <= times.next_begin_mono_ns
    first.free()
    recorder.begin_iteration(None)
    recorder.end(recorder.begin(("F", 2, 0)))
    assert recorder.order() == (("F", 2, 0),)
    last = recorder.end_iteration()
    assert last is not None
    assert last.times().next_begin_mono_ns == 0


def test_recorder_drops_instructions_beyond_its_capacity() -> None:
    recorder = HostRecorder(capacity=2)
    slots = [recorder.begin(("F", m, 0)) for m in range(4)]
    for slot in slots:
        recorder.end(slot)

    assert slots == [0, 1, -1, -1]
    assert recorder.order() == (("F", 0, 0), ("F", 1, 0))


def test_a_wait_for_data_lasts_until_the_next_begin() -> None:
    recorder = HostRecorder()
    recorder.begin_iteration(None)
    recorder.begin(("D", 0, 0))
    taken = recorder.end_iteration()
    recorder.begin_iteration(taken)

    assert taken is not None
    times = taken.times()
    ((*_, begin_ns, end_ns),) = times.instructions
    assert begin_ns <= times.end_mono_ns <= end_ns == times.next_begin_mono_ns


def test_instruction_that_never_ended_is_not_reported() -> None:
    recorder = HostRecorder(capacity=4, num_buffers=2)
    for _ in range(3):  # memory is reused: an old end must not serve a new begin
        recorder.end(recorder.begin(("F", 0, 0)))
        taken = recorder.end_iteration()
        assert taken is not None
        taken.free()
    recorder.begin(("F", 0, 0))
    taken = recorder.end_iteration()

    assert taken is not None
    assert taken.times().instructions == ()


def test_delayed_changes_of_one_instruction_are_kept_in_order() -> None:
    changes = (
        ("F", 0, 0, 9, 1500),
        ("F", 0, 0, 5, 1100),
        ("B", 0, 0, 0, 990),
        ("B", 0, 0, 3, 1410),
        ("W", 0, 0, 0, 900),
    )
    plan = prepare(PlanSlice("p", 1, 0, changes), b"t")

    assert plan.clocks == {
        ("F", 0, 0): PlannedClocks(0, 1100, 5, ((1500, 9),)),
        ("B", 0, 0): PlannedClocks(990, 1410, 3),
        ("W", 0, 0): PlannedClocks(900, 0, 0),
    }


def test_a_request_carries_as_many_later_clocks_as_the_worker_takes() -> None:
    changes = tuple(("F", 0, 0, delay_ns, 1000 + delay_ns) for delay_ns in range(100, 0, -1))
    (clocks,) = prepare(PlanSlice("p", 1, 0, changes), b"t").clocks.values()

    assert (clocks.later_sm_clock_mhz, clocks.later_delay_ns) == (1001, 1)
    assert clocks.further == tuple((1000 + delay_ns, delay_ns) for delay_ns in range(2, MAX_LATER_CLOCKS + 1))


def test_the_newest_due_plan_is_followed_and_clear_drops_all() -> None:
    plans = PlanQueue()
    plans.add(PreparedPlan(epoch, at, {}, b"") for epoch, at in [(1, 2), (3, 4), (2, 4), (4, 9)])

    followed = [plans.plan_for(index).plan_epoch for index in range(6)]
    assert followed == [0, 0, 1, 1, 3, 3]
    plans.clear()
    assert plans.plan_for(9) is NO_PLAN


def test_socket_is_the_argument_then_the_environments_then_the_systems(tmp_path: Path) -> None:
    own = tmp_path / "gpuenergyd" / "gpuenergyd.sock"
    own.parent.mkdir()
    own.touch()

    assert find_socket_path("/a", {"GPUENERGYD_SOCKET": "/b"}) == "/a"
    assert find_socket_path(None, {"GPUENERGYD_SOCKET": "/b"}) == "/b"
    assert find_socket_path(None, {"GPUENERGYD_SOCKET": "b"}) == str(Path.cwd() / "b")
    assert find_socket_path(None, {}) == "/run/gpuenergyd/gpuenergyd.sock"
    assert find_socket_path(None, {"XDG_RUNTIME_DIR": str(tmp_path)}) in {str(own), "/run/gpuenergyd/gpuenergyd.sock"}
    # A folder of another user, after `sudo -u`: root may search every folder, but gets an error for a long name.
    assert find_socket_path(None, {"XDG_RUNTIME_DIR": "/" + 99 * "long"}) == "/run/gpuenergyd/gpuenergyd.sock"


def test_all_processes_of_a_run_have_one_key_and_a_restart_another() -> None:
    launcher = {
        "TORCHELASTIC_RUN_ID": "none",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }

    assert find_run_key(environ={**launcher, "RANK": "0"}) == find_run_key(environ={**launcher, "RANK": "3"})
    assert find_run_key(environ=launcher) != find_run_key(environ={**launcher, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert find_run_key(environ={"SLURM_JOB_ID": "77"}) == "slurm_job_id=77"
    assert find_run_key("mine", environ=launcher) == "mine"
    assert find_run_key(environ={}) != find_run_key(num_processes=4, environ={})


def test_the_number_of_processes_comes_from_the_launcher() -> None:
    assert [find_world_size({"WORLD_SIZE": text}) for text in ("8", "", "many")] == [8, None, None]
    assert find_world_size({}) is None


def test_rank_comes_from_the_launcher_and_invalid_values_mean_a_single_process() -> None:
    assert find_rank({"RANK": "2", "WORLD_SIZE": "4"}) == (2, 4)
    assert find_rank({}) == (0, 1)
    assert find_rank({"RANK": "x", "WORLD_SIZE": "4"}) == (0, 1)
    assert find_rank({"RANK": "5", "WORLD_SIZE": "4"}) == (0, 1)


def test_rank_in_torch_distributed_counts_more_than_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of `mp.spawn` have no variables of their own, or those of the node."""
    group = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 3, get_world_size=lambda: 4
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", group)

    assert find_rank({}) == find_rank({"RANK": "1", "WORLD_SIZE": "2"}) == (3, 4)
    assert find_world_size({}) == 4
    assert find_gpu_uuid(environ={"GPUENERGYD_GPU_UUID": "GPU-a,GPU-b,GPU-c,GPU-d"}) == "GPU-d"


def test_gpu_uuid_is_the_argument_or_from_the_environment_or_unknown() -> None:
    assert find_gpu_uuid("GPU-a", environ={"GPUENERGYD_GPU_UUID": "GPU-b"}) == "GPU-a"
    assert find_gpu_uuid(environ={"GPUENERGYD_GPU_UUID": "GPU-b"}) == "GPU-b"
    assert find_gpu_uuid(environ={}) is None


def test_a_list_of_gpus_in_the_environment_is_indexed_by_local_rank() -> None:
    several = {"GPUENERGYD_GPU_UUID": "GPU-a, GPU-b"}

    assert find_gpu_uuid(environ={**several, "LOCAL_RANK": "1"}) == "GPU-b"
    assert find_gpu_uuid(environ={**several, "LOCAL_RANK": "2"}) is None
    assert find_gpu_uuid(environ={**several, "SLURM_LOCALID": "1"}) == "GPU-b"
    assert find_gpu_uuid(environ={**several, "RANK": "1", "WORLD_SIZE": "2"}) == "GPU-b"
    assert find_gpu_uuid(environ={**several, "RANK": "1", "WORLD_SIZE": "4"}) is None  # perhaps on two hosts
    assert find_gpu_uuid(environ=several) == "GPU-a"  # a single process


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({}, "no gpu_uuid argument, GPUENERGYD_GPU_UUID not set, CUDA not in use by this process"),
        (
            {"GPUENERGYD_GPU_UUID": "GPU-a,GPU-b", "WORLD_SIZE": "2"},
            "GPUENERGYD_GPU_UUID lists 2 GPUs, but this process's local rank is unknown: set LOCAL_RANK",
        ),
        (
            {"GPUENERGYD_GPU_UUID": "GPU-a,GPU-b", "LOCAL_RANK": "2"},
            "GPUENERGYD_GPU_UUID lists 2 GPUs, but LOCAL_RANK is 2",
        ),
        (
            {"GPUENERGYD_GPU_UUID": "GPU-a,,GPU-b", "LOCAL_RANK": "1"},
            "GPUENERGYD_GPU_UUID lists 3 GPUs, and entry 1 (LOCAL_RANK) is empty",
        ),
    ],
)
def test_a_missing_gpu_is_explained_by_what_is_missing(environ: dict[str, str], reason: str) -> None:
    assert find_gpu_uuid(environ=environ) is None
    assert missing_gpu_reason(environ).startswith(reason)


def test_control_client_names_the_socket_without_a_daemon(tmp_path: Path) -> None:
    path = str(tmp_path / "nobody.sock")

    with pytest.raises(DaemonNotRunningError, match=r"nobody\.sock"):
        DaemonClient(path).get_status()


def test_control_client_reports_the_daemons_reason(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path) as daemon:
        client = DaemonClient(daemon.socket_path)
        assert client.get_status() == {"jobs": []}
        with pytest.raises(ProtocolError, match="404: no GET /v1/nope"):
            client.get("/v1/nope")
        assert client.post("/v1/release", {"rank_token": "x"}) == {}
        client.close()


def test_plain_loop_is_a_pipeline_of_one_instruction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with FakeDaemon(tmp_path) as daemon:
        with gpuenergyd.job("resnet", gpu_uuid="GPU-1", socket_path=daemon.socket_path, phases=False) as job:
            for _ in range(3):
                with job.iteration():
                    pass
            registration = daemon.registrations.get(timeout=WAIT_LIMIT_S)
            with job.iteration():
                pass
        report = daemon.reports.get(timeout=WAIT_LIMIT_S)

    assert registration["schedule_name"] == "loop"
    assert registration["order"] == [["F", 0, 0]]
    assert (registration["dp_rank"], registration["pp_rank"], registration["num_pp_ranks"]) == (3, 0, 1)
    assert [row[:3] for row in report["instructions"]] == [["F", 0, 0]]


def test_exception_in_a_plain_loop_propagates(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        gpuenergyd.job("resnet", gpu_uuid="GPU-1", socket_path=str(tmp_path / "none")) as job,
        job.iteration(),
    ):
        _ = 1 / 0


def test_import_and_use_load_the_standard_library_only() -> None:
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import gpuenergyd\n"
        "with gpuenergyd.job('x', gpu_uuid='GPU-1', socket_path='/nonexistent') as job:\n"
        "    with job.iteration(): pass\n"
        "loaded = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(loaded - set(sys.stdlib_module_names)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONPATH": ""}, cwd="/"
    )

    assert done.stdout.strip() == "['gpuenergyd']"


def reply_of(*pieces: bytes) -> tuple[int, bytes, bool]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(WAIT_LIMIT_S)
        for piece in pieces:
            theirs.sendall(piece)
        theirs.shutdown(socket.SHUT_WR)
        ((status, data),), may_serve_another = exchange(ours, "POST", "/v1/iterations", (b"{}",))
        return status, data, may_serve_another


def test_a_reply_in_any_number_of_segments_is_read() -> None:
    head = b"HTTP/1.1 404 Not Found\r\ncontent-LENGTH: 5\r\nX: y\r\n"

    assert reply_of(head + b"\r\nhello") == (404, b"hello", True)
    assert reply_of(*(bytes([byte]) for byte in head + b"Connection: Close\r\n\r\nhello")) == (404, b"hello", False)


@pytest.mark.parametrize(
    ("reply", "wrong"),
    [
        (b"SSH-2.0-x\r\n\r\n", "status line"),
        (b"HTTP/1.1 \xff00 OK\r\n\r\n", "status line"),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "without Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "without Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", "at most"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nabc", "2 bytes beyond the reply"),
        (b"x" * 70_000, "reply headers exceed"),
    ],
)
def test_an_invalid_reply_is_an_error(reply: bytes, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        reply_of(reply)


def test_requests_that_are_sent_at_once_have_a_reply_each() -> None:
    ours, theirs = socket.socketpair()
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
    with ours, theirs:
        ours.settimeout(WAIT_LIMIT_S)
        theirs.sendall(head % 2 + b"{}" + head % 0 + head % 5 + b"[1,2]")
        replies = exchange(ours, "POST", "/v1/iterations", (b"1", b"22", b"333"))
        sent = theirs.recv(4096)

    assert replies == ([(200, b"{}"), (200, b""), (200, b"[1,2]")], True)
    assert [part.partition(b"\r\n\r\n")[2] for part in sent.split(b"POST ")[1:]] == [b"1", b"22", b"333"]


def test_replies_after_one_that_closes_the_connection_are_missing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(WAIT_LIMIT_S)
        theirs.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        assert exchange(ours, "POST", "/v1/iterations", (b"1", b"2")) == ([(404, b"")], False)


def test_an_incomplete_reply_is_a_lost_connection() -> None:
    with pytest.raises(ConnectionResetError):
        reply_of(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")


def test_a_path_with_unsafe_characters_is_rejected() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ValueError, match="printable"):
        exchange(ours, "GET", "/v1/status\r\nX: y", (None,))


@pytest.mark.parametrize(("method", "is_answered"), [("GET", True), ("POST", False)])
def test_only_get_requests_are_repeated_after_a_closed_connection(
    tmp_path: Path, method: str, *, is_answered: bool
) -> None:
    path = tmp_path / "restarting.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            listening.accept()[0].close()
            if is_answered:
                second, _ = listening.accept()
                second.recv(4096)
                second.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                second.close()

        server = threading.Thread(target=serve)
        server.start()
        connection = HttpConnection(str(path))
        if is_answered:
            assert connection.request(method, "/v1/status", limit_s=WAIT_LIMIT_S) == (200, b"{}")
        else:
            with pytest.raises(ConnectionError):
                connection.request(method, "/v1/status", b"{}", limit_s=WAIT_LIMIT_S)
        connection.close()
        server.join(WAIT_LIMIT_S)


def test_a_recorder_gets_room_for_longer_iterations_and_keeps_what_is_still_read() -> None:
    recorder = HostRecorder(capacity=2)
    recorder.begin_iteration(None)
    recorder.end(recorder.begin(("F", 0, 0)))
    short = recorder.end_iteration()

    recorder.reserve(4)
    recorder.begin_iteration(short)
    slots = [recorder.begin(("F", number, 0)) for number in range(5)]
    for slot in slots:
        recorder.end(slot)

    assert slots == [0, 1, 2, 3, NOT_RECORDED]
    assert len(recorder.order()) == 4
    assert short is not None
    assert len(short.times().instructions) == 1
