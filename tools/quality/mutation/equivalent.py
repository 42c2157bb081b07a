"""Mutants that no test can tell from the code, each with its reason: they are left out of the score, and told."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Equivalent:
    """A change that changes nothing anybody can see."""

    path: str
    before: str
    """The changed line, or lines joined by one blank."""
    after: str
    reason: str
    """It has to hold wherever this line stands in the file."""


_CORE = "gpuenergyd/core"
_PLANNING = "policies/gpuenergyd_policies/planning"

EQUIVALENT: tuple[Equivalent, ...] = (
    Equivalent(
        f"{_CORE}/rank_reports.py",
        "plan_id = plan_id_of(epochs.pop()) if len(epochs) == 1 else None",
        "plan_id = plan_id_of(epochs.pop()) if len(epochs) <= 1 else None",
        "the epochs are those of the reports, and the one just taken is among them: there is never none",
    ),
    Equivalent(
        f"{_CORE}/rank_reports.py",
        "return self.ranks[0].iteration_index",
        "return self.ranks[ -1].iteration_index",
        "reports are put together by their index: it is the same in all of them, and there is at least one",
    ),
    Equivalent(
        f"{_CORE}/telemetry.py",
        "if keep_from > 0:",
        "if keep_from > -1:",
        "they differ at 0, where what would be deleted is the empty slice up to 0",
    ),
    Equivalent(
        f"{_CORE}/telemetry.py",
        "if keep_from > 0:",
        "if keep_from >= 0:",
        "they differ at 0, where what would be deleted is the empty slice up to 0",
    ),
    Equivalent(
        f"{_CORE}/telemetry.py",
        "self._append(edge_mono_ns, total_energy_j, 0)",
        "self._append(edge_mono_ns, total_energy_j, 1)",
        "the numbers of a counter's segments are counted on from the first and only compared with each other",
    ),
    Equivalent(
        f"{_CORE}/pace.py",
        "if above == below:",
        "if above <= below:",
        "one is the least known clock at or above the wanted one, one the greatest at or below: they never cross",
    ),
    Equivalent(
        f"{_CORE}/profile.py",
        "if left.sm_clock_mhz == right.sm_clock_mhz:",
        "if left.sm_clock_mhz <= right.sm_clock_mhz:",
        "they were sorted by falling clock a few lines above: the left one is never the lower",
    ),
    Equivalent(
        f"{_CORE}/measured_frontier.py",
        "settled = own[1:] if len(own) > LEAST_ITERATIONS else own",
        "settled = own[1:] if len(own) != LEAST_ITERATIONS else own",
        "they differ for a single iteration, of which the next lines make no point either way",
    ),
    Equivalent(
        f"{_CORE}/job.py",
        "_guarded_from: int = 0",
        "_guarded_from: int = -1",
        "it is only compared with iteration indices, and raised: they are counted from 0",
    ),
    Equivalent(
        f"{_PLANNING}/sweep.py",
        "OP_ARC = -1",
        "OP_ARC = - 2",
        "it is told from the numbers of edges by its sign alone",
    ),
    Equivalent(
        f"{_PLANNING}/sweep.py",
        "if other == FAR:",
        "if other >= FAR:",
        "distances begin at FAR and only become less: none is ever beyond it",
    ),
    Equivalent(
        f"{_PLANNING}/envpipe.py",
        "i.pp_rank == last_rank",
        "i.pp_rank >= last_rank",
        "last_rank is the number of ranks less one: no rank is beyond the last",
    ),
    Equivalent(
        f"{_PLANNING}/envpipe.py",
        "for r in range(num_ranks - 1):",
        "for r in range(num_ranks - 2):",
        "the round left out would lower the last rank, which has no ranks behind it and so nothing extra to lower",
    ),
)


def reason_for(path: str, before: str, after: str) -> str | None:
    """Return why a mutant is no other program, None where it is one."""
    for known in EQUIVALENT:
        if (known.path, known.before, known.after) == (path, before, after):
            return known.reason
    return None
