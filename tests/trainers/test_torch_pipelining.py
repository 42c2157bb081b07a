"""An attached torch pipeline on four gloo processes: order, losses, plans, detaching, failures."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # noqa: E402  after the skip

from gpuenergyd.core.pipeline.graph import one_forward_one_backward  # noqa: E402
from gpuenergyd.core.pipeline.schedules import make_schedule  # noqa: E402
from gpuenergyd_sim.driver.host import SimulatedHost  # noqa: E402
from gpuenergyd_sim.driver.world_kinds import WorldKind  # noqa: E402
from gpuenergyd_sim.training.gpt_model import build_stage, loss_of, make_batch, simulated_works  # noqa: E402
from gpuenergyd_sim.training.simulated_stage import simulate  # noqa: E402
from gpuenergyd_trainers.joining.handle import Handle, WrappedAttribute  # noqa: E402
from gpuenergyd_trainers.torch_inflight import Schedule1F1BExtraInflight  # noqa: E402
from gpuenergyd_trainers.torch_pipelining import PipelineHandle, attach  # noqa: E402
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon, drain, plan_slice  # noqa: E402, drain
from tests.support.thorough import thorough  # noqa: E402
from tests.trainers.executed import num_inflight  # noqa: E402
from tests.trainers.pipeline_processes import Pace, run_ranks  # noqa: E402

pytestmark = pytest.mark.torch

NUM_RANKS = 4
NUM_MICROBATCHES = 6
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Training:
    """One rank of the demo's model under a schedule, with an independent trace of its instructions."""

    def __init__(self, rank: int, schedule_name: str, extra_inflight: tuple[int, ...] = ()) -> None:
        self.rank = rank
        self.model = build_stage(rank, NUM_RANKS, seed=5)
        self.stage = PipelineStage(self.model, rank, NUM_RANKS, torch.device("cpu"))
        self.schedule: Any
        if extra_inflight:
            self.schedule = Schedule1F1BExtraInflight(
                self.stage, NUM_MICROBATCHES, extra_inflight=extra_inflight, loss_fn=loss_of
            )
        else:
            self.schedule = SCHEDULES[schedule_name](self.stage, NUM_MICROBATCHES, loss_fn=loss_of)
        self.peak_inflight = 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.trace: list[tuple[str, int, int]] = []
        self.num_steps = 0
        for name, kind in (("forward_one_chunk", "F"), ("backward_one_chunk", "B")):
            WrappedAttribute(self.stage, name, self._tracing(kind))

    def _tracing(self, kind: str) -> Any:
        def make(compute: Any) -> Any:
            def traced(chunk_id: int, *args: Any, **kwargs: Any) -> Any:
                self.trace.append((kind, chunk_id, 0))
                result = compute(chunk_id, *args, **kwargs)
                self.peak_inflight = max(self.peak_inflight, num_inflight(self.stage))
                return result

            return traced

        return make

    def _call(self, run: Any) -> list[str]:
        inputs, targets = make_batch(self.num_steps, NUM_MICROBATCHES, seed=5)
        losses: list[Any] = []
        is_last = self.rank == NUM_RANKS - 1
        run(*((inputs,) if self.rank == 0 else ()), **({"target": targets, "losses": losses} if is_last else {}))
        return [float(loss.detach()).hex() for loss in losses]

    def step(self) -> list[str]:
        """Train one iteration; return the exact losses of the microbatches."""
        self.trace.clear()
        losses = self._call(self.schedule.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
        return losses

    def evaluate(self) -> list[str]:
        """Run the forwards; return the exact losses of the microbatches."""
        peak_in_training = self.peak_inflight
        with torch.no_grad():
            losses = self._call(self.schedule.eval)
        self.peak_inflight = peak_in_training
        return losses


def join(training: Training, socket_path: str, **overrides: Any) -> Handle:
    keywords: dict[str, Any] = {"job": "test", "run_key": "r", "gpu_uuid": f"GPU-{training.rank}", **overrides}
    return attach(training.schedule, socket_path=socket_path, **keywords)


def reports_of(daemon: FakeDaemon) -> dict[int, list[dict[str, Any]]]:
    by_rank: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(NUM_RANKS)}
    for report in drain(daemon.reports):
        by_rank[daemon.tokens[report["rank_token"]]].append(report)
    return by_rank


