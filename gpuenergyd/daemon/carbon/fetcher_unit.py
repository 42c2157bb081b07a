"""The carbon fetcher as a unit of the service manager: reads the daemon's settings, then becomes the fetcher.

One configuration serves all: the zone that the core follows is the zone that is asked for. Without a source to ask it
ends at once, in order, and is not started again until somebody starts the daemon again.
"""

import json
import logging
import os
import sys

from gpuenergyd.daemon.carbon.fetcher_process import fetcher_configuration
from gpuenergyd.daemon.settings import Processes, load_settings
from gpuenergyd.errors import GpuEnergyError

log = logging.getLogger(__name__)

_FETCHER = ("-I", "-m", "gpuenergyd.carbon.fetcher")


def main() -> int:
    """Become the fetcher; return only where there is nothing to fetch, or what is set cannot be used."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        settings = load_settings(processes=Processes.UNITS)
    except GpuEnergyError as error:
        log.error("%s", error)  # noqa: TRY400  one line that names the key, no traceback
        return error.exit_code
    if not settings.asks_network:
        log.info("no carbon source is configured (carbon_zone): nothing to fetch")
        return 0
    reads, writes = os.pipe()
    os.write(writes, json.dumps(fetcher_configuration(settings)).encode())
    os.close(writes)
    os.dup2(reads, sys.stdin.fileno())
    return os.execv(sys.executable, (sys.executable, *_FETCHER))  # noqa: S606  ourselves, without what settings took


if __name__ == "__main__":
    sys.exit(main())
