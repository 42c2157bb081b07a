"""Measured clock changes outlive the daemon, by GPU model and driver version."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from gpuenergyd.core.pipeline.switching import ENOUGH, LatencyBasis, ObservedSwitch
from gpuenergyd.daemon.gpus.inventory import Gpus
from gpuenergyd.daemon.gpus.switching_file import MAX_KEPT, SavedSwitches, SwitchingFile
from gpuenergyd.gpu.device import GpuIdentity

A100 = GpuIdentity("GPU-0", 0, "A100", (1410, 1200, 900), is_simulated=False, driver_version="580.1")
H100 = replace(A100, gpu_uuid="GPU-1", model_name="H100")


def changes(count: int, *, settle_s: float = 0.001) -> tuple[ObservedSwitch, ...]:
    clocks = ((900, 1410), (1410, 900))
    return tuple(ObservedSwitch(*clocks[k % 2], 0.0, 0.004, settle_s, settle_s) for k in range(count))


def measured(identity: GpuIdentity, count: int) -> Gpus:
    """Return the GPUs of a daemon that has measured so many changes."""
    gpus = Gpus()
    gpus.update([identity])
    for change in changes(count):
        gpus[identity.gpu_uuid].switching.observe(change)
    return gpus


def restarted(path: Path, *identities: GpuIdentity) -> Gpus:
    gpus = Gpus(SwitchingFile(path).read())
    gpus.update(identities)
    return gpus


def test_the_next_daemon_knows_what_this_one_measured(tmp_path: Path) -> None:
    path = tmp_path / "state" / "switches.json"
    before = measured(A100, 3 * ENOUGH)
    SwitchingFile(path).save(before.measured_switches())

    after = restarted(path, A100, H100)

    known, new = after["GPU-0"].switching, after["GPU-1"].switching
    assert known.latency == replace(before["GPU-0"].switching.latency, basis=LatencyBasis.MEASURED_EARLIER)
    assert (known.num_seen, known.num_earlier) == (0, 3 * ENOUGH)
    assert (new.latency.basis, new.num_earlier) == (LatencyBasis.ASSUMED, 0)
    assert path.stat().st_mode & 0o777 == 0o600


def test_only_the_newest_changes_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "switches.json"
    all_changes = (*changes(40, settle_s=0.5), *changes(MAX_KEPT))

    SwitchingFile(path).save([SavedSwitches("A100", 1410, "580.1", all_changes)])

    (kept,) = SwitchingFile(path).read()
    assert kept.switches == changes(MAX_KEPT)


def test_changes_of_another_driver_version_are_dropped_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "switches.json"
    SwitchingFile(path).save(measured(A100, 3 * ENOUGH).measured_switches())
    caplog.set_level(logging.INFO)

    after = restarted(path, replace(A100, driver_version="590.2"))
    SwitchingFile(path).save(after.measured_switches())

    assert after["GPU-0"].switching.latency.basis is LatencyBasis.ASSUMED
    assert caplog.messages == [
        "A100: switch latencies are measured anew: driver version 590.2, saved ones are of 580.1"
    ]


def test_a_driver_update_under_a_running_daemon_begins_anew() -> None:
    gpus = measured(A100, 3 * ENOUGH)

    gpus.update([replace(A100, driver_version="590.2")])

    assert gpus["GPU-0"].switching.latency.basis is LatencyBasis.ASSUMED
    assert [saved.driver_version for saved in gpus.measured_switches()] == []


def test_changes_of_a_model_that_is_absent_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "switches.json"
    SwitchingFile(path).save(measured(A100, ENOUGH).measured_switches())

    SwitchingFile(path).save(restarted(path, H100).measured_switches())

    assert [saved.model_name for saved in SwitchingFile(path).read()] == ["A100"]


def test_changes_without_a_driver_version_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "switches.json"

    SwitchingFile(path).save(measured(replace(A100, driver_version=None), ENOUGH).measured_switches())

    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "malformed"),
        ('{"version": 1, "models": [{}]}', "malformed"),
        ('{"version": 9, "models": []}', "version 9; this program reads 1"),
    ],
)
def test_a_file_that_cannot_be_used_is_logged_and_replaced_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, reason: str
) -> None:
    path = tmp_path / "switches.json"
    path.write_text(text)
    file = SwitchingFile(path)

    assert file.read() == ()
    (line,) = caplog.messages
    assert reason in line
    assert line.endswith("switch latencies are measured anew")

    file.save(measured(A100, ENOUGH).measured_switches())
    assert json.loads(path.read_text())["version"] == 1


def test_a_file_is_written_only_when_there_is_something_new(tmp_path: Path) -> None:
    path = tmp_path / "switches.json"
    file, gpus = SwitchingFile(path), measured(A100, ENOUGH)
    file.save(gpus.measured_switches())
    path.unlink()

    file.save(gpus.measured_switches())
    assert not path.exists()

    gpus["GPU-0"].switching.observe(changes(1)[0])
    file.save(gpus.measured_switches())
    assert path.exists()


def test_a_file_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "folder"
    path.mkdir()

    SwitchingFile(path).save(measured(A100, ENOUGH).measured_switches())

    (line,) = caplog.messages
    assert line.startswith(f"cannot save switch latencies: {path}: ")
