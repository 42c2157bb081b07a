"""Help texts and checks of shared options; imports the standard library only, since `gpuenergyd run` uses them."""

import sys

from gpuenergyd.core.policy_api.target import LARGE_SLOWDOWN_RATIO, slowdown_problem
from gpuenergyd.errors import UsageError

MAX_SLOWDOWN_HELP = "Allowed slowdown against full speed, 0 to 1; 0.05 is 5 %."
SOCKET_HELP = "Daemon socket [default: GPUENERGYD_SOCKET or the system's]."


def checked_slowdown(ratio: float | None) -> float | None:
    """Return the value of --max-slowdown, or raise UsageError if it is out of range."""
    if ratio is not None and (problem := slowdown_problem(ratio)) is not None:
        raise UsageError(f"--max-slowdown {problem}")
    return ratio


def warn_of_large_slowdown(ratio: float | None) -> None:
    """Print a warning if a permitted slowdown is so large that it is probably a mistake."""
    if ratio is not None and ratio > LARGE_SLOWDOWN_RATIO:
        sys.stderr.write(
            f"gpuenergyd: warning: a slowdown of {ratio:g} lets iterations take {100 * ratio:g} % longer; 0.05 is 5 %\n"
        )
