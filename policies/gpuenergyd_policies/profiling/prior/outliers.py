"""Drops measured instruction times that all other times of the job contradict.

A GPU is sometimes not at the clock that it reported: rare clock changes take far longer than others, and a change that
was reported early may be taken back by the next request. The times of one kind of instruction on all stages, and of one
class at all clocks, bear each other out; a time that none does is worth less than no time at all.
"""

import math
from collections.abc import Sequence

import numpy as np

from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd_policies.profiling.prior.curves import CurveModel, Evidence
from gpuenergyd_policies.profiling.prior.seen import ClassAtFullSpeed, TimeSeen, time_evidence
from gpuenergyd_policies.profiling.prior.sizes import Factors

_MIN_RATIO, _MIN_SIGMAS = 0.1, 5.0
"""How far, in log time and in standard deviations, a time must be off all others: single clocks of measured tables are
up to 6 % off any curve."""
_FACTORS = Factors(job=2.0, stage=2.0, single_class=4.0, single_kind=2.0)
"""On the deviations assumed in that comparison: a job that differs much from the prior has no outliers for that."""
_MAX_SHARE = 0.1
"""Of the values: if more are off, the prior is wrong and not they."""

_Row = tuple[InstructionClass, tuple[int, ...]]


def without_outliers(
    times: Sequence[TimeSeen], possible: Sequence[Sequence[ClassAtFullSpeed]], of_time: CurveModel
) -> list[TimeSeen]:
    """Return the times without those that are off all others, whichever classes of `possible` are the true ones.

    `possible` are the same classes with other clocks at full speed: times that one of them explains are kept.
    """
    dropped = set.intersection(*(_outliers(times, classes, of_time) for classes in possible))
    return [own for own in times if (own.key, own.clocks_mhz) not in dropped]


def _outliers(times: Sequence[TimeSeen], classes: Sequence[ClassAtFullSpeed], of_time: CurveModel) -> set[_Row]:
    """Return the class and the clocks of outliers, the worst found first and left out of the next comparison."""
    top_mhz = {own.key: own.clocks_mhz[0] for own in classes}
    rows = list(dict.fromkeys((own.key, own.clocks_mhz) for own in times if min(own.clocks_mhz) < top_mhz[own.key]))
    observed, evidence = time_evidence(classes, times, of_time)
    kept = np.arange(len(rows))
    for _ in range(math.ceil(_MAX_SHARE * len(rows))):
        own = Evidence(evidence.weights[kept], evidence.values[kept], evidence.noise[np.ix_(kept, kept)])
        off, sigma = of_time.left_out(observed, own, _FACTORS)
        surprise = np.where(np.abs(off) > _MIN_RATIO, np.abs(off) / sigma, 0.0)
        if surprise.max() <= _MIN_SIGMAS:
            break
        kept = np.delete(kept, int(np.argmax(surprise)))
    return set(rows) - {rows[k] for k in kept.tolist()}
