"""Phases of plain loops, found by torch's own hooks on a virtual device that runs behind the program."""

import copy
import gc
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gpuenergyd  # noqa: E402  after the skip
from gpuenergyd.client.loop import LOOP_RANK, LoopJob  # noqa: E402  as above
from gpuenergyd.client.phases.marks import MAX_PHASES  # noqa: E402  as above
from gpuenergyd.client.phases.step_cycle import STEPS_WITHOUT_CYCLE, StepCycle  # noqa: E402  as above
from gpuenergyd.client.timing.device_recorder import DeviceRecorder  # noqa: E402  as above
from gpuenergyd_trainers.loop import UnmarkedLoop  # noqa: E402  as above
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon, plan_slice  # noqa: E402  as above
from tests.support.virtual_device import VirtualDevice  # noqa: E402  as above
from tests.support.waiting import wait_until  # noqa: E402  as above

pytestmark = pytest.mark.torch

F_MS, B_MS, O_MS, D_MS = 50.0, 90.0, 20.0, 30.0
ALL = [("F", 0, 0), ("B", 0, 0), ("C", 0, 0), ("O", 0, 0), ("D", 0, 0)]


@dataclass
class Gpu:
    """The device that the model's phases run on; `log` holds the phases in the order of their launch."""

    device: VirtualDevice
    communication_ms: float = 40.0

    def model(self) -> Any:
        """Return a model whose forward and backward take time on the device."""
        return torch.nn.Sequential(_Timed(self), torch.nn.Linear(4, 4))

    def optimizer(self, model: Any) -> Any:
        """Return an optimizer whose step takes time on the device."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: self.device.work(O_MS))  # torch calls it before ours
        return optimizer


class _Timed(torch.nn.Module):  # type: ignore[name-defined, misc]  # as above
    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, rows: Any) -> Any:
        """Return the scaled rows; the backward takes time, and then waits for other ranks as torch's own does."""
        gpu = self.gpu
        gpu.device.work(F_MS)

        class Scale(torch.autograd.Function):  # type: ignore[name-defined, misc]  # as above
            @staticmethod
            def forward(_context: Any, own: Any, scale: Any) -> Any:
                return own * scale

            @staticmethod
            def backward(_context: Any, gradient: Any) -> Any:
                """Take time, and wait after all gradients are computed."""
                gpu.device.work(B_MS)
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(lambda: gpu.device.work(gpu.communication_ms))
                return None, gradient.sum(0)

        return Scale.apply(rows, self.scale)


@pytest.fixture
def gpu() -> Gpu:
    return Gpu(VirtualDevice())


def joined(daemon: FakeDaemon, gpu: Gpu, **options: Any) -> LoopJob:
    recorder = DeviceRecorder(gpu.device, MAX_PHASES, sleep=gpu.device.sleep, mono_s=lambda: 0.0)
    rank = replace(LOOP_RANK, job_name="loop", gpu_uuid="GPU-1")
    return LoopJob(rank, run_key="1", socket_path=daemon.socket_path, timer=recorder, **options)


def batches() -> Iterator[Any]:
    while True:
        yield torch.ones(2, 4)


def train(
    job: LoopJob,
    gpu: Gpu,
    daemon: FakeDaemon,
    *,
    step: Callable[[Any, Any, Any], None] | None = None,
    model: Any = None,
    marks_iterations: bool = True,
) -> list[tuple[str, int, int]]:
    """Train until the loop has registered; return its phases. The device finishes each iteration before the next."""
    model = gpu.model() if model is None else model
    optimizer = gpu.optimizer(model)
    for number, batch in enumerate(islice(batches(), 40)):
        gpu.device.work(D_MS)
        with job.iteration() if marks_iterations else nullcontext():
            (step or plain_step)(model, optimizer, batch)
        gpu.device.sleep(1.0)
        if not daemon.registrations.empty() or not job._marks._is_learning:
            break
        wait_until(partial(_are_known, job, number))
    return [tuple(row) for row in daemon.registrations.get(timeout=WAIT_LIMIT_S)["order"]]


