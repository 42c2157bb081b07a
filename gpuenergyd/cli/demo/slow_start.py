"""A line that the demo prints if its imports take seconds, as they do on a busy host."""

import sys
import threading

_SLOW_AFTER_S = 2.0

_timers: list[threading.Timer] = []


def begin_start(*, is_output_json: bool) -> None:
    """Print the line in two seconds, unless the demo has started by then."""
    stream = sys.stderr if is_output_json else sys.stdout
    timer = threading.Timer(_SLOW_AFTER_S, print, ("gpuenergyd demo: starting",), {"file": stream, "flush": True})
    timer.daemon = True
    _timers.append(timer)
    timer.start()


def end_start() -> None:
    """Do not print the line any more: the demo prints its own lines from now on, or was refused."""
    while _timers:
        _timers.pop().cancel()
