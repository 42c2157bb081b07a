"""Savings of torch's pipeline schedules on simulated GPUs, and whether each ran as planned.

    python benchmarks/runs/schedules.py [--only NAME ...] [--rounds 2] [--microbatches 8] [--memory-limit 6]
        [--gpu-model h200] [--json]

Real torch training of the demo's GPT on four gloo processes and four simulated GPUs (A100s by default), under a real
daemon, with no slowdown allowed. One run alternates baseline blocks (nothing attached, original clocks) with blocks in
which `attach` has joined and planned. Saving and slowdown compare the planned iterations with the baseline blocks
before and after them, measured with the simulated GPUs' own counters and the host's clock, not by the daemon. Each
figure is the median over iterations with a bootstrap 95 % confidence interval. Of other GPU models as large a share of
the bound is wanted as of A100s.

Also reported: `bound_ratio`, the largest saving that any clocks allow at no slowdown, proven by the planner on the
GPUs' exact tables with instant, free clock changes and waiting at the clock of least power, above which no saving is
believed; whether every iteration ran in the registered order, from a trace in the stage's class; whether all ranks
followed one plan; and whether the losses equal those of a run without GPUs or daemon, bit for bit.

`1f1b+inflight` is 1F1B with extra microbatches in flight, chosen by the planner for ranks whose memory holds
`--memory-limit` microbatches; its baseline is plain 1F1B. Its peak memory is measured in microbatches and in bytes that
autograd keeps. It must save more than plain 1F1B in the same time if both are run.

An iteration takes 1.3 to 1.7 s, a schedule two to four minutes. Other load on the machine slows down iterations, tuned
or not: read the intervals. `schedules_virtual.py` takes the same options and does not depend on load. Needs the
checkout.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from schedule_bounds import GPU_MODEL, extra_inflight_for, most_saved_ratio, schedule_of

from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.store import open_history
from gpuenergyd_sim.driver.device_parameters import MODELS
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.world_kinds import WorldKind
from gpuenergyd_sim.training.gpt_model import loss_of
from gpuenergyd_sim.training.gpt_pipeline import PIPELINES, GptRank
from gpuenergyd_trainers.joining.handle import Handle
from gpuenergyd_trainers.torch_inflight import Schedule1F1BExtraInflight
from gpuenergyd_trainers.torch_pipelining import attach
from tests.support.daemon_process import running_daemon
from tests.support.simulated_memory import SavedActivations
from tests.trainers.executed import TracedStage, share_trace
from tests.trainers.pipeline_processes import run_ranks

NUM_RANKS = 4
INFLIGHT = "1f1b+inflight"
SEED = 5
RUN_LIMIT_S = 3_600.0
NUM_RESAMPLES = 2_000
WATCH_S = 0.4
NEEDED_SAVING_RATIO = {"1f1b": 0.08, "interleaved": 0.08}
LEAST_SAVING_RATIO = 0.05
MOST_SLOWDOWN_RATIO = 0.01


@dataclass(frozen=True, slots=True)
class Case:
    """A training: model, schedule and number of iterations."""

    name: str
    num_microbatches: int
    extra_inflight: tuple[int, ...] | None
    num_rounds: int
    block_iterations: int
    most_iterations: int
    duration_scale: float
    max_slowdown_ratio: float

    @property
    def schedule_name(self) -> str:
        """The schedule without extra microbatches in flight."""
        return "1f1b" if self.name == INFLIGHT else self.name


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration as seen by rank 0, from its start to the next one's."""

    round_index: int
    is_attached: bool
    plan_epoch: int
    time_s: float
    energy_j: float
    is_settled: bool
    """False for the first iterations of a block or plan, while clocks still change."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where daemons and ranks run: processes of this host, or virtual ones."""

    running_daemon: Callable[..., Any] = running_daemon
    run_ranks: Callable[..., list[dict[str, Any]]] = run_ranks


PROCESSES = Place()