def _are_known(job: LoopJob, num_iterations: int) -> bool:
    assert job._client is not None
    job._client._timer.read_late()  # no reporter does before the registration
    return len(job._marks._learned) >= num_iterations


def plain_step(model: Any, optimizer: Any, batch: Any) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulating_step(model: Any, optimizer: Any, batch: Any) -> None:
    for _ in range(2):
        model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def closure_step(model: Any, optimizer: Any, batch: Any) -> None:
    """Step as Lightning does: forward and backward run inside the optimizer step."""

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def test_phases_are_found_and_timed_on_the_device(gpu: Gpu, daemon: FakeDaemon) -> None:
    with joined(daemon, gpu) as job:
        assert train(job, gpu, daemon) == ALL


def test_accumulated_microbatches_have_phases_of_their_own(gpu: Gpu, daemon: FakeDaemon) -> None:
    with joined(daemon, gpu) as job:
        order = train(job, gpu, daemon, step=accumulating_step)

    assert order == [("F", 0, 0), ("B", 0, 0), ("C", 0, 0), ("F", 1, 0), ("B", 1, 0), ("C", 1, 0), *ALL[3:]]


def test_phases_are_registered_again_when_most_iterations_run_others(gpu: Gpu, daemon: FakeDaemon) -> None:
    model = gpu.model()
    optimizer, batch = gpu.optimizer(model), torch.ones(2, 4)

    def run(step: Callable[[Any, Any, Any], None], number: int) -> None:
        def body() -> None:
            with job.iteration():
                step(model, optimizer, batch)

        run_iterations(gpu, body, number)

    with joined(daemon, gpu) as job:
        first = train(job, gpu, daemon, step=accumulating_step, model=model)
        for _ in range(20):  # now and then other ones
            run(accumulating_step, 3)
            run(plain_step, 1)
        assert daemon.registrations.empty()
        run(plain_step, 40)
        second = daemon.registrations.get(timeout=WAIT_LIMIT_S)
        run(accumulating_step, 40)
        third = daemon.registrations.get(timeout=WAIT_LIMIT_S)

    assert [tuple(row) for row in second["order"]] == ALL
    assert [tuple(row) for row in third["order"]] == first
    assert [own["num_microbatches"] for own in (second, third)] == [1, 2]
    assert daemon.registrations.empty()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_that_waits_for_others_in_some_iterations_keeps_the_phase_of_that_wait(
    gpu: Gpu, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))

    def step(*own: Any) -> None:
        gpu.communication_ms = 41.0 - gpu.communication_ms
        plain_step(*own)

    with joined(daemon, gpu) as job:
        assert train(job, gpu, daemon, step=step) == [row for row in ALL if num_ranks > 1 or row[0] != "C"]


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("marks_iterations", [False, True])
def test_phases_of_a_model_that_replaces_or_wraps_the_first_are_marked(
    gpu: Gpu, daemon: FakeDaemon, *, is_wrapped: bool, marks_iterations: bool
) -> None:
    with joined(daemon, gpu, cycle=None if marks_iterations else StepCycle()) as job:
        job.join()
        inner = gpu.model()
        model = torch.nn.Sequential(inner)
        assert train(job, gpu, daemon, model=model, marks_iterations=marks_iterations) == ALL
        kept, model = model if is_wrapped else None, torch.nn.Sequential(inner if is_wrapped else gpu.model())
        optimizer = gpu.optimizer(model)
        for batch in islice(batches(), 6):
            with job.iteration() if marks_iterations else nullcontext():
                plain_step(model, optimizer, batch)
            gpu.device.sleep(1.0)
    reports = [daemon.reports.get(timeout=WAIT_LIMIT_S) for _ in range(6)]

    assert [[tuple(row[:3]) for row in report["instructions"]] for report in reports[-2:]] == [ALL, ALL]
    assert (kept is None) is not is_wrapped


