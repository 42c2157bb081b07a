"""Benchmark of orders chosen together with clocks: savings at 1F1B's time within memory, and plans of deep pipelines.

Usage: python benchmarks/runs/orders.py [--short] [--json]

Each case runs `gpuenergyd plan --schedule auto` on a measured GPT-3 table, with waiting charged at the GPU's blocking
power, and replays the plan: time, microbatches held and energy are computed again from order and clocks alone. Deep
pipelines repeat the table's second stage. Exits with 1 if a target is missed.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuenergyd.core.pipeline.graph import Schedule, dependency_graph
from gpuenergyd_plan.command import plan_figures
from gpuenergyd_plan.inputs import PlanInput, plan_input
from gpuenergyd_plan.offline.bubble_aware import plan_offline
from gpuenergyd_plan.tables import PlanOptions
from gpuenergyd_policies.planning.frontier import warm_up
from gpuenergyd_policies.planning.plan_evaluation import evaluate_clocks

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "profiles"
TABLES = {"A100": ("gpt3-175b_a100-sxm.csv", 83.64), "A40": ("gpt3-175b_a40.csv", 70.38)}
CURVES = {"A100": "a100-sxm", "A40": "a40"}
"""GPU models whose assumed power of waiting by clock is used."""
WAITS = (("A100", None), ("A100", "8,7,6,5,4,3,2,1"), ("A100", "8"), ("A40", None), ("A40", "8"))
WAIT_LATENCIES_S = (0.0, 0.014, 0.025)
CHUNKS = (("A100", 32, "8,7,6,5,4,3,2,1"), ("A100", 32, "8"), ("A100", 32, "12"), ("A40", 32, "8"))
BOUND_DISTANCE = 0.008
"""Largest distance between a saving and the bound over any order."""
DEPTHS = ((8, 128, 2.0), (16, 512, 5.0), (64, 1024, 60.0))
"""Stages, microbatches and CPU seconds of deep pipelines."""
MOST_GAP = 0.003
"""Largest distance of a deep pipeline's plan from the proven bound of its order."""


@dataclass(frozen=True, slots=True)
class Case:
    """One choice of an order, and the saving that it should reach."""

    gpu: str
    num_stages: int
    num_microbatches: int
    memory: str
    target_ratio: float | None = None


CASES = (
    Case("A100", 8, 32, "8,7,6,5,4,3,2,1", 0.252),
    Case("A100", 8, 32, "8", 0.282),
    Case("A40", 8, 32, "8,7,6,5,4,3,2,1", 0.255),
    Case("A40", 8, 32, "8", 0.276),
    Case("A100", 4, 8, "4,3,2,1", 0.2556),
    Case("A100", 4, 8, "4", 0.2916),
    Case("A100", 4, 8, "8", 0.2952),
    Case("A100", 4, 32, "4,3,2,1", 0.1570),
    Case("A100", 4, 32, "4", 0.1818),
    Case("A100", 4, 32, "8", 0.1943),
    Case("A100", 8, 8, "8,7,6,5,4,3,2,1", 0.2753),
    Case("A100", 8, 8, "8", 0.3191),
    Case("A100", 8, 32, "16", 0.2847),
    *(
        Case("A100", 8, number, "8,7,6,5,4,3,2,1", saving - 0.002)
        for number, saving in ((12, 0.279), (24, 0.266), (48, 0.227), (96, 0.190))
    ),
    *(
        Case("A100", 8, number, "8", saving - 0.002)
        for number, saving in ((12, 0.305), (24, 0.290), (48, 0.251), (96, 0.205))
    ),
)


def main(arguments: Sequence[str]) -> int:
    """Print the cases and the deep pipelines; return 1 if a target was missed."""
    is_short = "--short" in arguments
    warm_up()
    with tempfile.TemporaryDirectory() as folder:
        cases = [_case(case, Path(folder)) for case in (CASES[:2] if is_short else CASES)]
        depths = list(_depths(DEPTHS[:1] if is_short else DEPTHS, Path(folder)))
        waits = [_waits(gpu, memory, Path(folder)) for gpu, memory in (WAITS[:1] if is_short else WAITS)]
        chunks = [] if is_short else [_chunks(*case, Path(folder)) for case in CHUNKS]
    rows = (*cases, *depths, *waits, *chunks)
    met = [row[name] for row in rows for name in ("is_met", "is_near_bound") if row.get(name) is not None]
    document = {
        "cases": cases,
        "depths": depths,
        "waits": waits,
        "chunks": chunks,
        "num_met": sum(met),
        "num_targets": len(met),
    }
    if "--json" in arguments:
        print(json.dumps(document))
    else:
        for row in rows:
            print("  ".join(f"{name} {value}" for name, value in row.items()))
        print(f"{sum(met)} of {len(met)} targets are met")
    return 0 if all(met) else 1