def main(place: Place = PROCESSES) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*PIPELINES, INFLIGHT], default=[*PIPELINES, INFLIGHT])
    parser.add_argument("--rounds", type=int, default=2, help="attached blocks, each between two baseline blocks")
    parser.add_argument("--block", type=int, default=10, help="iterations of a baseline block, and of a settled plan")
    parser.add_argument("--most", type=int, default=160, help="maximum iterations of an attached block")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--memory-limit", type=int, default=6, help="microbatches that fit on each rank")
    parser.add_argument("--max-slowdown", type=float, default=0.0, help="allowed slowdown; 0.005 is 0.5 %%")
    parser.add_argument("--duration-scale", type=float, default=1.0, help="scale instruction durations")
    parser.add_argument("--gpu-model", choices=sorted(MODELS), default=GPU_MODEL)
    parser.add_argument("--seed", type=int, default=7, help="of the simulated GPUs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for name in options.only:
        extra = None
        if name == INFLIGHT:
            extra = extra_inflight_for(NUM_RANKS, options.microbatches, memory_limit=options.memory_limit)
        case = Case(
            name=name,
            num_microbatches=options.microbatches,
            extra_inflight=extra,
            num_rounds=options.rounds,
            block_iterations=options.block,
            most_iterations=options.most,
            duration_scale=options.duration_scale,
            max_slowdown_ratio=options.max_slowdown,
        )
        limit, model = options.memory_limit, options.gpu_model
        rows.append(row := measured(case, place, memory_limit=limit, gpu_model=model, seed=options.seed))
        if not options.json:
            show(row)
    by_name = {row["schedule"]: row for row in rows}
    if by_name.keys() >= {"1f1b", INFLIGHT}:
        plain_ratio, inflight_ratio = (by_name[name]["saving_ratio"] or 0.0 for name in ("1f1b", INFLIGHT))
        by_name[INFLIGHT]["saves_more_than_1f1b"] = inflight_ratio > plain_ratio
        by_name[INFLIGHT]["holds"] &= inflight_ratio > plain_ratio
    result = {"load_average": round(os.getloadavg()[0], 1), "schedules": rows, "holds": all(r["holds"] for r in rows)}
    if options.json:
        print(json.dumps(result))
    return 0 if result["holds"] else 1


def measured(case: Case, place: Place, *, memory_limit: int, gpu_model: str, seed: int) -> dict[str, Any]:
    """Train one case under its own daemon and return its row; what is needed is the same share of the bound."""
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="schedules-") as name:
        folder = Path(name)
        (folder / "daemon").mkdir()
        models = [gpu_model] * NUM_RANKS
        SimulatedHost.create(folder / "daemon" / "world", models, seed=seed, kind=WorldKind.UNKIND).close()
        with place.running_daemon(folder / "daemon", sample_period_s=0.1, baseline_iterations=10) as daemon:
            arguments = (case, str(daemon.world_path), str(daemon.socket_path))
            ranks = place.run_ranks(NUM_RANKS, folder, train, *arguments, limit_s=RUN_LIMIT_S)
            database_path = daemon.database_path
        figures = compared(ranks[0]["iterations"], tuned_epochs(database_path))
        num_steps = len(ranks[0]["epochs"])
        alone = run_alone(case, place, num_steps, folder / "alone", is_plain=False)
        plain = run_alone(case, place, num_steps, folder / "plain", is_plain=True) if case.extra_inflight else alone
    is_as_planned = {
        "is_order_as_registered": all(rank["is_order_right"] and rank["num_errors"] == 0 for rank in ranks),
        "is_plan_followed": all(rank["epochs"] == ranks[0]["epochs"] for rank in ranks),
        "are_losses_equal": all(
            joined["losses"] == one["losses"] == other["losses"]
            for joined, one, other in zip(ranks, alone, plain, strict=True)
        ),
    }
    schedule = schedule_of(case.schedule_name, NUM_RANKS, case.num_microbatches, case.extra_inflight)
    usual_bound, bound = (most_saved_ratio(schedule, case.duration_scale, gpu_model=m) for m in (GPU_MODEL, gpu_model))
    needed = NEEDED_SAVING_RATIO.get(case.schedule_name, LEAST_SAVING_RATIO) * bound / usual_bound
    row = {
        "schedule": case.name,
        "gpu_model": gpu_model,
        "seed": seed,
        **figures,
        "needed_saving_ratio": round(needed, 4),
        "bound_ratio": round(bound, 4),
        **is_as_planned,
        "load_average": [round(load_before, 1), round(os.getloadavg()[0], 1)],
    }
    if case.extra_inflight is not None:
        row |= memory_figures(case, alone, plain, memory_limit)
        is_as_planned["is_within_memory"] = row["is_within_memory"]
    row["holds"] = (
        figures["saving_ratio"] is not None
        and figures["saving_ratio"] >= needed
        and figures["saving_low"] <= row["bound_ratio"]
        and figures["slowdown_ratio"] <= MOST_SLOWDOWN_RATIO
        and all(is_as_planned.values())
    )
    return row


