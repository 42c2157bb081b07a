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


_CORE = "gpuenergyd/core"

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
)


def reason_for(path: str, before: str, after: str) -> str | None:
    """Return why a mutant is no other program, None where it is one."""
    for known in EQUIVALENT:
        if (known.path, known.before, known.after) == (path, before, after):
            return known.reason
    return None
