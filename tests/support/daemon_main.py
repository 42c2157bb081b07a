"""The daemon as a program whose settings are one JSON argument."""

import json
import sys
from collections.abc import Sequence

from gpuenergyd.daemon.api.plugin_routes import plugin_routes
from gpuenergyd.daemon.app import serve
from gpuenergyd.daemon.host_services import host_services
from gpuenergyd.daemon.settings import load_settings
from gpuenergyd.errors import GpuEnergyError
from tests.support.forked_helpers import fork_helpers

# What each daemon imports when it starts is imported before one is forked.
host_services()
plugin_routes()


def main(arguments: Sequence[str]) -> int:
    """Run the daemon; return its exit status."""
    try:
        settings = load_settings(**json.loads(arguments[0]))
        return serve(settings, start_child=fork_helpers(settings))
    except GpuEnergyError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