def memory_figures(
    case: Case, alone: list[dict[str, Any]], plain: list[dict[str, Any]], memory_limit: int
) -> dict[str, Any]:
    """Return each rank's peak memory; plain 1F1B, which holds a known number, gives the size of a microbatch."""
    limits_bytes = [memory_limit * one["peak_bytes"] / one["peak_inflight"] for one in plain]
    return {
        "extra_inflight": case.extra_inflight,
        "memory_limit_microbatches": memory_limit,
        "peak_inflight": [one["peak_inflight"] for one in alone],
        "peak_saved_bytes": [one["peak_bytes"] for one in alone],
        "memory_limit_bytes": [round(limit) for limit in limits_bytes],
        "is_within_memory": all(one["peak_inflight"] <= memory_limit for one in alone)
        and all(one["peak_bytes"] <= limit for one, limit in zip(alone, limits_bytes, strict=True)),
    }


def tuned_epochs(database_path: Path) -> list[set[int]]:
    """Return the epochs of the last tuned plan of each attached block, in order."""
    with open_history(database_path) as history:
        jobs = sorted(history.job_summaries(), key=lambda job: job.started_at)
        found = []
        for job in jobs:
            tuned = [row for row in history.plans(job.job_id) if row.plan.purpose is PlanPurpose.TUNED]
            found.append({row.plan_epoch for row in tuned if row.plan.plan_id == tuned[-1].plan.plan_id})
    return found


def compared(iterations: Sequence[Iteration], epochs: Sequence[set[int]]) -> dict[str, Any]:
    """Return saving and slowdown of the planned iterations against the neighbouring baseline blocks."""
    settled = [iteration for iteration in iterations if iteration.is_settled]
    rounds = []
    for round_index, wanted in enumerate(epochs):
        beside = (round_index, round_index + 1)
        at_full_speed = [i for i in settled if not i.is_attached and i.round_index in beside]
        tuned = [i for i in settled if i.is_attached and i.round_index == round_index and i.plan_epoch in wanted]
        if at_full_speed and tuned:
            rounds.append((at_full_speed, tuned))
    figures: dict[str, Any] = {"num_tuned": sum(len(tuned) for _, tuned in rounds), "num_iterations": len(iterations)}
    for name, sign in (("saving", -1), ("slowdown", 1)):
        changes = [sign * (ratio - 1) for ratio in ratios(rounds, is_energy=name == "saving")] if rounds else [None]
        for what, value in zip(("ratio", "low", "high"), bounds(changes), strict=True):
            figures[f"{name}_{what}"] = value
    return figures


def ratios(rounds: Sequence[tuple[list[Iteration], list[Iteration]]], *, is_energy: bool) -> list[float]:
    """Return tuned over baseline, averaged over rounds: for all iterations first, then for resampled ones."""

    def of(iterations: Sequence[Iteration]) -> float:
        return statistics.median(i.energy_j if is_energy else i.time_s for i in iterations)

    resampled = random.Random(2)
    found = [statistics.mean(of(tuned) / of(at_full_speed) for at_full_speed, tuned in rounds)]
    for _ in range(NUM_RESAMPLES):
        drawn = [[resampled.choices(side, k=len(side)) for side in sides] for sides in rounds]
        found.append(statistics.mean(of(tuned) / of(at_full_speed) for at_full_speed, tuned in drawn))
    return found


