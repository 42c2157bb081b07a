"""Measures what the client costs a program whose interpreter is busy nearly all the time.

    python benchmarks/runs/host_bound.py [--pairs N] [--seconds S] [--seed K] [--json]

Two programs, launch-bound as small models on a large GPU are: a loop of 96 modules, 5 to 10 ms a step; and a one-stage
1F1B pipeline of torch.distributed.pipelining with 16 instructions a step. Their events come from `compiled_events.py`:
they cost what CUDA's cost, and hold the interpreter's lock as torch does. Three arms: no daemon at the socket's path; a
daemon that only observes; and one whose plan asks for six changes of clock inside each iteration of the pipeline, one
for each iteration of the loop. That daemon is a scripted one in another process. GPUENERGYD_COMPILED_THREAD=0 measures
the third arm without the compiled thread.

**Design.** A core's speed changes by some percent from one tenth of a second to the next, and other programs take their
share. So steps with and without the client alternate in one process that has joined once: four steps, in random order,
are two with the client, a plain one, and another plain one for the null arm. For a plain step, all hooks and wrappers
are taken away, which is not measured; they are put in and taken away before each step of either kind. A pair has at
least eight fours, 16 iterations in a row for the client, which are as many as it takes to have one of each kind that it
makes (it times the instructions of every 16th iteration, and reads the times of eight at once), and as many as there
are between two of its reports. The figure is the median over pairs of the client's steps against both kinds of plain
ones; that of the null arm, which shows the resolution, of one kind against the other. No step is left out. Intervals
(95 %) are of a bootstrap over pairs; a program ends when those of time, CPU time and null arm have a half-width of
0.001, or after its limit of pairs or seconds. The figure of an arm is that of the program that the client costs more.

`wall` is the time of the training thread less the time in which it could have run, but another program did (the run
delay of /proc/self/schedstat): what a step takes on a core of its own, waits for the interpreter's lock included.
`raw` is the time with those delays. `cpu` is the CPU time of the training thread. The client's own threads run on other
cores where there are any; the CPU time that they take in a step is printed as `threads_us`. Their reports come as often
as in a program that only has steps with the client: the reporter's pause passes in these steps alone, and a plain step
waits for the end of a report. So does the clock of the events.

`calls_us` is the CPU time of the training thread in the client's outermost calls, in a session of its own in which each
of them is timed. It is far less affected by other programs than the difference of two steps, and leaves out what torch
takes to call hooks, and what the client displaces from the caches.

What alternation leaves out: what a step with the client displaces from the caches for the next step. `after` compares
the plain steps after it with the other plain steps. The first steps after joining, in which the client learns the
program and times all instructions, are not measured; what they cost in all is printed (`first_ms`). Needs the checkout
and gcc.
"""

import argparse
import json
import logging
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist
from compiled_events import CompiledDevice, missing_compiler
from paired_steps import Switch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import gpuenergyd
from gpuenergyd.client import loop
from gpuenergyd.client import reporter as reporting
from gpuenergyd.client.phases.marks import PhaseMarks
from gpuenergyd.client.phases.torch_hooks import _ModuleHook
from gpuenergyd.client.rank import RankClient
from gpuenergyd.client.reporter import REPORT_PERIOD_S, Reporter
from gpuenergyd.client.timing.device_recorder import DeviceRecorder
from gpuenergyd_trainers.joining.ordered_rank import OrderedRank
from gpuenergyd_trainers.torch_pipelining import attach
from tests.client.fake_daemon import FakeDaemon, plan_slice

