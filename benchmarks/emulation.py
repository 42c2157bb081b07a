"""GPT-3 175B on up to 8,192 GPUs, emulated as in Perseus section 6: EnvPipe, Perseus and ours on the same tables.

Usage: python benchmarks/emulation.py [--profiles FOLDER] [--gpus a100-sxm a40] [--microbatches 12 24 48 96]

FOLDER holds the measured stage tables of the Perseus artifact, its planner's own frontiers (paper_frontiers/) and what
it gives for EnvPipe. Eight stages, tensor parallel 8, and as many pipelines as share 1,536 microbatches: all of one
speed but one, where a straggler is asked for. Savings are against every instruction of every pipeline at its highest
clock, waits charged at the blocking power until the slowest pipeline is done. Perseus's energies are those of its own
solver, which rounds each duration down; ours are judged on un-quantised times. Tables measured, pipelines emulated.
"""

import argparse
import csv
import platform
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gpuenergyd.cli.plan import load_planner
from gpuenergyd.cli.plan_inputs import PlanOptions, plan_input
from gpuenergyd.core.policy import OfflinePlan

PROFILES = Path(__file__).parents[2] / "shared" / "data" / "profiles"
BLOCKING_POWER_W = {"a100-sxm": 83.64, "a40": 70.38}
NUM_STAGES, TENSOR_PARALLEL, MICROBATCHES_OF_ALL = 8, 8, 1536
STRAGGLERS = (1.05, 1.1, 1.2, 1.3, 1.4, 1.5)
ENVPIPE_TIME_SCALE, ENVPIPE_ENERGY_SCALE = 10.0, 80.0
"""The artifact's EnvPipe figures speak of ten times the time, and ten times eight times the energy, of the tables."""


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

    def plan(self, straggler_time_s: float | None = None, extra_inflight: str | None = None) -> OfflinePlan:
        options = PlanOptions(
            microbatches=self.num_microbatches,
            blocking_power_w=BLOCKING_POWER_W[self.gpu],
            straggler_time_s=straggler_time_s,
            extra_inflight=extra_inflight,
        )
        given = plan_input(self.folder / f"gpt3-175b_{self.gpu}.csv", options)
        return load_planner("bubble-aware")(given.request)

    def charged_j(self, time_s: float, energy_j: float, until_s: float) -> float:
        """Return a pipeline's energy with the wait until the slowest one is done."""
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
        """Return time and energy as the artifact gives them for EnvPipe."""
        with (self.folder / "paper_frontiers" / "envpipe_result_gpt3-175b.csv").open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                text = " ".join(row.values()).lower().replace("_", "-")
                if self.gpu in text and str(self.num_microbatches) in row.values():
                    time_s = float(row["iteration_time"]) / ENVPIPE_TIME_SCALE
                    return time_s, float(row["energy"]) / ENVPIPE_ENERGY_SCALE
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, default=PROFILES)
    parser.add_argument("--gpus", nargs="+", choices=sorted(BLOCKING_POWER_W), default=sorted(BLOCKING_POWER_W))
    parser.add_argument("--microbatches", nargs="+", type=int, default=[12, 24, 48, 96])
    options = parser.parse_args()
    print(f"{datetime.now(tz=UTC):%Y-%m-%d}, {platform.machine()}, Python {platform.python_version()}\n")
    cases = [Case(gpu, count, options.profiles) for gpu in options.gpus for count in options.microbatches]
    _print_intrinsic(cases)
    _print_stragglers(cases)


def _print_intrinsic(cases: list[Case]) -> None:
    print("### No straggler, no slowdown: energy saved, %\n")
    print(
        "| GPU | microbatches | pipelines | GPUs | EnvPipe (its slowdown) | Perseus | ours, plain 1F1B "
        "| ours, microbatches ahead | most ahead | planning, CPU s | ahead, CPU s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for case in cases:
        plain, plain_cpu_s = _timed(case, None)
        ahead, ahead_cpu_s = _timed(case, "auto")
        base_s, base_j = plain.baseline_time_s, plain.baseline_energy_j
        theirs = case.envpipe()
        envpipe = "-" if theirs is None else f"{_percent(theirs[1], base_j)} ({100 * (theirs[0] / base_s - 1):+.2f} %)"
        print(
            f"| {case.gpu} | {case.num_microbatches} | {case.num_pipelines} | {case.num_gpus:,} | {envpipe} "
            f"| {_percent(case.perseus_j(base_s, base_s), base_j)} | {_percent(plain.energy_j, base_j)} "
            f"| {_percent(ahead.energy_j, base_j)} | {max(ahead.extra_inflight, default=0)} "
            f"| {plain_cpu_s:.2f} | {ahead_cpu_s:.2f} |"
        )


def _print_stragglers(cases: list[Case]) -> None:
    print("\n### One straggler: energy saved by all pipelines together, %, Perseus / ours plain / ours ahead\n")
    print("| GPU | GPUs |", " | ".join(f"{ratio:g} x" for ratio in STRAGGLERS), "|")
    print("|---|---|" + "---|" * len(STRAGGLERS))
    for case in cases:
        base = case.plan()
        cells = []
        for ratio in STRAGGLERS:
            until_s = ratio * base.baseline_time_s
            waiting_j = case.charged_j(base.baseline_time_s, base.baseline_energy_j, until_s)
            # The straggler runs at full speed, and longer: its own energy is its power's, the same for everybody.
            straggler_j = ratio * base.baseline_energy_j
            others = case.num_pipelines - 1
            plans = [case.plan(until_s), case.plan(until_s, "auto")]
            ours_j = (case.charged_j(plan.iteration_time_s, plan.energy_j, until_s) for plan in plans)
            energies_j = [case.perseus_j(base.baseline_time_s, until_s), *ours_j]
            everything_j = others * waiting_j + straggler_j
            cells.append(" / ".join(_percent(others * e + straggler_j, everything_j) for e in energies_j))
        print(f"| {case.gpu} | {case.num_gpus:,} |", " | ".join(cells), "|")


def _timed(case: Case, extra_inflight: str | None) -> tuple[OfflinePlan, float]:
    begun_s = time.process_time()
    plan = case.plan(extra_inflight=extra_inflight)
    return plan, time.process_time() - begun_s


def _percent(energy_j: float, baseline_j: float) -> str:
    return f"{100 * (1 - energy_j / baseline_j):.2f}"


if __name__ == "__main__":
    main()
