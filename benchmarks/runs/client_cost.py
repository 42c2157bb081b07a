"""Measures the cost of the client in a training process: per instruction, per clock change, per iteration.

    python benchmarks/runs/client_cost.py [--rounds 400] [--instructions 64] [--json]

One process acts as a training thread; a scripted daemon in another one answers on real sockets and sends one rank a
plan that changes the clock at every instruction. Each round times one iteration of each kind, so that other work on the
machine affects all of them alike; the empty loop among them is the control and is subtracted. A round begins when the
reporter is idle, as in training, where an iteration is far longer than its report.

`instruction` is the cost of the client's two calls, `wrapped` the same through the torch pipelining adapter, whose
wrappers are around every forward and backward; `iteration` is the work of the training thread at the begin and end of
an iteration, with its first instruction, which queues the report of the iteration before; `reporter` is the CPU time of
the background thread for that report, which can delay the training thread when both need the interpreter; `figures` is
what the callback for Hugging Face adds to a step that the trainer logs, with every figure known, and `new_figures`
the same for the first such step after the daemon has sent newer ones, at most every two seconds. Needs the checkout.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpuenergyd.client import reporter
from gpuenergyd.client.rank import RankClient, RankDescription
from gpuenergyd.wire.messages import JobFigures
from gpuenergyd_trainers.huggingface import _Hooks as TrainerHooks
from gpuenergyd_trainers.torch_pipelining import attach
from tests.client.fake_daemon import FakeDaemon, plan_slice, wait_for_report

LIMITS_US = {"instruction": 1.0, "clock_change": 15.0, "iteration": 200.0, "figures": 20.0, "new_figures": 20.0}
PLAIN, TUNED, WRAPPED = range(3)
Rows = list[tuple[str, int]]
"""Kind and microbatch of instructions."""
WARM_UP_ROUNDS = 20
NS_PER_US = 1_000


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--instructions", type=int, default=64, help="per iteration")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    reporter.REPORT_PERIOD_S = 0.0  # each iteration is reported by itself
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        daemon = context.Process(target=serve, args=(Path(folder), theirs, options.instructions))
        daemon.start()
        ours.recv()
        try:
            result = measure(str(Path(folder) / "daemon.sock"), options.rounds, options.instructions)
        finally:
            ours.send("end")
            daemon.join()
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0 if result["holds"] else 1


def serve(folder: Path, pipe: Connection, num_instructions: int) -> None:
    """Run the scripted daemon until it is stopped."""
    with FakeDaemon(folder) as daemon:
        changes = [(kind, m, 0, 0, 900 + 15 * (m % 20)) for m in range(num_instructions // 2) for kind in "FB"]
        daemon.plans_by_pp_rank[TUNED] = [plan_slice(1, 0, changes)]
        pipe.send("ready")
        pipe.recv()


def measure(socket_path: str, num_rounds: int, num_instructions: int) -> dict[str, Any]:
    """Return medians and spreads, in microseconds, and whether the limits hold."""
    rows = [(kind, m) for m in range(num_instructions // 2) for kind in "FB"]
    order = [(kind, m, 0) for kind, m in rows]
    names: dict[str, Any] = {"job_name": "cost", "run_key": "r", "schedule_name": "1f1b"}
    names |= {"num_microbatches": num_instructions // 2, "num_pp_ranks": 3}
    ranks = [RankDescription(**names, pp_rank=rank, gpu_uuid=f"GPU-{rank}") for rank in (PLAIN, TUNED)]
    clients = {rank.pp_rank: RankClient(rank, order=order, socket_path=socket_path) for rank in ranks}
    stage, schedule = bare_stage(), SimpleNamespace(step=lambda: None)
    handle = attach(schedule, job="cost", gpu_uuid="GPU-2", stages=[stage], num_microbatches=num_instructions,
                    socket_path=socket_path, run_key="r", dp_rank=0)  # fmt: skip
    assert handle.is_attached
    bare = bare_stage()

    def mark(client: RankClient) -> Callable[[Rows], None]:
        def run(own: Rows) -> None:
            begin, end = client.begin_instruction, client.end_instruction
            for kind, microbatch_index in own:
                end(begin(kind, microbatch_index))

        return run

    def empty(own: Rows) -> None:
        for _kind, _microbatch_index in own:
            pass

    def forwards_of(one: Any) -> Callable[[Rows], None]:
        def run(own: Rows) -> None:
            for _kind, microbatch_index in own:
                one.forward_one_chunk(microbatch_index, ())

        return run

    wrapped_rank: RankClient = handle._rank.client  # type: ignore[union-attr]  # noqa: SLF001  attached, as asserted
    kinds = {
        "control": (None, empty),
        "instruction": (clients[PLAIN], mark(clients[PLAIN])),
        "clock_change": (clients[TUNED], mark(clients[TUNED])),
        "bare": (None, forwards_of(bare)),
        "wrapped": (wrapped_rank, forwards_of(stage)),
    }
    samples_us: dict[str, list[float]] = {
        name: [] for name in (*kinds, "iteration", "reporter", "figures", "new_figures")
    }
    job, log_figures = logging_step()
    epochs: list[int] = []
    for round_index in range(WARM_UP_ROUNDS + num_rounds):
        took_us, iterations_us = {}, []
        cpu_before_ns, thread_before_ns = time.process_time_ns(), time.thread_time_ns()
        for name, (client, run) in kinds.items():
            if client is not None:
                iterations_us.append(timed_us(client.begin_iteration) + timed_us(partial(run, rows[:1])))
                wait_until_reported(client, socket_path)
            took_us[name] = timed_us(partial(run, rows[1:])) / (num_instructions - 1)
            if client is not None:
                iterations_us[-1] += timed_us(client.end_iteration)
        if round_index < WARM_UP_ROUNDS:
            continue
        elsewhere_ns = (time.process_time_ns() - cpu_before_ns) - (time.thread_time_ns() - thread_before_ns)
        samples_us["reporter"].append(elsewhere_ns / NS_PER_US / len(iterations_us))
        samples_us["iteration"].append(statistics.mean(iterations_us))
        samples_us["figures"].append(timed_us(log_figures))
        job.figures = replace(job.figures)
        samples_us["new_figures"].append(timed_us(log_figures))
        samples_us["control"].append(took_us["control"])
        samples_us["bare"].append(took_us["bare"])
        samples_us["instruction"].append(took_us["instruction"] - took_us["control"])
        samples_us["clock_change"].append(took_us["clock_change"] - took_us["control"])
        samples_us["wrapped"].append(took_us["wrapped"] - took_us["bare"])
        epochs.append(clients[TUNED].plan_epoch)
    num_errors = sum(client.total_errors for client in (*clients.values(), wrapped_rank))
    for client in clients.values():
        client.release()
    handle.detach()
    assert set(epochs) == {1}, "the plan was not followed"
    assert num_errors == 0, f"{num_errors} errors in the client"
    figures = {name: summary(values) for name, values in samples_us.items()}
    return {
        "n": num_rounds,
        "instructions_per_iteration": num_instructions,
        **{f"{name}_us": figure for name, figure in figures.items()},
        "limits_us": LIMITS_US,
        "holds": all(figures[name]["median"] <= limit for name, limit in LIMITS_US.items()),
    }


def logging_step() -> tuple[Any, Callable[[], None]]:
    """Return a job with figures, and what the callback for Hugging Face adds to a step that the Trainer logs."""
    callback, state = TrainerHooks("cost"), SimpleNamespace(log_history=[{}])
    job = SimpleNamespace(figures=JobFigures("tuned", **{field.name: 1 for field in fields(JobFigures)[1:]}))
    callback._marks._job = job  # type: ignore[assignment]  # noqa: SLF001  a job without a daemon has no figures
    return job, lambda: callback.add_figures(state, {"loss": 1.0})


def bare_stage() -> Any:
    """Return a stage with empty methods and the attributes that the adapter reads."""

    class Stage:
        stage_index, group_size, group_rank, is_last, has_backward, device, group = 0, 1, 0, False, True, None, None

        def forward_one_chunk(self, fwd_chunk_id: int, args: Any) -> None:
            """Do nothing."""

        def backward_one_chunk(self, bwd_chunk_id: int) -> None:
            """Do nothing."""

        def backward_weight_one_chunk(self, bwd_chunk_id: int) -> None:
            """Do nothing."""

    return Stage()


def wait_until_reported(client: RankClient, socket_path: str) -> None:
    """Wait for the report of the previous iteration."""
    if client.iteration_index > 0:
        wait_for_report(socket_path, client.pp_rank, client.iteration_index - 1)


def timed_us(run: Callable[[], Any]) -> float:
    begin_ns = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - begin_ns) / NS_PER_US


def summary(values: list[float]) -> dict[str, float]:
    ranked = sorted(values)
    return {
        "median": round(statistics.median(ranked), 3),
        "p5": round(ranked[len(ranked) // 20], 3),
        "p95": round(ranked[-1 - len(ranked) // 20], 3),
    }


def show(result: dict[str, Any]) -> None:
    print(f"{'':<14}{'median':>10}{'p5':>10}{'p95':>10}{'limit':>9}   us, n = {result['n']}")
    for name in (
        "control",
        "instruction",
        "bare",
        "wrapped",
        "clock_change",
        "iteration",
        "reporter",
        "figures",
        "new_figures",
    ):
        figure, limit = result[f"{name}_us"], result["limits_us"].get(name)
        print(f"{name:<14}{figure['median']:>10.3f}{figure['p5']:>10.3f}{figure['p95']:>10.3f}{limit or '':>9}")


if __name__ == "__main__":
    sys.exit(main())
