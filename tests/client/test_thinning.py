"""Which iterations have their instructions timed, and that thinning loses no clock request."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.client.rank import RankClient, RankDescription
from gpuenergyd.client.thinning import MOST_COST_RATIO, NEW_ITERATIONS, STRIDES, TimedIterations
from gpuenergyd.client.timing.device_recorder import DeviceRecorder
from gpuenergyd.client.timing.recorder import HostRecorder, IterationTimes, RecordedIteration
from gpuenergyd.wire.messages import OrderRow
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon, covered, plan_slice
from tests.support.examples import examples
from tests.support.virtual_device import CalledRequest, VirtualDevice
from tests.support.waiting import wait_until

ORDER: tuple[OrderRow, ...] = (("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("B", 1, 0))
RANK = RankDescription(job_name="gpt", run_key="1", gpu_uuid="GPU-1", schedule_name="gpipe", num_microbatches=2)


@dataclass
class CostlyClient:
    """A client whose calls cost what they do; iterations take 1 s."""

    timed_s: float
    untimed_s: float
    timed: TimedIterations = field(default_factory=TimedIterations)
    index: int = -1

    def run(self, num_iterations: int) -> list[int]:
        """Run iterations; return which were timed."""
        timed = []
        for _ in range(num_iterations):
            self.index += 1
            self.timed.begin(self.index)
            if self.timed.is_measured:
                self.timed.add_cost(self.timed_s if self.timed.is_timed else self.untimed_s)
            self.timed.add_time(1.0)
            timed += [self.index] if self.timed.is_timed else []
        return timed


def test_a_client_that_costs_little_times_all_iterations() -> None:
    assert CostlyClient(MOST_COST_RATIO, 0.0001).run(200) == list(range(200))


def test_a_costly_client_times_the_first_iterations_and_then_as_few_as_make_it_cheap_enough() -> None:
    client = CostlyClient(2.2 * MOST_COST_RATIO, 0.5 * MOST_COST_RATIO)

    assert client.run(64) == [*range(16), *range(16, 64, 4)]
    client.timed.restart(64)
    assert client.run(64) == [*range(64, 80), *range(80, 128, 4)]


def test_a_client_that_is_costly_even_without_times_takes_the_longest_stride() -> None:
    client = CostlyClient(9 * MOST_COST_RATIO, 2 * MOST_COST_RATIO)
    client.run(40)

    assert client.run(40) == [48, 64]


def test_an_iteration_that_another_program_delays_changes_nothing() -> None:
    client = CostlyClient(0.5 * MOST_COST_RATIO, 0.1 * MOST_COST_RATIO)
    client.run(20)
    client.timed_s = 1.0
    client.run(16)
    client.timed_s = 0.5 * MOST_COST_RATIO

    assert client.run(20) == list(range(36, 56))


def test_each_kind_of_iteration_has_its_own_cost() -> None:
    client = CostlyClient(2.2 * MOST_COST_RATIO, 0.5 * MOST_COST_RATIO)
    client.run(30)
    costs = []
    for _ in range(3):
        client.run(1)
        costs.append(client.timed.cost_s(is_timed=client.timed.is_timed))

    assert costs == [client.untimed_s, client.untimed_s, client.timed_s]


@pytest.mark.parametrize("num_together", range(1, 9))
def test_reading_several_iterations_at_once_counts_in_as_many_samples_as_it_takes_part_in(num_together: int) -> None:
    timed, costs = TimedIterations(), []
    for index in range(16, 16 + 104 * num_together):
        timed.begin(index)
        if timed.is_measured:
            timed.add_cost(1.0 if index % num_together == 0 else 0.0)
            costs.append(timed.cost_s(is_timed=timed.is_timed))

    assert costs.count(1.0) * num_together == len(costs)


@given(st.lists(st.floats(0.0, 0.1), min_size=2, max_size=4), st.integers(0, 40))
@settings(max_examples=examples(100))
def test_ranks_time_the_same_iterations_as_far_as_each_times_any(costs_s: list[float], restarted_at: int) -> None:
    timed = []
    for cost_s in costs_s:
        client = CostlyClient(cost_s, cost_s / 4)
        own = set(client.run(restarted_at))
        client.timed.restart(restarted_at)
        timed.append(own | set(client.run(200 - restarted_at)))

    common = set.intersection(*timed)
    assert common >= {*range(restarted_at, restarted_at + NEW_ITERATIONS), *range(0, 200, STRIDES[-1])}
    assert common in timed  # the rank with the longest stride


class Program:
    """A program on a virtual device, some of whose iterations are timed and some of whose instructions have plans."""

    def __init__(self, *, can_signal: bool) -> None:
        self.device = VirtualDevice()
        self.recorder = DeviceRecorder(self.device, 8, sleep=self.device.sleep, mono_s=lambda: 0.0)
        self.sent: list[tuple[int, int]] = []
        self.times: list[IterationTimes] = []
        self._previous: RecordedIteration | None = None
        if can_signal:
            self.recorder._requests = self  # type: ignore[assignment]
            self.recorder._is_request_opened = True

    def put(self, request: CalledRequest) -> bool:
        """Send a request when the stream reaches it, as a device does that writes its progress."""
        request()
        return True

    def close(self) -> None:
        """Do nothing."""

    def run(self, number: int, planned: frozenset[int], *, is_timed: bool) -> None:
        """Launch an iteration that requests clocks at some of its instructions."""
        with self.device.launching():
            self.recorder.begin_iteration(self._previous, is_timed=is_timed)
            if self._previous is not None:
                self._report(self._previous)
            for k, row in enumerate(ORDER):
                slot = self.recorder.begin(row) if is_timed else k
                if k in planned:
                    self.recorder.call_at_begin(slot, CalledRequest(partial(self.sent.append, (number, k))))
                self.device.work(1.0)
                if is_timed:
                    self.recorder.end(slot)
            assert not is_timed or self.recorder.order() == ORDER
            self._previous = self.recorder.end_iteration()
        self.device.sleep(0.01)

    def _report(self, recorded: RecordedIteration) -> None:
        def keep() -> None:
            self.times.append(recorded.times())
            recorded.free()

        self.recorder.call_when_known(recorded, keep)


@pytest.mark.parametrize("can_signal", [True, False])
@given(st.lists(st.tuples(st.booleans(), st.frozensets(st.integers(0, len(ORDER) - 1))), min_size=1, max_size=20))
@settings(max_examples=examples(100), deadline=None)
def test_every_planned_request_is_sent_once_and_in_order_however_few_iterations_are_timed(
    can_signal: bool,  # noqa: FBT001  a parameter of the test
    iterations: list[tuple[bool, frozenset[int]]],
) -> None:
    program = Program(can_signal=can_signal)
    for number, (is_timed, planned) in enumerate(iterations):
        program.run(number, planned, is_timed=is_timed)
    expected = [(number, k) for number, (_, planned) in enumerate(iterations) for k in sorted(planned)]
    wait_until(lambda: len(program.sent) >= len(expected))
    program.recorder.close(WAIT_LIMIT_S)

    assert program.sent == expected
    for times, (is_timed, _) in zip(program.times, iterations, strict=False):
        assert len(times.instructions) == (len(ORDER) if is_timed else 0)
        assert round((times.end_mono_ns - times.begin_mono_ns) / 1e6) == len(ORDER)


def test_an_untimed_iteration_takes_two_events_and_no_more() -> None:
    program = Program(can_signal=True)
    recorded: list[object] = []
    program.device.record = recorded.append  # type: ignore[assignment]

    program.run(0, frozenset({1, 2}), is_timed=False)

    program.recorder.close(0.0)
    assert len(recorded) == 2
    assert program.sent == [(0, 1), (0, 2)]


class ThinnedRank:
    """A rank whose client always costs too much, attached to a daemon that can do without times of instructions."""

    def __init__(self, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gpuenergyd.client.thinning.MOST_COST_RATIO", 0.0)
        monkeypatch.setattr("gpuenergyd.client.reporter.REPORT_PERIOD_S", 0.0)
        self.daemon = daemon
        daemon.takes_untimed = True
        self.client = RankClient(RANK, order=ORDER, socket_path=daemon.socket_path, timer=HostRecorder())
        self.reports: list[dict[str, object]] = []
        self.is_quick = False
        """Whether iterations are marked with the least code, as far as the client permits."""
        wait_until(lambda: self.client.rank_token is not None)

    def begin_quickly(self) -> bool:
        """Begin an iteration with the least code; return False if it has to be marked in full."""
        return self.is_quick and self.client.num_left > self.client.num_in_full and self.client.begin_next()

    def run(self, order: tuple[OrderRow, ...] = ORDER, *, is_reported: bool = True) -> dict[str, object]:
        """Run an iteration and return the report of the one before, if there is one."""
        if self.begin_quickly():
            for row in order:
                self.client.request_clock(*row)
            self.client.end_next()
        else:
            self.client.begin_iteration()
            for row in order:
                self.client.end_instruction(self.client.begin_instruction(*row))
            assert self.client.end_iteration() == order
        if self.client.iteration_index and is_reported:
            self.reports.append(self.daemon.reports.get(timeout=WAIT_LIMIT_S))
        return self.reports[-1] if self.reports else {}

    def settle(self) -> None:
        """Run iterations until all that is new is timed; some may begin before the daemon's first reply was read."""
        self.run()
        wait_until(lambda: not is_timed(self.run()))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path) as fake:
        yield fake


