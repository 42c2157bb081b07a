"""Number of microbatches by Megatron-core's own calculator, which changes while the batch size is ramped up."""

import sys

from gpuenergyd.errors import GpuEnergyError
from gpuenergyd_trainers.joining.ordered_rank import OrderedRank

_CALCULATOR = "megatron.core.num_microbatches_calculator"


def calculated_microbatches() -> int | None:
    """Return the number of microbatches of the next step; None in a program without Megatron's calculator."""
    module = sys.modules.get(_CALCULATOR)
    try:
        return int(module.get_num_microbatches()) if module is not None else None
    except AttributeError:  # no calculator was initialized
        return None


class MicrobatchRampUp:
    """Changes a rank's registered order with the number of microbatches.

    The calculator is followed if it gives the registered number at the start. Numbers that Megatron's schedule does not
    run are not: the check of the order then ends the plans.
    """

    def __init__(self, rank: OrderedRank, num_microbatches: int) -> None:
        self._rank = rank
        self._num_microbatches = num_microbatches
        self._is_followed = calculated_microbatches() == num_microbatches and rank.can_change_microbatches

    def follow(self) -> None:
        """Register again if the next step has another number of microbatches; call between two steps."""
        now = calculated_microbatches() if self._is_followed else None
        if now is None or now == self._num_microbatches:
            return
        self._num_microbatches = now
        try:
            self._rank.change_microbatches(now)
        except GpuEnergyError:
            self._is_followed = False
