"""An HTTP server of the daemon without GPU worker and policy host, for tests of the server alone."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpuenergyd.daemon.across_hosts.pipeline_member import PipelineMembers
from gpuenergyd.daemon.api.server import ManualChanges, Server, UserLimits
from gpuenergyd.daemon.capped_worker import CappedWorker
from gpuenergyd.daemon.gpus.access import AccessRules
from gpuenergyd.daemon.gpus.proof_of_use import ProofOfUse
from gpuenergyd.daemon.host_services import HostParts, host_services
from gpuenergyd.daemon.jobs.operators import JobFits, Operators, OrderFile
from gpuenergyd.daemon.jobs.past_jobs import PastJobStore
from gpuenergyd.daemon.manual_leases.administrator import AdministratorLeases
from gpuenergyd.daemon.manual_leases.leases import ManualLeases
from gpuenergyd.daemon.manual_leases.releases import GpuReleases
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.daemon.settings import load_settings
from tests.support.job_stage import FakeWorker, Stage


async def no_policy(*_: object) -> PolicyFailure:
    """Fail: no test asks for a fitted profile or a division of power."""
    return PolicyFailure("no policy host")


async def any_policy(_: str) -> None:
    """Accept any options."""


def server_of(stage: Stage, folder: Path, *, status: Callable[[], Mapping[str, Any]] = dict) -> Server:
    """Return a server that is not started."""
    worker = FakeWorker()
    leases = ManualLeases(worker, stage.gpus, stage.history)
    capped = CappedWorker(worker, stage.gpus)
    parts = HostParts(load_settings(state_dir=folder), stage.gpus, stage.jobs, capped, no_policy, stage.history)
    return Server(
        stage.jobs,
        ManualChanges(
            AdministratorLeases(leases, stage.gpus, worker),
            GpuReleases(worker, stage.gpus, stage.history, stage.jobs.spawn),
        ),
        PipelineMembers(stage.jobs),
        Operators(stage.jobs, any_policy, lambda _: None, OrderFile(folder / "orders.json")),
        JobFits(stage.jobs, no_policy, lambda _: None),
        status=status,
        job_detail=lambda _: None,
        past_jobs=PastJobStore(f"sqlite:///{folder / 'history.sqlite3'}", stage.history),
        proof_of_use=ProofOfUse(AccessRules(), worker.process_ids),
        host_services={name: service(parts) for name, service in host_services().items()},
        limits=UserLimits(1, 1e9),
    )