@pytest.fixture
def rank(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThinnedRank]:
    thinned = ThinnedRank(daemon, monkeypatch)
    yield thinned
    thinned.client.release()


def is_timed(report: dict[str, object]) -> bool:
    assert bool(report["instructions"]) is ("is_in_order" not in report)
    return "is_in_order" not in report


def test_reports_of_untimed_iterations_say_that_they_ran_in_order(rank: ThinnedRank) -> None:
    rank.settle()
    begun = len(rank.reports)
    for _ in range(40):
        rank.run()

    timed = [int(str(report["iteration_index"])) for report in rank.reports[begun:] if is_timed(report)]
    assert timed
    assert not any(index % STRIDES[-1] for index in timed)
    assert all(report["is_in_order"] for report in rank.reports if not is_timed(report))
    assert all(report["client_cost_s"] is not None for report in rank.reports[-8:])


def test_an_untimed_iteration_in_another_order_says_so(rank: ThinnedRank) -> None:
    rank.settle()
    wait_until(lambda: bool(rank.run()) and rank.client.iteration_index % STRIDES[-1] == 4)
    rank.run(ORDER[::-1])

    assert rank.run()["is_in_order"] is False
    assert rank.run()["is_in_order"] is True


def test_iterations_under_a_new_plan_are_timed_and_no_request_is_left_out(rank: ThinnedRank) -> None:
    rank.settle()
    begins_at = rank.client.iteration_index + 3
    rank.daemon.plans = [plan_slice(1, begins_at, [("F", 1, 0, 0, 900), ("B", 1, 0, 0, 1200)])]
    wait_until(lambda: bool(rank.run()) and rank.client.plan_epoch == 1)
    num_before = len([report for report in rank.reports if report["plan_epoch"] == 1])
    for _ in range(40):
        rank.run()

    under = [report for report in rank.reports if report["plan_epoch"] == 1]
    assert [is_timed(report) for report in under[:NEW_ITERATIONS]] == [True] * NEW_ITERATIONS
    assert num_before == 0
    assert sum(is_timed(report) for report in under[NEW_ITERATIONS:]) <= 2
    requests = [rank.daemon.clock_requests.get(timeout=WAIT_LIMIT_S) for _ in range(2 * (len(under) + 1))]
    assert [sent.request.sm_clock_mhz for sent in requests] == [900, 1200] * (len(under) + 1)


