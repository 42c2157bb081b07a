"""What the client does to a training process: nothing without a daemon, and little with one."""

import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.client import lookout, reporter
from gpuenergyd.client.loop import LOOP_RANK, LoopJob
from gpuenergyd.client.phases.marks import PhaseMarks
from gpuenergyd.client.phases.torch_hooks import TorchPhases
from gpuenergyd.client.rank import RankClient, RankDescription
from gpuenergyd.client.timing.compiled_thread import VARIABLE
from gpuenergyd.client.timing.device_recorder import DeviceRecorder
from gpuenergyd.client.timing.request_memory import REACHED
from gpuenergyd.client.timing.watched_requests import WatchedRequests
from gpuenergyd.wire.messages import OrderRow
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon, covered, plan_slice
from tests.support.virtual_device import VirtualDevice
from tests.support.waiting import wait_until

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
ORDER: tuple[OrderRow, ...] = (("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("B", 1, 0))
RANK = RankDescription(job_name="gpt", run_key="1", gpu_uuid="GPU-1", schedule_name="gpipe", num_microbatches=2)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path) as fake:
        yield fake


def run_iteration(client: RankClient) -> tuple[OrderRow, ...]:
    client.begin_iteration()
    for row in ORDER:
        client.end_instruction(client.begin_instruction(*row))
    return client.end_iteration()


def torch_hooks() -> list[Any]:
    """Return torch's hooks of all modules and all optimizers."""
    modules, optimizers = torch.nn.modules.module, sys.modules["torch.optim.optimizer"]
    return [
        hook
        for hooks in (
            modules._global_forward_pre_hooks,
            modules._global_forward_hooks,
            modules._global_backward_hooks,
            optimizers._global_optimizer_pre_hooks,
            optimizers._global_optimizer_post_hooks,
        )
        for hook in hooks.values()
    ]


class Training:
    """A loop over a small model."""

    def __init__(self, socket_path: str, device: VirtualDevice) -> None:
        self.device = device
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        rank = replace(LOOP_RANK, job_name="loop", gpu_uuid="GPU-1")
        timer = DeviceRecorder(device, 16, sleep=device.sleep, mono_s=lambda: 0.0)
        self.job = LoopJob(rank, run_key="1", socket_path=socket_path, timer=timer)

    def step(self) -> bool:
        """Run an iteration, which the device executes before the next one; return True."""
        with self.job.iteration():
            self.model(torch.ones(2, 4)).square().mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.device.work(3.0)
        self.device.sleep(1.0)
        return True


def test_without_a_daemon_a_loop_has_no_thread_no_hook_and_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    monkeypatch.setattr(lookout, "_identity", looks.append)
    threads, hooks = threading.enumerate(), torch_hooks()
    training = Training(str(tmp_path / "none.sock"), VirtualDevice())
    with training.job:
        for _ in range(20):
            training.step()

            assert threading.enumerate() == threads
            assert torch_hooks() == hooks
            assert not training.model._forward_pre_hooks
    assert training.device.num_events == 0
    assert len(looks) < 20


@pytest.mark.parametrize(("iteration_s", "most_asked"), [(0.005, 200), (1e-6, 1000), (1.0, 1000)])
def test_a_program_of_short_iterations_asks_for_a_daemon_in_few_of_them_but_often_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iteration_s: float, most_asked: int
) -> None:
    now_ns, asked_at_ns, num_left_out = 0, [0], 0
    monkeypatch.setattr(lookout, "monotonic_ns", lambda: now_ns)
    daemon_lookout = lookout.DaemonLookout(str(tmp_path / "none.sock"))
    for _ in range(1000):
        now_ns += round(iteration_s * 1e9)
        if num_left_out:
            num_left_out -= 1
            continue
        assert not daemon_lookout.sees_daemon()
        asked_at_ns.append(now_ns)
        num_left_out = daemon_lookout.num_to_leave_out
        assert num_left_out < 16, "the next iterations may take minutes each"

    assert len(asked_at_ns) <= most_asked + 1
    assert max(later - earlier for earlier, later in pairwise(asked_at_ns)) <= max(0.2, iteration_s) * 1e9


def test_a_loop_joins_when_a_daemon_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookout, "_LOOK_EVERY_NS", 0)
    training = Training(str(tmp_path / "daemon.sock"), VirtualDevice())
    with training.job:
        training.step()
        with FakeDaemon(tmp_path) as daemon:
            wait_until(lambda: training.step() and not daemon.registrations.empty())


def test_a_loop_with_one_clock_keeps_one_hook_of_its_outermost_module(daemon: FakeDaemon) -> None:
    hooks = torch_hooks()
    training = Training(daemon.socket_path, VirtualDevice())
    with training.job:
        training.step()
        wait_until(lambda: training.step() and not daemon.registrations.empty())

        assert torch_hooks() == hooks
        assert len(training.model._forward_pre_hooks) == 1
        assert not training.model._forward_hooks
    assert not training.model._forward_pre_hooks


