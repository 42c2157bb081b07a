"""GPT-3 175B on up to 8,192 GPUs, emulated as in Perseus section 6: EnvPipe, Perseus and this planner.

Usage: python benchmarks/runs/emulation.py [--profiles FOLDER] [--gpus a100-sxm a40] [--microbatches 12 24 48 96]
                                                [--json]

FOLDER contains the measured stage tables of the Perseus artifact, its planner's own frontiers (paper_frontiers/) and
its EnvPipe figures. Eight stages, tensor parallel 8, and as many pipelines as share 1,536 microbatches, all equally
fast except
for one in the straggler cases. Savings are against every instruction of every pipeline at its highest clock; waits cost
blocking power until the slowest pipeline is done. Perseus's energies are those of its own solver, which rounds
durations down; this planner's are evaluated on exact times. Tables are measured, pipelines are emulated.

"Any order" is an upper bound on the saving of any schedule at no slowdown, whatever is in flight: the planner's own
bound with memory for all microbatches, once for whole backwards and once for whole and split ones, each half assumed to
take half of the backward. Each case runs in its own process; memory is what its
planning adds to the imports and a small plan. "Carbon" lets the largest job follow forecasts for four months of 2024
with at most 5 % slowdown, where traces are available.
"""

import argparse
import csv
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from carbon import zones_in

from gpuenergyd.core.pipeline.graph import dependency_graph, one_forward_one_backward
from gpuenergyd.core.policy_api.policy import OfflinePlan, OfflineRequest
from gpuenergyd_carbon.lab.replay import replay
from gpuenergyd_carbon.lab.results import ReplayRequest
from gpuenergyd_plan.inputs import load_planner, plan_input
from gpuenergyd_plan.offline.order_bound import MOST_CELLS, any_order_bound
from gpuenergyd_plan.tables import PlanOptions
from gpuenergyd_policies.planning.frontier import frontier
from gpuenergyd_policies.planning.orders.relaxation import OrderTask

DATA = Path(__file__).parents[3] / "shared" / "data"
PROFILES = DATA / "profiles"
BLOCKING_POWER_W = {"a100-sxm": 83.64, "a40": 70.38}
NUM_STAGES, TENSOR_PARALLEL, MICROBATCHES_OF_ALL = 8, 8, 1536
STRAGGLERS = (1.05, 1.1, 1.2, 1.3, 1.4, 1.5)
PERSEUS_TABLE_6 = {
    "a100-sxm": {12: 0.152, 24: 0.142, 48: 0.136, 96: 0.133},
    "a40": {12: 0.118, 24: 0.102, 48: 0.093, 96: 0.089},
}
"""Intrinsic saving of GPT-3 175B on eight stages (Chung et al., SOSP'24, Table 6)."""
PERSEUS_FIGURE_7 = {"a100-sxm": (0.270, 0.120), "a40": (0.236, 0.078)}
"""GPT-3 175B on 1,024 GPUs with a straggler of 1.2, total saving: Perseus, EnvPipe (the same, Figure 7)."""
CARBON_SLOWDOWN = 0.05
TRAIN_UNTIL_AT = datetime(2024, 1, 1, tzinfo=UTC)
MONTH_HOURS = 30 * 24.0
ENVPIPE_TIME_SCALE, ENVPIPE_ENERGY_SCALE = 10.0, 80.0
"""The artifact's EnvPipe figures are for ten times the time, and ten times eight times the energy, of the tables."""