def train_alone(rank: int, schedule_name: str, absent_path: str | None, num_steps: int) -> Any:
    training = Training(rank, schedule_name)
    if absent_path is not None:
        join(training, absent_path)
    return [training.step() for _ in range(num_steps)]


def train_joined(rank: int, schedule_name: str, socket_path: str, num_steps: int) -> Any:
    training = Training(rank, schedule_name)
    handle = join(training, socket_path)
    pace = Pace(handle, rank, socket_path)
    losses, traces = [], []
    for _ in range(num_steps):
        losses.append(training.step())
        traces.append(tuple(training.trace))
        pace.keep()
    result = losses, traces, handle.num_errors, handle.is_attached
    handle.detach()
    pace.finish()
    return result


@pytest.mark.parametrize("schedule_name", ["1f1b", *thorough("gpipe")])
def test_the_reported_order_is_the_executed_one_and_losses_are_unchanged(
    tmp_path: Path, daemon: FakeDaemon, schedule_name: str
) -> None:
    alone_folder, absent_folder = tmp_path / "alone", tmp_path / "absent"
    alone_folder.mkdir()
    absent_folder.mkdir()
    alone = run_ranks(NUM_RANKS, alone_folder, train_alone, schedule_name, None, 5)
    absent = run_ranks(NUM_RANKS, absent_folder, train_alone, schedule_name, str(tmp_path / "nobody.sock"), 5)
    joined = run_ranks(NUM_RANKS, tmp_path, train_joined, schedule_name, daemon.socket_path, 5)

    expected = make_schedule(schedule_name, NUM_RANKS, NUM_MICROBATCHES)
    registered = {registration["pp_rank"]: registration for registration in drain(daemon.registrations)}
    reports = reports_of(daemon)
    assert [result[0] for result in joined] == alone == absent
    assert all(losses for losses in joined[-1][0])
    for rank, (_, traces, num_errors, is_attached) in enumerate(joined):
        order = [(str(i.kind), i.microbatch_index, 0) for i in expected.orders[rank]]
        assert is_attached
        assert num_errors == 0
        assert [tuple(row) for row in registered[rank]["order"]] == order
        assert registered[rank]["schedule_name"] == schedule_name
        # The first step, in which torch infers shapes, is no iteration.
        assert [report["iteration_index"] for report in reports[rank]] == [0, 1, 2, 3]
        for report, trace in zip(reports[rank], traces[1:], strict=True):
            assert [tuple(row[:3]) for row in report["instructions"]] == list(trace) == order


def follow(rank: int, socket_path: str) -> Any:
    training = Training(rank, "1f1b")
    handle = join(training, socket_path)
    pace = Pace(handle, rank, socket_path)
    for _ in range(10):
        training.step()
        pace.keep()
    handle.detach()
    pace.finish()


def test_every_rank_follows_its_own_slice_of_a_plan(tmp_path: Path, daemon: FakeDaemon) -> None:
    for rank in range(NUM_RANKS):
        daemon.plans_by_pp_rank[rank] = [plan_slice(1, 4, [("F", 0, 0, 0, 1000 + rank), ("B", 5, 0, 0, 1300 + rank)])]
    run_ranks(NUM_RANKS, tmp_path, follow, daemon.socket_path)

    reports = reports_of(daemon)
    epochs = {rank: [report["plan_epoch"] for report in reports[rank]] for rank in range(NUM_RANKS)}
    num_followed = {rank: sum(epochs[rank]) for rank in range(NUM_RANKS)}
    requests = [daemon.clock_requests.get(timeout=WAIT_LIMIT_S) for _ in range(2 * sum(num_followed.values()))]
    assert daemon.clock_requests.empty()
    for rank in range(NUM_RANKS):
        tokens = {bytes.fromhex(token) for token, owner in daemon.tokens.items() if owner == rank}
        clocks = [sent.request.sm_clock_mhz for sent in requests if sent.token in tokens]
        assert epochs[rank] == sorted(epochs[rank])
        assert epochs[rank][:4] == [0, 0, 0, 0]
        assert num_followed[rank] > 0
        assert clocks == [1000 + rank, 1300 + rank] * num_followed[rank]


