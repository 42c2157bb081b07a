"""The OpenAPI description matches the routes and the message types."""

import asyncio
import json
import re
import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.daemon.across_hosts.pipeline_member import PipelineMembers
from gpuenergyd.daemon.api.openapi import api_description, api_text
from gpuenergyd.daemon.api.server import ManualChanges, Server, UserLimits
from gpuenergyd.daemon.gpus.access import AccessRules
from gpuenergyd.daemon.gpus.proof_of_use import ProofOfUse
from gpuenergyd.daemon.jobs.fits import JobFits
from gpuenergyd.daemon.jobs.operators import Operators, OrderFile
from gpuenergyd.daemon.jobs.past_jobs import PastJobStore
from gpuenergyd.daemon.manual_leases.administrator import AdministratorLeases
from gpuenergyd.daemon.manual_leases.calibration import Calibrations
from gpuenergyd.daemon.manual_leases.leases import ManualLeases
from gpuenergyd.daemon.manual_leases.releases import GpuReleases
from gpuenergyd.daemon.power.capped_worker import CappedWorker
from gpuenergyd.daemon.power.service import PowerService
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.daemon.processes.power_queries import PowerQuery
from gpuenergyd.daemon.settings import load_settings
from gpuenergyd.daemon.zeusd.requests import ZeusdChanges
from gpuenergyd.gpu.device import GpuDetails, GpuIdentity
from gpuenergyd.gpu.link.messages import GpuSnapshot, LeaseOwner
from gpuenergyd.wire.daemon_codec import encode
from gpuenergyd.wire.messages import IterationReport, RankRegistered, RankRegistration, RankRelease
from tests.support.job_stage import FakeWorker, Stage, registration, report


class UnusedWorker(FakeWorker):
    """A worker that records its calls; no test calls it."""

    async def set_power_limit(self, lease_id: str, gpu_uuid: str, power_limit_w: float, owner: LeaseOwner) -> float:
        """Record the call."""
        assert lease_id == owner.job_id
        self.calls.append(("limit", (gpu_uuid,)))
        return power_limit_w

    async def divide_power(self, query: PowerQuery) -> PolicyFailure:
        """Record the call."""
        self.calls.append(("divide", (query.power_target,)))
        return PolicyFailure("unused")

    async def process_ids(self, gpu_uuid: str) -> tuple[int, ...]:
        """Record the call."""
        self.calls.append(("users", (gpu_uuid,)))
        return ()

    async def release_gpus(self, gpu_uuids: Sequence[str], reason: str) -> None:
        """Record the call."""
        self.calls.append((reason, tuple(gpu_uuids)))

    async def reopen_gpus(self, gpu_uuids: Sequence[str]) -> tuple[GpuIdentity, ...]:
        """Record the call."""
        self.calls.append(("reopen", tuple(gpu_uuids)))
        return ()

    async def snapshot(self, gpu_uuid: str) -> GpuSnapshot:
        """Record the call."""
        self.calls.append(("look", (gpu_uuid,)))
        return GpuSnapshot(None, None, GpuDetails())


async def no_policy(*_: object) -> PolicyFailure:
    """Fail: no test asks for a fitted profile."""
    return PolicyFailure("no policy host")


async def any_policy(_: str) -> None:
    """Accept any options."""


def served_routes(tmp_path: Path) -> frozenset[tuple[str, str]]:
    async def scenario() -> frozenset[tuple[str, str]]:
        stage = Stage()
        leases = ManualLeases(UnusedWorker(), stage.gpus, stage.history)
        server = Server(
            stage.jobs,
            ManualChanges(
                AdministratorLeases(leases, stage.gpus, UnusedWorker()),
                Calibrations(leases, stage.gpus, UnusedWorker()),
                ZeusdChanges(leases, UnusedWorker()),
                PowerService(
                    load_settings(state_dir=tmp_path),
                    stage.gpus,
                    stage.jobs,
                    CappedWorker(UnusedWorker(), stage.gpus),
                    UnusedWorker(),
                    stage.history,
                ),
                GpuReleases(UnusedWorker(), stage.gpus, stage.history, stage.jobs.spawn),
            ),
            PipelineMembers(stage.jobs),
            Operators(stage.jobs, any_policy, lambda _: None, OrderFile(tmp_path / "orders.json")),
            JobFits(stage.jobs, no_policy, lambda _: None),
            status=dict,
            job_detail=lambda _: None,
            past_jobs=PastJobStore(tmp_path / "history.sqlite3", stage.history),
            proof_of_use=ProofOfUse(AccessRules(), UnusedWorker().process_ids),
            limits=UserLimits(1, 1.0),
        )
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "socket"))
        await server.start(listener)
        routes = server.routes
        await server.close()
        return routes

    return asyncio.run(scenario())


def test_openapi_describes_exactly_the_routes(tmp_path: Path) -> None:
    described = {
        (method.upper(), path) for path, operations in api_description()["paths"].items() for method in operations
    }

    assert described == served_routes(tmp_path)


def references(value: Any) -> set[str]:
    """Return all schema references in a document."""
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(v) for v in value.values()))
    if isinstance(value, list):
        return set().union(*(references(v) for v in value))
    return set()


def test_every_schema_reference_exists() -> None:
    document = api_description()

    found = references(document)

    assert found
    for reference in found:
        name = re.fullmatch(r"#/components/schemas/(\w+)", reference)
        assert name is not None
        assert name[1] in document["components"]["schemas"]


@pytest.mark.parametrize("message_type", [RankRegistration, RankRegistered, IterationReport, RankRelease])
def test_a_schema_has_the_fields_of_its_message(message_type: type[Any]) -> None:
    schema = api_description()["components"]["schemas"][message_type.__name__]

    assert set(schema["properties"]) == set(message_type.__dataclass_fields__)


def test_client_messages_contain_all_required_fields() -> None:
    schemas = api_description()["components"]["schemas"]

    assert set(schemas["RankRegistration"]["required"]) <= set(asdict(registration(0)))
    assert set(schemas["IterationReport"]["required"]) <= set(asdict(report("00", 0, 0, 0)))


def test_the_document_is_built_once() -> None:
    assert api_text() is api_text()
    assert json.loads(api_text()) == json.loads(encode(api_description()))
