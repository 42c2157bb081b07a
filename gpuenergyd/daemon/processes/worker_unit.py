"""What the GPU worker's unit starts: it reads the settings, as the core does, and becomes the worker.

    python -I -m gpuenergyd.daemon.processes.worker_unit --core-user gpuenergyd

Nothing of what reads settings stays in the process that may change GPUs: it is replaced, sockets and pid kept.
"""

import os
import sys

from gpuenergyd.daemon.processes.launch import worker_command
from gpuenergyd.daemon.settings import load_settings
from gpuenergyd.errors import GpuEnergyError


def main() -> None:
    """Become the worker, or say which setting makes no sense."""
    try:
        command = [*worker_command(load_settings()), *sys.argv[1:]]
    except GpuEnergyError as error:
        print(f"gpuenergyd-worker: {error}", file=sys.stderr)  # noqa: T201  a command's own voice
        sys.exit(error.exit_code)
    os.execv(command[0], command)  # noqa: S606  a fixed interpreter and our own module


if __name__ == "__main__":
    main()
