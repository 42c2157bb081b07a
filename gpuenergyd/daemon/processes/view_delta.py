"""How a job's view travels to its policy: only what the policy host does not have yet.

A view holds hundreds of observations, of which one is new. Encoding them all would keep the core busy for tens of
milliseconds per iteration, and clock records waiting for it. So both sides number what was sent: the sender names
what the view consists of, and encloses what it has not sent before.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import Schedule
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.policy_api.policy import GpuView, JobView
from gpuenergyd.core.policy_api.previous_run import PreviousRun
from gpuenergyd.errors import ProtocolError

T = TypeVar("T")

_NOTHING = Schedule(name="", num_microbatches=0, orders=())


@dataclass(frozen=True, slots=True)
class ViewDifference:
    """A view without what was sent before; numbers say what belongs into it, in order.

    `reduced.observations` and `reduced.issued_plans` hold the new ones, in the order in which they are first named.
    """

    reduced: JobView
    observation_numbers: tuple[int, ...]
    plan_numbers: tuple[int, ...]
    has_schedule: bool
    has_gpus: bool
    has_previous_run: bool = True
    """Whether what an earlier run showed is as enclosed, or else as it was sent before."""


@dataclass(slots=True)
class _Numbered(Generic[T]):
    """Things by identity, each with the number it was sent under; holding them keeps identities from being reused."""

    known: dict[int, tuple[T, int]] = field(default_factory=dict)
    next_number: int = 0

    def number(self, things: Iterable[T]) -> tuple[tuple[int, ...], tuple[T, ...]]:
        """Return the numbers of all things and those that are new; what is no longer there is forgotten."""
        numbers: list[int] = []
        new: list[T] = []
        still_known: dict[int, tuple[T, int]] = {}
        for thing in things:
            entry = self.known.get(id(thing)) or still_known.get(id(thing))
            if entry is None:
                entry = (thing, self.next_number)
                self.next_number += 1
                new.append(thing)
            still_known[id(thing)] = entry
            numbers.append(entry[1])
        self.known = still_known
        return tuple(numbers), tuple(new)


@dataclass(slots=True)
class ViewSender:
    """Knows what one policy host has of one job."""

    _observations: _Numbered[IterationObservation] = field(default_factory=_Numbered[IterationObservation])
    _plans: _Numbered[ClockPlan] = field(default_factory=_Numbered[ClockPlan])
    _schedule: Schedule | None = None
    _gpus: tuple[GpuView, ...] | None = None
    _previous_run: PreviousRun | None = None

    def difference(self, view: JobView) -> ViewDifference:
        """Return what to send; from now on it counts as sent."""
        observation_numbers, new_observations = self._observations.number(view.observations)
        plan_numbers, new_plans = self._plans.number(view.issued_plans)
        has_schedule = view.schedule is not self._schedule
        has_gpus = view.gpus != self._gpus
        has_previous_run = view.previous_run is not self._previous_run
        self._schedule, self._gpus, self._previous_run = view.schedule, view.gpus, view.previous_run
        return ViewDifference(
            reduced=replace(
                view,
                observations=new_observations,
                issued_plans=new_plans,
                schedule=view.schedule if has_schedule else _NOTHING,
                gpus=view.gpus if has_gpus else (),
                previous_run=view.previous_run if has_previous_run else None,
            ),
            observation_numbers=observation_numbers,
            plan_numbers=plan_numbers,
            has_schedule=has_schedule,
            has_gpus=has_gpus,
            has_previous_run=has_previous_run,
        )


@dataclass(slots=True)
class ViewReceiver:
    """Keeps what was received of one job."""

    _observations: dict[int, IterationObservation] = field(default_factory=dict)
    _plans: dict[int, ClockPlan] = field(default_factory=dict)
    _schedule: Schedule | None = None
    _gpus: tuple[GpuView, ...] = ()
    _previous_run: PreviousRun | None = None

    def view(self, difference: ViewDifference) -> JobView:
        """Return the whole view.

        Raises:
            ProtocolError: it refers to what was never sent.
        """
        reduced = difference.reduced
        if difference.has_schedule:
            self._schedule = reduced.schedule
        if difference.has_gpus:
            self._gpus = reduced.gpus
        if difference.has_previous_run:
            self._previous_run = reduced.previous_run
        if self._schedule is None:
            raise ProtocolError("a view without a schedule, and none was sent before")
        self._observations = _completed(self._observations, difference.observation_numbers, reduced.observations)
        self._plans = _completed(self._plans, difference.plan_numbers, reduced.issued_plans)
        return replace(
            reduced,
            observations=tuple(self._observations[number] for number in difference.observation_numbers),
            issued_plans=tuple(self._plans[number] for number in difference.plan_numbers),
            schedule=self._schedule,
            gpus=self._gpus,
            previous_run=self._previous_run,
        )


def _completed(known: dict[int, T], numbers: tuple[int, ...], new: tuple[T, ...]) -> dict[int, T]:
    wanted = dict.fromkeys(numbers)
    unknown = [number for number in wanted if number not in known]
    if len(unknown) != len(new):
        raise ProtocolError(f"{len(unknown)} things are unknown, {len(new)} were sent")
    known = {**known, **dict(zip(unknown, new, strict=True))}
    return {number: thing for number, thing in known.items() if number in wanted}
