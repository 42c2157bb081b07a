"""The policy host as a unit of its own: one per connection of the core, killed the moment that connection ends.

    python -I -m gpuenergyd.daemon.processes.policy_unit MEMORY_LIMIT_BYTES

Standard input is the connection (`Accept=yes`, `StandardInput=socket`). Only the core may have opened it: the socket
file is the core user's alone, which the kernel checks. A policy that computes for ever in C hears nothing of its
connection, so it runs in a child, and what waits here is free to kill it.
"""

import os
import select
import signal
import sys

_HANG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR


def main() -> int:
    """Run a policy host until it ends or the core hangs up; return 0 for either, since both are normal."""
    child = os.fork()
    if child == 0:
        from gpuenergyd.daemon.processes.policy_host import main as run_host  # noqa: PLC0415  the guard itself stays small

        run_host()
        return 0
    pidfd = os.pidfd_open(child)
    poller = select.poll()
    poller.register(0, _HANG_UP)
    poller.register(pidfd, select.POLLIN)
    poller.poll()
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.waitpid(child, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