def detach_and_compare(rank: int, socket_path: str) -> Any:
    training = Training(rank, "1f1b")
    objects = (training.schedule, training.stage)
    before = [dict(vars(target)) for target in objects]
    handle = join(training, socket_path)
    changed = [
        {name for name, value in vars(target).items() if old.get(name) is not value}
        for target, old in zip(objects, before, strict=True)
    ]
    handle.detach()
    same = [
        vars(target).keys() == old.keys() and all(vars(target)[name] is old[name] for name in old)
        for target, old in zip(objects, before, strict=True)
    ]
    return changed, same, handle.is_attached


def test_detaching_restores_schedule_and_stage_exactly(tmp_path: Path) -> None:
    results = run_ranks(NUM_RANKS, tmp_path, detach_and_compare, str(tmp_path / "nobody.sock"))

    for rank, (changed, same, is_attached) in enumerate(results):
        assert changed[0] == ({"step", "_loss_fn"} if rank == NUM_RANKS - 1 else {"step"})
        assert changed[1] == {"forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"}
        assert same == [True, True]
        assert not is_attached


def evaluate_between(rank: int, socket_path: str | None) -> Any:
    training = Training(rank, "1f1b")
    handle = join(training, socket_path) if socket_path else Handle()
    pace = Pace(handle, rank, socket_path)
    losses = []
    for run in (training.step,) * 3 + (training.evaluate,) + (training.step,) * 3:
        losses.append(run())
        if socket_path is not None:
            pace.keep()
    handle.detach()
    if socket_path is not None:
        pace.finish()
    return losses


@pytest.mark.thorough
def test_an_evaluation_is_not_an_iteration(tmp_path: Path, daemon: FakeDaemon) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    plain = run_ranks(NUM_RANKS, alone, evaluate_between, None)
    joined = run_ranks(NUM_RANKS, tmp_path, evaluate_between, daemon.socket_path)

    assert joined == plain
    for reports in reports_of(daemon).values():
        assert [len(report["instructions"]) for report in reports] == [2 * NUM_MICROBATCHES] * 4
        assert [report["next_begin_mono_ns"] == 0 for report in reports] == [False, True, False, True]


def fail_in_the_model(rank: int, socket_path: str) -> Any:
    training = Training(rank, "1f1b")
    handle = join(training, socket_path)
    training.step()
    if rank == 0:
        # Nobody else is waiting: the others stop after the step, as rank 0 fails before it sends anything.
        def fail(*_: Any) -> None:
            raise ArithmeticError("the model's own failure")

        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr(training.model, "forward", fail)
        with pytest.raises(RuntimeError) as raised:
            training.step()
        assert isinstance(raised.value.__cause__, ArithmeticError)
    handle.detach()
    return handle.num_errors


def test_an_exception_of_the_model_passes_through(tmp_path: Path, daemon: FakeDaemon) -> None:
    assert run_ranks(NUM_RANKS, tmp_path, fail_in_the_model, daemon.socket_path) == [0] * NUM_RANKS


def run_another_order(rank: int, socket_path: str) -> Any:
    training = Training(rank, "gpipe")
    type(training.schedule).__name__ = "Schedule1F1B"  # the class claims an order that it does not run
    handle = join(training, socket_path)
    type(training.schedule).__name__ = "ScheduleGPipe"
    losses = [training.step() for _ in range(4)]
    return losses, handle.is_attached


