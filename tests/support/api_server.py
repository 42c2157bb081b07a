"""An HTTP server of the daemon without GPU worker and policy host, for tests of the server alone."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from gpuenergyd.core.policy_api.power import PowerDecision
from gpuenergyd.daemon.api.server import ManualChanges, Server, UserLimits
from gpuenergyd.daemon.capped_worker import CappedWorker
from gpuenergyd.daemon.gpus.access import AccessRules
from gpuenergyd.daemon.gpus.proof_of_use import ProofOfUse
from gpuenergyd.daemon.host_services import HostParts, host_services
from gpuenergyd.daemon.jobs.operators import JobFits, Operators, OrderFile
from gpuenergyd.daemon.jobs.past_jobs import PastJobStore
from gpuenergyd.daemon.manual_leases.leases import ManualLeases
from gpuenergyd.daemon.manual_leases.releases import GpuReleases
from gpuenergyd.daemon.processes.launch import PolicyChannel
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.daemon.processes.power_queries import PowerQuery
from gpuenergyd.daemon.settings import Settings, load_settings
from gpuenergyd.errors import GpuError
from tests.support.job_stage import FakeWorker, Stage


async def no_policy(*_: object) -> PolicyFailure:
    """Fail: no test asks for a fitted profile or a division of power."""
    return PolicyFailure("no policy host")


async def no_policy_host() -> PolicyChannel:
    """Fail: no test asks for a forecast."""
    raise GpuError("no policy host")


async def any_policy(_: str) -> None:
    """Accept any options."""


def parts_of(
    stage: Stage,
    settings: Settings,
    *,
    capped: CappedWorker | None = None,
    divide_power: Callable[[PowerQuery], Awaitable[PowerDecision | PolicyFailure]] = no_policy,
) -> HostParts:
    """Return the parts of a host without policy host, for its services."""
    capped = capped or CappedWorker(FakeWorker(), stage.gpus)
    return HostParts(settings, stage.gpus, stage.jobs, capped, divide_power, stage.history, no_policy, no_policy_host)


def server_of(stage: Stage, folder: Path, *, status: Callable[[], Mapping[str, Any]] = dict) -> Server:
    worker = FakeWorker()
    leases = ManualLeases(worker, stage.gpus, stage.history)
    parts = parts_of(stage, load_settings(state_dir=folder), capped=CappedWorker(worker, stage.gpus))
    return Server(
        stage.jobs,
        ManualChanges(worker, leases, GpuReleases(worker, stage.gpus, stage.history, stage.jobs.spawn)),
        Operators(stage.jobs, any_policy, OrderFile(folder / "orders.json")),
        JobFits(stage.jobs, no_policy),
        status=status,
        job_detail=lambda _: None,
        past_jobs=PastJobStore(f"sqlite:///{folder / 'history.sqlite3'}", stage.history),
        proof_of_use=ProofOfUse(AccessRules(), worker.process_ids),
        host_services={name: service(parts) for name, service in host_services().items()},
        limits=UserLimits(1, 1e9),
    )