@pytest.mark.parametrize("is_quick", [True, False])
def test_iterations_without_a_plan_are_reported_together_and_none_is_lost_or_reported_twice(
    rank: ThinnedRank,
    is_quick: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    rank.is_quick = is_quick
    rank.settle()
    start = rank.client.iteration_index
    rank.daemon.takes_together = True
    wait_until(lambda: rank.run(is_reported=False) is not None and rank.client.num_left > 0)
    first = rank.client.iteration_index
    for number in range(200):
        rank.client.num_tokens = 7 if number == 50 else None  # for instance the last batch of an epoch
        rank.run(is_reported=False)
        assert rank.client.iteration_index == first + number + 1
        if number == 100:
            rank.client.pause()
    rank.client.release()
    wait_until(lambda: not rank.daemon.releases.empty())
    reports = [rank.daemon.reports.get() for _ in range(rank.daemon.reports.qsize())]

    assert covered(reports) == list(range(start, first + 201))
    assert [report["iteration_index"] for report in reports if report.get("num_tokens")] == [first + 51]
    assert len([report for report in reports if report["iteration_index"] > first]) < 200 / 4
    for one, following in pairwise(reports):
        is_paused = one["iteration_index"] == first + 101
        assert one["next_begin_mono_ns"] == (0 if is_paused else following["begin_mono_ns"])
    assert all(one["is_in_order"] for one in reports if one.get("num_together", 1) > 1)
    assert rank.client.total_errors == 0


def test_iterations_under_a_plan_are_reported_one_by_one_even_if_it_comes_within_a_group(rank: ThinnedRank) -> None:
    rank.settle()
    rank.daemon.takes_together = True
    wait_until(lambda: rank.run(is_reported=False) is not None and rank.client.num_left > 0)
    rank.daemon.plans = [plan_slice(1, 0, [("F", 1, 0, 0, 900)])]
    wait_until(lambda: bool(rank.run(is_reported=False)) and rank.client.plan_epoch == 1)
    for _ in range(2 * NEW_ITERATIONS):
        rank.run(is_reported=False)
    rank.client.release()
    wait_until(lambda: not rank.daemon.releases.empty())
    reports = [rank.daemon.reports.get() for _ in range(rank.daemon.reports.qsize())]

    under = [report for report in reports if report["plan_epoch"]]
    assert any("num_together" in report for report in reports)
    assert len(under) > 2 * NEW_ITERATIONS
    assert not any("num_together" in report for report in under)


@pytest.mark.parametrize("is_quick", [True, False])
def test_iterations_under_a_settled_plan_are_reported_together_with_the_times_and_requests_of_each(
    rank: ThinnedRank,
    monkeypatch: pytest.MonkeyPatch,
    is_quick: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    rank.is_quick = is_quick
    monkeypatch.setattr("gpuenergyd.client.rank._SPANS_LIMIT_S", 1e9)  # groups are as long, however busy the host
    rank.daemon.takes_spans = True
    rank.daemon.plans = [plan_slice(1, 0, [("F", 1, 0, 0, 900), ("B", 1, 0, 0, 1200)])]
    wait_until(lambda: rank.run(is_reported=False) is not None and rank.client.plan_epoch == 1)
    begun = rank.client.iteration_index
    wait_until(lambda: rank.run(is_reported=False) is not None and rank.client.num_left == 4)
    assert rank.begin_quickly() or rank.client.begin_iteration()
    rank.client.abandon_iteration()
    failed = rank.client.iteration_index
    wait_until(lambda: rank.run(is_reported=False) is not None and rank.client.num_left == 4)
    rank.client.num_tokens = 7
    rank.run(is_reported=False)
    shorter, rank.client.num_tokens = rank.client.iteration_index, None
    wait_until(lambda: rank.run(is_reported=False) is not None and rank.client.num_left == 4)
    ends_at = rank.client.iteration_index + 3
    rank.daemon.plans = [plan_slice(2, ends_at, [])]
    wait_until(lambda: rank.run(is_reported=False) is not None and rank.client.plan_epoch == 2)
    first_after = rank.client.iteration_index
    rank.client.release()
    wait_until(lambda: not rank.daemon.releases.empty())
    reports = [rank.daemon.reports.get() for _ in range(rank.daemon.reports.qsize())]
    spans = [row[3:] for report in reports if "num_together" in report for row in report["instructions"]]
    num_requests = 2 * (first_after - begun - 1)

    assert covered(reports) == [k for k in range(first_after + 1) if k != failed]
    assert [report["iteration_index"] for report in reports if report.get("num_tokens")] == [shorter]
    assert spans
    assert all(before[1] <= after[0] <= after[1] for before, after in pairwise(spans))
    requests = [rank.daemon.clock_requests.get(timeout=WAIT_LIMIT_S) for _ in range(num_requests)]
    assert [sent.request.sm_clock_mhz for sent in requests] == [900, 1200] * (num_requests // 2)
    assert rank.client.total_errors == 0


def test_iterations_are_timed_for_another_daemon_and_for_one_that_does_not_know_of_others(rank: ThinnedRank) -> None:
    rank.settle()
    rank.daemon.takes_untimed = False
    wait_until(lambda: is_timed(rank.run()))
    for _ in range(20):
        assert is_timed(rank.run())
    rank.daemon.takes_untimed = True
    wait_until(lambda: not is_timed(rank.run()))
    before = rank.client.rank_token
    rank.daemon.tokens = {"other": 0}  # a restarted one gives other tokens, and has lost a report

    wait_until(lambda: bool(rank.run(is_reported=False)) and rank.client.rank_token not in {before, None})
    first = rank.client.iteration_index + 1
    for _ in range(NEW_ITERATIONS - 3):
        rank.run(is_reported=False)
    newest_index = -1
    while newest_index < rank.client.iteration_index - 1:
        newest = rank.daemon.reports.get(timeout=WAIT_LIMIT_S)
        newest_index = newest["iteration_index"]
        assert is_timed(newest) or newest_index < first


def test_a_loop_that_waits_for_data_in_an_instruction_of_its_own_is_always_timed(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuenergyd.client.thinning.MOST_COST_RATIO", 0.0)
    daemon.takes_untimed = True
    order: tuple[OrderRow, ...] = (("F", 0, 0), ("B", 0, 0), ("D", 0, 0))
    client = RankClient(RANK, order=order, socket_path=daemon.socket_path)
    for _ in range(40):
        client.begin_iteration()
        for row in order:
            slot = client.begin_instruction(*row)
            if row[0] != "D":
                client.end_instruction(slot)
        client.end_iteration()
    client.release()

    reports = [daemon.reports.get(timeout=WAIT_LIMIT_S) for _ in range(30)]
    assert all(len(report["instructions"]) == len(order) for report in reports)


def test_replays_of_captured_graphs_are_always_timed(daemon: FakeDaemon) -> None:
    device = VirtualDevice()
    recorder = DeviceRecorder(device, 8, sleep=device.sleep, mono_s=lambda: 0.0)
    client = RankClient(RANK, order=ORDER, socket_path=daemon.socket_path, timer=recorder)
    with device.capture() as graph:
        assert client.begin_capture()
        for row in ORDER:
            client.end_instruction(client.begin_instruction(*row))
        captured = client.end_capture()
    assert captured is not None
    client.begin_iteration()
    client._begun = []
    client.follow_replay(captured)
    device.replay(graph)
    client.end_iteration()
    _, _, _, _, is_in_order, *_ = client._ended or pytest.fail("not recorded")
    client.release(shall_wait=False)

    assert is_in_order is None