def bounds(changes: Sequence[float | None]) -> tuple[float | None, float | None, float | None]:
    """Return the estimate and its 95 % interval; all None if nothing was measured."""
    known = [change for change in changes if change is not None]
    if not known:
        return None, None, None
    ranked = sorted(known[1:])
    low, high = ranked[round(0.025 * len(ranked))], ranked[round(0.975 * len(ranked)) - 1]
    return round(known[0], 4), round(low, 4), round(high, 4)


# --- one rank ---


class Move(IntEnum):
    """What all ranks do before the next iteration."""

    GO_ON = 0
    ATTACH = 1
    DETACH = 2
    STOP = 3


class Watcher:
    """Polls the daemon's status of the job in a thread: a request takes longer than a rank has slack."""

    def __init__(self, socket_path: str) -> None:
        self._daemon = DaemonClient(socket_path)
        self._jobs: list[Mapping[str, Any]] = []
        self._over: set[str] = set()
        threading.Thread(target=self._ask, daemon=True).start()

    def job(self) -> Mapping[str, Any] | None:
        """Return the last status of this block's job, None before the first."""
        return next((job for job in self._jobs if job["job_id"] not in self._over), None)

    def leave_out(self, job: Mapping[str, Any]) -> None:
        """Stop polling this job: its ranks are about to leave."""
        self._over.add(job["job_id"])

    def _ask(self) -> None:
        while True:
            self._jobs = self._daemon.get_status()["jobs"]
            time.sleep(WATCH_S)


class Conductor:
    """Rank 0's controller: reads clock and counters between iterations and decides what comes next."""

    def __init__(self, case: Case, host: SimulatedHost, socket_path: str) -> None:
        self._case, self._host = case, host
        self._gpu_uuids = [identity.gpu_uuid for identity in host.identities()]
        self._watcher = Watcher(socket_path)
        self._round_index, self._num_in_block, self._is_attached = 0, 0, False
        self._last: tuple[float, float] | None = None
        self._last_epoch = 0
        self.iterations: list[Iteration] = []

    def next_move(self, plan_epoch: int) -> Move:
        """Record the last iteration, which followed this plan, and decide what comes next."""
        now_s, total_j = time.monotonic(), sum(self._host.exact_energy_j(uuid) for uuid in self._gpu_uuids)
        if self._last is not None:
            self.iterations.append(
                Iteration(
                    self._round_index,
                    self._is_attached,
                    plan_epoch,
                    now_s - self._last[0],
                    total_j - self._last[1],
                    is_settled=self._num_in_block > 1 and plan_epoch == self._last_epoch,
                )
            )
        self._last, self._last_epoch = (now_s, total_j), plan_epoch
        job = self._watcher.job()
        move = self._move(job)
        if move is Move.DETACH and job is not None:
            self._watcher.leave_out(job)
        self._num_in_block = 1 if move in {Move.ATTACH, Move.DETACH} else self._num_in_block + 1
        self._is_attached = move is Move.ATTACH or (self._is_attached and move is Move.GO_ON)
        self._round_index += move is Move.DETACH
        return move

    def _move(self, job: Mapping[str, Any] | None) -> Move:
        if not self._is_attached:
            if self._num_in_block <= self._case.block_iterations:
                return Move.GO_ON
            return Move.STOP if self._round_index == self._case.num_rounds else Move.ATTACH
        is_settled = (
            job is not None
            and job["plan_purpose"] == PlanPurpose.TUNED
            and job["num_iterations_of_plan"] > self._case.block_iterations
        )
        return Move.DETACH if is_settled or self._num_in_block > self._case.most_iterations else Move.GO_ON


