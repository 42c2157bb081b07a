"""Programs that run ahead of their simulated GPUs: errors of the reported times, savings and slowdowns by depth.

    python benchmarks/runs/run_ahead.py [--depths 0 0.5 1 2 4] [--rounds 3] [--iterations 60] [--json]

Four stages of the demo's GPT train under a daemon. Each depth is the number of iterations that the program may launch
ahead of the simulated GPUs; the program reads nothing back, or synchronises after every step. Times that the daemon
gets are compared with the instants of the simulation. Savings are simulated: medians of the exact energy of iterations
with the settled plan against those at full speed in the same training; the daemon's own estimates stand beside them
with their intervals. Slowdowns are the daemon's estimates. Every case is trained once per round, in turn. What else the
host's cores do shifts the caution of a single plan, and its saving with a standard deviation of half a point and more;
the figures of a depth are therefore medians over its trainings, with and without synchronisation, in all rounds. A
training whose plans still changed at its end has no settled plan, hence no saving; most of a depth's must have one.
Losses must be equal in all runs, and to a training without a daemon.
"""

import argparse
import os
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report.printing import print_figures
from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.client.timing.device_recorder import DeviceRecorder
from gpuenergyd.client.timing.recorder import RecordedIteration
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.world_kinds import WorldKind
from gpuenergyd_sim.training.gpt_pipeline import GptRank, RunAhead
from gpuenergyd_trainers.torch_pipelining import attach
from tests.support.daemon_process import running_daemon
from tests.trainers.pipeline_processes import run_ranks

NUM_RANKS, NUM_MICROBATCHES = 4, 8
DURATION_SCALE = 1.0
"""Iterations of about 1.4 s: the caution of a plan follows from the noise of its baseline, and disturbances by the
host's own programs, which share two cores here, are small beside iterations of that length."""
DEPTHS = (0.0, 0.5, 1.0, 2.0, 4.0)
TOLERATED_WINDOW_ERROR = TOLERATED_SLOWDOWN = 0.01
TOLERATED_SAVING_LOSS = 0.007
LEAST_SETTLED = 8
SYNCED = " synced"
"""End of the names of cases that synchronise after every step."""


@dataclass(frozen=True, slots=True)
class Case:
    """One training."""

    depth: float
    """Iterations that the program may launch ahead of the GPUs."""
    syncs_each_step: bool
    num_iterations: int
    seed: int
    is_attached: bool = True

    @property
    def name(self) -> str:
        """Name in the results."""
        return f"{self.depth:g}{SYNCED if self.syncs_each_step else ''}"


@dataclass(frozen=True, slots=True)
class TimeErrors:
    """Largest errors of the times of one rank, as shares of the iteration."""

    window_ratio: float = 0.0
    work_ratio: float = 0.0
    num_iterations: int = 0


class StoredPlan(NamedTuple):
    """The plan of an iteration in the daemon's history."""

    purpose: str | None
    plan_id: str | None