LIMITS = {"without_daemon": 1.001, "observe": 1.005, "control": 1.01}
HALF_WIDTH = 0.001
"""The narrowest margin: a wider interval does not tell 1.001 from 1."""
MIN_PAIRS, PAIRS_PER_SESSION = 30, 40
"""Pairs before a program may end, and pairs after which the client leaves and joins again."""
MODULES, WIDTH, SEQUENCES, MICROBATCHES = 96, 16, 4, 8
SETTLING_STEPS, JOINING_STEPS = 24, 48
"""Steps in which caches are filled, and those after joining until the client is in a steady state."""
CLIENT, PLAIN, NULL = range(3)
FOUR, FOURS_PER_PAIR = (CLIENT, CLIENT, PLAIN, NULL), 8
NUM_RESAMPLES = 1_000
TIMED_STEPS = 160
"""Steps in which calls are timed: ten of each kind of iteration."""
CALLS: tuple[tuple[type, str], ...] = (
    (loop.LoopJob, "iteration"), (PhaseMarks, "__enter__"), (PhaseMarks, "__exit__"), (_ModuleHook, "__call__"),
    (OrderedRank, "begin_step"), (OrderedRank, "sees_instructions"), (OrderedRank, "end_step"),
    (RankClient, "begin_instruction"), (RankClient, "end_instruction"), (RankClient, "request_clock"),
    (RankClient, "begin_next"), (RankClient, "end_next"),
)  # fmt: skip
CHANGES = [("F", 0, 0, 0, 1200), ("F", 3, 0, 0, 900), ("B", 2, 0, 0, 1100), ("F", 6, 0, 0, 1000),
           ("B", 5, 0, 0, 1300), ("B", 7, 0, 0, 900)]  # fmt: skip
GPU_UUID = "GPU-0"


class Nowhere:
    """A queue that keeps nothing."""

    def put(self, _item: object) -> None:
        """Drop it."""


class ScriptedDaemon(FakeDaemon):
    """Gives every rank that registers the same plan, or none."""

    def __init__(self, folder: Path, *, has_plan: bool) -> None:
        super().__init__(folder)
        self._has_plan = has_plan
        self.takes_untimed, self.takes_together, self.takes_spans = True, not has_plan, True
        for name in ("registrations", "reports", "releases", "clock_requests"):
            setattr(self, name, Nowhere())

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the reply."""
        if path == "/v1/ranks" and self._has_plan:
            own = {(kind, microbatch, chunk) for kind, microbatch, chunk in map(tuple, body["order"])}
            self.plans_by_pp_rank[0] = [plan_slice(1, 0, [row for row in CHANGES if row[:3] in own])]
        return super().answer(method, path, body)


def serve(folder: Path, pipe: Connection, has_plan: bool) -> None:  # noqa: FBT001  a process takes no keywords here
    """Run the scripted daemon until it is stopped."""
    with ScriptedDaemon(folder, has_plan=has_plan):
        pipe.send("ready")
        pipe.recv()


@contextmanager
def daemon_for(arm: str, folder: Path) -> Iterator[str]:
    """Run the daemon of an arm; yield the socket's path."""
    if arm == "without_daemon":
        yield str(folder / "daemon.sock")
        return
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(folder, theirs, arm == "control"))
    process.start()
    assert process.pid is not None
    move_to_other_cores(process.pid)
    ours.recv()
    try:
        yield str(folder / "daemon.sock")
    finally:
        ours.send("end")
        process.join()


def move_to_other_cores(thread_id: int) -> None:
    """Have a thread or process run beside the training thread, where the host has further cores."""
    others = set(range(os.cpu_count() or 1)) - os.sched_getaffinity(threading.main_thread().native_id or 0)
    with suppress(OSError):  # there are none, or it has ended
        os.sched_setaffinity(thread_id, others)


@dataclass(frozen=True, slots=True)
class Joined:
    """A program in its job."""

    step: Callable[[], None]
    """The step with the client."""
    client: RankClient | None
    switch: Callable[[bool], None]
    """Takes the client out of the program, with False, or restores it."""


class TorchHooks:
    """All hooks that torch calls in the steps of a loop, removed and restored together."""

    def __init__(self, model: nn.Module) -> None:
        names = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
        modules, optimizers = (sys.modules[name] for name in ("torch.nn.modules.module", "torch.optim.optimizer"))
        self._hooks: list[dict[Any, Any]] = [getattr(modules, f"_global_{name}") for name in names]
        self._hooks += [getattr(optimizers, f"_global_optimizer_{name}_hooks") for name in ("pre", "post")]
        self._hooks += [getattr(module, f"_{name}") for module in model.modules() for name in names]
        self._removed: list[tuple[dict[Any, Any], dict[Any, Any]]] = []

    def switch(self, is_on: bool) -> None:  # noqa: FBT001  a Joined.switch
        """Restore the hooks, or remove them."""
        if is_on:
            for hooks, removed in self._removed:
                hooks.update(removed)
        else:
            self._removed = [(hooks, dict(hooks)) for hooks in self._hooks if hooks]
            for hooks, _ in self._removed:
                hooks.clear()


