"""Starts a data-parallel loop's exchange of paces with other hosts, in one rank of each host.

The exchange needs torch for the job's store, and the client only the standard library. So an entry point names it.
"""

import os
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points

from gpuenergyd.client.environment import has_other_hosts
from gpuenergyd.client.rank import RankClient
from gpuenergyd.log_lines import safe_logger

EXCHANGES_GROUP = "gpuenergyd.exchanges"
_LOOP = "loop"

logger = safe_logger("gpuenergyd.client")


def start_loop_exchange(
    client: RankClient,
    *,
    run_key: str,
    dp_rank: int,
    socket_path: str | None,
    environ: Mapping[str, str] = os.environ,
) -> Callable[[], None] | None:
    """Start the exchange of a host's ranks with other hosts; return a function that ends it, or None without one.

    The host's first rank sends the paces of all its ranks. Never raises: without the exchange, ranks are compared only
    with those of their own host.
    """
    if not has_other_hosts(environ) or environ.get("LOCAL_RANK") != "0":
        return None
    try:
        point = next(iter(entry_points(group=EXCHANGES_GROUP, name=_LOOP)), None)
        if point is None:
            return None
        stop: Callable[[], None] | None = point.load()(
            client, run_key=run_key, dp_rank=dp_rank, socket_path=socket_path
        )
    except Exception as error:  # noqa: BLE001  whatever a plugin raises must not reach training
        logger.warning("gpuenergyd: ranks on other hosts are not compared with those of this one: %r", error)
        return None
    return stop
