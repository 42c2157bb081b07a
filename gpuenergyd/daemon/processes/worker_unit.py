"""Main program of the GPU worker's systemd unit: reads the daemon's settings, then executes the worker.

    python -I -m gpuenergyd.daemon.processes.worker_unit --daemon-user gpuenergyd

execv replaces this process, so no code that parses settings remains in the privileged process; its pid and inherited
sockets stay the same.
"""

import os
import sys

from gpuenergyd.daemon.processes.launch import worker_command
from gpuenergyd.daemon.settings import load_settings
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.log_lines import write_log_line


def main() -> None:
    """Execute the worker, or print which setting is invalid and exit."""
    try:
        command = [*worker_command(load_settings()), *sys.argv[1:]]
    except GpuEnergyError as error:
        write_log_line("gpuenergyd-worker", str(error))
        sys.exit(error.exit_code)
    os.execv(command[0], command)  # noqa: S606  a fixed interpreter and our own module


if __name__ == "__main__":
    main()
