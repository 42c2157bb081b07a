"""Main program of the carbon fetcher's systemd unit: reads the daemon's settings, then executes the fetcher.

Daemon and fetcher share one configuration file. Without a configured source the program exits with status 0, and
systemd starts it again only with the daemon.
"""

import json
import logging
import os
import sys

from gpuenergyd.daemon.settings import Processes, load_settings
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.log_lines import configure_logging
from gpuenergyd_carbon.fetching.fetcher_process import fetcher_configuration

log = logging.getLogger(__name__)

_FETCHER = ("-I", "-m", "gpuenergyd_carbon.fetching.fetcher")


def main() -> int:
    """Execute the fetcher; return only if nothing is to be fetched or a setting is invalid."""
    configure_logging("gpuenergyd-carbon")
    try:
        settings = load_settings(processes=Processes.UNITS)
    except GpuEnergyError as error:
        log.error("%s", error)  # noqa: TRY400  one line that names the key, no traceback
        return error.exit_code
    if not settings.needs_carbon_fetcher:
        log.info("nothing to fetch: carbon_zone is not set")
        return 0
    reads, writes = os.pipe()
    os.write(writes, json.dumps(fetcher_configuration(settings)).encode())
    os.close(writes)
    os.dup2(reads, sys.stdin.fileno())
    return os.execv(sys.executable, (sys.executable, *_FETCHER))  # noqa: S606  our own interpreter and module


if __name__ == "__main__":
    sys.exit(main())