def test_a_deviation_from_the_registered_order_only_stops_following_plans(tmp_path: Path, daemon: FakeDaemon) -> None:
    results = run_ranks(NUM_RANKS, tmp_path, run_another_order, daemon.socket_path)

    assert all(len(losses) == 4 for losses, _ in results)
    assert [is_attached for _, is_attached in results] == [False] * NUM_RANKS
    assert daemon.releases.qsize() == NUM_RANKS
    assert all(len(reports) <= 1 for reports in reports_of(daemon).values())


def hold_on_simulated_gpu(rank: int, socket_path: str, world: Path) -> Any:
    training = Training(rank, "1f1b")
    host = SimulatedHost.open(world)
    gpu_uuid = host.identities()[rank].gpu_uuid
    works = simulated_works(rank, NUM_RANKS, duration_scale=0.1)
    simulated = simulate(training.stage, host, gpu_uuid, works)
    handle = join(training, socket_path, gpu_uuid=gpu_uuid)
    before_j = host.exact_energy_j(gpu_uuid)
    pace = Pace(handle, rank, socket_path)
    losses = []
    for _ in range(3):
        losses.append(training.step())
        pace.keep()
    spent_j = host.exact_energy_j(gpu_uuid) - before_j
    handle.detach()
    simulated.detach()
    restored = [name for name in vars(training.stage) if name == "backward_weight_one_chunk"]
    host.close()
    return losses, spent_j, restored, works["F"].memory_time_s + works["F"].compute_time_s


@pytest.mark.thorough
def test_a_recorded_instruction_includes_the_simulated_duration(tmp_path: Path, daemon: FakeDaemon) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    world = tmp_path / "world"
    SimulatedHost.create(world, ["a100-sxm"] * NUM_RANKS, seed=1, kind=WorldKind.UNKIND).close()
    plain = run_ranks(NUM_RANKS, alone, train_alone, "1f1b", None, 3)
    simulated = run_ranks(NUM_RANKS, tmp_path, hold_on_simulated_gpu, daemon.socket_path, world)

    reports = reports_of(daemon)
    for rank, (losses, spent_j, restored, forward_s) in enumerate(simulated):
        assert losses == plain[rank]
        assert spent_j > 0
        assert restored == []
        forwards = [row for report in reports[rank] for row in report["instructions"] if row[0] == "F"]
        # Durations vary by a few tenths of a percent by the world's seed; none may be shorter than that.
        assert all(end - begin >= 0.97 * forward_s * 1e9 for *_, begin, end in forwards)


def test_an_unknown_object_is_not_attached_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Foreign:
        pass

    handle = attach(Foreign(), job="test", gpu_uuid="GPU-0")

    assert not handle.is_attached
    handle.detach()
    assert len([record for record in caplog.records if "cannot be joined" in record.message]) == 1


EXTRA_INFLIGHT = (2, 1, 1, 0)


def train_with_extra_inflight(rank: int, extra_inflight: tuple[int, ...], socket_path: str) -> Any:
    training = Training(rank, "1f1b", extra_inflight)
    handle = join(training, socket_path)
    losses = [training.step() for _ in range(3)]
    losses.append(training.evaluate())
    losses += [training.step() for _ in range(2)]
    order = tuple(training.trace)
    is_attached = handle.is_attached
    handle.detach()
    return losses, order, training.peak_inflight, is_attached