@dataclass(frozen=True, slots=True)
class Case:
    """One GPU and number of microbatches per pipeline."""

    gpu: str
    num_microbatches: int
    folder: Path

    @property
    def num_pipelines(self) -> int:
        return MICROBATCHES_OF_ALL // self.num_microbatches

    @property
    def num_gpus(self) -> int:
        return self.num_pipelines * NUM_STAGES * TENSOR_PARALLEL

    def request(
        self, straggler_time_s: float | None = None, extra_inflight: str | None = None, schedule: str | None = None
    ) -> OfflineRequest:
        options = PlanOptions(
            schedule=schedule,
            microbatches=self.num_microbatches,
            blocking_power_w=BLOCKING_POWER_W[self.gpu],
            straggler_time_s=straggler_time_s,
            extra_inflight=extra_inflight,
        )
        return plan_input(self.folder / f"gpt3-175b_{self.gpu}.csv", options).request

    def plan(self, straggler_time_s: float | None = None, extra_inflight: str | None = None) -> OfflinePlan:
        return load_planner("bubble-aware")(self.request(straggler_time_s, extra_inflight))

    def any_order_bound_ratio(self, time_s: float, energy_j: float, schedule: str | None) -> float:
        """Return the most that any order could save in this time with unlimited memory; auto splits backwards, too."""
        number, profile = self.num_microbatches, self.request(schedule=schedule).profile
        bound = any_order_bound(OrderTask(number, profile, time_s, [number] * NUM_STAGES), num_cells=MOST_CELLS)
        assert bound is not None
        return 1 - bound / energy_j

    def frontier(self) -> list[tuple[float, float]]:
        """Return times and energies of plain 1F1B plans, from the fastest to the one with the lowest energy."""
        graph = dependency_graph(one_forward_one_backward(NUM_STAGES, self.num_microbatches))
        whole = frontier(graph, self.request().profile, until_slowest=False)
        return [(point.iteration_time_s, point.energy_j) for point in whole.points]

    def charged_j(self, time_s: float, energy_j: float, until_s: float) -> float:
        """Return a pipeline's energy including the wait for the slowest one."""
        return energy_j + BLOCKING_POWER_W[self.gpu] * NUM_STAGES * max(0.0, until_s - time_s)

    def perseus_frontier(self) -> list[tuple[float, float]]:
        name = f"{self.gpu.replace('-', '_')}__gpt3-175b_bf16_mb{self.num_microbatches}.csv"
        with (self.folder / "paper_frontiers" / name).open(encoding="utf-8") as file:
            return [(float(row["time"]), float(row["energy"])) for row in csv.DictReader(file)]

    def perseus_j(self, fastest_s: float, until_s: float) -> float:
        """Return the energy of Perseus's best plan that is done by then.

        Its solver rounds each duration down; times are stretched so that its fastest plan takes what it really does.
        """
        points = self.perseus_frontier()
        stretch = fastest_s / min(points)[0]
        in_time = [(stretch * t, e) for t, e in points if stretch * t <= until_s * (1 + 1e-9)]
        return min(self.charged_j(time_s, energy_j, until_s) for time_s, energy_j in in_time)

    def envpipe(self) -> tuple[float, float] | None:
        """Return time and energy of EnvPipe from the artifact."""
        with (self.folder / "paper_frontiers" / "envpipe_result_gpt3-175b.csv").open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                text = " ".join(row.values()).lower().replace("_", "-")
                if self.gpu in text and str(self.num_microbatches) in row.values():
                    time_s = float(row["iteration_time"]) / ENVPIPE_TIME_SCALE
                    return time_s, float(row["energy"]) / ENVPIPE_ENERGY_SCALE
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, default=PROFILES)
    parser.add_argument("--gpus", nargs="+", choices=sorted(BLOCKING_POWER_W), default=sorted(BLOCKING_POWER_W))
    parser.add_argument("--microbatches", nargs="+", type=int, default=[12, 24, 48, 96])
    parser.add_argument("--traces", type=Path, default=DATA / "carbon")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(emulated(Case(options.gpus[0], options.microbatches[0], options.profiles))))
        return 0
    if not options.json:
        print(f"{datetime.now(tz=UTC):%Y-%m-%d}, {platform.machine()}, Python {platform.python_version()}")
    rows = []
    for gpu in options.gpus:
        for count in options.microbatches:
            given = ["--gpus", gpu, "--microbatches", str(count), "--profiles", str(options.profiles)]
            command = [sys.executable, __file__, "--one", *given]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rows.append(json.loads(done.stdout))
            if not options.json:
                show({name: value for name, value in rows[-1].items() if name != "frontier"})
    months = list(carbon_months(max(rows, key=lambda row: int(row["num_gpus"])), options.traces))
    if options.json:
        for row in rows:
            del row["frontier"]
        print(json.dumps({"cases": rows, "months": months, "figure_7": PERSEUS_FIGURE_7}))
    else:
        for month in months:
            show(month)
    return 0


def show(figures: dict[str, Any]) -> None:
    print("\n" + "\n".join(f"{name:<24}{value}" for name, value in figures.items()), flush=True)


