"""Other orders than 1F1B in a running torch pipeline: equal losses and gradients, one boundary, refusals."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # noqa: E402  after the skip

from gpuenergyd.core.pipeline.graph import Schedule, one_forward_one_backward  # noqa: E402
from gpuenergyd.core.pipeline.reorder import check_orders, split_in_place  # noqa: E402
from gpuenergyd_policies.planning.orders.shape import RankShape, shaped_schedule  # noqa: E402
from gpuenergyd_sim.training.gpt_model import build_stage, loss_of, make_batch  # noqa: E402
from gpuenergyd_trainers.joining.handle import Handle, WrappedAttribute  # noqa: E402
from gpuenergyd_trainers.joining.memory import CudaMemory, MicrobatchMemory  # noqa: E402
from gpuenergyd_trainers.joining.ordered_rank import order_rows  # noqa: E402
from gpuenergyd_trainers.joining.place import Coordinate, Place, given_place  # noqa: E402
from gpuenergyd_trainers.torch_pipelining import attach  # noqa: E402
from gpuenergyd_trainers.torch_reorder import ReorderedSteps, exchange_blocks, reorder_refusal  # noqa: E402
from tests.client.fake_daemon import FakeDaemon, drain, plan_slice  # noqa: E402, drain
from tests.support.simulated_memory import SimulatedMemory  # noqa: E402
from tests.support.thorough import thorough  # noqa: E402
from tests.trainers.executed import TracedStage, share_trace  # noqa: E402
from tests.trainers.pipeline_processes import Pace, run_ranks  # noqa: E402

pytestmark = pytest.mark.torch

NUM_RANKS, NUM_MICROBATCHES, NUM_STEPS = 4, 6, 12
PLAIN = one_forward_one_backward(NUM_RANKS, NUM_MICROBATCHES)
SPLIT = split_in_place(PLAIN)
DELAYED = shaped_schedule(tuple(RankShape(NUM_RANKS - r, NUM_RANKS) for r in range(NUM_RANKS)), NUM_MICROBATCHES)
PARTLY = shaped_schedule(
    tuple(RankShape(NUM_RANKS - r, NUM_RANKS - r, is_split=r > 0) for r in range(NUM_RANKS)), NUM_MICROBATCHES
)
WEIGHTS_FIRST = shaped_schedule(
    tuple(RankShape(NUM_RANKS - r, NUM_RANKS + 1, runs_weight_first=True) for r in range(NUM_RANKS)), NUM_MICROBATCHES
)
ORDERS: tuple[Schedule | None, ...] = (None, SPLIT, DELAYED, PARTLY, WEIGHTS_FIRST)


class Training:
    """One rank of the demo's model under torch's 1F1B."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model = build_stage(rank, NUM_RANKS, seed=5)
        self.stage = TracedStage(self.model, rank, NUM_RANKS, torch.device("cpu"))
        self.trace = share_trace([self.stage])
        self.schedule = Schedule1F1B(self.stage, NUM_MICROBATCHES, loss_fn=loss_of)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.num_steps = 0

    def step(self) -> tuple[list[str], list[bytes]]:
        """Train one iteration; return the exact losses and gradients."""
        self.trace.clear()
        inputs, targets = make_batch(self.num_steps, NUM_MICROBATCHES, seed=5)
        losses: list[Any] = []
        is_last = self.rank == NUM_RANKS - 1
        keywords: dict[str, Any] = {"target": targets, "losses": losses} if is_last else {}
        self.schedule.step(*((inputs,) if self.rank == 0 else ()), **keywords)
        gradients = [
            bytes(parameter.grad.numpy()) for parameter in self.model.parameters() if parameter.grad is not None
        ]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
        return [float(loss.detach()).hex() for loss in losses], gradients


def rows_of(schedule: Schedule | None, rank: int) -> Any:
    return () if schedule is None else order_rows(schedule, rank)


def train(rank: int, offset_by_rank: int | None) -> Any:
    """Run all orders in turn; with an offset, each rank is at another place of the turn. None: torch's own 1F1B."""
    training = Training(rank)
    now: list[Any] = [()]
    if offset_by_rank is not None:
        steps = ReorderedSteps(training.schedule, training.stage, lambda: now[0], lambda _: None)
        WrappedAttribute(training.schedule, "_step_microbatches", steps.around)
    found, traces = [], []
    for k in range(NUM_STEPS):
        if offset_by_rank is not None:
            now[0] = rows_of(ORDERS[(k + offset_by_rank * rank) % len(ORDERS)], rank)
        found.append(training.step())
        traces.append((now[0] or tuple(order_rows(PLAIN, rank)), tuple(training.trace)))
    return found, traces