def test_a_loop_whose_phases_keep_changing_has_one_instruction(gpu: Gpu, daemon: FakeDaemon) -> None:
    model = gpu.model()
    optimizer, batch = gpu.optimizer(model), torch.ones(2, 4)
    random_numbers = random.Random(1)

    def body() -> None:
        with job.iteration():
            for _ in range(random_numbers.choice((1, 2, 3, 4))):
                model(batch).square().mean().backward()
            optimizer.step()

    with joined(daemon, gpu) as job:
        train(job, gpu, daemon, model=model)
        run_iterations(gpu, body, 80)
        registrations = [daemon.registrations.get(timeout=WAIT_LIMIT_S) for _ in range(daemon.registrations.qsize())]

    assert [own["order"] for own in registrations] == [[["F", 0, 0]]]


def test_a_step_that_runs_forward_and_backward_itself_begins_after_them(gpu: Gpu, daemon: FakeDaemon) -> None:
    with joined(daemon, gpu) as job:
        assert train(job, gpu, daemon, step=closure_step) == ALL


def test_nothing_is_left_behind_by_parameters_in_outputs_and_by_optimizers_that_are_gone(
    gpu: Gpu, daemon: FakeDaemon
) -> None:
    class WithWeight(torch.nn.Module):  # type: ignore[name-defined, misc]  # torch is optional here
        def __init__(self) -> None:
            super().__init__()
            self.inner = gpu.model()

        def forward(self, rows: Any) -> Any:
            """Return the output and a parameter."""
            return self.inner(rows), self.inner[0].scale

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        model(batch)[0].square().mean().backward()
        optimizer.step()
        gpu.optimizer(model).step()  # as a program that makes one for each phase of its training

    model = WithWeight()
    with joined(daemon, gpu) as job:
        train(job, gpu, daemon, step=step, model=model)
        gc.collect()

        assert not model.inner[0].scale._backward_hooks
        assert job.phases is not None
        assert len(job.phases._checkpoint_handles) <= 1


def test_short_phases_get_no_clock_of_their_own(gpu: Gpu, daemon: FakeDaemon) -> None:
    gpu.communication_ms = 1.0
    with joined(daemon, gpu) as job:
        assert train(job, gpu, daemon) == [row for row in ALL if row[0] != "C"]


def test_a_loop_that_marks_nothing_has_the_same_phases(gpu: Gpu, daemon: FakeDaemon) -> None:
    with joined(daemon, gpu, cycle=StepCycle()) as job:
        job.join()
        assert train(job, gpu, daemon, marks_iterations=False) == ALL


@dataclass
class Models:
    """Two models that are trained in turn."""

    gpu: Gpu

    def __post_init__(self) -> None:
        self.generator, self.critic = self.gpu.model(), self.gpu.model()
        self.of_generator, self.of_critic = self.gpu.optimizer(self.generator), self.gpu.optimizer(self.critic)

    def step_critic(self) -> None:
        """Train the critic on what the generator makes."""
        made = self.generator(torch.ones(2, 4)).detach()
        self.critic(made).square().mean().backward()
        self.of_critic.step()

    def step_generator(self) -> None:
        """Train the generator through the critic."""
        self.critic(self.generator(torch.ones(2, 4))).square().mean().backward()
        self.of_generator.step()


def run_iterations(gpu: Gpu, body: Callable[[], None], number: int) -> None:
    for _ in range(number):
        gpu.device.work(D_MS)
        body()
        gpu.device.sleep(2.0)


def durations_ms(daemon: FakeDaemon, number: int) -> list[dict[str, int]]:
    """Return the durations of the instructions of the next reports, by their kinds."""
    reports = [daemon.reports.get(timeout=WAIT_LIMIT_S) for _ in range(number)]
    return [{row[0]: round((row[4] - row[3]) / 1e6) for row in report["instructions"]} for report in reports]


@pytest.mark.parametrize("num_critic_steps", [1, 5])
def test_a_loop_of_two_models_has_one_instruction_per_round(
    gpu: Gpu, daemon: FakeDaemon, num_critic_steps: int
) -> None:
    models = Models(gpu)

    def body() -> None:
        for _ in range(num_critic_steps):
            models.step_critic()
        models.step_generator()

    with joined(daemon, gpu, cycle=StepCycle()) as job:
        job.join()
        run_iterations(gpu, body, 5)
        registrations = [daemon.registrations.get(timeout=WAIT_LIMIT_S)]
        wait_until(lambda: daemon.reports.qsize() >= 2)
        while not daemon.registrations.empty():
            registrations.append(daemon.registrations.get())
        reports = durations_ms(daemon, daemon.reports.qsize())

    critic_ms = 2 * F_MS + B_MS + gpu.communication_ms + O_MS
    generator_ms = 2 * (F_MS + B_MS + gpu.communication_ms) + O_MS
    assert registrations[-1]["order"] == [["F", 0, 0]]
    assert reports[-1] == {"F": round(num_critic_steps * critic_ms + generator_ms)}


