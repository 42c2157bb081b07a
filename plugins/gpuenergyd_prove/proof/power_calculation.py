"""Power calculation: how many rounds a proof needs, from the spread of a pilot.

A round has one block of each arm; its saving is the log ratio of their energies per iteration. With a spread sigma
between rounds, the mean of R rounds has a standard error sigma / sqrt(R). A true saving s is distinguished from zero
with the wanted probability if s >= (t(confidence) + t(power)) * sigma / sqrt(R). The pilot's own spread is uncertain,
so its upper 80 % bound is used (chi-square by Wilson and Hilferty).
"""

import math
from collections.abc import Sequence
from statistics import NormalDist, stdev

from gpuenergyd.core.job.measurements.savings import student_quantile
from gpuenergyd.count_text import count_text
from gpuenergyd_prove.errors import ProofError
from gpuenergyd_prove.proof.registration import CONFIDENCE, LEAST_ROUNDS, ProofDesign

POWER = 0.9
LEAST_PILOT_ROUNDS = 4
_SPREAD_CONFIDENCE = 0.8
_LEAST_SIGMA_RATIO = 1e-5
"""Least spread assumed between rounds, since simulated runs may be identical."""


def margin_factor(num_rounds: int) -> float:
    """Return the half width of an interval in standard deviations between rounds."""
    return student_quantile(0.5 + CONFIDENCE / 2, num_rounds - 1) / math.sqrt(num_rounds)


def design(
    pilot_log_ratios: Sequence[float], *, block_iterations: int, smallest_saving_ratio: float, max_rounds: int
) -> ProofDesign:
    """Return the numbers of a proof.

    Args:
        pilot_log_ratios: log of claimed over full-speed energy per iteration, one per pilot round.
        block_iterations: evaluated iterations of a block.
        smallest_saving_ratio: the saving that the proof must be able to show.
        max_rounds: most rounds that may run.

    Raises:
        ProofError: there are too few pilot rounds, or more rounds are needed than may run.
    """
    if len(pilot_log_ratios) < LEAST_PILOT_ROUNDS:
        usable = count_text(len(pilot_log_ratios), "usable pilot round")
        raise ProofError(f"{usable}; at least {LEAST_PILOT_ROUNDS} are needed")
    sigma = max(_LEAST_SIGMA_RATIO, stdev(pilot_log_ratios) * _upper_spread_factor(len(pilot_log_ratios) - 1))
    needed = next((n for n in range(LEAST_ROUNDS, 10_000) if _is_enough(n, sigma, smallest_saving_ratio)), 10_000)
    if needed > max_rounds:
        raise ProofError(
            f"the pilot's spread of {sigma:.2%} between rounds needs {count_text(needed, 'round')} to show a saving of"
            f" {smallest_saving_ratio:.1%}, and {max_rounds} may run: use longer blocks, more rounds, or claim more"
        )
    return ProofDesign(needed, block_iterations, smallest_saving_ratio, sigma, len(pilot_log_ratios))


def _is_enough(num_rounds: int, sigma: float, saving_ratio: float) -> bool:
    power_factor = student_quantile(POWER, num_rounds - 1) / math.sqrt(num_rounds)
    return (margin_factor(num_rounds) + power_factor) * sigma <= saving_ratio


def _upper_spread_factor(degrees: int) -> float:
    """Return the ratio of the upper bound of a standard deviation to its estimate."""
    z = NormalDist().inv_cdf(1 - _SPREAD_CONFIDENCE)
    chi_square = degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3
    return math.sqrt(degrees / chi_square)