@pytest.mark.thorough
def test_extra_inflight_changes_order_and_memory_as_planned_and_losses_are_unchanged(
    tmp_path: Path, daemon: FakeDaemon
) -> None:
    plain_folder = tmp_path / "plain"
    plain_folder.mkdir()
    nobody = str(tmp_path / "nobody.sock")
    plain = run_ranks(NUM_RANKS, plain_folder, train_with_extra_inflight, (), nobody)
    extra = run_ranks(NUM_RANKS, tmp_path, train_with_extra_inflight, EXTRA_INFLIGHT, daemon.socket_path)

    planned = one_forward_one_backward(NUM_RANKS, NUM_MICROBATCHES, EXTRA_INFLIGHT)
    registered = {registration["pp_rank"]: registration for registration in drain(daemon.registrations)}
    assert [result[0] for result in extra] == [result[0] for result in plain]
    for rank, (_, order, peak_inflight, is_attached) in enumerate(extra):
        assert is_attached
        assert list(order) == [(str(i.kind), i.microbatch_index, 0) for i in planned.orders[rank]]
        assert [tuple(row) for row in registered[rank]["order"]] == list(order)
        assert peak_inflight == planned.peak_inflight(rank)
    assert [result[2] for result in extra] > [result[2] for result in plain]


@pytest.mark.parametrize("name", ["fwd_cache", "_forward_chunk_states"])
def test_microbatches_in_flight_are_counted_with_torch_before_and_since_2_15(name: str) -> None:
    assert num_inflight(SimpleNamespace(**{name: {0: "activations", 3: "activations"}})) == 2


class WatchedRank:
    """A rank that says whether its instructions are to be marked."""

    def __init__(self) -> None:
        self.is_active, self.sees = True, True
        self.marked: list[tuple[str, int, int]] = []
        self.requested: list[tuple[str, int, int]] = []
        self.client = SimpleNamespace(
            may_reorder=False,
            num_left=0,
            num_in_full=1,
            due={},
            begin_instruction=self._begin,
            request_clock=lambda *row: self.requested.append(row),
            end_instruction=lambda _slot: None,
            assume_order=lambda: None,
            total_errors=0,
        )

    def _begin(self, *row: Any) -> int:
        self.marked.append(row)
        return 0

    def begin_step(self) -> None: ...

    def end_step(self) -> None: ...

    def sees_instructions(self) -> bool:
        return self.sees


def test_a_stage_is_wrapped_only_where_its_instructions_matter_and_each_is_marked_once() -> None:
    stage = SimpleNamespace(
        stage_index=0,
        is_last=False,
        has_backward=True,
        forward_one_chunk=lambda microbatch: microbatch,
        backward_one_chunk=lambda _microbatch: None,
        backward_weight_one_chunk=lambda _microbatch: None,
    )
    schedule = SimpleNamespace(step=lambda *, arg_mbs=(3,): stage.forward_one_chunk(*arg_mbs))
    plain, plain_backward, rank = stage.forward_one_chunk, stage.backward_one_chunk, WatchedRank()
    handle = PipelineHandle(schedule, [stage], rank, 1, None)  # type: ignore[arg-type]  # a double
    first = schedule.step(arg_mbs=[3])  # as torchtitan passes what it has split itself
    rank.sees = False
    schedule.step()
    is_plain = stage.forward_one_chunk is plain
    rank.client.due = {("F", 3, 0): "a request"}
    schedule.step()
    is_backward_plain, is_forward_plain = stage.backward_one_chunk is plain_backward, stage.forward_one_chunk is plain
    rank.client.due = {}
    schedule.step()
    replaced = stage.forward_one_chunk = lambda microbatch: plain(microbatch) + 1
    second = schedule.step()
    rank.sees = True
    third = schedule.step()
    wrapped = stage.forward_one_chunk
    stage.forward_one_chunk = partial(wrapped)  # wraps what we have put in
    rank.sees = False
    schedule.step()
    rank.sees = True
    schedule.step()

    assert (first, second, third) == (3, 4, 4)
    assert is_plain
    assert (is_backward_plain, is_forward_plain) == (True, False)
    assert replaced is not wrapped
    assert rank.marked == [("F", 3, 0)] * 4
    assert rank.requested == [("F", 3, 0)]
    assert handle.num_errors == 0