def test_a_second_model_that_comes_late_ends_the_phases_of_the_first(gpu: Gpu, daemon: FakeDaemon) -> None:
    with joined(daemon, gpu, cycle=StepCycle()) as job:
        job.join()
        model = gpu.model()
        assert train(job, gpu, daemon, model=model, marks_iterations=False) == ALL
        models = Models(gpu)

        def body() -> None:
            plain_step(model, models.of_critic, torch.ones(2, 4))
            models.step_generator()

        run_iterations(gpu, body, 6)

        assert daemon.registrations.get(timeout=WAIT_LIMIT_S)["order"] == [["F", 0, 0]]


def test_optimizers_of_one_model_that_step_together_leave_its_phases(gpu: Gpu, daemon: FakeDaemon) -> None:
    model = gpu.model()
    others = [gpu.optimizer(part) for part in (model[0], model[1])]

    def step(_model: Any, _optimizer: Any, batch: Any) -> None:
        model(batch).square().mean().backward()
        for optimizer in others:
            optimizer.step()

    with joined(daemon, gpu, cycle=StepCycle()) as job:
        job.join()
        run_iterations(gpu, lambda: step(model, None, torch.ones(2, 4)), 3)
        order = train(job, gpu, daemon, model=model, step=step, marks_iterations=False)

    assert order == [("F", 0, 0), ("B", 0, 0), ("C", 0, 0), ("O", 0, 0), ("O", 1, 0), ("D", 0, 0)]


def test_optimizers_of_one_model_with_backwards_between_their_steps_leave_one_instruction(
    gpu: Gpu, daemon: FakeDaemon
) -> None:
    model = gpu.model()
    actor, critic = (gpu.optimizer(part) for part in (model[0], model[1]))

    def body() -> None:
        for optimizer in (actor, critic):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()

    with joined(daemon, gpu, cycle=StepCycle()) as job:
        job.join()
        run_iterations(gpu, body, 8)

        assert daemon.registrations.get(timeout=WAIT_LIMIT_S)["order"] == [["F", 0, 0]]
        assert durations_ms(daemon, 3)[-1] == {"F": round(2 * (F_MS + B_MS + gpu.communication_ms + O_MS))}


def test_a_loop_whose_forwards_no_hook_sees_has_iterations_from_step_to_step(gpu: Gpu, daemon: FakeDaemon) -> None:
    scale = torch.nn.Parameter(torch.ones(4))
    optimizer = gpu.optimizer(torch.nn.ParameterList([scale]))

    def body() -> None:
        gpu.device.work(F_MS)
        (scale * 2).sum().backward()
        optimizer.step()

    with joined(daemon, gpu, cycle=StepCycle()) as job:
        job.join()
        run_iterations(gpu, body, 6)

        assert daemon.registrations.get(timeout=WAIT_LIMIT_S)["order"] == [["F", 0, 0]]
        daemon.reports.get(timeout=WAIT_LIMIT_S)


