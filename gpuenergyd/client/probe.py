"""Liveness check for containers: `python -I -m gpuenergyd.client.probe` succeeds while the daemon answers.

It starts in a fraction of the time of `gpuenergyd status`. A degraded daemon counts as alive.
"""

import sys
from contextlib import closing

from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.client.environment import find_socket_path
from gpuenergyd.errors import GpuEnergyError


def main() -> int:
    """Request the daemon's status; return 0, or write why there is no answer and return that error's exit code."""
    try:
        with closing(DaemonClient(find_socket_path())) as client:
            client.get_status()
    except GpuEnergyError as error:
        sys.stderr.write(f"gpuenergyd: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
