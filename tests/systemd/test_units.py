"""systemd's own checks of the units: no unknown settings, low exposure."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import finished

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "systemd"
SERVICES = sorted(path.name for path in UNITS.glob("*.service"))
CORE, WORKER = "gpuenergyd.service", "gpuenergyd-gpu.service"
EXPOSURE_LIMITS = {CORE: 0.8, WORKER: 1.2}
OTHERS_LIMIT = 1.3

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd-analyze here: install the Debian package systemd"
)


def settings_of(name: str) -> dict[str, list[str]]:
    """Return the settings of a unit file with their values in order."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


@needs_systemd
@pytest.mark.parametrize("name", SERVICES)
def test_no_service_exceeds_its_exposure_limit(name: str) -> None:
    limit = EXPOSURE_LIMITS.get(name, OTHERS_LIMIT)
    threshold = round(10 * limit)

    result = finished(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={threshold}", str(UNITS / name)]
    )

    assert result.returncode == 0, f"more than {limit}: {result.stdout[-300:]}{result.stderr}"
    assert "Overall exposure level" in result.stdout


@needs_systemd
def test_systemd_verifies_every_unit(tmp_path: Path) -> None:
    copies = []
    for unit in UNITS.glob("*.s*"):
        if unit.is_file():
            text = unit.read_text(encoding="utf-8").replace("/opt/gpuenergyd/bin/python", sys.executable)
            copies.append(tmp_path / unit.name)
            copies[-1].write_text(text, encoding="utf-8")

    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, copies)], capture_output=True, text=True, check=False
    )

    reply = [line for line in result.stderr.splitlines() if "gpuenergyd" in line]
    assert (result.returncode, reply) == (0, [])
    assert len(copies) == 9


def test_only_the_worker_has_a_capability_and_only_fetcher_and_receiver_network_access() -> None:
    capable = {name for name in SERVICES if settings_of(name)["CapabilityBoundingSet"] != [""]}
    networked = {name for name in SERVICES if settings_of(name).get("PrivateNetwork") != ["yes"]}

    assert capable == {WORKER, "gpuenergyd-restore.service"}
    assert {value for name in capable for value in settings_of(name)["CapabilityBoundingSet"]} == {"CAP_SYS_ADMIN"}
    assert networked == {"gpuenergyd-carbon.service", "gpuenergyd-openadr.service"}


def test_every_process_runs_as_its_own_sysusers_user() -> None:
    lines = (UNITS / "sysusers.d" / "gpuenergyd.conf").read_text(encoding="utf-8").splitlines()
    made = {line.split()[1] for line in lines if line.startswith("u ")}
    users = {name: settings_of(name)["User"][0] for name in SERVICES}

    assert set(users.values()) == made
    assert users[WORKER] == users["gpuenergyd-restore.service"]
    assert len(made) == 5


def test_daemon_and_worker_conflict_with_other_clock_daemons() -> None:
    for name in (CORE, WORKER):
        assert settings_of(name)["Conflicts"] == ["zeusd.service geopm.service eard.service"]


def test_only_the_daemon_may_connect_to_worker_and_policy_host() -> None:
    for name in ("gpuenergyd-gpu.socket", "gpuenergyd-policy.socket"):
        settings = settings_of(name)

        assert (settings["SocketUser"], settings["SocketMode"]) == (["gpuenergyd"], ["0600"])