def test_a_loop_in_no_regular_turn_is_reported_once(
    gpu: Gpu, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rng, models = random.Random(1), Models(gpu)
    with unmarked_loop(daemon, monkeypatch):
        for _ in range(3 * STEPS_WITHOUT_CYCLE):
            rng.choice([models.of_critic, models.of_generator]).step()

    (line,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert line == (
        "gpuenergyd: this loop is not followed: 2 optimizers step in no regular turn, so its iterations are not known;"
        " mark them with gpuenergyd.job"
    )


@contextmanager
def unmarked_loop(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[UnmarkedLoop]:
    """Have loops joined from their optimizer steps; remove the hooks, which else stay for good."""
    monkeypatch.setenv("GPUENERGYD_SOCKET", daemon.socket_path)
    monkeypatch.setenv("GPUENERGYD_GPU_UUID", "GPU-1")
    monkeypatch.setattr("gpuenergyd_trainers.loop.has_clients", lambda: False)  # those of other tests
    optimizers = sys.modules["torch.optim.optimizer"]
    hooks = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    before = [dict(own) for own in hooks]
    loop = UnmarkedLoop(optimizers)
    try:
        yield loop
    finally:
        if loop._job is not None:
            loop._job.__exit__(None, None, None)
        for own, kept in zip(hooks, before, strict=True):
            own.clear()
            own.update(kept)


def test_a_loop_is_joined_beside_other_hooks_of_its_optimizers(
    gpu: Gpu, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizers, steps = sys.modules["torch.optim.optimizer"], []
    with unmarked_loop(daemon, monkeypatch):
        other = optimizers.register_optimizer_step_post_hook(lambda *_: steps.append(1))
        model = gpu.model()
        optimizer = gpu.optimizer(model)
        try:
            for _ in range(12):
                plain_step(model, optimizer, torch.ones(2, 4))
            registration = daemon.registrations.get(timeout=WAIT_LIMIT_S)
        finally:
            other.remove()

    assert len(steps) == 12
    assert (registration["framework"], registration["order"][0]) == ("loop", ["F", 0, 0])


@pytest.mark.parametrize("num_steps_before", [3, 12])
def test_an_unmarked_loop_leaves_to_a_job_that_is_marked_later(
    gpu: Gpu, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, num_steps_before: int
) -> None:
    model = gpu.model()
    optimizer = gpu.optimizer(model)
    with unmarked_loop(daemon, monkeypatch):
        for _ in range(num_steps_before):
            plain_step(model, optimizer, torch.ones(2, 4))
        if num_steps_before == 12:
            assert daemon.registrations.get(timeout=WAIT_LIMIT_S)["job_name"] != "marked"
        with gpuenergyd.job("marked", gpu_uuid="GPU-1", socket_path=daemon.socket_path, phases=False) as job:
            for _ in range(3):
                with job.iteration():
                    plain_step(model, optimizer, torch.ones(2, 4))

    assert daemon.registrations.get(timeout=WAIT_LIMIT_S)["job_name"] == "marked"
    daemon.releases.get(timeout=WAIT_LIMIT_S)


def test_a_model_that_is_not_trained_is_no_phase(gpu: Gpu, daemon: FakeDaemon) -> None:
    teacher, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def distilling_step(model: Any, optimizer: Any, batch: Any) -> None:
        with torch.no_grad():
            batch = teacher(batch)
        other(batch)  # trained by nobody
        plain_step(model, optimizer, batch)

    with joined(daemon, gpu) as job:
        assert train(job, gpu, daemon, step=distilling_step) == ALL


def test_several_backwards_of_one_forward_leave_one_instruction(gpu: Gpu, daemon: FakeDaemon) -> None:
    numbers = iter(range(100))

    def uneven_step(model: Any, optimizer: Any, batch: Any) -> None:
        loss = model(batch).square().mean()
        for _ in range(1 + next(numbers) % 2):
            loss.backward(retain_graph=True)
        optimizer.step()

    with joined(daemon, gpu) as job:
        assert train(job, gpu, daemon, step=uneven_step) == [("F", 0, 0)]


@pytest.mark.parametrize("is_found", [True, False])
def test_a_loop_without_phases_has_one_instruction_from_the_first_iteration(
    gpu: Gpu, daemon: FakeDaemon, *, is_found: bool
) -> None:
    step = plain_step if not is_found else lambda *_: None
    with joined(daemon, gpu, finds_phases=is_found) as job:
        assert train(job, gpu, daemon, step=step) == [("F", 0, 0)]


def test_an_evaluation_between_iterations_is_a_pause(gpu: Gpu, daemon: FakeDaemon) -> None:
    model = gpu.model()
    with joined(daemon, gpu) as job:
        order = train(job, gpu, daemon, model=model)
        optimizer = gpu.optimizer(model)
        for number in range(4):
            with job.iteration():
                plain_step(model, optimizer, torch.ones(2, 4))
            gpu.device.sleep(1.0)
            if number == 1:
                model.eval()
                with torch.no_grad():
                    model(torch.ones(2, 4))
                model.train()
                gpu.device.sleep(1.0)
        reports = [daemon.reports.get(timeout=WAIT_LIMIT_S) for _ in range(3)]

    assert order == ALL
    before_pause = [report["next_begin_mono_ns"] == 0 for report in reports]
    assert before_pause.count(True) == 1
    regular = reports[before_pause.index(False)]
    durations_ms = {row[0]: round((row[4] - row[3]) / 1e6) for row in regular["instructions"]}
    assert durations_ms.items() >= {"F": 50, "B": 90, "C": 40, "O": 20}.items()


class _Wrapper(torch.nn.Module):  # type: ignore[name-defined, misc]  # torch is optional here
    """Wraps a model as DistributedDataParallel does."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, rows: Any) -> Any:
        """Return the output of the model."""
        return self.module(rows)


def evaluate_inside(model: Any) -> None:
    with torch.no_grad():
        model.module(torch.ones(2, 4))


def read_state(model: Any) -> None:
    model.module.state_dict()


@pytest.mark.parametrize("interrupt", [evaluate_inside, read_state, torch.nn.Module.state_dict])
def test_an_evaluation_or_a_checkpoint_of_the_wrapped_model_is_a_pause_at_full_speed(
    gpu: Gpu, daemon: FakeDaemon, interrupt: Callable[[Any], Any]
) -> None:
    daemon.plans = [{**plan_slice(1, 0, [("F", 0, 0, 0, 900)]), "full_speed_sm_clock_mhz": 1410}]
    model = _Wrapper(gpu.model())
    with joined(daemon, gpu) as job:
        train(job, gpu, daemon, model=model)
        optimizer = gpu.optimizer(model)
        requested_mhz: list[int] = []
        while 900 not in requested_mhz:
            with job.iteration():
                plain_step(model, optimizer, torch.ones(2, 4))
            gpu.device.sleep(1.0)
            daemon.reports.get(timeout=WAIT_LIMIT_S)
            requested_mhz += requests_of(daemon)
        interrupt(model)
        gpu.device.sleep(1.0)
        wait_until(lambda: 1410 in requests_of(daemon))


def requests_of(daemon: FakeDaemon) -> list[int]:
    """Return the clocks that were requested since the last call."""
    return [daemon.clock_requests.get().request.sm_clock_mhz for _ in range(daemon.clock_requests.qsize())]


def test_hooks_leave_with_the_job(gpu: Gpu, daemon: FakeDaemon) -> None:
    model = gpu.model()
    with joined(daemon, gpu) as job:
        train(job, gpu, daemon, model=model)

    optimizers, modules = sys.modules["torch.optim.optimizer"], torch.nn.modules.module
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert not optimizers._global_optimizer_pre_hooks
    assert not optimizers._global_optimizer_post_hooks
    assert not modules._global_forward_pre_hooks


def test_a_model_can_be_copied_and_saved_while_its_phases_are_marked(gpu: Gpu, daemon: FakeDaemon) -> None:
    plain = torch.nn.Linear(4, 4)
    with joined(daemon, gpu) as job:
        train(job, gpu, daemon, model=plain, step=plain_step)
        assert plain._forward_hooks
        copies = [copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))]

    for own in copies:
        assert torch.equal(own(torch.ones(1, 4)), plain(torch.ones(1, 4)))
    assert b"gpuenergyd" not in pickle.dumps(copies[0])


def test_the_hooks_change_no_bit_of_the_training(gpu: Gpu, daemon: FakeDaemon) -> None:
    torch.manual_seed(0)
    model = gpu.model()
    with joined(daemon, gpu) as job:
        train(job, gpu, daemon, model=model)
    torch.manual_seed(0)
    alone = gpu.model()
    optimizer = gpu.optimizer(alone)

    def is_equal() -> bool:
        plain_step(alone, optimizer, torch.ones(2, 4))
        return all(torch.equal(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))

    assert any(is_equal() for _ in range(40))
