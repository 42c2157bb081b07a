"""Savings to expect by kind of workload, computed by the planner from the tables of the example pipeline."""

import csv
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs.site.pictures import BLOCKING_POWER_W, EXAMPLE
from gpuenergyd_plan.inputs import load_planner, plan_input
from gpuenergyd_plan.tables import PlanOptions

_BALANCED_STAGE = "0"


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of workload: stages of the example pipeline, and microbatches per iteration."""

    name: str
    stages: tuple[str, ...]
    """The stage of the example's table that each stage of the workload has the costs of."""
    num_microbatches: int
    communication_ratio: float = 0.0
    """Share of the time at full speed in communication within each instruction: it takes as long at every clock."""


WORKLOADS = (
    Workload("pipeline of 4 stages, the last one slower, 8 microbatches", ("0", "1", "2", "3"), 8),
    Workload("the same, 32 microbatches", ("0", "1", "2", "3"), 32),
    Workload("pipeline of 4 equal stages, 8 microbatches", (_BALANCED_STAGE,) * 4, 8),
    Workload("the same, 32 microbatches", (_BALANCED_STAGE,) * 4, 32),
    Workload("one GPU", (_BALANCED_STAGE,), 1),
    Workload("FSDP with expert parallelism, a third of the time communicating", (_BALANCED_STAGE,), 1, 1 / 3),
)
SLOWDOWNS = (0.0, 0.02, 0.05, 0.1)
"""Permitted slowdowns of the table."""


@cache
def saving_ratio(workload: Workload, *, slowdown: float = 0.0, extra_inflight: str | None = None) -> float:
    """Return the share of the energy at full speed that the plan for a workload saves."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "profile.csv")
        table.write_text(_profile_of(workload), encoding="utf-8")
        options = PlanOptions(
            microbatches=workload.num_microbatches,
            extra_inflight=extra_inflight,
            slowdown=slowdown,
            blocking_power_w=BLOCKING_POWER_W,
        )
        plan = load_planner("bubble-aware")(plan_input(table, options).request)
    return 1 - plan.energy_j / plan.baseline_energy_j


def _profile_of(workload: Workload) -> str:
    """Return a profile table whose stages have the costs of the given stages of the example."""
    header, *rows = list(csv.reader(EXAMPLE.read_text(encoding="utf-8").splitlines()))
    waits_per_work = workload.communication_ratio / (1 - workload.communication_ratio)
    lines = [",".join(header)]
    for stage, source in enumerate(workload.stages):
        own = [row[1:] for row in rows if row[0] == source]
        for instruction, clock, time_s, energy_j in own:
            waits_s = waits_per_work * min(float(row[2]) for row in own if row[0] == instruction)
            costs = float(time_s) + waits_s, float(energy_j) + waits_s * BLOCKING_POWER_W
            lines.append(",".join(map(str, (stage, instruction, clock, *costs))))
    return "\n".join(lines) + "\n"