def emulated(case: Case) -> dict[str, Any]:
    """Return all figures of one case except carbon."""
    Case(case.gpu, 4, case.folder).plan()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plain, plain_cpu_s = _timed(case, None)
    plain_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ahead, ahead_cpu_s = _timed(case, "auto")
    ahead_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    base_s, base_j = plain.baseline_time_s, plain.baseline_energy_j
    theirs = case.envpipe()
    assert plain.lower_bound_j is not None
    return {
        "gpu": case.gpu,
        "num_microbatches": case.num_microbatches,
        "num_pipelines": case.num_pipelines,
        "num_gpus": case.num_gpus,
        "envpipe_ratio": None if theirs is None else 1 - theirs[1] / base_j,
        "envpipe_slowdown_ratio": None if theirs is None else theirs[0] / base_s - 1,
        "perseus_published_ratio": PERSEUS_TABLE_6[case.gpu].get(case.num_microbatches),
        "perseus_ratio": 1 - case.perseus_j(base_s, base_s) / base_j,
        "plain_ratio": 1 - plain.energy_j / base_j,
        "plain_slowdown_ratio": plain.iteration_time_s / base_s - 1,
        "plain_bound_ratio": 1 - plain.lower_bound_j / base_j,
        "ahead_ratio": 1 - ahead.energy_j / base_j,
        "ahead_slowdown_ratio": ahead.iteration_time_s / base_s - 1,
        "any_order_bound_ratio": case.any_order_bound_ratio(base_s, base_j, schedule=None),
        "any_split_order_bound_ratio": case.any_order_bound_ratio(base_s, base_j, schedule="auto"),
        "extra_inflight": list(ahead.extra_inflight),
        "plain_cpu_s": plain_cpu_s,
        "ahead_cpu_s": ahead_cpu_s,
        "plain_memory_mb": (plain_kib - before_kib) / 1024,
        "ahead_memory_mb": (ahead_kib - before_kib) / 1024,
        "stragglers": [with_straggler(case, plain, ratio) for ratio in STRAGGLERS],
        "frontier": [(base_s, base_j), *case.frontier()],
    }


def with_straggler(case: Case, base: OfflinePlan, ratio: float) -> dict[str, float]:
    """Return the total saving of all pipelines while one is slower by a ratio."""
    until_s = ratio * base.baseline_time_s
    waiting_j = case.charged_j(base.baseline_time_s, base.baseline_energy_j, until_s)
    # The straggler runs longer at full speed; its own energy is the same for all planners.
    straggler_j = ratio * base.baseline_energy_j
    others = case.num_pipelines - 1
    everything_j = others * waiting_j + straggler_j

    def saved(energy_j: float) -> float:
        return 1 - (others * energy_j + straggler_j) / everything_j

    plain, ahead = case.plan(until_s), case.plan(until_s, "auto")
    return {
        "straggler": ratio,
        "perseus_ratio": saved(case.perseus_j(base.baseline_time_s, until_s)),
        "plain_ratio": saved(case.charged_j(plain.iteration_time_s, plain.energy_j, until_s)),
        "ahead_ratio": saved(case.charged_j(ahead.iteration_time_s, ahead.energy_j, until_s)),
    }


def carbon_months(row: dict[str, Any], traces: Path) -> Iterator[dict[str, Any]]:
    """Yield, per zone, what following forecasts for a month adds to the plan; grams against the baseline."""
    zones = zones_in(traces, None) if traces.is_dir() else []
    if not zones:
        return
    (_, base_j), *points = [(float(time_s), float(energy_j)) for time_s, energy_j in row["frontier"]]
    tuned_ratio = min(points)[1] / base_j
    starts = tuple(datetime(2024, month, 1, tzinfo=UTC) for month in (1, 4, 7, 10))
    request = ReplayRequest(
        tuple(zones),
        tuple(points),
        TRAIN_UNTIL_AT,
        max_slowdown_ratio=CARBON_SLOWDOWN,
        job_hours=MONTH_HOURS,
        starts_at={zone.zone: starts for zone in zones},
    )
    for found in replay(request):
        by_name = {method.name: method for method in found.methods}
        yield {
            "gpu": row["gpu"],
            "num_gpus": row["num_gpus"],
            "zone": found.zone,
            "num_months": found.num_jobs,
            "max_slowdown_ratio": CARBON_SLOWDOWN,
            "at_full_speed_ratio": 1 - tuned_ratio,
            "constant_ratio": 1 - tuned_ratio * (1 - found.constant_saving_ratio),
            "with_forecasts_ratio": 1 - tuned_ratio * (1 - by_name["forecast"].saving_ratio),
            "time_used_ratio_max": found.time_used_ratio_max,
        }


def _timed(case: Case, extra_inflight: str | None) -> tuple[OfflinePlan, float]:
    begun_s = time.process_time()
    plan = case.plan(extra_inflight=extra_inflight)
    return plan, time.process_time() - begun_s


if __name__ == "__main__":
    sys.exit(main())
