"""What operators may change on a running job: policy, slowdown, priority, pause; and where an option comes from."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:  # `gpuenergyd status` needs the texts below but not the models
    from gpuenergyd.core.job.description import JobDescription

LOWEST_PRIORITY = 9
"""Priorities range from 0, the highest, to this number."""


@dataclass(frozen=True, slots=True)
class OperatorOrders:
    """Orders for one job; None keeps the choice of the job's program or of the daemon."""

    policy: str | None = None
    max_slowdown_ratio: float | None = None
    priority: int | None = None
    is_paused: bool | None = None

    def followed_by(self, later: Self) -> Self:
        """Return these orders, overridden by later ones."""
        given = {order.name: value for order in fields(later) if (value := getattr(later, order.name)) is not None}
        return replace(self, **given)

    def applied_to(self, description: "JobDescription", registered: Self) -> "JobDescription":
        """Return a job's description under these orders; `registered` applies where there is no order."""
        own = registered.followed_by(self)
        ratio = own.max_slowdown_ratio if own.max_slowdown_ratio is not None else description.target.max_slowdown_ratio
        return replace(
            description,
            policy=own.policy or description.policy,
            target=replace(description.target, max_slowdown_ratio=ratio),
            priority=own.priority or 0,
        )

    def changes_from(self, before: Self) -> tuple[tuple[str, str, str], ...]:
        """Return what differs as names with old and new values, e.g. `(("priority", "0", "2"),)`."""
        pairs = ((order.name, getattr(before, order.name), getattr(self, order.name)) for order in fields(self))
        return tuple((name, value_text(old), value_text(new)) for name, old, new in pairs if old != new)


def choices_of(description: "JobDescription") -> OperatorOrders:
    """Return the options with which a job was registered."""
    return OperatorOrders(description.policy, description.target.max_slowdown_ratio, description.priority, False)


def value_text(value: object, *, none: str = "none", yes: str = "yes", no: str = "no") -> str:
    """Return a value as it is shown where a change of it is recorded."""
    match value:
        case None:
            return none
        case bool():
            return yes if value else no
        case float():
            return f"{value:g}"
        case _:
            return str(value)


class OptionSource(StrEnum):
    """Where the policy or the permitted slowdown of a job comes from, in order of precedence."""

    OPERATOR = "operator"
    ARGUMENT = "argument"
    ENVIRONMENT = "environment"
    DAEMON = "daemon"


SOURCE_TEXTS: Mapping[str, str] = {
    OptionSource.OPERATOR: "ordered by an operator",
    OptionSource.ARGUMENT: "set by the program",
    OptionSource.ENVIRONMENT: "from the environment",
    OptionSource.DAEMON: "the daemon's default",
}