def test_a_loop_that_is_only_observed_marks_few_iterations_and_counts_all(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuenergyd.client.thinning.MOST_COST_RATIO", 0.0)
    daemon.takes_untimed = daemon.takes_together = True
    training = Training(daemon.socket_path, VirtualDevice())
    recorded: list[object] = []
    record = training.device.record

    def count(event: Any) -> None:
        recorded.append(event)
        record(event)

    monkeypatch.setattr(training.device, "record", count)
    with training.job:
        wait_until(lambda: training.step() and training.job._client is not None and training.job._client.num_left > 0)
        client = training.job._client
        assert client is not None
        recorded.clear()
        for number in range(160):
            training.step()
            if number >= 80 and client.num_left == 5:
                with pytest.raises(ZeroDivisionError), training.job.iteration():
                    training.device.work(3.0 / 0.0)
    wait_until(lambda: not daemon.releases.empty())
    reports = [daemon.reports.get() for _ in range(daemon.reports.qsize())]

    assert len(recorded) < 160
    reported = covered(reports)
    assert reported == list(range(reported[0], client.iteration_index + 1))
    assert client.total_errors == 0


@pytest.mark.parametrize("takes_spans", [True, False])
def test_a_loop_whose_planned_clock_is_in_force_marks_only_the_ends_of_its_iterations(
    daemon: FakeDaemon,
    monkeypatch: pytest.MonkeyPatch,
    takes_spans: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    monkeypatch.setattr("gpuenergyd.client.thinning.MOST_COST_RATIO", 0.0)
    monkeypatch.setattr("gpuenergyd.client.rank._REPEAT_AFTER_NS", 10**18)
    monkeypatch.setattr("gpuenergyd.client.rank._SPANS_LIMIT_S", 1e9)
    daemon.takes_untimed, daemon.takes_spans = True, takes_spans
    daemon.plans = [plan_slice(1, 0, [("F", 0, 0, 0, 900)])]
    training = Training(daemon.socket_path, VirtualDevice())
    with training.job:
        wait_until(
            lambda: training.step() and training.job._client is not None and not training.job._client._timed.is_timed
        )
        client = training.job._client
        assert client is not None
        before = client._sender.next_sequence()
        for _ in range(32):
            training.step()
        client._in_force_until_ns = 1  # its time has passed
        for _ in range(32):
            training.step()
        after = client._sender.next_sequence()
    wait_until(lambda: not daemon.releases.empty())
    reports = [daemon.reports.get() for _ in range(daemon.reports.qsize())]

    assert after - before - 1 <= (10 if takes_spans else 1)
    assert covered(reports) == list(range(reports[0]["iteration_index"], 1 + client.iteration_index))
    assert [report.get("is_in_order", True) for report in reports] == [True] * len(reports)
    assert sum(report.get("num_together", 1) for report in reports if "is_in_order" in report) >= 56
    assert any("num_together" in report for report in reports) is takes_spans
    assert client.total_errors == 0


def test_hooks_of_phases_do_nothing_in_an_iteration_recorded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(PhaseMarks, "backward_begins", lambda _marks: seen.append("B"))  # None: no end to mark
    monkeypatch.setattr(PhaseMarks, "optimizer_begins", lambda _marks: seen.append("O"))
    marks, model = PhaseMarks(), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = TorchPhases(torch, marks)
    try:
        for is_left_out in (False, True, False):
            marks.is_left_out = is_left_out
            seen.append("left out" if is_left_out else "marked")
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
    finally:
        hooks.detach()

    assert seen == ["marked", "B", "O", "left out", "marked", "B", "O"]


def test_torch_warns_of_global_hooks_of_the_program_only() -> None:
    model = torch.compile(torch.nn.Linear(4, 1), backend="eager")
    own = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    for has_own_hook in (True, False):
        hooks = TorchPhases(torch, PhaseMarks())
        with pytest.raises(UserWarning, match="global hooks") if has_own_hook else nullcontext():
            model(torch.ones(2, 4))
        hooks.detach()
        own.remove()


def test_a_rank_joins_a_daemon_that_replaces_a_killed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookout, "_LOOK_EVERY_NS", 0)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "daemon.sock"))
    client = RankClient(RANK, order=ORDER, socket_path=str(tmp_path / "daemon.sock"))
    wait_until(lambda: client.is_unheard)
    left = run_iteration(client)
    with FakeDaemon(tmp_path) as daemon:
        wait_until(lambda: run_iteration(client) == ORDER and not daemon.registrations.empty())
        client.release()

    assert left == ()
    assert client.total_errors == 0