class ReportedTimes:
    """Compares the times that a recorder reports with the instants of the simulated stream; notes exact energies."""

    def __init__(self, recorder: DeviceRecorder, read_energy_j: Callable[[], float]) -> None:
        self.errors = TimeErrors()
        self.energy_by_end_j: dict[int, float] = {}
        """What the GPU had consumed when it reached the end of each iteration, by iteration index."""
        self._read_energy_j = read_energy_j
        self._call_when_known = recorder.call_when_known
        recorder.call_when_known = self._compare_when_known  # type: ignore[method-assign]

    def _compare_when_known(self, recorded: RecordedIteration, act: Any) -> None:
        self._call_when_known(recorded, partial(self._compare, recorded, act))

    def _compare(self, recorded: Any, act: Any) -> None:
        [finished] = act.args
        self.energy_by_end_j[finished.iteration_index] = self._read_energy_j()
        times = recorded.times()
        begin_ns, end_ns = recorded.opening.mono_ns, recorded.last.mono_ns
        true_work_ns = sum(
            min(end.mono_ns, end_ns) - max(begin.mono_ns, begin_ns)
            for begin, end, has_ended in zip(recorded.begins, recorded.ends, recorded.has_ended, strict=True)
            if has_ended
        )
        window_end_ns = times.next_begin_mono_ns or times.end_mono_ns
        work_ns = sum(
            min(end, window_end_ns) - max(begin, times.begin_mono_ns) for *_, begin, end in times.instructions
        )
        window_ns = end_ns - begin_ns
        self.errors = TimeErrors(
            max(self.errors.window_ratio, abs(window_end_ns - times.begin_mono_ns - window_ns) / window_ns),
            max(self.errors.work_ratio, abs(work_ns - true_work_ns) / window_ns),
            self.errors.num_iterations + 1,
        )
        act()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--depths", type=float, nargs="+", default=DEPTHS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    alone = Case(0.0, syncs_each_step=False, num_iterations=options.iterations, seed=options.seed, is_attached=False)
    losses_alone = run(alone)["losses"]
    results: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for depth in options.depths:
            for syncs in (False, True):
                case = Case(depth, syncs_each_step=syncs, num_iterations=options.iterations, seed=options.seed)
                result = run(case)
                results.setdefault(case.name, []).append(result)
                shown = {name: value for name, value in result.items() if name not in {"losses", "errors"}}
                print(f"{case.name}: {shown}, errors {asdict(result['errors'])}", file=sys.stderr, flush=True)
    every = [result for of_case in results.values() for result in of_case]
    figures = {
        "window_error_max_ratio": max(max(r["errors"].window_ratio, r["errors"].work_ratio) for r in every),
        "saving_ratio_by_depth": by_depth(results, "saving_ratio"),
        "saving_ratios_by_case": by_case(results, "saving_ratio"),
        "estimated_saving_ratio_by_case": {
            case: middle(values) for case, values in by_case(results, "estimated_saving_ratio").items()
        },
        "slowdown_ratio_by_depth": by_depth(results, "slowdown_ratio"),
        "slowdown_ratios_by_case": by_case(results, "slowdown_ratio"),
        "losses_equal": all(result["losses"] == losses_alone for result in every),
        "num_iterations": options.iterations,
        "num_rounds": options.rounds,
        "num_trainings": len(every),
        "seed": options.seed,
    }
    print_figures(figures, is_json=options.json)
    return 0 if are_targets_met(figures) else 1