def train(rank: int, case: Case, world: str, socket_path: str) -> dict[str, Any]:
    """Train baseline and attached blocks in turn; return this rank's records."""
    host = SimulatedHost.open(Path(world))
    gpu_uuid = host.identities()[rank].gpu_uuid
    training = make_rank(case, rank)
    trace = share_trace(training.stages)
    plain, planned = training.schedule, planned_schedule(case, training)
    simulated = training.simulate_on(host, gpu_uuid, duration_scale=case.duration_scale)
    conductor = Conductor(case, host, socket_path) if rank == 0 else None
    handle = Handle()
    losses: list[list[str]] = []
    epochs: list[int] = []
    is_order_right, num_errors, num_attached = True, 0, 0
    while (move := decided(conductor, handle.plan_epoch)) is not Move.STOP:
        if move is Move.DETACH:
            is_order_right &= handle.is_attached
            handle.detach()
            num_errors += handle.num_errors
            handle = Handle()
        elif move is Move.ATTACH:
            num_attached += 1
            handle = attach(
                planned,
                job=case.name,
                run_key=f"round-{num_attached}",
                gpu_uuid=gpu_uuid,
                socket_path=socket_path,
                max_slowdown_ratio=case.max_slowdown_ratio,
                timer=training.timer,
            )
        training.schedule = planned if handle.is_attached else plain
        trace.clear()
        losses.append(exactly(training.step(len(epochs))))
        is_order_right &= handle.order is None or list(handle.order) == trace
        epochs.append(handle.plan_epoch)
    simulated.close()
    host.close()
    return {
        "iterations": conductor.iterations if conductor else [],
        "losses": losses,
        "epochs": epochs,
        "is_order_right": is_order_right,
        "num_errors": num_errors,
    }


def decided(conductor: Conductor | None, plan_epoch: int) -> Move:
    """Return rank 0's decision."""
    decision = torch.tensor([int(conductor.next_move(plan_epoch)) if conductor else 0])
    dist.broadcast(decision, src=0)
    return Move(int(decision.item()))


def run_alone(case: Case, place: Place, num_steps: int, folder: Path, *, is_plain: bool) -> list[dict[str, Any]]:
    """Train as many steps without daemon and GPUs; return each rank's losses and peak memory."""
    folder.mkdir()
    return place.run_ranks(NUM_RANKS, folder, train_alone, case, num_steps, is_plain, limit_s=RUN_LIMIT_S)


def train_alone(rank: int, case: Case, num_steps: int, is_plain: bool) -> dict[str, Any]:  # noqa: FBT001  passed on by position
    training = make_rank(case, rank)
    share_trace(training.stages)
    if not is_plain:
        training.schedule = planned_schedule(case, training)
    saved = SavedActivations(parameter for stage in training.stages for parameter in stage.submod.parameters())
    for stage in training.stages:
        stage.saved = saved
    losses = [exactly(training.step(index)) for index in range(num_steps)]
    peak_inflight = max(stage.peak_inflight for stage in training.stages)
    return {"losses": losses, "peak_inflight": peak_inflight, "peak_bytes": saved.peak_bytes}


def make_rank(case: Case, rank: int) -> GptRank:
    """Return a rank of the training, under the schedule without extra microbatches."""
    return GptRank(case.schedule_name, rank, NUM_RANKS, case.num_microbatches, seed=SEED, stage_class=TracedStage)


def planned_schedule(case: Case, training: GptRank) -> Any:
    """Return the schedule that is attached: the training's own, or one with extra microbatches on the same stage."""
    if case.extra_inflight is None:
        return training.schedule
    return Schedule1F1BExtraInflight(
        training.stages[0], case.num_microbatches, extra_inflight=case.extra_inflight, loss_fn=loss_of
    )


def exactly(losses: Sequence[torch.Tensor]) -> list[str]:
    """Return losses as exact hexadecimal floats."""
    return [float(loss.detach()).hex() for loss in losses]


# --- printing ---


def show(row: Mapping[str, Any]) -> None:
    if row["saving_ratio"] is None:
        print(f"{row['schedule']:<15} no planned iterations within {row['num_iterations']} iterations", flush=True)
        return
    saving, slowdown = (
        f"{100 * row[f'{what}_ratio']:+.2f} % [{100 * row[f'{what}_low']:+.2f}, {100 * row[f'{what}_high']:+.2f}]"
        for what in ("saving", "slowdown")
    )
    most, needed = 100 * row["bound_ratio"], 100 * row["needed_saving_ratio"]
    verdict = "holds" if row["holds"] else "DOES NOT HOLD"
    print(f"{row['schedule']:<15} saves {saving} of at most {most:.2f} %, needed {needed:.0f} %; time {slowdown};"
          f" n = {row['num_tuned']}: {verdict}; {dict(list(row.items())[11:])}", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
