"""Services of plugins: parts of the daemon that act on all jobs and GPUs of a host, such as its power budget.

Each is a class, named by an entry point of the group `gpuenergyd.host_services`. Services run on the daemon's event
loop, so a service that blocks delays every training program.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol

from gpuenergyd.core.policy_api.power import PowerDecision
from gpuenergyd.daemon.capped_worker import CappedWorker
from gpuenergyd.daemon.gpus.inventory import Gpus
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.daemon.ports import HistoryPort
from gpuenergyd.daemon.processes.launch import StartPolicyHost
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.daemon.processes.power_queries import PowerQuery
from gpuenergyd.daemon.processes.target_queries import TargetQuery, TargetReply
from gpuenergyd.daemon.settings import SERVICES_GROUP, Settings
from gpuenergyd.errors import GpuEnergyError, UsageError
from gpuenergyd.gpu.link.messages import GpuSample

log = logging.getLogger(__name__)

_NEEDS = {
    "power": ("power_budget_w", "power_schedule_path", "power_ramp_w_per_s"),
    "carbon": ("carbon_zone", "signal_path"),
}
"""Settings without effect unless a service with this name is installed."""


@dataclass(frozen=True, slots=True)
class HostParts:
    """The parts of the daemon that a service may use."""

    settings: Settings
    gpus: Gpus
    jobs: Jobs
    """Their runners accept events, such as a power target; `watch` reports their iterations to a service."""
    ceilings: CappedWorker
    """Sets limits per GPU that no lease can exceed, and lifts them when the daemon stops."""
    divide_power: Callable[[PowerQuery], Awaitable[PowerDecision | PolicyFailure]]
    """Asks a power target policy in the policy host, with the frontiers of all jobs."""
    history: HistoryPort
    next_target: Callable[[str, TargetQuery], Awaitable[TargetReply | PolicyFailure]]
    """Asks a target policy in the policy host about a job, with the job's frontier."""
    start_policy_host: StartPolicyHost
    """Starts a further policy host, for work that must not delay plans."""


class HostService(Protocol):
    """A service of one plugin. An exception in constructor, `check` or `start` keeps the daemon from starting."""

    def __init__(self, parts: HostParts) -> None: ...

    @staticmethod
    def check(settings: Settings) -> None:
        """Check the settings before the daemon starts; raise GpuEnergyError if the service cannot work with them."""
        ...

    async def start(self) -> None:
        """Start the service; the GPUs are known by now."""
        ...

    async def close(self) -> None:
        """Stop; the daemon then lifts all ceilings and restores the GPUs."""
        ...

    def handle_samples(self, samples: Sequence[GpuSample]) -> None:
        """Handle new readings of GPUs."""
        ...

    @property
    def trouble(self) -> str | None:
        """Why the daemon's status should be degraded; None if there is no problem."""
        ...

    def status(self) -> Mapping[str, Any]:
        """Return fields of `GET /v1/status`, other than the daemon's own."""
        ...


@cache
def host_services() -> Mapping[str, type[HostService]]:
    """Return the installed services by name.

    Raises:
        GpuEnergyError: a service cannot be loaded; without it, the daemon might exceed a limit of its host.
    """
    found: dict[str, type[HostService]] = {}
    for point in sorted(entry_points(group=SERVICES_GROUP), key=lambda point: point.name):
        try:
            found[point.name] = point.load()
        except Exception as error:  # a plugin's import may fail in any way
            reason = f"{type(error).__name__}: {error}"
            raise GpuEnergyError(f"service {point.name!r} ({point.value}) cannot be loaded: {reason}") from error
    return found


def check_services(settings: Settings) -> None:
    """Check the settings against the installed services, and warn of a saved power budget that none of them enforces.

    Raises:
        GpuEnergyError: a service is missing that a setting needs, cannot be loaded, or refuses the settings.
    """
    services = host_services()
    for name in _NEEDS.keys() - services.keys():
        for setting in _NEEDS[name]:
            if getattr(settings, setting) is not None:
                given = "carbon_signal" if setting == "signal_path" else setting
                missing = f"no installed package provides the service {name!r}; the plugin gpuenergyd_{name} does"
                raise UsageError(f"{given} is set, but {missing}")
    if "power" not in services and settings.power_budget_path.exists():
        log.warning(
            "the power budget saved in %s, if still valid, is not in force: no installed package provides the service"
            " 'power'",
            settings.power_budget_path,
        )
    if unknown := settings.service_options.keys() - services.keys():
        raise UsageError(f"[{min(unknown)}]: no such service; installed: {', '.join(services)}")
    for service in services.values():
        service.check(settings)