def _case(case: Case, folder: Path) -> dict[str, Any]:
    name, power_w = TABLES[case.gpu]
    table = _table_of(FOLDER / name, case.num_stages, folder)
    given = _given(table, "auto", case.num_microbatches, power_w, case.memory)
    figures = _planned(given)
    limits = [int(part) for part in case.memory.split(",")]
    limits = limits * case.num_stages if len(limits) == 1 else limits
    saving, bound = figures["saving_ratio"], figures["any_order_bound_ratio"]
    is_valid = figures["iteration_time_s"] <= figures["baseline_time_s"] and all(
        held <= limit for held, limit in zip(figures["held_microbatches"], limits, strict=True)
    )
    return {
        "gpu": case.gpu,
        "stages": case.num_stages,
        "microbatches": case.num_microbatches,
        "memory": case.memory,
        "saving_ratio": saving,
        "own_order_saving_ratio": figures["own_order_saving_ratio"],
        "any_order_bound_ratio": bound,
        "time_ratio": figures["iteration_time_s"] / figures["baseline_time_s"],
        "held_microbatches": figures["held_microbatches"],
        "cpu_s": figures["solve_cpu_s"],
        "target_ratio": case.target_ratio,
        "is_met": None if case.target_ratio is None else is_valid and saving >= case.target_ratio,
        "is_near_bound": bound is not None and bound - saving <= BOUND_DISTANCE,
    }


