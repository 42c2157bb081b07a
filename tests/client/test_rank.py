"""RankClient against a real Unix-socket server: reports, plans, and no effect on training."""

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.client.rank import RankClient, RankDescription
from gpuenergyd.client.timing.recorder import RecordedIteration
from gpuenergyd.wire.messages import OrderRow
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon, plan_slice
from tests.support.waiting import wait_until

ORDER: tuple[OrderRow, ...] = (("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("B", 1, 0))
FIRST_TOKEN = f"{0xA0:032x}"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path) as fake:
        yield fake


def make_client(socket_path: str, **overrides: Any) -> RankClient:
    fields: dict[str, Any] = {
        "job_name": "gpt",
        "run_key": "run-1",
        "gpu_uuid": "GPU-1",
        "schedule_name": "gpipe",
        "num_microbatches": 2,
        "pp_rank": 1,
        "num_pp_ranks": 2,
    }
    order, timer = overrides.pop("order", ORDER), overrides.pop("timer", None)
    return RankClient(RankDescription(**fields | overrides), order=order, timer=timer, socket_path=socket_path)


def run_iteration(client: RankClient) -> tuple[OrderRow, ...]:
    client.begin_iteration()
    for kind, microbatch_index, chunk_index in ORDER:
        client.end_instruction(client.begin_instruction(kind, microbatch_index, chunk_index))
    return client.end_iteration()


def get(waiting: "queue.Queue[Any]") -> Any:
    return waiting.get(timeout=WAIT_LIMIT_S)


def run_until_reported(client: RankClient, daemon: FakeDaemon) -> dict[str, Any]:
    """Run iterations until the daemon has a report: the rank is registered by then."""
    while True:
        run_iteration(client)
        try:
            report: dict[str, Any] = daemon.reports.get(timeout=0.05)
        except queue.Empty:
            continue
        return report


def client_under(daemon: FakeDaemon, plan: dict[str, Any]) -> RankClient:
    """Return a client that has run an iteration under a plan."""
    client = make_client(daemon.socket_path)
    run_until_reported(client, daemon)
    daemon.plans = [plan]
    while run_until_reported(client, daemon)["plan_epoch"] != plan["plan_epoch"]:
        pass
    return client


def test_registration_describes_the_rank_and_its_order(daemon: FakeDaemon) -> None:
    client = make_client(daemon.socket_path, policy="uniform", max_slowdown_ratio=0.05)

    registration = get(daemon.registrations)

    client.release()
    assert registration["job_name"] == "gpt"
    assert (registration["pp_rank"], registration["num_pp_ranks"]) == (1, 2)
    assert [tuple(row) for row in registration["order"]] == list(ORDER)
    assert registration["policy"] == "uniform"
    assert registration["max_slowdown_ratio"] == 0.05


def test_iteration_is_reported_with_every_instruction_when_the_next_begins(daemon: FakeDaemon) -> None:
    client = make_client(daemon.socket_path)
    run_until_reported(client, daemon)
    run_iteration(client)
    report = get(daemon.reports)

    client.release()
    assert [tuple(row[:3]) for row in report["instructions"]] == list(ORDER)
    stamps = [
        report["begin_mono_ns"],
        *(stamp for row in report["instructions"] for stamp in row[3:]),
        report["end_mono_ns"],
        report["next_begin_mono_ns"],
    ]
    assert stamps == sorted(stamps)
    assert report["plan_epoch"] == 0


def test_release_reports_the_last_iteration_and_leaves_the_job(daemon: FakeDaemon) -> None:
    client = make_client(daemon.socket_path)
    run_until_reported(client, daemon)
    client.release()

    while (report := get(daemon.reports))["next_begin_mono_ns"] != 0:
        pass
    assert report["iteration_index"] == client.iteration_index
    assert get(daemon.releases) == {"rank_token": FIRST_TOKEN, "reorder_refusal": ""}


def test_plan_is_followed_from_its_iteration_on_and_not_before(daemon: FakeDaemon) -> None:
    client = make_client(daemon.socket_path)
    run_until_reported(client, daemon)
    apply_at = client.iteration_index + 6
    daemon.plans = [plan_slice(3, apply_at, [("F", 1, 0, 0, 1200)])]
    epochs = {}
    while client.iteration_index < apply_at + 2:
        run_iteration(client)
        report = get(daemon.reports)
        epochs[report["iteration_index"]] = report["plan_epoch"]

    client.release()
    while not daemon.reports.empty():
        report = daemon.reports.get()
        epochs[report["iteration_index"]] = report["plan_epoch"]
    assert {index for index, epoch in epochs.items() if epoch == 3} == {apply_at, apply_at + 1, apply_at + 2}


def test_clock_request_carries_the_planned_clock_and_the_later_one(daemon: FakeDaemon) -> None:
    client = make_client(daemon.socket_path)
    run_until_reported(client, daemon)
    daemon.plans = [plan_slice(7, 0, [("F", 1, 0, 0, 1200), ("F", 1, 0, 4_000_000, 1410), ("B", 0, 0, 9_000, 990)])]
    for _ in range(3):
        run_iteration(client)
        get(daemon.reports)

    first, second = get(daemon.clock_requests), get(daemon.clock_requests)
    client.release()
    assert first.token == bytes.fromhex(FIRST_TOKEN)
    assert second.sequence == first.sequence + 1
    request, next_request = first.request, second.request
    assert (request.sm_clock_mhz, request.later[0].sm_clock_mhz, request.plan_epoch) == (1200, 1410, 7)
    assert request.later[0].at_mono_ns - request.sent_mono_ns == 4_000_000
    assert (next_request.sm_clock_mhz, next_request.later[0].sm_clock_mhz) == (0, 990)


def test_plan_without_changes_sends_nothing(daemon: FakeDaemon) -> None:
    client = make_client(daemon.socket_path)
    run_until_reported(client, daemon)
    daemon.plans = [plan_slice(1, 0)]
    for _ in range(4):
        run_iteration(client)
        report = get(daemon.reports)

    client.release()
    assert report["plan_epoch"] == 1
    assert daemon.clock_requests.empty()


def test_a_pause_runs_at_full_speed_and_the_iteration_after_it_under_the_plan(daemon: FakeDaemon) -> None:
    low = plan_slice(1, 0, [("F", 0, 0, 0, 1005), ("B", 1, 0, 5, 1110)])
    client = client_under(daemon, {**low, "full_speed_sm_clock_mhz": 1410})

    def is_handed_over_by_a_pause() -> bool:
        run_iteration(client)  # one that found no memory free is never reported: then the next is
        client.pause()
        with contextlib.suppress(queue.Empty):
            report: dict[str, Any] = daemon.reports.get(timeout=0.05)
            return bool(report["next_begin_mono_ns"] == 0)
        return False

    wait_until(is_handed_over_by_a_pause)
    while (request := get(daemon.clock_requests).request).sm_clock_mhz != 1410:
        assert request.sm_clock_mhz in {0, 1005, 1110}
    run_iteration(client)
    after = [get(daemon.clock_requests).request for _ in range(2)]

    client.release()
    assert request.plan_epoch == 1
    # What the iteration before the pause left in force, then the plan's own changes.
    assert [each.sm_clock_mhz for each in after] == [1110, 1005]


def test_a_clock_that_is_in_force_is_not_requested_in_each_short_iteration(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuenergyd.client.rank._REPEAT_AFTER_NS", 10**18)
    client = client_under(daemon, {**plan_slice(1, 0, [("B", 0, 0, 0, 900)]), "full_speed_sm_clock_mhz": 1410})
    for _ in range(3):
        run_iteration(client)
    client.pause()
    for _ in range(3):
        run_iteration(client)
    monkeypatch.setattr("gpuenergyd.client.rank._REPEAT_AFTER_NS", 0)
    client.pause()
    for _ in range(3):
        run_iteration(client)

    clocks_mhz = [get(daemon.clock_requests).request.sm_clock_mhz for _ in range(9)]
    client.release()
    # Once; after a pause at its begin and in its place; and in each iteration once the time has passed.
    assert clocks_mhz == [900, 1410, 900, 900, 1410, 900, 900, 900, 900]


def test_a_request_that_was_dropped_is_repeated_in_the_next_iteration(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuenergyd.client.rank._REPEAT_AFTER_NS", 10**18)
    client = client_under(daemon, {**plan_slice(1, 0, [("B", 0, 0, 0, 900)]), "full_speed_sm_clock_mhz": 1410})
    client.pause()

    def full(*_: object) -> int:
        raise BlockingIOError

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "send", full)
        run_iteration(client)
    for _ in range(3):
        run_iteration(client)
    client.pause()

    clocks_mhz = [get(daemon.clock_requests).request.sm_clock_mhz for _ in range(4)]
    client.release()
    assert clocks_mhz == [900, 1410, 900, 1410]


def test_failed_iteration_is_not_reported(daemon: FakeDaemon) -> None:
    client = make_client(daemon.socket_path)
    run_until_reported(client, daemon)
    client.begin_iteration()
    client.begin_instruction("F", 0)
    failed_index = client.iteration_index
    client.abandon_iteration()
    run_iteration(client)
    client.release()

    while (report := get(daemon.reports))["next_begin_mono_ns"] != 0:
        assert report["iteration_index"] != failed_index
    assert report["iteration_index"] == failed_index + 1


@pytest.mark.fault(40)
def test_after_a_daemon_restart_the_rank_registers_again_without_old_plans(daemon: FakeDaemon) -> None:
    client = client_under(daemon, plan_slice(9, 0, [("F", 0, 0, 0, 990)]))
    get(daemon.registrations)
    daemon.stop()
    run_iteration(client)
    daemon.start()
    run_until_registered_again(client, daemon)
    report = run_until_reported(client, daemon)
    while report["iteration_index"] < client.iteration_index - 2:
        report = get(daemon.reports)

    client.release()
    last = report
    while not daemon.reports.empty():
        last = daemon.reports.get()
    assert last["plan_epoch"] == 0


def run_until_registered_again(client: RankClient, daemon: FakeDaemon) -> None:
    while True:
        run_iteration(client)
        try:
            daemon.registrations.get(timeout=0.05)
        except queue.Empty:
            continue
        return


def test_a_rank_with_a_learned_order_registers_when_it_is_known(daemon: FakeDaemon) -> None:
    client = make_client(daemon.socket_path, order=())
    order = run_iteration(client)
    assert daemon.registrations.empty()
    client.register(order)

    registration = get(daemon.registrations)

    client.release()
    assert [tuple(row) for row in registration["order"]] == list(ORDER)


@pytest.fixture
def forbid_waiting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record every call that could wait for the daemon from the training thread, which is this one."""
    seen: list[str] = []
    training_thread = threading.get_ident()

    def guard(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == training_thread:
                seen.append(name)
                raise AssertionError(f"{name} called in the training thread")
            return original(*args, **kwargs)

        return guarded

    class GuardedSocket(socket.socket):
        pass

    for name in ("connect", "recv", "recv_into", "sendall", "makefile", "accept"):
        setattr(GuardedSocket, name, guard(name, getattr(socket.socket, name)))
    monkeypatch.setattr(socket, "socket", GuardedSocket)
    monkeypatch.setattr(time, "sleep", guard("sleep", time.sleep))
    return seen


def hang(listener: socket.socket, held: list[socket.socket]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        held.append(connection)


def talk_garbage(listener: socket.socket, held: list[socket.socket]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
            held.append(connection)
            connection.recv(4096)
            connection.sendall(b"\x00\xff not HTTP at all\r\n\r\n{]")
        except OSError:
            return


def close_at_once(listener: socket.socket, held: list[socket.socket]) -> None:
    while True:
        try:
            held.append(listener.accept()[0])
            held.pop().close()
        except OSError:
            return


@pytest.mark.parametrize("behaviour", [None, hang, talk_garbage, close_at_once])
def test_a_faulty_daemon_never_affects_the_training_thread(
    tmp_path: Path, forbid_waiting: list[str], behaviour: Callable[[socket.socket, list[socket.socket]], None] | None
) -> None:
    socket_path = str(tmp_path / "bad.sock")
    held: list[socket.socket] = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    thread = threading.Thread(target=behaviour or close_at_once, args=(listener, held), daemon=True)
    if behaviour is not None:
        listener.bind(socket_path)
        listener.listen()
        thread.start()
    client = make_client(socket_path)
    orders = {run_iteration(client) for _ in range(50)}

    client.release()
    if behaviour is not None:
        listener.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()
        thread.join(WAIT_LIMIT_S)
    for opened in [listener, *held]:
        opened.close()
    assert orders == {() if behaviour is None else ORDER}  # without a socket, nothing is marked
    assert forbid_waiting == []
    assert client.total_errors == 0


def test_a_full_clock_socket_drops_requests_without_blocking(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_under(daemon, plan_slice(2, 0, [("F", 0, 0, 0, 990), ("B", 0, 0, 0, 1410)]))

    def full(*_: object) -> int:
        raise BlockingIOError

    monkeypatch.setattr(socket.socket, "send", full)
    first_full_index = client.iteration_index + 1
    run_iteration(client)
    run_iteration(client)
    report = get(daemon.reports)
    while report["iteration_index"] < first_full_index:
        report = get(daemon.reports)

    monkeypatch.undo()
    client.release()
    assert report["num_records_dropped"] == 2
    assert client.total_errors == 0


def test_internal_errors_are_counted_and_training_continues(daemon: FakeDaemon) -> None:
    class BrokenTimer:
        def begin_iteration(self, previous: RecordedIteration | None, *, is_timed: bool) -> None:
            """Begin: it breaks at the first instruction."""

        def begin(self, key: OrderRow) -> int:  # noqa: ARG002  the Protocol's signature
            raise RuntimeError("broken")

        def end(self, slot: int) -> None:  # noqa: ARG002  the Protocol's signature
            raise RuntimeError("broken")

        reads_late = False

        def reserve(self, capacity: int) -> None:
            """Do nothing: nothing is recorded."""

        def read_late(self) -> None:
            raise RuntimeError("broken")

        def prepare_requests(self) -> None:
            raise RuntimeError("broken")

        def call_at_begin(self, slot: int, act: Callable[[], None]) -> None:  # noqa: ARG002  the Protocol's signature
            raise RuntimeError("broken")

        def order(self) -> tuple[OrderRow, ...]:
            raise RuntimeError("broken")

        def end_iteration(self) -> None:
            raise RuntimeError("broken")

        def call_when_reached(self, act: Callable[[], None]) -> None:  # noqa: ARG002  the Protocol's signature
            raise RuntimeError("broken")

        def call_when_known(self, recorded: RecordedIteration, act: Callable[[], None]) -> None:  # noqa: ARG002
            raise RuntimeError("broken")

        def close(self, limit_s: float) -> None:
            """Do nothing: there is no thread."""

    client = make_client(daemon.socket_path, timer=BrokenTimer())
    assert run_iteration(client) == ()

    client.release()
    assert client.total_errors == len(ORDER) + 1  # an instruction without a begin has no end


def test_a_forked_child_sends_nothing(daemon: FakeDaemon) -> None:
    client = client_under(daemon, plan_slice(2, 0, [("F", 0, 0, 0, 990)]))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run_iteration(client)
            client.release()
            code = 0 if client.iteration_index >= 0 else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    index_of_parent = client.iteration_index
    before = daemon.reports.qsize(), daemon.clock_requests.qsize(), daemon.releases.qsize()
    run_iteration(client)

    assert os.waitstatus_to_exitcode(status) == 0
    assert before[2] == 0
    assert client.iteration_index == index_of_parent + 1
    last = get(daemon.reports)
    client.release()
    assert last["rank_token"] == FIRST_TOKEN
    assert daemon.registrations.qsize() == 1


def test_concurrent_threads_get_different_slots(daemon: FakeDaemon) -> None:
    client = make_client(daemon.socket_path)
    client.begin_iteration()
    slots: list[int] = []
    start = threading.Barrier(2)

    def mark(kind: str) -> None:
        start.wait()
        for microbatch_index in range(200):
            slot = client.begin_instruction(kind, microbatch_index)
            slots.append(slot)
            client.end_instruction(slot)

    threads = [threading.Thread(target=mark, args=(kind,)) for kind in "FB"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    order = client.end_iteration()

    client.release()
    assert sorted(slots) == list(range(400))
    assert sorted(order) == sorted((kind, m, 0) for kind in "FB" for m in range(200))


def test_without_a_gpu_nothing_is_registered(daemon: FakeDaemon, caplog: pytest.LogCaptureFixture) -> None:
    client = make_client(daemon.socket_path, gpu_uuid=None)

    assert run_iteration(client) == ()
    client.release()
    assert daemon.registrations.empty()
    assert len([record for record in caplog.records if "no GPU UUID" in record.message]) == 1


def test_absent_daemon_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = make_client(str(tmp_path / "nobody.sock"))
    for _ in range(20):
        run_iteration(client)
    client.release()

    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning == f"gpuenergyd: no daemon at {tmp_path / 'nobody.sock'}; training continues at full speed"


def test_an_unreachable_clock_socket_is_named_and_logged_once(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.clock_socket_path = "run/missing.sock"
    client = make_client(daemon.socket_path)
    for _ in range(5):
        run_iteration(client)
        wait_until(lambda: bool(caplog.records))
    client.release()

    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert "clock socket run/missing.sock: No such file or directory" in warning


def test_a_clock_socket_whose_folder_is_mounted_elsewhere_is_found_beside_the_socket(daemon: FakeDaemon) -> None:
    daemon.clock_socket_path = f"/run/of-the-host/{Path(daemon.clock_socket_path).name}"
    client = make_client(daemon.socket_path)
    run_until_reported(client, daemon)
    daemon.plans = [plan_slice(7, 0, [("F", 1, 0, 0, 1200)])]
    for _ in range(3):
        run_iteration(client)
        get(daemon.reports)

    sent = get(daemon.clock_requests)
    client.release()
    assert sent.request.sm_clock_mhz == 1200


def test_a_refused_registration_is_logged_whole(daemon: FakeDaemon, caplog: pytest.LogCaptureFixture) -> None:
    daemon.refusal = "no policy 'x'; installed: " + ", ".join(f"policy-{k}" for k in range(60))
    client = make_client(daemon.socket_path)

    wait_until(lambda: bool(caplog.records))
    client.release()

    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert message == (
        f"gpuenergyd: job gpt, rank 1: the daemon at {daemon.socket_path} refused this rank: {daemon.refusal};"
        " training continues at full speed"
    )


def test_a_rank_registers_again_with_another_order_and_drops_its_plans(daemon: FakeDaemon) -> None:
    daemon.plans = [plan_slice(1, 0, [("F", 0, 0, 0, 900)])]
    client = make_client(daemon.socket_path)
    run_until_reported(client, daemon)
    wait_until(lambda: run_iteration(client) != () and client.plan_epoch == 1)
    longer: tuple[OrderRow, ...] = (*ORDER[:2], ("F", 2, 0), *ORDER[2:], ("B", 2, 0))

    client.pause()
    client.change_order(longer, num_microbatches=3)
    run_iteration(client)

    first, again = get(daemon.registrations), get(daemon.registrations)
    assert client.plan_epoch == 0
    client.release()
    assert (first["num_microbatches"], again["num_microbatches"]) == (2, 3)
    assert [tuple(row) for row in again["order"]] == list(longer)
    assert {name: first[name] for name in first if name not in {"order", "num_microbatches"}} == {
        name: again[name] for name in again if name not in {"order", "num_microbatches"}
    }


def test_the_newest_measured_energy_and_power_per_gpu_are_those_of_the_last_reply_that_had_them(
    daemon: FakeDaemon,
) -> None:
    client = make_client(daemon.socket_path)
    run_until_reported(client, daemon)
    before = client.energy_per_gpu_j, client.power_per_gpu_w
    daemon.figures = {"energy_per_gpu_j": 812.5, "power_per_gpu_w": 290.0}
    wait_until(lambda: run_iteration(client) != () and client.energy_per_gpu_j is not None)
    daemon.figures = {}
    while not daemon.reports.empty():
        daemon.reports.get()
    run_until_reported(client, daemon)

    assert before == (None, None)
    assert (client.energy_per_gpu_j, client.power_per_gpu_w) == (812.5, 290.0)
    client.release()