def test_losses_and_gradients_are_equal_bit_for_bit_in_every_order_and_mixture_of_orders(tmp_path: Path) -> None:
    for schedule in ORDERS:
        if schedule is not None:
            check_orders(schedule.orders, PLAIN)
    found = []
    for name, offset in (("plain", None), ("together", 0), ("apart", 1)):
        folder = tmp_path / name
        folder.mkdir()
        found.append(run_ranks(NUM_RANKS, folder, train, offset))

    plain, *others = found
    for other in others:
        for rank in range(NUM_RANKS):
            assert other[rank][0] == plain[rank][0]
            assert all(planned == ran for planned, ran in other[rank][1])
    assert plain[-1][0][0][0] != plain[-1][0][-1][0]


# --- under a daemon ---


def join(training: Training, socket_path: str, **overrides: Any) -> Handle:
    keywords: dict[str, Any] = {"job": "test", "run_key": "r", "gpu_uuid": f"GPU-{training.rank}", **overrides}
    return attach(training.schedule, socket_path=socket_path, **keywords)


def follow(rank: int, socket_path: str, allow: bool) -> Any:  # noqa: FBT001  passed through processes
    training = Training(rank)
    memory = SimulatedMemory(training.stage, capacity_bytes=10**9)
    handle = join(training, socket_path, allow_reorder=allow, memory=memory)
    pace = Pace(handle, rank, socket_path)
    found, kinds = [], []
    for _ in range(14):
        found.append(training.step())
        kinds.append("".join(sorted({kind for kind, *_ in training.trace})))
        pace.keep()
    result = found, kinds, handle.num_errors, handle.is_attached
    handle.detach()
    pace.finish()
    return result


@pytest.mark.parametrize("allow", [True, *thorough(False)])
def test_all_ranks_take_a_plans_order_at_its_iteration_and_leave_it_again(tmp_path: Path, allow: bool) -> None:  # noqa: FBT001
    with FakeDaemon(tmp_path) as daemon:
        for rank in range(NUM_RANKS):
            there = {**plan_slice(1, 4, []), "order": rows_of(DELAYED, rank) if allow else []}
            daemon.plans_by_pp_rank[rank] = [there, plan_slice(2, 9, [])]
        ranks = run_ranks(NUM_RANKS, tmp_path, follow, daemon.socket_path, allow)
        registrations = drain(daemon.registrations)
        reports = [report for report in drain(daemon.reports) if daemon.tokens[report["rank_token"]] == 0]

    alone_folder = tmp_path / "alone"
    alone_folder.mkdir()
    alone = run_ranks(NUM_RANKS, alone_folder, train, None)
    for rank, (found, kinds, num_errors, is_attached) in enumerate(ranks):
        assert found[:NUM_STEPS] == alone[rank][0]
        assert (num_errors, is_attached) == (0, True)
        # The first step, in which torch infers shapes, is no iteration.
        expected = ["BF"] * 5 + ["FIW" if allow else "BF"] * 5 + ["BF"] * 4
        assert kinds == expected
    assert {registration["allow_reorder"] for registration in registrations} == {allow}
    assert {registration["reorder_refusal"] for registration in registrations} == {""}
    sizes = [report["memory_bytes"] for report in reports if report["memory_bytes"]]
    assert all(capacity == 10**9 and 0 < free < capacity for free, _, capacity in sizes)
    assert all(microbatch > 0 for _, microbatch, _ in sizes)


# --- refusals ---


def do_nothing(*_: Any, **__: Any) -> None:
    """Take any arguments."""


def make_stage(module: Any = None, **attributes: Any) -> Any:
    methods = dict.fromkeys(
        ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk", "get_fwd_recv_ops",
         "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops", "perform_reduce_grad"),
        do_nothing,
    )  # fmt: skip
    return SimpleNamespace(submod=torch.nn.Linear(2, 2) if module is None else module, **{**methods, **attributes})


def make_schedule(name: str = "Schedule1F1B", *, without: str = "") -> Any:
    names = ("_step_microbatches", "_check_inputs", "_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss",
             "_update_losses")  # fmt: skip
    methods = {method: do_nothing for method in names if method != without}
    return type(name, (SimpleNamespace,), {})(_n_microbatches=8, **methods)


