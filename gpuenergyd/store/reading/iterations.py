"""Iterations of a job as they are read: single ones, and those that were put together to blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.store.readers.sqlite import Reader, names_of

_PURPOSES: Mapping[str | None, PlanPurpose | None] = {None: None, "": None, **{str(word): word for word in PlanPurpose}}
OF_ITERATIONS = ("iteration_index", "started_at", "plan_purpose", "is_regular", "iteration_time_s", "energy_j")
OF_BLOCKS = (
    *("first_iteration_index", "started_at", "plan_purpose", "is_regular", "num_iterations"),
    *("sum_time_s", "median_time_s", "num_measured", "sum_energy_j", "median_energy_j"),
)
"""The columns that `Iterations` holds, in its order."""


@dataclass(frozen=True, slots=True)
class IterationRow:
    """One iteration as recorded."""

    iteration_index: int
    started_at: datetime
    iteration_time_s: float
    energy_j: float | None
    plan_id: str | None
    plan_purpose: PlanPurpose | None
    is_regular: bool


def iteration_rows(reader: Reader, job_id: str) -> tuple[IterationRow, ...]:
    """Return the single iterations of a job, in order."""
    rows = reader.values(names_of(IterationRow), "iterations", {"job_id = ?": job_id}, order_by="iteration_index")
    return tuple(
        IterationRow(index, at, time_s, energy_j, plan_id, _PURPOSES[purpose], is_regular)
        for index, at, time_s, energy_j, plan_id, purpose, is_regular in rows
    )


@dataclass(frozen=True, slots=True)
class Iterations:
    """One or many iterations that are alike in plan and regularity; times and energies are medians beside sums."""

    first_index: int
    started_at: datetime
    purpose: PlanPurpose | None
    is_regular: bool
    num_iterations: int
    sum_time_s: float
    median_time_s: float
    num_measured: int
    sum_energy_j: float | None
    median_energy_j: float | None

    @property
    def measured_time_s(self) -> float:
        """How long those took whose energy was measured, taken in proportion."""
        return self.sum_time_s * self.num_measured / self.num_iterations


def all_iterations(reader: Reader, job_id: str) -> list[Iterations]:
    """Return a job's iterations in order, as single as they are still kept."""
    own = {"job_id = ?": job_id}
    found = [single_of(row) for row in reader.values(OF_ITERATIONS, "iterations", own)]
    found += [block_of(row) for row in reader.values(OF_BLOCKS, "iteration_blocks", own)]
    return sorted(found, key=lambda each: each.first_index)


def single_of(row: Sequence[Any]) -> Iterations:
    """Return one iteration of the columns `OF_ITERATIONS`."""
    index, at, purpose, is_regular, time_s, energy_j = row
    is_measured = int(energy_j is not None)
    return Iterations(index, at, _PURPOSES[purpose], is_regular, 1, time_s, time_s, is_measured, energy_j, energy_j)


def block_of(row: Sequence[Any]) -> Iterations:
    """Return many iterations of the columns `OF_BLOCKS`."""
    index, at, purpose, *figures = row
    return Iterations(index, at, _PURPOSES[purpose], *figures)