class LoopProgram:
    """A plain loop."""

    def __init__(self, device: CompiledDevice) -> None:
        setattr(loop, "loaded_cuda_device", lambda: device)  # noqa: B010  a double, which type checkers would refuse
        self._model = deep_model(MODULES)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, foreach=False)
        self._batch = torch.randn(SEQUENCES, WIDTH)

    def step(self) -> None:
        """Run a step."""
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    @contextmanager
    def joined(self, socket_path: str) -> Iterator[Joined]:
        """Join a job."""
        with gpuenergyd.job("host-bound", gpu_uuid=GPU_UUID, socket_path=socket_path, run_key="r") as job:

            def step() -> None:
                with job.iteration():
                    self.step()

            step()
            yield Joined(step, job._client, TorchHooks(self._model).switch)  # noqa: SLF001  only needed here


class PipelineProgram:
    """A pipeline of one stage: 16 instructions a step."""

    def __init__(self, device: CompiledDevice) -> None:
        self._device = device
        model = deep_model(MODULES)
        stage = PipelineStage(model, 0, 1, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        self._batch = torch.randn(MICROBATCHES * SEQUENCES, WIDTH)

    def step(self) -> None:
        """Run a step."""
        self._schedule.step(self._batch, target=self._batch, losses=[], return_outputs=False)
        self._optimizer.step()
        self._optimizer.zero_grad()

    @contextmanager
    def joined(self, socket_path: str) -> Iterator[Joined]:
        """Attach the schedule."""
        timer = DeviceRecorder(self._device, 4 * MICROBATCHES + 1)
        handle = attach(self._schedule, job="host-bound", gpu_uuid=GPU_UUID, socket_path=socket_path, timer=timer,
                        run_key="r")  # fmt: skip
        switch = Switch(handle, makes_pauses=False)
        rank = handle._rank  # noqa: SLF001  only needed here
        try:
            yield Joined(self.step, None if rank is None else rank.client, lambda is_on: switch.turn(is_on=is_on))
        finally:
            handle.detach()


PROGRAMS: dict[str, Callable[[CompiledDevice], LoopProgram | PipelineProgram]] = {
    "loop": LoopProgram,
    "pipeline": PipelineProgram,
}


def deep_model(num_modules: int) -> nn.Module:
    """Return many small modules."""
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(num_modules // 4)]
    return nn.Sequential(*blocks)


class ReportPause(threading.Event):
    """The pause of a reporter between two reports, in time of the client's steps."""

    def __init__(self, reporter: Reporter) -> None:
        """Take the place of the event that ends the reporter's pause early."""
        super().__init__()
        self._over = threading.Event()
        self._is_pausing = self._is_reporting = False
        self._left_s = REPORT_PERIOD_S
        handle = reporter._handle  # noqa: SLF001  only needed here

        def handle_alone(first: Any) -> bool:
            self._is_reporting = True
            try:
                return handle(first)
            finally:
                self._is_reporting = False

        setattr(reporter, "_handle", handle_alone)  # noqa: B010  a double, which type checkers would refuse
        reporter._stopping = self  # noqa: SLF001  as above

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the pause is over."""
        self._left_s = timeout or 0.0
        self._is_pausing = True
        self._over.wait()
        self._over.clear()
        self._is_pausing = False
        return self.is_set()

    def set(self) -> None:
        """End the reporter."""
        super().set()
        self._over.set()

    def let_pass(self, time_s: float) -> None:
        """Let time pass, of a step of the client."""
        self._left_s -= time_s
        if self._is_pausing and self._left_s <= 0.0:
            self._over.set()

    def wait_for_report(self) -> None:
        """Wait until no report is under way."""
        give_up_s = time.monotonic() + 5.0
        while (self._is_reporting or (self._over.is_set() and self._is_pausing)) and time.monotonic() < give_up_s:
            time.sleep(1e-4)


def _thread_ids() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


class Clocks:
    """Clocks of the training thread and of the client's threads, in ns."""

    def __init__(self) -> None:
        self._own = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._others: dict[int, int] = {}
        self._known: set[int] = _thread_ids()

    def find_threads(self) -> None:
        """Follow the threads that the client has started since."""
        for thread_id in _thread_ids() - self._known - set(self._others):
            self._others[thread_id] = os.open(f"/proc/self/task/{thread_id}/schedstat", os.O_RDONLY)
            move_to_other_cores(thread_id)

    def read(self) -> tuple[int, int, int]:
        """Return time without run delay, time, and CPU time of the training thread."""
        raw_ns, delay_ns = time.perf_counter_ns(), int(os.pread(self._own, 80, 0).split()[1])
        return raw_ns - delay_ns, raw_ns, time.thread_time_ns()

    def read_others(self) -> int:
        """Return the CPU time of the client's threads."""
        total_ns = 0
        for descriptor in self._others.values():
            with suppress(OSError):  # it has ended
                total_ns += int(os.pread(descriptor, 80, 0).split()[0])
        return total_ns

    def close(self) -> None:
        """Close all files."""
        for descriptor in (self._own, *self._others.values()):
            os.close(descriptor)


class CallTimes:
    """CPU time of the training thread in the client's outermost calls, of objects that are made in the context."""

    def __init__(self) -> None:
        self.times_ns: list[int] = []
        self._is_inside = False
        self._methods = [(owner, name, getattr(owner, name)) for owner, name in CALLS]

    def __enter__(self) -> Self:
        for owner, name, method in self._methods:
            setattr(owner, name, self.timed(method))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, method in self._methods:
            setattr(owner, name, method)

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return method(*args, **kwargs)
            self._is_inside = True
            began_ns = time.thread_time_ns()
            try:
                return method(*args, **kwargs)
            finally:
                self.times_ns.append(time.thread_time_ns() - began_ns)
                self._is_inside = False

        return timed


def call_time_s(program: Any, socket_path: str, device: CompiledDevice) -> float:
    """Return the CPU time of the client's calls in a step, without what it takes to time them.

    That is known from a call that does nothing, after a plain step, which displaces it from the caches as others are.
    """
    with CallTimes() as calls, program.joined(socket_path) as joined:
        for _ in range(JOINING_STEPS):
            joined.step()
        nothing, own_ns = calls.timed(lambda: None), []
        calls.times_ns.clear()
        for _ in range(TIMED_STEPS):
            joined.step()
            joined.switch(False)
            device.stop_clock()
            program.step()
            nothing()
            own_ns.append(calls.times_ns.pop())
            joined.switch(True)
            device.start_clock()
        return (sum(calls.times_ns) - len(calls.times_ns) * median(own_ns)) / 1e9 / TIMED_STEPS


@dataclass(slots=True)
class Pairs:
    """Pairs of one program in one arm."""

    ratios: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in ("wall", "cpu", "null", "null_cpu", "raw", "null_raw", "after")}
    )
    step_s: list[float] = field(default_factory=list)
    """Time of a plain step, by pair."""
    busy_ratio: list[float] = field(default_factory=list)
    threads_s: list[float] = field(default_factory=list)
    """CPU time of the client's threads in a step, by pair."""
    first_s: list[float] = field(default_factory=list)
    """Time of the first steps after joining, by session."""

    def add(self, times_s: list[list[tuple[float, float, float]]], plain_after_s: list[list[float]]) -> None:
        """Take the steps of a pair: of each kind, time without delays, time and CPU time; those after a client's."""
        for which, (name, null) in enumerate((("wall", "null"), ("raw", "null_raw"), ("cpu", "null_cpu"))):
            client_s, plain_s, null_s = (sum(step[which] for step in steps) for steps in times_s)
            self.ratios[name].append(client_s / (plain_s + null_s))
            self.ratios[null].append(null_s / plain_s)
        after_s, others_s = plain_after_s
        if after_s and others_s:
            self.ratios["after"].append(len(others_s) * sum(after_s) / (len(after_s) * sum(others_s)))
        plain = times_s[PLAIN] + times_s[NULL]
        wall_s, _, cpu_s = (sum(step[which] for step in plain) for which in range(3))
        self.step_s.append(wall_s / len(plain))
        self.busy_ratio.append(cpu_s / wall_s)

    def is_known(self) -> bool:
        """Return whether all intervals are narrow enough."""
        names = ("wall", "cpu", "null", "null_cpu")
        return all(spread(self.ratios[name])["half_width"] <= HALF_WIDTH for name in names)

    def figures(self) -> dict[str, Any]:
        """Return medians with the half-widths of their intervals."""
        step_s = median(self.step_s)
        return {
            **{name: spread(ratios) for name, ratios in self.ratios.items() if ratios},
            "pairs": len(self.step_s),
            "step_ms": round(1e3 * step_s, 3),
            "threads_us": round(1e6 * sum(self.threads_s) / len(self.threads_s), 1),
            "first_ms": round(1e3 * (median(self.first_s) - JOINING_STEPS * step_s), 1),
            "busy_ratio": round(median(self.busy_ratio), 3),
        }


