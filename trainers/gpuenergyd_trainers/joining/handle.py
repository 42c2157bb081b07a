"""The handle that every `attach` returns, and the attributes that it has wrapped."""

from collections.abc import Callable
from typing import Any, Protocol

from gpuenergyd.client.figures import Metrics, metrics_of
from gpuenergyd.log_lines import safe_logger
from gpuenergyd.wire.messages import JobFigures, OrderRow
from gpuenergyd_trainers.joining.ordered_rank import OrderedRank

logger = safe_logger("gpuenergyd.trainers")

Call = Callable[..., Any]


class Wrapped(Protocol):
    """A part of the program that was wrapped."""

    def undo(self) -> bool:
        """Restore the original; return False if the program has changed the part since."""
        ...


class WrappedAttribute:
    """An attribute of `target` that was replaced, on the instance only, by `make(original)`.

    The class is not changed, so that objects that a framework has built can be wrapped too.
    """

    def __init__(self, target: object, name: str, make: Callable[[Call], Call]) -> None:
        self._target = target
        self._name = name
        self._make = make
        self._was_on_instance = name in vars(target)
        self._original: Call = getattr(target, name)
        self._wrapper = make(self._original)
        setattr(target, name, self._wrapper)

    def put_in(self) -> None:
        """Replace the attribute, also if the program has changed it since it was restored."""
        original: Call = getattr(self._target, self._name)
        if original != self._original:
            self._was_on_instance = self._name in vars(self._target)
            self._original, self._wrapper = original, self._make(original)
        setattr(self._target, self._name, self._wrapper)

    @property
    def is_in(self) -> bool:
        """Whether the attribute is replaced, and has not been replaced again."""
        return vars(self._target).get(self._name) is self._wrapper

    def undo(self) -> bool:
        """Restore the attribute; return False if it has been wrapped again, so that this wrapper remains in use."""
        if not self.is_in:
            return False
        if self._was_on_instance:
            setattr(self._target, self._name, self._original)
        else:
            delattr(self._target, self._name)
        return True


class Handle:
    """An attached training program, until `detach`; without a rank, a program that could not be attached."""

    def __init__(self, rank: OrderedRank | None = None) -> None:
        self._rank = rank
        self._wrapped: list[Wrapped] = []
        self._num_errors = 0
        self.on_detach: list[Callable[[], None]] = []
        """Functions that `detach` calls after it has restored the attributes."""

    @property
    def is_attached(self) -> bool:
        """Whether the program is wrapped and runs its instructions in the registered order."""
        return self._rank is not None and self._rank.is_active and bool(self._wrapped)

    @property
    def job_name(self) -> str:
        """Name of the job in reports; empty for a program that was not attached."""
        return self._rank.client.job_name if self._rank is not None else ""

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of the training; messages to the user come from the first rank only."""
        return self._rank is not None and self._rank.client.is_first

    @property
    def order(self) -> tuple[OrderRow, ...] | None:
        """The instructions of this rank in one iteration, in order; None while they are unknown."""
        return self._rank.order if self._rank is not None else None

    @property
    def plan_epoch(self) -> int:
        """The epoch of the plan that the newest iteration followed; 0 if it ran at full speed without a plan."""
        return self._rank.client.plan_epoch if self._rank is not None else 0

    @property
    def energy_per_gpu_j(self) -> float | None:
        """Energy per GPU of the newest measured iteration (J/iter/GPU), a mean over all GPUs; None before the first."""
        return self._rank.client.energy_per_gpu_j if self._rank is not None else None

    @property
    def power_per_gpu_w(self) -> float | None:
        """Mean power per GPU in that iteration (W/GPU); None before the first."""
        return self._rank.client.power_per_gpu_w if self._rank is not None else None

    def metrics(self, *, price_per_kwh: float | None = None) -> Metrics:
        """Return the job's measured figures for the program's own log; see `gpuenergyd.client.figures`."""
        return metrics_of(self.figures, price_per_kwh=price_per_kwh)

    @property
    def figures(self) -> JobFigures | None:
        """The figures as the daemon last sent them: the same object until newer ones arrive."""
        return self._rank.client.figures if self._rank else None

    @property
    def num_errors(self) -> int:
        """Number of this package's own exceptions that were suppressed; each is a bug worth reporting."""
        return self._num_errors + (self._rank.client.total_errors if self._rank is not None else 0)

    def detach(self) -> None:
        """Leave the job and restore the wrapped attributes."""
        for wrapped in reversed(self._wrapped):
            wrapped.undo()
        self._wrapped.clear()
        for end in self.on_detach:
            end()
        self.on_detach.clear()
        if self._rank is not None:
            self._rank.leave()

    def shielded(self, act: Callable[[], None]) -> None:
        """Call a function within a training step; exceptions are counted and suppressed, and the first is logged."""
        try:
            act()
        except Exception:
            self._num_errors += 1
            if self._num_errors == 1:
                logger.exception("gpuenergyd: internal error; training continues")
