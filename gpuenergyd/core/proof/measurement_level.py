"""Level of the EE HPC WG power measurement methodology (version 2.0) that a proof's meters reach.

Level 1 asks for mean power over the core phase, with at least a reading a second, of the nodes and upstream of their
power supplies. Level 2 asks for the whole run, and for network and the like, measured or estimated. Level 3 asks for a
revenue-grade meter that integrates energy, which no program can vouch for: it is never claimed. A proof that reads GPU
boards or CPU packages alone reaches none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuenergyd.core.proof.registration import MeterFacts

COVERS = ("node", "node-and-network", "components")
_LEVEL_1_PERIOD_S = 1.0
_TOLERANCE = 1.1
_LEAST_PHASE_S = 60.0
_WHOLE_RATIO = 0.99


@dataclass(frozen=True, slots=True)
class MeasurementLevel:
    """The level, 0 (none) to 2, and what is missing for the next one."""

    level: int
    missing: str


def measurement_level(
    meters: Sequence[MeterFacts], *, period_s: float | None, covered_s: float, run_s: float
) -> MeasurementLevel:
    """Return the level reached.

    Args:
        meters: the outside meters.
        period_s: median time between readings; None without readings.
        covered_s: length of the blocks with readings.
        run_s: length of all blocks.
    """
    outside = [meter for meter in meters if meter.covers != "components"]
    if not outside or period_s is None:
        return MeasurementLevel(0, "no meter upstream of the node's power supplies: GPU counters see the boards alone")
    if period_s > _LEVEL_1_PERIOD_S * _TOLERANCE:
        return MeasurementLevel(0, f"a reading every {period_s:.1f} s; one per second is needed")
    if covered_s < min(_LEAST_PHASE_S, run_s):
        return MeasurementLevel(0, f"readings cover {covered_s:.0f} s; the core phase, at least 60 s, is needed")
    if covered_s < _WHOLE_RATIO * run_s:
        return MeasurementLevel(1, f"readings cover {covered_s:.0f} of {run_s:.0f} s; level 2 needs the whole run")
    if not any(meter.covers == "node-and-network" for meter in outside):
        return MeasurementLevel(1, "network and storage are neither measured nor estimated")
    return MeasurementLevel(2, "level 3 needs a revenue-grade meter that integrates energy")
