"""Equivalent mutants: no test can distinguish them from the code. Each has a reason; they do not count in the score."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Equivalent:
    """A mutant that behaves like the original code."""

    path: str
    before: str
    """The changed line, or lines joined by a blank."""
    after: str
    reason: str
    """Must hold for every occurrence of this line in the file."""


_CORE = "gpuenergyd/core"
_PLANNING = "policies/gpuenergyd_policies/planning"

EQUIVALENT: tuple[Equivalent, ...] = (
    Equivalent(
        f"{_CORE}/job/measurements/rank_reports.py",
        "plan_id = plan_id_of(epochs.pop()) if len(epochs) == 1 else None",
        "plan_id = plan_id_of(epochs.pop()) if len(epochs) <= 1 else None",
        "the epochs come from the reports, and there is at least one report",
    ),
    Equivalent(
        f"{_CORE}/job/measurements/rank_reports.py",
        "return self.ranks[0].iteration_index",
        "return self.ranks[ -1].iteration_index",
        "reports are grouped by iteration index, so all have the same one; there is at least one report",
    ),
    Equivalent(
        f"{_CORE}/measurement/telemetry.py",
        "if keep_from > 0:",
        "if keep_from > -1:",
        "they differ only at 0, where the deleted slice is empty",
    ),
    Equivalent(
        f"{_CORE}/measurement/telemetry.py",
        "if keep_from > 0:",
        "if keep_from >= 0:",
        "they differ only at 0, where the deleted slice is empty",
    ),
    Equivalent(
        f"{_CORE}/measurement/telemetry.py",
        "self._begin_count(edge_mono_ns, total_energy_j, 0)",
        "self._begin_count(edge_mono_ns, total_energy_j, 1)",
        "segment numbers are only compared with each other",
    ),
    Equivalent(
        f"{_CORE}/distributed/pace.py",
        "if above == below:",
        "if above <= below:",
        "above is the lowest known clock >= the requested one, below the highest <= it, so above < below cannot occur",
    ),
    Equivalent(
        f"{_CORE}/pipeline/profile.py",
        "if left.sm_clock_mhz == right.sm_clock_mhz:",
        "if left.sm_clock_mhz <= right.sm_clock_mhz:",
        "the options are sorted by descending clock, so the left one is never lower",
    ),
    Equivalent(
        f"{_CORE}/job/measurements/measured_frontier.py",
        "settled = own[1:] if len(own) > LEAST_ITERATIONS else own",
        "settled = own[1:] if len(own) != LEAST_ITERATIONS else own",
        "they differ only for a single iteration, which gives no point in either case",
    ),
    Equivalent(
        f"{_CORE}/job/guard.py",
        "since: int = 0",
        "since: int = -1",
        "it is only compared with iteration indices, which start at 0, and only increases",
    ),
    Equivalent(
        f"{_PLANNING}/exact/sweep_kernels.py",
        "OPERATION_ARC = -1",
        "OPERATION_ARC = - 2",
        "only its sign distinguishes it from edge numbers",
    ),
    Equivalent(
        f"{_PLANNING}/exact/sweep_kernels.py",
        "if other == FAR:",
        "if other >= FAR:",
        "distances start at FAR and only decrease",
    ),
    Equivalent(
        "plugins/gpuenergyd_other_policies/envpipe.py",
        "i.pp_rank == last_rank",
        "i.pp_rank >= last_rank",
        "last_rank is the highest rank",
    ),
    Equivalent(
        "plugins/gpuenergyd_other_policies/envpipe.py",
        "for r in range(num_ranks - 1):",
        "for r in range(num_ranks - 2):",
        "the omitted round handles the last rank, which has no ranks behind it and hence nothing to lower",
    ),
)


def reason_for(path: str, before: str, after: str) -> str | None:
    """Return why a mutant is equivalent; None if it is not listed."""
    for known in EQUIVALENT:
        if (known.path, known.before, known.after) == (path, before, after):
            return known.reason
    return None
