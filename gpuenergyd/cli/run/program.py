"""Start of a training program, in an environment that makes it attach to the daemon."""

import os
import sys
from importlib.metadata import entry_points

from gpuenergyd.cli.option_checks import warn_of_large_slowdown
from gpuenergyd.cli.run.arguments import RunRequest
from gpuenergyd.client.environment import (
    DEADLINE_VARIABLE,
    HOURS_VARIABLE,
    ITERATIONS_VARIABLE,
    JOB_VARIABLE,
    MAX_SLOWDOWN_VARIABLE,
    POLICY_VARIABLE,
    REORDER_VARIABLE,
    can_see,
    find_socket_path,
)
from gpuenergyd.errors import UsageError

_LAUNCHERS = "gpuenergyd.launchers"


def run_program(request: RunRequest) -> int:
    """Replace this process with the program, or raise UsageError if the program cannot be started."""
    warn_of_large_slowdown(request.max_slowdown_ratio)
    environ = dict(os.environ)
    variables = {
        JOB_VARIABLE: request.job,
        POLICY_VARIABLE: request.policy,
        MAX_SLOWDOWN_VARIABLE: request.max_slowdown_ratio,
        ITERATIONS_VARIABLE: request.iterations,
        HOURS_VARIABLE: request.hours,
        DEADLINE_VARIABLE: request.deadline,
        REORDER_VARIABLE: "1" if request.allow_reorder else None,
        "GPUENERGYD_SOCKET": request.socket,
    }
    environ.update({name: str(value) for name, value in variables.items() if value is not None})
    program = request.command[0]
    if not can_see(found := find_socket_path(environ=environ)):
        sys.stderr.write(f"gpuenergyd: no daemon socket at {found} yet; starting {program}\n")
    for launcher in entry_points(group=_LAUNCHERS):
        environ = launcher.load()(environ)
    try:
        os.execvpe(program, request.command, environ)  # noqa: S606  runs the user's program
    except OSError as error:
        raise UsageError(f"cannot run {program!r}: {error.strerror}") from None
