"""Main program of the policy host's systemd unit: one per connection of the daemon, killed when the connection ends.

    python -I -m gpuenergyd.daemon.processes.policy_unit MEMORY_LIMIT_BYTES

Standard input is the connection (`Accept=yes`, `StandardInput=socket`). Only the daemon can have opened it, because the
socket file is accessible to the daemon's user alone. A policy in an endless loop in C code does not notice the end of
its connection, so the host runs in a child process that this process kills.
"""

import os
import select
import signal
import sys

_HANG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR


def main() -> int:
    """Run a policy host until it exits or the daemon closes the connection; both are normal and return 0."""
    child = os.fork()
    if child == 0:
        from gpuenergyd.daemon.processes.policy_host import main as run_host  # noqa: PLC0415  keeps the guard process small

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