@pytest.mark.parametrize("takes_several", [True, False])
def test_iterations_are_all_reported_with_fewer_wake_ups_and_messages_than_iterations(
    daemon: FakeDaemon,
    monkeypatch: pytest.MonkeyPatch,
    takes_several: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    daemon.takes_several = takes_several
    wake_ups: list[str] = []

    class Counted(reporter.Reporter):
        def _handle(self, first: Any) -> bool:
            wake_ups.append("reports")
            return super()._handle(first)

    monkeypatch.setattr("gpuenergyd.client.rank.Reporter", Counted)
    client = RankClient(RANK, order=ORDER, socket_path=daemon.socket_path)
    wait_until(lambda: run_iteration(client) == ORDER and not daemon.reports.empty())
    first, before, num_messages = client.iteration_index, len(wake_ups), daemon.num_messages
    for _ in range(300):
        run_iteration(client)
    client.release()
    wait_until(lambda: not daemon.releases.empty())

    reported = [daemon.reports.get()["iteration_index"] for _ in range(daemon.reports.qsize())]
    assert reported[-300:] == list(range(first + 1, first + 301))
    assert len(wake_ups) - before <= 150
    assert (daemon.num_messages - num_messages <= 150) is takes_several


class WatchedRecorder(DeviceRecorder):
    """A recorder that knows when the reporter's thread waits."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__(device, 16, sleep=device.sleep, mono_s=lambda: 0.0)
        self.is_awaited = threading.Event()

    @property
    def reads_late(self) -> bool:
        """Whether times may become known without a mark."""
        self.is_awaited.set()
        return super().reads_late


def test_the_last_iteration_before_a_long_pause_is_reported(daemon: FakeDaemon) -> None:
    device = VirtualDevice()
    recorder = WatchedRecorder(device)
    client = RankClient(RANK, order=ORDER, socket_path=daemon.socket_path, timer=recorder)
    assert recorder.is_awaited.wait(WAIT_LIMIT_S)  # before there is anything to wait for
    run_iteration(client)
    device.work(3.0)
    client.pause()
    device.sleep(1.0)

    assert daemon.reports.get(timeout=WAIT_LIMIT_S)["iteration_index"] == 0
    client.release()


def test_the_cost_of_the_clients_calls_is_sampled_and_reported(daemon: FakeDaemon) -> None:
    client = RankClient(RANK, order=ORDER, socket_path=daemon.socket_path)
    for _ in range(3):
        run_iteration(client)
    client.release()
    report = daemon.reports.get(timeout=WAIT_LIMIT_S)

    assert 0.0 < report["client_cost_s"] < WAIT_LIMIT_S


class SignallingDevice(VirtualDevice):
    """A device that writes its progress where the test says that it has reached a request."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[int] = []
        self.requests: WatchedRequests | None = None

    def open_requests(self) -> WatchedRequests:  # type: ignore[override]  # the other has none
        def map_memory(_address: int, _size: int) -> Callable[[int], bool]:
            def write(number: int) -> bool:
                self.launched.append(number)
                return True

            return write

        self.requests = WatchedRequests(map_memory)
        return self.requests

    def reach(self, number: int) -> None:
        assert self.requests is not None
        self.requests._words[REACHED] = number


@pytest.mark.parametrize("is_compiled", [True, False])
def test_requests_are_sent_when_the_gpu_reaches_their_instruction_with_and_without_the_compiled_thread(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_compiled: bool
) -> None:
    if is_compiled and shutil.which("cc") is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "1" if is_compiled else "0")
    device = SignallingDevice()
    timer = DeviceRecorder(device, 16, sleep=device.sleep, mono_s=lambda: 0.0)
    client = RankClient(RANK, order=ORDER, socket_path=daemon.socket_path, timer=timer)

    def run() -> int:
        run_iteration(client)
        device.sleep(1.0)
        return client.plan_epoch

    wait_until(lambda: run() == 0 and not daemon.reports.empty())
    daemon.plans = [plan_slice(1, 0, [("F", 1, 0, 0, 1200), ("B", 1, 0, 0, 990)])]
    wait_until(lambda: run() == 1)
    num_first = len(device.launched)
    client.begin_iteration()
    launched_at = []
    for row in ORDER:
        client.end_instruction(client.begin_instruction(*row))
        launched_at.append(len(device.launched) - num_first)
    client.end_iteration()
    device.reach(device.launched[-1] - 1)
    clocks = [daemon.clock_requests.get(timeout=WAIT_LIMIT_S).request.sm_clock_mhz for _ in device.launched[:-1]]
    is_last_sent = not daemon.clock_requests.empty()
    device.reach(device.launched[-1])
    last = daemon.clock_requests.get(timeout=WAIT_LIMIT_S).request.sm_clock_mhz
    client.release()

    assert device.requests is not None
    assert device.requests.is_compiled == is_compiled
    assert launched_at == [0, 1, 1, 2]
    assert clocks == ([1200, 990] * len(device.launched))[: len(clocks)]
    assert not is_last_sent
    assert last == 990
    assert client.total_errors == 0