def _depths(depths: Sequence[tuple[int, int, float]], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the time and the gap of 1F1B, ZB-H1 and chosen orders of deep pipelines."""
    name, power_w = TABLES["A100"]
    for num_stages, num_microbatches, most_cpu_s in depths:
        table = _table_of(FOLDER / name, num_stages, folder)
        for schedule in ("1f1b", "zb-h1", "auto"):
            begun_cpu_s = time.process_time()
            figures = _planned(_given(table, schedule, num_microbatches, power_w, None))
            cpu_s = time.process_time() - begun_cpu_s
            gap = figures["energy_j"] / figures["lower_bound_j"] - 1
            yield {
                "schedule": schedule,
                "stages": num_stages,
                "microbatches": num_microbatches,
                "saving_ratio": figures["saving_ratio"],
                "gap_ratio": gap,
                "solve_cpu_s": figures["solve_cpu_s"],
                "cpu_s": cpu_s,
                "most_cpu_s": most_cpu_s,
                "is_met": figures["solve_cpu_s"] <= most_cpu_s and gap <= MOST_GAP,
            }


def _waits(gpu: str, memory: str | None, folder: Path) -> dict[str, Any]:
    """Return what waiting by clock adds: charged at the clock in force, and lowered, without and with switch latency.

    Without `memory` the order is 1F1B, else it is chosen. No saving may be above what the bound permits.
    """
    name, power_w = TABLES[gpu]
    table = _table_of(FOLDER / name, 8, folder)
    options = PlanOptions(
        schedule=None if memory is None else "auto", microbatches=32, memory_limit_microbatches=memory
    )
    constant = plan_figures(
        own := plan_input(table, replace(options, blocking_power_w=power_w)), plan_offline(own.request)
    )
    row: dict[str, Any] = {"gpu": gpu, "memory": memory, "constant_saving_ratio": constant["saving_ratio"]}
    is_met = True
    for latency_s in WAIT_LATENCIES_S:
        given = plan_input(table, replace(options, waiting_power=CURVES[gpu], switch_latency_s=latency_s))
        figures = plan_figures(given, plan_offline(given.request))
        bound = 1 - figures["lower_bound_j"] / figures["baseline_energy_j"]
        label = f"{1000 * latency_s:g}_ms"
        row[f"kept_saving_ratio_{label}"] = figures["waiting"]["kept_clock_saving_ratio"]
        row[f"saving_ratio_{label}"] = figures["saving_ratio"]
        row[f"bound_ratio_{label}"] = bound
        row[f"num_lowered_{label}"] = len(figures["waiting"]["lowered"])
        is_met &= figures["saving_ratio"] <= bound and figures["saving_ratio"] >= row[f"kept_saving_ratio_{label}"]
    return {**row, "is_met": is_met}


def _chunks(gpu: str, num_microbatches: int, memory: str, folder: Path) -> dict[str, Any]:
    """Return the saving with two stages per GPU, each half of a stage of the table."""
    name, power_w = TABLES[gpu]
    header, *lines = (FOLDER / name).read_text().splitlines()
    halves = [header]
    for line in lines:
        stage, word, mhz, time_s, energy_j = line.split(",")
        halves += [
            f"{2 * int(stage) + half},{word},{mhz},{float(time_s) / 2!r},{float(energy_j) / 2!r}" for half in (0, 1)
        ]
    table = folder / "halves.csv"
    table.write_text("\n".join(halves) + "\n")
    options = PlanOptions(
        schedule="auto",
        microbatches=num_microbatches,
        chunks=2,
        blocking_power_w=power_w,
        memory_limit_microbatches=memory,
    )
    given = plan_input(table, options)
    figures = plan_figures(given, plan_offline(given.request))
    return {
        "gpu": gpu,
        "microbatches": num_microbatches,
        "memory": memory,
        "saving_ratio": figures["saving_ratio"],
        "any_order_bound_ratio": figures["any_order_bound_ratio"],
        "time_ratio": figures["iteration_time_s"] / figures["baseline_time_s"],
        "held_microbatches": max(figures["held_microbatches"]),
        "stage_of_chunk": figures["stage_of_chunk"],
        "cpu_s": figures["solve_cpu_s"],
    }


def _given(table: Path, schedule: str, num_microbatches: int, power_w: float, memory: str | None) -> PlanInput:
    options = PlanOptions(
        schedule=schedule, microbatches=num_microbatches, blocking_power_w=power_w, memory_limit_microbatches=memory
    )
    return plan_input(table, options)


def _planned(given: PlanInput) -> dict[str, Any]:
    """Return the figures of a plan whose time and energy were computed again from its order and clocks."""
    planned = plan_offline(given.request)
    figures = plan_figures(given, planned)
    graph = dependency_graph(Schedule("replayed", given.schedule.num_microbatches, planned.orders))
    clocks = [planned.sm_clocks_mhz[i] for i in graph.instructions]
    replayed = evaluate_clocks(graph, given.request.profile, clocks)
    for own, again in (
        (figures["iteration_time_s"], replayed.iteration_time_s),
        (figures["energy_j"], replayed.energy_j),
    ):
        if abs(own / again - 1) > 1e-9:
            raise AssertionError(f"the plan promises {own}, replayed it is {again}")
    return figures


def _table_of(path: Path, num_stages: int, folder: Path) -> Path:
    """Return a table with another number of stages: neighbours of eight merged, or the second stage repeated."""
    header, *lines = path.read_text().splitlines()
    rows = [line.split(",") for line in lines]
    if num_stages == 8:
        return path
    costs = {(int(s), word, mhz): (float(time_s), float(energy_j)) for s, word, mhz, time_s, energy_j in rows}
    result = [header]
    for stage in range(num_stages):
        if num_stages < 8:
            merged = range(stage * 8 // num_stages, (stage + 1) * 8 // num_stages)
        else:
            merged = range(7, 8) if stage == num_stages - 1 else range(min(stage, 1), min(stage, 1) + 1)
        for word, mhz in sorted({(word, mhz) for s, word, mhz in costs if s == merged[0]}):
            parts = [costs[s, word, mhz] for s in merged if (s, word, mhz) in costs]
            if len(parts) == len(merged):
                time_s, energy_j = (sum(values) for values in zip(*parts, strict=True))
                result.append(f"{stage},{word},{mhz},{time_s!r},{energy_j!r}")
    target = folder / f"{path.stem}-{num_stages}.csv"
    target.write_text("\n".join(result) + "\n")
    return target


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
