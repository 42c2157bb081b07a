"""Services of plugins: they act on the host's jobs and GPUs, and a daemon that cannot load one does not start."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from docs.site.house_map import ROOT
from gpuenergyd.daemon.api.status import daemon_status
from gpuenergyd.daemon.app import Daemon
from gpuenergyd.daemon.host_services import HostParts, HostService, check_services, host_services
from gpuenergyd.daemon.settings import load_settings
from gpuenergyd.errors import GpuEnergyError, UsageError
from gpuenergyd.gpu.link.messages import GpuSample
from gpuenergyd.wire.daemon_codec import encode
from gpuenergyd_power.requested import RequestFile
from gpuenergyd_power.rules.budget import BudgetSource, PowerBudget
from tests.support.api_server import parts_of
from tests.support.documents import blocks
from tests.support.installed_distribution import install_distribution, site_of
from tests.support.job_stage import Stage

PAGE = ROOT / "docs" / "how-to" / "write-a-plugin.md"
site = site_of(host_services.cache_clear)


def parts(folder: Path) -> HostParts:
    return parts_of(Stage(), load_settings(state_dir=folder))


def install(site: Path, **services: str) -> None:
    install_distribution(site, "plugin", "gpuenergyd.host_services", services)


def own_fields(folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the status fields of a daemon without plugins."""
    monkeypatch.setattr("gpuenergyd.daemon.app.host_services", dict)
    monkeypatch.setattr("gpuenergyd.daemon.api.server.plugin_routes", tuple)
    return {*daemon_status(Daemon(load_settings(state_dir=folder)))}


@pytest.mark.parametrize("service", host_services().values(), ids=lambda service: service.__module__)
def test_a_service_starts_idle_and_adds_fields_of_its_own(
    service: type[HostService], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        service.check(load_settings(state_dir=tmp_path))
        running = service(parts(tmp_path))
        await running.start()
        running.handle_samples([])
        running.handle_samples([GpuSample("GPU-0", 1, None, None, None, None, None, None)])

        assert running.trouble is None
        assert encode(running.status())
        assert own_fields(tmp_path, monkeypatch).isdisjoint(running.status())
        await running.close()

    asyncio.run(scenario())


def test_the_service_of_the_documents_degrades_the_status(site: Path) -> None:
    (text,) = (block.text for block in blocks(PAGE) if "HostParts" in block.text and block.language == "python")
    (site / "heat_service.py").write_text(text)
    install(site, heat="heat_service:Heat")

    heat = host_services()["heat"](parts(site))
    heat.handle_samples([GpuSample("GPU-0", 1, 300.0, None, None, 1410, 95.0, None)])

    assert heat.trouble == "too hot: GPU-0"
    assert heat.status() == {"hot_gpus": ["GPU-0"]}


def test_a_service_that_cannot_be_loaded_keeps_the_daemon_from_starting(site: Path) -> None:
    install(site, shaky="no_such_module:Service")

    with pytest.raises(GpuEnergyError, match=r"service 'shaky' \(no_such_module:Service\) cannot be loaded: Module"):
        check_services(load_settings(state_dir=site))


@pytest.mark.parametrize("limit", [{"power_budget_w": 500.0}, {"power_ramp_w_per_s": 500.0}], ids=str)
def test_a_limit_without_the_service_that_keeps_it_is_refused(
    limit: dict[str, Any], site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuenergyd.daemon.host_services.entry_points", lambda **_: ())

    with pytest.raises(
        UsageError, match=f"{next(iter(limit))} is set, but no installed package provides the service 'power'"
    ):
        check_services(load_settings(state_dir=site, **limit))
    check_services(load_settings(state_dir=site))


def test_a_requested_budget_without_the_service_that_keeps_it_is_logged(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = load_settings(state_dir=site)
    RequestFile(settings.power_budget_path).save(PowerBudget(500.0, BudgetSource.REQUEST))
    check_services(settings)
    assert not caplog.messages
    host_services.cache_clear()
    monkeypatch.setattr("gpuenergyd.daemon.host_services.entry_points", lambda **_: ())

    check_services(settings)

    (line,) = caplog.messages
    assert "power-budget.json, if still valid, is not in force: no installed package provides the service" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heat": {}}, r"\[heat\]: no such service; installed: across-hosts, carbon, idle, power"),
        ({"power": {"budget_w": 5}}, r"\[power\]: no such table"),
        ({"across-hosts": {}}, r"\[across-hosts\]: no such table"),
        ({"carbon": {"zone": "GB"}}, r"\[carbon\]: no such table"),
        ({"idle": {"after": 5}}, r"\[idle\]: unknown option 'after'; valid: enabled, after_s"),
        ({"idle": {"enabled": 1}}, r"\[idle\] enabled = 1: must be true or false"),
        ({"idle": {"after_s": 0.1}}, r"\[idle\] after_s = 0.1: must be from 1 to 86400"),
    ],
    ids=str,
)
def test_options_that_no_service_takes_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    host_services.cache_clear()
    with pytest.raises(UsageError, match=message):
        check_services(load_settings(state_dir=tmp_path, service_options=options))
