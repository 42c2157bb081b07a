"""The service of idle GPUs: which GPUs it leaves alone, who lifts them, and what it leaves behind."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData

from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd.daemon.gpus.inventory import Gpu, GpuClaim
from gpuenergyd.daemon.settings import load_settings
from gpuenergyd.errors import GpuNotFoundError, StoreError
from gpuenergyd.gpu.device import GpuDetails
from gpuenergyd.gpu.link.messages import GpuHealth, GpuSample
from gpuenergyd.store.plugin_tables import open_plugin_tables
from gpuenergyd_idle.rules.use import GpuUse
from gpuenergyd_idle.service import IdleService
from gpuenergyd_idle.store import stored_use
from tests.daemon.test_host_services import parts

GPU = "GPU-0"


class Host:
    """The service on a host of simulated readings, 0.1 s apart."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        enabled = {"idle": {"enabled": True, "after_s": 1.0}}
        own = {"state_dir": folder, "mode": "control", "service_options": enabled, **settings}
        self.parts = replace(parts(folder), settings=load_settings(**own))
        self.service = IdleService(self.parts)
        self.gpu: Gpu = self.parts.gpus[GPU]
        self.gpu.knobs.details = GpuDetails()
        self.at_ns = 1_000_000_000_000

    def read(self, num: int, *, utilization_ratio: float | None = 0.0) -> None:
        """Read the GPU so often; a process holds it."""
        for _ in range(num):
            self.at_ns += 100_000_000
            clock_mhz = self.parts.ceilings.idle_clocks.get(GPU, 1410)
            sample = GpuSample(GPU, self.at_ns, 60.0, None, None, clock_mhz, 40.0, is_power_capped=False)
            self.service.handle_samples([replace(sample, utilization_ratio=utilization_ratio)])
            self.service._followed[GPU].num_processes = 1

    def is_lowered(self) -> bool:
        return GPU in self.parts.ceilings.idle_clocks

    def of_gpu(self) -> dict[str, Any]:
        """Return the fields of the GPU in the status."""
        (own,) = self.service.status()["idle"]["gpus"]
        return dict(own)


def scenario(check: Callable[[Host], None], folder: Path, **settings: Any) -> Host:
    """Run a check on the event loop, and close the service."""

    async def run() -> Host:
        host = Host(folder, **settings)
        check(host)
        await host.parts.ceilings.settled()
        await host.service.close()
        return host

    return asyncio.run(run())


def test_a_stop_lifts_before_jobs_are_handed_over_and_keeps_account_and_hours(tmp_path: Path) -> None:
    def check(host: Host) -> None:
        host.read(300)
        assert host.is_lowered()
        host.read(5, utilization_ratio=1.0)
        assert not host.is_lowered()
        host.service._followed[GPU].idle.account.lost_s = 1.5
        host.read(900)
        assert host.is_lowered()

    host = scenario(check, tmp_path)
    assert not host.is_lowered()
    assert host.service.trouble is None
    uses = {own.use: own.total for own in stored_use(host.parts.settings.database_url)}
    assert uses[GpuUse.IDLE_CONTEXT].time_s == pytest.approx(120, abs=2)
    assert uses[GpuUse.IDLE_CONTEXT].energy_j == pytest.approx(120 * 60, abs=120)
    assert uses[GpuUse.IDLE_CONTEXT].lowered_s > 30

    def has_account(later: Host) -> None:
        later.read(1)
        assert later.of_gpu()["lost_s"] == 1.5

    scenario(has_account, tmp_path)


def test_a_lift_of_an_unknown_gpu_is_refused(tmp_path: Path) -> None:
    def check(host: Host) -> None:
        host.read(300)
        with pytest.raises(GpuNotFoundError, match="no GPU 'GPU-9'"):
            host.service.lift((GPU, "GPU-9"), 60.0)
        assert host.is_lowered()

    scenario(check, tmp_path)


