"""Finds what a plugin offers to ranks of a training on several hosts: exchanges of paces, and pipelines across hosts.

These need torch for the job's store, and the client only the standard library. So entry points name them.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

from gpuenergyd.client.environment import has_other_hosts
from gpuenergyd.client.plans import PlanQueue
from gpuenergyd.client.rank import RankClient, RankDescription
from gpuenergyd.log_lines import safe_logger

EXCHANGES_GROUP = "gpuenergyd.exchanges"
_MISSING = "the plugin gpuenergyd_across_hosts is not installed"

logger = safe_logger("gpuenergyd.client")


class PaceExchange(Protocol):
    """Exchanges the paces of replicas with other hosts, in one rank of each host or replica.

    The entry point `loop` is for all ranks of a data-parallel loop on this host, `replica` for a pipeline on this host.
    """

    def __call__(
        self, client: RankClient, *, run_key: str, dp_rank: int, socket_path: str | None
    ) -> Callable[[], None] | None:
        """Start the exchange; return a function that ends it, or None if the job has no store."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The position of a rank in its job, and what it exchanges with other hosts."""

    rank: RankDescription
    """The position, as the rank registers it with the daemon of its host."""
    start_exchange: Callable[[RankClient, str | None], Callable[[], None] | None] = lambda _client, _socket_path: None
    """Starts the exchange with other hosts, given the client and the socket path; returns a function that ends it, or
    None if there is nothing to exchange."""
    plans: PlanQueue | None = None
    """Plans that the rank agrees on with members on other hosts; None for those of its daemon."""


class PipelineExchange(Protocol):
    """Makes a rank the member of a pipeline across hosts: the entry point `pipeline`."""

    def __call__(self, rank: RankDescription) -> Membership | None:
        """Return the membership; None, after a warning, if the job has no store.

        Args:
            rank: its place in the pipeline, without options.
        """
        ...


def start_pace_exchange(
    name: str,
    client: RankClient,
    socket_path: str | None,
    *,
    run_key: str,
    dp_rank: int,
    environ: Mapping[str, str] = os.environ,
) -> Callable[[], None] | None:
    """Start an exchange with other hosts; return a function that ends it, or None without one.

    A `loop` is started in the first rank of a host only. Never raises: without the exchange, ranks are compared only
    with those of their own host.
    """
    if not has_other_hosts(environ) or (name == "loop" and environ.get("LOCAL_RANK") != "0"):
        return None
    try:
        exchange: PaceExchange | None = _find(name)
        if exchange is not None:
            return exchange(client, run_key=run_key, dp_rank=dp_rank, socket_path=socket_path)
        reason = _MISSING
    except Exception as error:  # noqa: BLE001  whatever a plugin raises must not reach training
        reason = repr(error)
    logger.warning("gpuenergyd: ranks on other hosts are not compared with those of this one: %s", reason)
    return None


def find_pipeline_membership(rank: RankDescription) -> Membership | None:
    """Return the membership of a rank in a pipeline across hosts; None if it cannot be a member, which is logged."""
    exchange: PipelineExchange | None = _find("pipeline")
    if exchange is not None:
        return exchange(rank)
    logger.warning("gpuenergyd: the pipeline spans hosts, but %s; training continues at full speed", _MISSING)
    return None


def _find(name: str) -> Any:
    """Return what an entry point names; None if no installed package has it."""
    point = next(iter(entry_points(group=EXCHANGES_GROUP, name=name)), None)
    return None if point is None else point.load()
