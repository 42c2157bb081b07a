"""Savings of plans with few clock segments and late clocks, for planner.py.

Eight stages, 32 microbatches, no slowdown when simulated with the latency. Shares are of the ideal saving, the proven
bound with clocks that change at once. "Naive" asks for each clock when its instruction begins.
"""

from collections.abc import Iterator
from pathlib import Path

from gpuenergyd.core.policy_api.policy import OfflinePlan
from gpuenergyd_plan.inputs import load_planner, plan_input
from gpuenergyd_plan.tables import PlanOptions

INSTANCE = "s8m32_1f1b_a100"
NUM_MICROBATCHES = 32
NUM_SEGMENTS = 8
LATENCIES_S = (0.025, 0.1)


def print_late_clocks(tables: dict[str, tuple[Path, float]], instances: Path) -> None:
    """Print one row per pipeline: tables of eight stages by name, with their blocking power, and the instance."""
    print(f"## Late clocks, share of the ideal saving at no slowdown; K = {NUM_SEGMENTS} clock segments a stage\n")
    print("| pipeline | " + " | ".join(f"K = {NUM_SEGMENTS}, {1e3 * s:.0f} ms" for s in LATENCIES_S), end=" | ")
    print(f"free clocks, naive, {1e3 * LATENCIES_S[0]:.0f} ms |\n|---|{'---|' * (len(LATENCIES_S) + 1)}")
    for name, path, microbatches, blocking_power_w in pipelines(tables, instances):
        plans = [late_plan(path, microbatches, blocking_power_w, latency_s) for latency_s in LATENCIES_S]
        switching = plans[0].switching
        assert switching is not None
        naive = share(plans[0], switching.free_naive_energy_j)
        later = switching.free_naive_time_s / plans[0].baseline_time_s - 1
        kept = " | ".join(f"{share(plan, plan.energy_j):.1f} %" for plan in plans)
        print(f"| {name} | {kept} | {naive:.1f} % at {100 * later:+.1f} % time |", flush=True)
    print()


def pipelines(
    tables: dict[str, tuple[Path, float]], instances: Path
) -> Iterator[tuple[str, Path, int | None, float | None]]:
    """Yield the available pipelines: name, file, and microbatches and blocking power if the file lacks them."""
    if (instance := instances / f"{INSTANCE}.json").is_file():
        yield f"{INSTANCE} (synthetic)", instance, None, None
    for name, (path, blocking_power_w) in tables.items():
        if path.is_file():
            yield f"{name} 8x{NUM_MICROBATCHES}", path, NUM_MICROBATCHES, blocking_power_w


def late_plan(path: Path, microbatches: int | None, blocking_power_w: float | None, latency_s: float) -> OfflinePlan:
    """Return a plan with few segments whose clocks take effect a latency after each request."""
    options = PlanOptions(
        microbatches=microbatches,
        blocking_power_w=blocking_power_w,
        max_switches=NUM_SEGMENTS,
        switch_latency_s=latency_s,
    )
    return load_planner("bubble-aware")(plan_input(path, options).request)


def share(plan: OfflinePlan, energy_j: float) -> float:
    """Return a saving in percent of the proven maximum."""
    assert plan.lower_bound_j is not None
    return 100 * (plan.baseline_energy_j - energy_j) / (plan.baseline_energy_j - plan.lower_bound_j)
