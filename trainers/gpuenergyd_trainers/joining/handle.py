"""What every `attach` returns: the way back, and what became of the attachment."""

import logging
from collections.abc import Callable

from gpuenergyd.wire.messages import OrderRow
from gpuenergyd_trainers.joining.ordered_rank import OrderedRank
from gpuenergyd_trainers.joining.wrapping import WrappedAttribute

logger = logging.getLogger("gpuenergyd.trainers")


class Handle:
    """An attached training program; `detach` restores it. Without a rank it stands for one that was left alone."""

    def __init__(self, rank: OrderedRank | None = None) -> None:
        self._rank = rank
        self._wrapped: list[WrappedAttribute] = []
        self._num_errors = 0
        self.on_detach: list[Callable[[], None]] = []
        """What else ends with the attachment."""

    @property
    def is_attached(self) -> bool:
        """Whether the program is wrapped and its order as registered."""
        return self._rank is not None and self._rank.is_active and bool(self._wrapped)

    @property
    def order(self) -> tuple[OrderRow, ...] | None:
        """What this rank runs in one iteration; None while that is not known."""
        return self._rank.order if self._rank is not None else None

    @property
    def plan_epoch(self) -> int:
        """The plan that the newest iteration followed; 0 while un-tuned."""
        return self._rank.client.plan_epoch if self._rank is not None else 0

    @property
    def num_errors(self) -> int:
        """How many exceptions of ours were swallowed; each is a defect worth reporting."""
        return self._num_errors + (self._rank.client.total_errors if self._rank is not None else 0)

    def detach(self) -> None:
        """Leave the job and restore what was wrapped."""
        for wrapped in reversed(self._wrapped):
            wrapped.undo()
        self._wrapped.clear()
        for end in self.on_detach:
            end()
        self.on_detach.clear()
        if self._rank is not None:
            self._rank.leave()

    def shielded(self, act: Callable[[], None]) -> None:
        """Do something of ours inside a training step; an exception is counted and logged once."""
        try:
            act()
        except Exception:
            self._num_errors += 1
            if self._num_errors == 1:
                logger.exception("gpuenergyd: an error of its own, not of the training program; training goes on")
