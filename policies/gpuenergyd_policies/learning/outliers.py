"""Drops measured instruction times that all other times of the job contradict.

A GPU is sometimes not at the clock that it reported: rare clock changes take far longer than others, and a change that
was reported early may be taken back by the next request. The times of one kind of instruction on all stages, and of one
class at all clocks, bear each other out; a time that none does is worth less than no time at all.
"""

import math
from collections.abc import Sequence

import numpy as np

from gpuenergyd_policies.learning.curves import CurveModel, Evidence
from gpuenergyd_policies.learning.seen import ClassAtFullSpeed, TimeRow, TimeRows, TimeSeen, time_evidence, time_rows
from gpuenergyd_policies.learning.sizes import Factors

_MIN_RATIO, _MIN_SIGMAS = 0.1, 5.0
"""How far, in log time and in standard deviations, a time must be off all others: single clocks of measured tables are
up to 6 % off any curve."""
_FACTORS = Factors(job=2.0, stage=2.0, single_class=4.0, single_kind=2.0)
"""On the deviations assumed in that comparison: a job that differs much from the prior has no outliers for that."""
_MAX_SHARE = 0.1
"""Of the values: if more are off, the prior is wrong and not they."""


def without_outliers(
    times: Sequence[TimeSeen],
    possible: Sequence[Sequence[ClassAtFullSpeed]],
    of_time: CurveModel,
    *,
    calls_sigma_s: tuple[float, float] = (0.0, 0.0),
) -> list[TimeSeen]:
    """Return the times without those that are off all others, whichever classes of `possible` are the true ones.

    `possible` are the same classes with other clocks at full speed: times that one of them explains are kept.
    """
    rows = time_rows(possible[0], times, has_calls=any(calls_sigma_s))
    dropped = set.intersection(*(_outliers(rows, classes, of_time, calls_sigma_s) for classes in possible))
    return [own for own in times if own.row not in dropped]


def _outliers(
    rows: TimeRows,
    classes: Sequence[ClassAtFullSpeed],
    of_time: CurveModel,
    calls_sigma_s: tuple[float, float],
) -> set[TimeRow]:
    """Return the rows of outliers, the worst found first and left out of the next comparison."""
    seen = time_evidence(classes, rows, of_time, calls_sigma_s=calls_sigma_s, num_rounds=1)
    observed, evidence = seen.observed, seen.evidence
    kept = np.arange(len(rows.rows))
    for _ in range(math.ceil(_MAX_SHARE * len(rows.rows))):
        own = Evidence(evidence.weights[kept], evidence.values[kept], evidence.noise[np.ix_(kept, kept)])
        off, sigma = of_time.left_out(observed, own, _FACTORS)
        surprise = np.where(np.abs(off) > _MIN_RATIO, np.abs(off) / sigma, 0.0)
        if surprise.max() <= _MIN_SIGMAS:
            break
        kept = np.delete(kept, int(np.argmax(surprise)))
    return set(rows.rows) - {rows.rows[k] for k in kept.tolist()}
