"""Driver calls that the daemon requests, and the restore after a worker that was killed around one."""

import os
from pathlib import Path

import pytest

from gpuenergyd.gpu.link.messages import LeaseOwner, LowerPowerLimit
from gpuenergyd.gpu.restore.command import restore
from gpuenergyd.gpu.restore.executor import RestoreResult
from gpuenergyd.gpu.restore.journal import Journal
from gpuenergyd.gpu.restore.policy import RestoreRules
from gpuenergyd.gpu.worker.driver_requests import DriverRequests
from gpuenergyd_sim.driver.host import SimulatedHost

OWNER = LeaseOwner("job-1", os.getpid(), os.getuid())


@pytest.mark.fault(4, 14)
def test_a_power_limit_is_restored_whether_its_worker_was_killed_before_or_after_a_driver_call(
    host: SimulatedHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = host.identities()[0].gpu_uuid
    journal = Journal(tmp_path / "journal.json")
    requests = DriverRequests(host, journal, "simulated", host.path, RestoreRules())
    original_w = host.power_limit_w(gpu)
    moments: list[tuple[bytes, float]] = []
    set_power_limit = SimulatedHost.set_power_limit

    def watched(self: SimulatedHost, gpu_uuid: str, power_limit_w: float) -> None:
        moments.append((journal.path.read_bytes(), self.power_limit_w(gpu_uuid)))
        set_power_limit(self, gpu_uuid, power_limit_w)
        moments.append((journal.path.read_bytes(), self.power_limit_w(gpu_uuid)))

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedHost, "set_power_limit", watched)
        for limit_w in (original_w - 60.0, original_w - 75.0, original_w - 30.0, None):
            requests.lower_power_limit(LowerPowerLimit("L1", gpu, limit_w, OWNER))

    assert len({limit_w for _, limit_w in moments}) == 4
    for body, limit_w in moments:
        journal.path.write_bytes(body)
        host.set_power_limit(gpu, limit_w)
        (outcome,) = restore(journal.path)
        assert (outcome.result, host.power_limit_w(gpu)) == (RestoreResult.RESTORED, original_w)


@pytest.mark.parametrize("read_w", [0.0, float("nan"), 90.0, 4_294_967.295, 250.0])
def test_a_power_limit_read_wrongly_once_is_not_taken_for_an_operator_s(
    host: SimulatedHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_w: float
) -> None:
    gpu, journal = host.identities()[0].gpu_uuid, Journal(tmp_path / "journal.json")
    requests = DriverRequests(host, journal, "simulated", host.path, RestoreRules())
    original_w = host.power_limit_w(gpu)
    requests.lower_power_limit(LowerPowerLimit("L1", gpu, 300.0, OWNER))
    answers, read = [read_w], SimulatedHost.power_limit_w
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedHost, "power_limit_w", lambda *call: answers.pop() if answers else read(*call))
        requests.lower_power_limit(LowerPowerLimit("L1", gpu, 280.0, OWNER))
    restore(journal.path)

    assert host.power_limit_w(gpu) == original_w