def by_case(results: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> dict[str, list[float | None]]:
    """Return a figure of all rounds of each case."""
    return {case: [result[name] for result in of_case] for case, of_case in results.items()}


def by_depth(results: Mapping[str, Sequence[Mapping[str, Any]]], name: str) -> dict[str, float | None]:
    """Return the median of a figure over all trainings of each depth; None if fewer than two thirds have one."""
    of_depth: dict[str, list[float | None]] = {}
    for case, values in by_case(results, name).items():
        of_depth.setdefault(case.removesuffix(SYNCED), []).extend(values)
    return {depth: middle(values) for depth, values in of_depth.items()}


def middle(values: Sequence[float | None]) -> float | None:
    """Return the median of known values; None if fewer than two thirds are known."""
    known = [value for value in values if value is not None]
    return median(known) if known and 3 * len(known) >= 2 * len(values) else None


def are_targets_met(figures: dict[str, Any]) -> bool:
    """Return whether times, savings, slowdowns and losses are as they should be at every depth."""
    savings, slowdowns = figures["saving_ratio_by_depth"], figures["slowdown_ratio_by_depth"]
    at_0 = savings.get("0")
    return (
        figures["losses_equal"]
        and figures["window_error_max_ratio"] <= TOLERATED_WINDOW_ERROR
        and at_0 is not None
        and all(saving is not None and saving >= at_0 - TOLERATED_SAVING_LOSS for saving in savings.values())
        and all(slowdown is not None and slowdown <= TOLERATED_SLOWDOWN for slowdown in slowdowns.values())
    )


def run(case: Case) -> dict[str, Any]:
    """Train once under a daemon of its own; return its estimates, the errors of the times and the losses."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Ideal GPUs otherwise, so that cases differ in depth alone.
        settings: dict[str, Any] = {"warmup_iterations": 2, "baseline_iterations": 10}
        with running_daemon(folder / "daemon", kind=WorldKind.KIND, **settings) as daemon:
            ranks = run_ranks(
                NUM_RANKS, folder, train, case, str(daemon.world_path), str(daemon.socket_path), str(folder / "signals")
            )
            database_path = daemon.database_path
        plans = plans_of_iterations(database_path) if case.is_attached else {}
    job = ranks[0]["job"] or {}
    errors = [rank["errors"] for rank in ranks]
    return {
        "saving_ratio": exact_saving([rank["energy_by_end_j"] for rank in ranks], plans),
        "estimated_saving_ratio": job.get("saving_ratio"),
        "saving_interval": job.get("saving_interval"),
        "slowdown_ratio": job.get("slowdown_ratio"),
        "phase": job.get("phase"),
        "num_tuned_iterations": job.get("num_tuned_iterations"),
        "iterations_before_the_plan": job.get("first_tuned_iteration"),
        "errors": TimeErrors(
            max(e.window_ratio for e in errors),
            max(e.work_ratio for e in errors),
            sum(e.num_iterations for e in errors),
        ),
        "losses": ranks[-1]["losses"],
    }


def plans_of_iterations(database_path: Path) -> dict[int, StoredPlan]:
    """Return the plan of each iteration, as the daemon stored it; without iterations that it saw as irregular."""
    with closing(sqlite3.connect(database_path)) as database:
        rows = database.execute("SELECT iteration_index, plan_purpose, plan_id FROM iterations WHERE is_regular")
        return {index: StoredPlan(purpose, plan_id) for index, purpose, plan_id in rows}


def exact_saving(
    energy_by_end_j_by_rank: Sequence[Mapping[int, float]], plans: Mapping[int, StoredPlan]
) -> float | None:
    """Return the median energy saved by an iteration with the settled plan, as a share of one at full speed.

    Settled is the last plan that ran for at least `LEAST_SETTLED` iterations. Left out are iterations whose predecessor
    had another plan: clocks still change in them.
    """
    full_speed_j: list[float] = []
    tuned_j: dict[str | None, list[float]] = {}
    for index, plan in sorted(plans.items()):
        is_known = all(index in rank and index - 1 in rank for rank in energy_by_end_j_by_rank)
        if not is_known or plans.get(index - 1) != plan:
            continue
        energy_j = sum(rank[index] - rank[index - 1] for rank in energy_by_end_j_by_rank)
        if plan.purpose == PlanPurpose.BASELINE:
            full_speed_j.append(energy_j)
        elif plan.purpose == PlanPurpose.TUNED:
            tuned_j.setdefault(plan.plan_id, []).append(energy_j)
    settled_j = next((own for own in reversed(tuned_j.values()) if len(own) >= LEAST_SETTLED), None)
    if settled_j is None or not full_speed_j:
        return None
    return 1 - median(settled_j) / median(full_speed_j)


def train(rank: int, case: Case, world: str, socket_path: str, signals_path: str) -> dict[str, Any]:
    """Train on one rank; return its losses, the errors of its times, and on rank 0 the daemon's view of the job."""
    host = SimulatedHost.open(Path(world))
    gpu_uuid = host.identities()[rank].gpu_uuid
    training = GptRank("1f1b", rank, NUM_RANKS, NUM_MICROBATCHES, seed=case.seed)
    losses: list[str] = []
    job: dict[str, Any] | None = None
    with ExitStack() as cleanup:
        run_ahead = RunAhead(case.depth, Path(signals_path))
        cleanup.callback(host.close)
        cleanup.enter_context(training.simulate_on(host, gpu_uuid, duration_scale=DURATION_SCALE, run_ahead=run_ahead))
        assert isinstance(training.timer, DeviceRecorder)
        reported = ReportedTimes(training.timer, partial(host.exact_energy_j, gpu_uuid))
        if case.is_attached:
            handle = attach(
                training.schedule,
                job="run-ahead",
                run_key=f"run-ahead-{os.getppid()}",
                gpu_uuid=gpu_uuid,
                socket_path=socket_path,
                timer=training.timer,
            )
            cleanup.callback(handle.detach)
        for iteration_index in range(case.num_iterations):
            losses += [float(loss.detach()).hex() for loss in training.step(iteration_index)]
            if case.syncs_each_step:
                training.synchronize()
            if rank == 0 and case.is_attached and iteration_index % 10 == 9:
                job = next(iter(DaemonClient(socket_path).get_status()["jobs"]), job)
        training.synchronize()
        if rank == 0 and case.is_attached:
            job = next(iter(DaemonClient(socket_path).get_status()["jobs"]), job)
    return {"losses": losses, "errors": reported.errors, "energy_by_end_j": reported.energy_by_end_j, "job": job}


if __name__ == "__main__":
    sys.exit(main())
