"""Pseudo-random integers for compiled searches, so that equal input gives equal plans, compiled or not."""

from gpuenergyd_policies.planning.compiled import compiled

RANDOM_FACTOR, RANDOM_MODULUS = 48271, 2147483647
"""The generator `minstd` of Park and Miller; its state is never 0."""


@compiled
def next_random(state: int) -> int:
    """Return the next number from 1 to RANDOM_MODULUS - 1, which is also the generator's state."""
    return state * RANDOM_FACTOR % RANDOM_MODULUS
