"""Checks the raw data of a proof: a block that was not run as registered, or cannot be true, costs the verdict."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from gpuenergyd.core.proof.measurements import Block, energy_j
from gpuenergyd.core.proof.registration import Registration
from gpuenergyd.core.proof.rounds import num_blocks_due
from gpuenergyd.count_text import count_text

_MAX_COUNTER_ERROR_RATIO = 0.1
"""The iterations' energies and the counters beside them may differ by this much over a block."""
_SAME_TIME_S = 0.05
"""Clocks of different processes of a host are read this far apart."""


def problems(registration: Registration, blocks: Sequence[Block]) -> Iterator[str]:
    """Yield what speaks against the data, each as one line."""
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
    """Compare the iterations' energies with the counters that were read beside them, where both are known."""
    counted_j = sampled_j = 0.0
    for sample in block.iterations:
        between_j = energy_j(block.gpu_power, sample.begun_at_s, sample.begun_at_s + sample.time_s)
        if between_j is not None and sample.gpu_energy_j is not None:
            counted_j, sampled_j = counted_j + sample.gpu_energy_j, sampled_j + between_j
    if sampled_j > 0 and abs(counted_j / sampled_j - 1) > _MAX_COUNTER_ERROR_RATIO:
        return f"energies of its iterations and counters read beside them differ by {counted_j / sampled_j - 1:+.0%}"
    return None