def spread(values: list[float]) -> dict[str, float]:
    """Return the median and half the width of its 95 % interval, with the quartiles."""
    drawn = np.random.default_rng(2).integers(len(values), size=(NUM_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(np.asarray(values)[drawn], axis=1), (2.5, 97.5))
    p25, ratio, p75 = np.percentile(values, (25, 50, 75))
    figures = {"ratio": ratio, "half_width": (high - low) / 2, "p25": p25, "p75": p75}
    return {name: round(float(value), 6) for name, value in figures.items()}


class Session:
    """A program that has joined, and makes steps with and without its client."""

    def __init__(self, program: Any, joined: Joined, device: CompiledDevice, clocks: Clocks) -> None:
        """Run the first steps."""
        self._program, self._joined, self._device, self._clocks = program, joined, device, clocks
        began_ns = clocks.read()[0]
        for _ in range(JOINING_STEPS):
            joined.step()
        self.first_s = (clocks.read()[0] - began_ns) / 1e9
        clocks.find_threads()
        reporter = None if joined.client is None else joined.client._reporter  # noqa: SLF001  only needed here
        self._reporter = reporter
        self._pause = None if reporter is None else ReportPause(reporter)
        self._shall_wait = False
        self._switch(is_on=False)
        self._is_after_client = False

    def run_pair(self, pairs: Pairs) -> None:
        """Add a pair."""
        times_s: list[list[tuple[float, float, float]]] = [[], [], []]
        plain_after_s: list[list[float]] = [[], []]
        threads_ns, num_fours, client_s = 0, 0, 0.0
        period_s = 0.0 if self._reporter is None else self._reporter._period_s  # noqa: SLF001  only needed here
        while num_fours < FOURS_PER_PAIR or client_s < period_s:
            num_fours += 1
            for kind in random.sample(FOUR, len(FOUR)):
                before_ns = self._clocks.read_others()
                lasted_s = self._run_step(is_client=kind == CLIENT)
                if kind == CLIENT:
                    self._wait_for_report()
                    threads_ns += self._clocks.read_others() - before_ns
                else:
                    plain_after_s[0 if self._is_after_client else 1].append(lasted_s[0])
                self._is_after_client = kind == CLIENT
                times_s[kind].append(lasted_s)
            client_s = sum(own_s for own_s, *_ in times_s[CLIENT])
        pairs.add(times_s, plain_after_s)
        pairs.threads_s.append(threads_ns / 1e9 / len(times_s[CLIENT]))

    def end(self) -> None:
        """Restore the client, so that it can leave."""
        self._switch(is_on=True)

    def _run_step(self, *, is_client: bool) -> tuple[float, float, float]:
        step = self._joined.step if is_client else self._program.step
        for is_on in (True, False, True)[: 3 if is_client else 2]:  # so that both find the same in the caches
            self._switch(is_on=is_on)
        began_ns = self._clocks.read()
        step()
        ended_ns = self._clocks.read()
        if is_client:
            self._switch(is_on=False)
        own_s, raw_s, cpu_s = ((end - begin) / 1e9 for begin, end in zip(began_ns, ended_ns, strict=True))
        if is_client and self._pause is not None:
            self._pause.let_pass(own_s)
        return own_s, raw_s, cpu_s

    def _switch(self, *, is_on: bool) -> None:
        if is_on:
            self._joined.switch(True)
            self._device.start_clock()
        else:
            self._device.stop_clock()
            self._joined.switch(False)

    def _wait_for_report(self) -> None:
        if self._pause is not None:
            self._pause.wait_for_report()


def measure(
    program: Any, socket_path: str, device: CompiledDevice, *, max_pairs: int, limit_s: float
) -> dict[str, Any]:
    """Run pairs until the medians are known well enough."""
    for _ in range(SETTLING_STEPS):
        program.step()
    pairs, end_s = Pairs(), time.monotonic() + limit_s

    def is_over() -> bool:
        return len(pairs.step_s) >= max_pairs or time.monotonic() > end_s

    while not is_over() and not (len(pairs.step_s) >= MIN_PAIRS and pairs.is_known()):
        clocks = Clocks()
        with program.joined(socket_path) as joined:
            session = Session(program, joined, device, clocks)
            pairs.first_s.append(session.first_s)
            for _ in range(PAIRS_PER_SESSION):
                session.run_pair(pairs)
                if is_over():
                    break
            session.end()
        clocks.close()
    figures, calls_s = pairs.figures(), call_time_s(program, socket_path, device)
    return {**figures, "calls_us": round(1e6 * calls_s, 1), "calls_ratio": round(calls_s / median(pairs.step_s), 6)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=4000, help="at most, of each program in each arm")
    parser.add_argument("--seconds", type=float, default=240.0, help="at most, of each program in each arm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=LIMITS, default=list(LIMITS), help="arms")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    reason = missing_compiler()
    if reason is not None:
        print(f"not measured: {reason}", file=sys.stderr)
        return 0
    random.seed(options.seed)
    setattr(reporting, "_LATE_AFTER_S", 1e6)  # noqa: B010  on a busy host, the training thread reads times as elsewhere
    quiet = logging.getLogger("gpuenergyd")  # the client joins for each block
    quiet.setLevel(logging.INFO)
    quiet.addHandler(logging.NullHandler())
    torch.set_num_threads(1)
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/group"
        dist.init_process_group("gloo", rank=0, world_size=1, init_method=store)
        device = CompiledDevice(Path(folder))
        programs = {name: PROGRAMS[name](device) for name in options.programs}
        for arm in options.only:
            own = Path(folder) / arm
            own.mkdir()
            with daemon_for(arm, own) as socket_path:
                figures = {
                    name: measure(program, socket_path, device, max_pairs=options.pairs, limit_s=options.seconds)
                    for name, program in programs.items()
                }
            result[arm] = figures
            show(arm, figures)
        dist.destroy_process_group()
    summary = summarized(result)
    summary["load_average"] = round(os.getloadavg()[0], 1)
    if options.json:
        print(json.dumps({**summary, "arms": result}))
    return 0 if summary["is_met"] else 1


def summarized(result: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the figures of each arm: those of the program that the client costs more."""
    summary: dict[str, Any] = {}
    is_met, is_resolved = True, True
    for arm, figures in result.items():
        worst = max(figures.values(), key=lambda each: float(each["wall"]["ratio"]))
        cpu_ratio = max(each["cpu"]["ratio"] for each in figures.values())
        summary |= {f"{arm}_ratio": worst["wall"]["ratio"], f"{arm}_half_width": worst["wall"]["half_width"]}
        summary |= {f"{arm}_pairs": worst["pairs"], f"{arm}_cpu_ratio": cpu_ratio}
        summary[f"{arm}_calls_ratio"] = max(each["calls_ratio"] for each in figures.values())
        summary[f"{arm}_null_ratio"] = max((each["null"]["ratio"] for each in figures.values()), key=_distance_from_1)
        is_met &= worst["wall"]["ratio"] <= LIMITS[arm] and (arm != "without_daemon" or cpu_ratio <= LIMITS[arm])
        is_resolved &= _distance_from_1(summary[f"{arm}_null_ratio"]) <= HALF_WIDTH and all(
            each[name]["half_width"] <= HALF_WIDTH for each in figures.values() for name in ("wall", "null")
        )
    return {**summary, "is_met": is_met, "is_resolved": is_resolved}


def _distance_from_1(ratio: float) -> float:
    return abs(ratio - 1.0)


def show(arm: str, figures: dict[str, dict[str, Any]]) -> None:
    for name, each in figures.items():
        ratios = "; ".join(f"{key} {each[key]['ratio']:.4f} +- {each[key]['half_width']:.4f}" for key in
                           ("wall", "null", "cpu", "null_cpu", "raw", "after") if key in each)  # fmt: skip
        print(f"{arm:<15} {name:<9} {ratios}; {each['pairs']} pairs, step {each['step_ms']:.2f} ms, busy"
              f" {each['busy_ratio']:.2f}, calls {each['calls_us']:.0f} us and threads {each['threads_us']:.0f} us a"
              f" step, first {JOINING_STEPS} steps {each['first_ms']:+.0f} ms", file=sys.stderr)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
