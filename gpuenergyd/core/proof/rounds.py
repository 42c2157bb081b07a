"""Finds the rounds of a proof that cannot be used, and how many blocks must run until enough rounds can."""

from collections.abc import Sequence
from statistics import median

from gpuenergyd.core.proof.measurements import Block, IterationSample
from gpuenergyd.core.proof.registration import ExclusionRules, Registration

DISTURBED = "too many disturbed iterations"
UNMEASURED = "too few iterations with a measured energy"


def counted(block: Block, rules: ExclusionRules) -> tuple[IterationSample, ...]:
    """Return the iterations of a block that count: settled, and not disturbed from outside."""
    settled = block.iterations[rules.settling_iterations :]
    limit_s = median(sample.time_s for sample in settled) * (1 + rules.outlier_ratio) if settled else 0.0
    return tuple(sample for sample in settled if sample.time_s <= limit_s)


def why_void(block: Block, rules: ExclusionRules, block_iterations: int) -> str | None:
    """Return why a block, and with it its round, is void; None if it is sound."""
    num_settled = len(block.iterations[rules.settling_iterations :])
    kept = counted(block, rules)
    if not kept or len(kept) < (1 - rules.max_excluded_ratio) * max(num_settled, block_iterations):
        return DISTURBED
    num_measured = sum(sample.gpu_energy_j is not None for sample in kept)
    return UNMEASURED if num_measured < rules.min_measured_ratio * len(kept) else None


def num_blocks_due(registration: Registration, blocks: Sequence[Block]) -> int:
    """Return how many blocks a proof needs in all, as far as the blocks that have run tell.

    Void rounds are repeated in the registered order, if the rules say so and until there are too many of them.
    """
    num_arms, num_rounds = len(registration.arms), registration.design.num_rounds
    num_sound = num_run = 0
    while num_sound < num_rounds and num_run < registration.most_rounds:
        own = blocks[num_run * num_arms : (num_run + 1) * num_arms]
        num_run += 1
        if len(own) < num_arms:
            break
        num_sound += all(
            why_void(block, registration.rules, registration.design.block_iterations) is None for block in own
        )
    return num_arms * max(num_run, num_rounds)
