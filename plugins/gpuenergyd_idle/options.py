"""The options of `[idle]` in the configuration."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpuenergyd.errors import UsageError

_LEAST_AFTER_S, _MOST_AFTER_S = 1.0, 86_400.0


@dataclass(frozen=True, slots=True)
class IdleOptions:
    """Whether idle GPUs are lowered, and after how long."""

    enabled: bool
    after_s: float


def idle_options(table: Mapping[str, object]) -> IdleOptions:
    """Return the options in a table.

    Raises:
        UsageError: an option is unknown, or its value is invalid.
    """
    if unknown := table.keys() - {"enabled", "after_s"}:
        raise UsageError(f"[idle]: unknown option {min(unknown)!r}; valid: enabled, after_s")
    enabled, after_s = table.get("enabled", False), table.get("after_s", 30.0)
    if not isinstance(enabled, bool):
        raise UsageError(f"[idle] enabled = {enabled!r}: must be true or false")
    if (
        isinstance(after_s, bool)
        or not isinstance(after_s, int | float)
        or not _LEAST_AFTER_S <= after_s <= _MOST_AFTER_S
    ):
        raise UsageError(f"[idle] after_s = {after_s!r}: must be from {_LEAST_AFTER_S:g} to {_MOST_AFTER_S:g}")
    return IdleOptions(enabled, float(after_s))
