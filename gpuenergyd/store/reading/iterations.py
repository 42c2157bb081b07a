"""Iterations of a job: single ones and blocks of merged ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.store.reader import Reader, column_names

_PURPOSES: Mapping[str | None, PlanPurpose | None] = {None: None, "": None, **{str(word): word for word in PlanPurpose}}
ITERATION_COLUMNS = (
    *("iteration_index", "started_at", "plan_purpose", "is_regular", "iteration_time_s", "energy_j"),
    "energy_low_j",
)
BLOCK_COLUMNS = (
    *("first_iteration_index", "started_at", "plan_purpose", "is_regular", "num_iterations"),
    *("sum_time_s", "median_time_s", "num_measured", "sum_energy_j", "median_energy_j", "num_estimated"),
)
"""The columns of `Iterations`, in the order of its fields."""


@dataclass(frozen=True, slots=True)
class IterationRow:
    """One iteration as stored."""

    iteration_index: int
    started_at: datetime
    iteration_time_s: float
    energy_j: float | None
    plan_id: str | None
    plan_purpose: PlanPurpose | None
    is_regular: bool
    energy_low_j: float | None = None
    energy_high_j: float | None = None
    """The 95 % interval of an estimated energy; both are None for a measured one."""


def iteration_rows(reader: Reader, job_id: str) -> tuple[IterationRow, ...]:
    """Return the iterations of a job that are stored singly, in order."""
    rows = reader.values(column_names(IterationRow), "iterations", {"job_id = ?": job_id}, order_by="iteration_index")
    return tuple(
        IterationRow(index, at, time_s, energy_j, plan_id, _PURPOSES[purpose], *regular_and_range)
        for index, at, time_s, energy_j, plan_id, purpose, *regular_and_range in rows
    )


@dataclass(frozen=True, slots=True)
class Iterations:
    """One iteration, or a block of merged ones with the same plan and regularity, as sums and medians."""

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
    num_estimated: int = 0
    """Number of iterations with estimated energy, because they were shorter than the time between counter readings."""

    @property
    def measured_time_s(self) -> float:
        """Time of the iterations whose energy was measured, assuming equal iteration times."""
        return self.sum_time_s * self.num_measured / self.num_iterations


def all_iterations(reader: Reader, job_id: str) -> list[Iterations]:
    """Return all iterations of a job in order: single ones if still stored, otherwise blocks."""
    of_job = {"job_id = ?": job_id}
    found = [single_of(row) for row in reader.values(ITERATION_COLUMNS, "iterations", of_job)]
    found += [block_of(row) for row in reader.values(BLOCK_COLUMNS, "iteration_blocks", of_job)]
    return sorted(found, key=lambda each: each.first_index)


def single_of(row: Sequence[Any]) -> Iterations:
    index, at, purpose, is_regular, time_s, energy_j, low_j = row
    energies = int(energy_j is not None), energy_j, energy_j, int(low_j is not None)
    return Iterations(index, at, _PURPOSES[purpose], is_regular, 1, time_s, time_s, *energies)


def block_of(row: Sequence[Any]) -> Iterations:
    index, at, purpose, *values = row
    return Iterations(index, at, _PURPOSES[purpose], *values)
