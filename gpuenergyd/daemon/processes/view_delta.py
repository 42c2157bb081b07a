"""Incremental encoding of a job's view, which sends only what the policy host does not have yet.

A view holds hundreds of observations, of which one is new per iteration. Encoding all of them would block the event
loop, and with it clock requests, for tens of milliseconds. So both sides number the observations and plans: the sender
lists the numbers of the view's items and attaches those items that it has not sent before.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import Schedule
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.core.policy_api.policy import GpuView, JobView
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ProtocolError

T = TypeVar("T")

_NO_SCHEDULE = Schedule(name="", num_microbatches=0, orders=())


@dataclass(frozen=True, slots=True)
class ViewDifference:
    """A view without the items sent before; the numbers list its items in order.

    `reduced.observations` and `reduced.issued_plans` hold the new items, in the order of their first number.
    """

    reduced: JobView
    observation_numbers: tuple[int, ...]
    plan_numbers: tuple[int, ...]
    has_schedule: bool
    has_gpus: bool
    has_past_jobs: bool = True
    """Whether `reduced` contains the past jobs; otherwise those sent before apply."""


@dataclass(slots=True)
class _Numbered(Generic[T]):
    """Items by identity, each with the number it was sent under; keeps them alive, so that no `id()` is reused."""

    known: dict[int, tuple[T, int]] = field(default_factory=dict)
    next_number: int = 0

    def number(self, items: Iterable[T]) -> tuple[tuple[int, ...], tuple[T, ...]]:
        """Return the numbers of all items, and the new items; items no longer in use are dropped."""
        numbers: list[int] = []
        new: list[T] = []
        still_known: dict[int, tuple[T, int]] = {}
        for item in items:
            entry = self.known.get(id(item)) or still_known.get(id(item))
            if entry is None:
                entry = (item, self.next_number)
                self.next_number += 1
                new.append(item)
            still_known[id(item)] = entry
            numbers.append(entry[1])
        self.known = still_known
        return tuple(numbers), tuple(new)


@dataclass(slots=True)
class ViewSender:
    """Encodes the views of one job; tracks the items that the policy host has."""

    _observations: _Numbered[IterationObservation] = field(default_factory=_Numbered[IterationObservation])
    _plans: _Numbered[ClockPlan] = field(default_factory=_Numbered[ClockPlan])
    _schedule: Schedule | None = None
    _gpus: tuple[GpuView, ...] | None = None
    _past_jobs: tuple[PastJob, ...] = ()

    def difference(self, view: JobView) -> ViewDifference:
        """Return what is new compared with the views sent before, and record it as sent."""
        observation_numbers, new_observations = self._observations.number(view.observations)
        plan_numbers, new_plans = self._plans.number(view.issued_plans)
        has_schedule = view.schedule is not self._schedule
        has_gpus = view.gpus != self._gpus
        has_past_jobs = view.past_jobs is not self._past_jobs
        self._schedule, self._gpus = view.schedule, view.gpus
        self._past_jobs = view.past_jobs
        return ViewDifference(
            reduced=replace(
                view,
                observations=new_observations,
                issued_plans=new_plans,
                schedule=view.schedule if has_schedule else _NO_SCHEDULE,
                gpus=view.gpus if has_gpus else (),
                past_jobs=view.past_jobs if has_past_jobs else (),
            ),
            observation_numbers=observation_numbers,
            plan_numbers=plan_numbers,
            has_schedule=has_schedule,
            has_gpus=has_gpus,
            has_past_jobs=has_past_jobs,
        )


@dataclass(slots=True)
class ViewReceiver:
    """Decodes the views of one job; keeps the items received."""

    _observations: dict[int, IterationObservation] = field(default_factory=dict)
    _plans: dict[int, ClockPlan] = field(default_factory=dict)
    _schedule: Schedule | None = None
    _gpus: tuple[GpuView, ...] = ()
    _past_jobs: tuple[PastJob, ...] = ()

    def view(self, difference: ViewDifference) -> JobView:
        """Return the complete view; raise ProtocolError if the difference refers to an item that was not received."""
        reduced = difference.reduced
        if difference.has_schedule:
            self._schedule = reduced.schedule
        if difference.has_gpus:
            self._gpus = reduced.gpus
        if difference.has_past_jobs:
            self._past_jobs = reduced.past_jobs
        if self._schedule is None:
            raise ProtocolError("the view has no schedule, and none was received before")
        self._observations = _completed(self._observations, difference.observation_numbers, reduced.observations)
        self._plans = _completed(self._plans, difference.plan_numbers, reduced.issued_plans)
        return replace(
            reduced,
            observations=tuple(self._observations[number] for number in difference.observation_numbers),
            issued_plans=tuple(self._plans[number] for number in difference.plan_numbers),
            schedule=self._schedule,
            gpus=self._gpus,
            past_jobs=self._past_jobs,
        )


def _completed(known: dict[int, T], numbers: tuple[int, ...], new: tuple[T, ...]) -> dict[int, T]:
    wanted = dict.fromkeys(numbers)
    unknown = [number for number in wanted if number not in known]
    if len(unknown) != len(new):
        raise ProtocolError(f"the view refers to {count_text(len(unknown), 'unknown item')}, but {len(new)} were sent")
    known = {**known, **dict(zip(unknown, new, strict=True))}
    return {number: item for number, item in known.items() if number in wanted}
