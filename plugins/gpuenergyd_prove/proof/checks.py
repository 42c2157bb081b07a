"""Checks the raw data of a proof for void rounds, which are repeated, and for data that rule out a verdict.

A block with too many disturbed iterations makes its round void. If a block was not run as registered, or its data are
impossible, the proof has no verdict.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from gpuenergyd.count_text import count_text
from gpuenergyd_prove.proof.measurements import Block, IterationSample, energy_j
from gpuenergyd_prove.proof.registration import ExclusionRules, Registration

DISTURBED = "too many disturbed iterations"
UNMEASURED = "too few iterations with a measured energy"
_MAX_COUNTER_ERROR_RATIO = 0.1
"""Permitted difference, over a block, between the iterations' energies and the separately read counters."""
_SAME_TIME_S = 0.05
"""Tolerance for times recorded by different processes of a host."""


def counted(block: Block, rules: ExclusionRules) -> tuple[IterationSample, ...]:
    """Return the iterations of a block to evaluate: those after settling that were not disturbed from outside."""
    settled = block.iterations[rules.settling_iterations :]
    limit_s = median(sample.time_s for sample in settled) * (1 + rules.outlier_ratio) if settled else 0.0
    return tuple(sample for sample in settled if sample.time_s <= limit_s)


def why_void(block: Block, rules: ExclusionRules, block_iterations: int) -> str | None:
    """Return why a block, and so its round, is void; None if it is sound."""
    num_settled = len(block.iterations[rules.settling_iterations :])
    kept = counted(block, rules)
    if not kept or len(kept) < (1 - rules.max_excluded_ratio) * max(num_settled, block_iterations):
        return DISTURBED
    num_measured = sum(sample.gpu_energy_j is not None for sample in kept)
    return UNMEASURED if num_measured < rules.min_measured_ratio * len(kept) else None


def num_blocks_due(registration: Registration, blocks: Sequence[Block]) -> int:
    """Return how many blocks a proof needs in total, judging by the blocks that have run.

    Void rounds are repeated in the registered order if the rules say so, unless there are too many of them.
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


def problems(registration: Registration, blocks: Sequence[Block]) -> Iterator[str]:
    """Yield the problems of the data, each as one line."""
    order, num_due = registration.order(), num_blocks_due(registration, blocks)
    if len(blocks) != num_due:
        yield f"{count_text(len(blocks), 'block')}; {num_due} were registered"
    for number, (block, arm) in enumerate(zip(blocks, order, strict=False)):
        if block.arm != arm:
            yield f"block {number} ran arm {block.arm!r}; {arm!r} was registered"
            break
    if blocks and blocks[0].begun_at_s < registration.registered_at_s:
        yield "the first block began before the registration"
    for number, (left, right) in enumerate(pairwise(blocks)):
        if right.begun_at_s < left.ended_at_s:
            yield f"block {number + 1} began before block {number} had ended"
            break
    for number, block in enumerate(blocks):
        if (problem := _block_problem(block)) is not None:
            yield f"block {number}: {problem}"
            break


def _block_problem(block: Block) -> str | None:
    if block.ended_at_s <= block.begun_at_s:
        return "it ended before it began"
    for sample in block.iterations:
        end_s = sample.begun_at_s + sample.time_s
        if sample.begun_at_s < block.begun_at_s - _SAME_TIME_S or end_s > block.ended_at_s + _SAME_TIME_S:
            return f"iteration {sample.index} lies outside of it"
        if sample.time_s <= 0 or (sample.gpu_energy_j is not None and sample.gpu_energy_j <= 0):
            return f"iteration {sample.index} has a time or an energy that is not positive"
    for left, right in pairwise(block.iterations):
        if right.index <= left.index or right.begun_at_s < left.begun_at_s + left.time_s - _SAME_TIME_S:
            return f"iterations {left.index} and {right.index} overlap"
    return _power_problem(block)


def _power_problem(block: Block) -> str | None:
    """Compare the iterations' energies with the separately read counters where both are known."""
    counted_j = sampled_j = 0.0
    for sample in block.iterations:
        between_j = energy_j(block.gpu_power, sample.begun_at_s, sample.begun_at_s + sample.time_s)
        if between_j is not None and sample.gpu_energy_j is not None:
            counted_j, sampled_j = counted_j + sample.gpu_energy_j, sampled_j + between_j
    if sampled_j > 0 and abs(counted_j / sampled_j - 1) > _MAX_COUNTER_ERROR_RATIO:
        return f"energies of its iterations and counters read beside them differ by {counted_j / sampled_j - 1:+.0%}"
    return None
