"""Keys by which a report can group its figures: one, or two as in `user,month`."""

from enum import StrEnum

from gpuenergyd.errors import UsageError
from gpuenergyd.report.plugin_groups import plugin_groups


class GroupBy(StrEnum):
    """Grouping of the figures in a report."""

    JOB = "job"
    TRAINING = "training"
    USER = "user"
    HOST = "host"
    GPU = "gpu"
    DAY = "day"
    MONTH = "month"
    TAG = "tag"


PERIODS = frozenset({GroupBy.DAY, GroupBy.MONTH})
WITHOUT_JOBS = PERIODS | {GroupBy.GPU}
"""Keys unrelated to jobs; groups by these alone contain whole GPUs."""
_MAX_KEYS = 2


def parse_group_keys(text: str) -> tuple[GroupBy, ...]:
    """Return the keys in an option, one or two.

    Raises:
        UsageError: a key is unknown or repeated, or there are too many.
    """
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in {*GroupBy}]
    problem = ""
    if unknown:
        problem = f"unknown key {unknown[0]!r}"
    elif len(set(names)) < len(names):
        problem = "the same key twice"
    elif len(names) > _MAX_KEYS:
        problem = "more than two keys"
    if problem:
        others = "".join(f", or {key}" for key in plugin_groups())
        raise UsageError(
            f"--group-by {text!r}: {problem}; valid: one of {', '.join(GroupBy)}, or two of them, such as"
            f" user,month{others}"
        )
    return tuple(GroupBy(name) for name in names)