def tied() -> Any:
    """Return a stage that uses one parameter twice."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[1].weight = module[0].weight
    return module


def hooked() -> Any:
    module = torch.nn.Linear(2, 2)
    module.weight.register_post_accumulate_grad_hook(lambda _: None)
    return module


FOUR = given_place(pp_rank=0, num_pp_ranks=4)


@pytest.mark.parametrize(
    ("schedule", "stages", "place", "why"),
    [
        (make_schedule(), [make_stage()], FOUR, ""),
        (make_schedule("ScheduleGPipe"), [make_stage()], FOUR, "only that of Schedule1F1B"),
        (make_schedule(), [make_stage(), make_stage()], FOUR, "only that of Schedule1F1B"),
        (make_schedule(without="_update_losses"), [make_stage()], FOUR, "Schedule1F1B._update_losses of this version"),
        (make_schedule(), [make_stage(backward_one_chunk=lambda _: None)], FOUR, "takes other arguments"),
        (make_schedule(), [make_stage(dw_builder=print)], FOUR, "dw_builder"),
        (make_schedule(), [make_stage()], given_place(pp_rank=0, num_pp_ranks=1), "one stage"),
        (make_schedule(), [make_stage()], given_place(pp_rank=0, num_pp_ranks=9), "fewer microbatches"),
        (make_schedule(), [make_stage()], Place(pipeline=Coordinate(0, 4), is_across_hosts=True), ""),
        (make_schedule(), [make_stage()], Place(pipeline=Coordinate(0, 4), data=Coordinate(0, 2)), ""),
        (make_schedule(), [make_stage()], given_place(pp_rank=0, num_pp_ranks=4, num_tp_ranks=2), "several ranks"),
        (make_schedule(), [make_stage(tied())], FOUR, "shared within a stage"),
        (make_schedule(), [make_stage(hooked())], FOUR, "gradient hooks"),
    ],
)
def test_a_schedule_whose_sums_or_messages_might_change_is_refused(
    schedule: Any, stages: Sequence[Any], place: Place, why: str
) -> None:
    refusal = reorder_refusal(schedule, stages, place)
    assert why in refusal
    assert bool(refusal) == bool(why)


def test_real_schedules_are_known(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        stage = PipelineStage(torch.nn.Linear(2, 2), 0, 1, torch.device("cpu"))
        place = given_place(pp_rank=0, num_pp_ranks=1)
        assert "one stage" in reorder_refusal(Schedule1F1B(stage, 2), [stage], place)
        assert "ScheduleGPipe" in reorder_refusal(ScheduleGPipe(stage, 2), [stage], place)
    finally:
        torch.distributed.destroy_process_group()


def test_after_running_out_of_memory_no_order_is_run_again() -> None:
    refusals: list[str] = []

    def run_out_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    schedule = SimpleNamespace(_check_inputs=run_out_of_memory)
    steps = ReorderedSteps(schedule, None, lambda: (("F", 0, 0),), refusals.append)
    step = steps.around(lambda *_: "plain")
    with pytest.raises(torch.OutOfMemoryError):
        step()
    assert step() == "plain"
    assert refusals == ["a GPU ran out of memory in another order than 1F1B"]


def test_weight_gradients_follow_the_exchange_before_them() -> None:
    assert exchange_blocks([("F", 0, 0), ("I", 0, 0), ("W", 0, 0), ("F", 1, 0), ("B", 1, 0)]) == [
        (("F", 0, 0), []),
        (("I", 0, 0), [0]),
        (("F", 1, 0), []),
        (("B", 1, 0), []),
    ]


# --- memory ---


def test_memory_is_measured_in_the_first_iterations_and_in_every_one_in_another_order() -> None:
    class Meter:
        capacity_bytes = 100
        allocated = 0

        def allocated_bytes(self) -> int:
            return self.allocated

        def free_bytes(self) -> int:
            return 60

    meter = Meter()
    memory = MicrobatchMemory(meter)
    for _ in range(MicrobatchMemory.MEASURED_ITERATIONS):
        assert memory.is_measuring
        for size in (7, 5):
            memory.begin_forward()
            meter.allocated += size
            memory.end_forward()
        assert memory.end_iteration(is_reordered=False) == (60, 7, 100)
    assert not memory.is_measuring
    assert memory.end_iteration(is_reordered=False) is None
    assert memory.end_iteration(is_reordered=True) == (60, 7, 100)


def test_split_backwards_of_a_simulated_gpu_leave_no_memory_behind() -> None:
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight  # noqa: PLC0415

    model = build_stage(1, NUM_RANKS, seed=5)
    stage = SimpleNamespace(submod=model, forward_one_chunk=model.forward)
    memory = SimulatedMemory(stage, capacity_bytes=10**6)
    peaks = []
    for _ in range(3):
        values = torch.randn(2, 16, 32, requires_grad=True)
        output = stage.forward_one_chunk(values)
        gradients = [torch.randn_like(output)]
        _, groups = stage_backward_input([output], gradients, [values], model.parameters())
        assert memory.allocated_bytes() > 0
        stage_backward_weight(model.parameters(), groups)
        assert memory.allocated_bytes() == 0
        peaks.append(memory.peak_bytes)
    assert len(set(peaks)) == 1
    assert memory.free_bytes() == 10**6 - memory.peak_bytes


def test_free_cuda_memory_is_what_nobody_reserved_and_what_this_process_reserved_beyond_its_peak() -> None:
    cuda = SimpleNamespace(
        mem_get_info=lambda _device: (30, 80),
        memory_allocated=lambda _device: 12,
        memory_reserved=lambda _device: 40,
        max_memory_allocated=lambda _device: 25,
    )
    memory = CudaMemory(SimpleNamespace(cuda=cuda), "cuda:0")
    assert (memory.capacity_bytes, memory.allocated_bytes(), memory.free_bytes()) == (80, 12, 45)
