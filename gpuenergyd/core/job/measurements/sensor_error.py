"""Error of measured energies that repetition does not reveal, because a power sensor samples the same parts each time.

Theory of operation. Some GPUs sample power during a quarter of each period of their energy counter (A100 and H100,
arXiv 2312.02741) and use it as the mean of the period. If iterations begin at varying phases of the period, these
errors differ from iteration to iteration: they appear as scatter, and average out. If an iteration takes a multiple of
the period, the sensor samples the same parts of every iteration, and the error is the same in all of them.

The error of one iteration comes from its power changes, each of which is detected up to one period early or late. It is
proportional to the ratio of period to iteration time, and independent between GPUs. The share that remains in the mean
of many iterations is the concentration of their phases: the length of the mean of unit vectors in the directions of the
phases, if significantly above zero (Rayleigh's test; Mardia and Jupp, Directional Statistics, 2000).
"""

import cmath
import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from gpuenergyd.core.measurement.observation import IterationObservation, RankEnergy

_ERROR_OF_A_PERIOD = 1.0
"""Standard deviation of an iteration's energy error, as mean power times this many periods. In simulations about 1 if
the instructions also take multiples of the period, 0.5 otherwise."""
_BY_CHANCE = 2.0
"""Critical value of Rayleigh's statistic; random phases exceed it in one of seven sets."""
_MIN_ITERATIONS = 3
_MAX_PERIOD_RATIO = 0.5
"""Longest period relative to an iteration; with fewer than two updates per iteration, edges do not show the period."""


def hidden_energy_error_ratio(observations: Sequence[IterationObservation]) -> float:
    """Return the standard deviation of the relative error common to the energies of these iterations."""
    of_rank: dict[int, list[RankEnergy]] = defaultdict(list)
    for observation in observations:
        for rank in observation.ranks:
            if rank.energy_j is not None and rank.counter_phase is not None and rank.counter_period_s is not None:
                of_rank[rank.pp_rank].append(rank)
    if not of_rank:
        return 0.0
    return math.hypot(*map(_common_error_ratio, of_rank.values())) / len(of_rank)


def _common_error_ratio(energies: Sequence[RankEnergy]) -> float:
    """Return the common relative error of one GPU's energies."""
    if len(energies) < _MIN_ITERATIONS:
        return 0.0
    periods = median((rank.counter_period_s or 0.0) / rank.window_s for rank in energies)
    if periods > _MAX_PERIOD_RATIO:
        return 0.0
    return _ERROR_OF_A_PERIOD * periods * concentration([rank.counter_phase or 0.0 for rank in energies])


def concentration(phases: Sequence[float]) -> float:
    """Return the concentration of phases (in turns): 1 if all are equal, 0 if it could be chance."""
    n = len(phases)
    length = abs(sum(cmath.exp(2j * math.pi * phase) for phase in phases) / n)
    return length if n * length**2 >= _BY_CHANCE * (1 - 1e-9) else 0.0