def test_hours_that_could_not_be_stored_are_stored_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(database: str, rows: object) -> None:
        raise StoreError(f"{database} is locked, {rows}")

    async def run() -> Host:
        host = Host(tmp_path)
        host.read(100)
        with monkeypatch.context() as patch:
            patch.setattr("gpuenergyd_idle.service.add_use", refuse)
            await host.service._store()
        assert host.service.trouble is not None
        host.read(100)
        await host.service.close()
        return host

    host = asyncio.run(run())
    assert host.service.trouble is None
    times_s = [own.total.time_s for own in stored_use(host.parts.settings.database_url)]
    assert sum(times_s) == pytest.approx(20, abs=0.2)


def test_a_report_changes_no_history(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    with pytest.raises(StoreError, match="no history at"):
        stored_use(path)
    open_plugin_tables(path, MetaData(), busy_timeout_s=1.0).dispose()
    before = path.read_bytes()
    assert stored_use(path) == ()
    assert path.read_bytes() == before


def test_what_an_observing_daemon_would_have_lost_is_no_lost_time(tmp_path: Path) -> None:
    def check(host: Host) -> None:
        host.read(300)
        host.read(5, utilization_ratio=1.0)
        assert host.service._followed[GPU].idle.account.lost_s > 0
        assert host.of_gpu()["lost_s"] == 0

    def has_lost_nothing(later: Host) -> None:
        later.read(1)
        assert later.service._followed[GPU].idle.account.lost_s == 0

    scenario(check, tmp_path, mode="observe")
    scenario(has_lost_nothing, tmp_path)


@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        (lambda gpu: setattr(gpu.knobs, "details", GpuDetails(is_mig_enabled=True)), "MIG: its instances"),
        (lambda gpu: setattr(gpu.knobs, "details", GpuDetails(is_display_active=True)), "it drives a display"),
        (lambda gpu: setattr(gpu.knobs, "details", GpuDetails(foreign_sm_clock_mhz=900)), "another program has locked"),
        (lambda gpu: setattr(gpu.knobs, "details", None), "its settings were not read yet"),
        (lambda gpu: setattr(gpu, "health", GpuHealth.DEGRADED), "the GPU is degraded"),
        (lambda gpu: setattr(gpu, "claim", GpuClaim("j", "job", 0, 0)), "a job or lease has it"),
    ],
    ids=["mig", "display", "foreign lock", "unread", "degraded", "claimed"],
)
def test_who_else_uses_a_gpu_keeps_and_lifts_its_clock(
    obstacle: Callable[[Gpu], None], reason: str, tmp_path: Path
) -> None:
    def check(host: Host) -> None:
        host.read(300)
        assert host.is_lowered()
        obstacle(host.gpu)
        host.read(1)
        assert not host.is_lowered()
        host.read(900)
        assert not host.is_lowered()
        assert host.of_gpu()["reason"].startswith(reason)

    scenario(check, tmp_path)


def test_the_account_pays_the_wake_of_a_job_whose_lease_has_lifted_its_gpu(tmp_path: Path) -> None:
    def check(host: Host) -> None:
        host.read(300)
        assert host.is_lowered()
        host.gpu.claim = GpuClaim("j", "job", 0, 0)
        host.parts.ceilings.set_idle_clock(GPU, None)  # as a lease does
        host.read(2)
        assert host.of_gpu()["lost_s"] > 0

    scenario(check, tmp_path)


@pytest.mark.parametrize(
    "settings", [{"mode": "observe"}, {"levers": (Lever.POWER_LIMITS,)}, {"service_options": {}}], ids=str
)
def test_nothing_is_lowered_where_the_settings_do_not_permit_it(settings: dict[str, Any], tmp_path: Path) -> None:
    def check(host: Host) -> None:
        host.read(3600)
        assert not host.is_lowered()
        assert not host.of_gpu()["is_lowered"]

    scenario(check, tmp_path, **settings)


def test_a_clock_that_a_new_worker_does_not_have_is_set_again_a_minute_later(tmp_path: Path) -> None:
    def check(host: Host) -> None:
        host.read(300)
        host.parts.ceilings.handle_worker_ready()
        host.read(1)
        assert not host.is_lowered()
        assert not host.of_gpu()["is_lowered"]
        host.read(600)
        assert host.is_lowered()

    scenario(check, tmp_path)
