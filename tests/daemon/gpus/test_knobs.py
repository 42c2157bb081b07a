"""Settings that are read back: what changed, and whether this daemon or another program changed it."""

from pathlib import Path

import pytest

from gpuenergyd.daemon.gpus.knobs import FOREIGN, OURS, KnobChange, Knobs
from gpuenergyd.daemon.jobs.audit_log import suspects_text
from gpuenergyd.gpu.device import GpuDetails
from gpuenergyd.gpu.link.codec import decode, encode
from gpuenergyd.gpu.link.messages import GpuSettingsRead


def read(power_limit_w: float, *, is_ours: bool = False, is_persistent: bool = True) -> GpuSettingsRead:
    return GpuSettingsRead("GPU-a", GpuDetails(power_limit_w, is_persistent=is_persistent), is_ours)


def test_what_was_set_before_the_daemon_is_no_change() -> None:
    knobs = Knobs(400.0)

    assert knobs.update(read(300.0)) == ()
    assert knobs.power_limit_owner == FOREIGN


def test_our_limit_and_its_restore_are_ours_and_a_foreign_one_between_is_not() -> None:
    knobs = Knobs(400.0)
    knobs.update(read(350.0))

    ours = knobs.update(read(250.0, is_ours=True))
    restored = knobs.update(read(350.0))
    knobs.update(read(250.0, is_ours=True))
    foreign = knobs.update(read(280.0))

    assert ours == (KnobChange("power_limit_w", "350", "250", OURS),)
    assert restored == (KnobChange("power_limit_w", "250", "350", OURS),)
    assert foreign == (KnobChange("power_limit_w", "250", "280", FOREIGN),)


def test_modes_are_always_foreign() -> None:
    knobs = Knobs(400.0)
    knobs.update(read(400.0))

    assert knobs.update(read(400.0, is_persistent=False)) == (KnobChange("is_persistent", "on", "off", FOREIGN),)
    assert knobs.power_limit_owner is None


@pytest.mark.parametrize("profiles", [None, "", "2,20"])
def test_settings_travel_over_the_link(profiles: str | None) -> None:
    message = GpuSettingsRead("GPU-a", GpuDetails(300.0, requested_power_profiles=profiles), is_our_power_limit=False)

    assert decode(encode(message)) == (None, message)


def profiles_read(requested: str | None, ours: int | None) -> GpuSettingsRead:
    details = GpuDetails(300.0, requested_power_profiles=requested, enforced_power_profiles=requested)
    return GpuSettingsRead("GPU-a", details, is_our_power_limit=False, our_power_profile=ours)


def test_our_workload_power_profile_and_its_removal_are_ours_and_others_are_not() -> None:
    knobs = Knobs(400.0)
    knobs.update(profiles_read("", None))

    added = knobs.update(profiles_read("1", 1))
    beside = knobs.update(profiles_read("1,20", 1))
    foreign = knobs.foreign_power_profiles
    removed = knobs.update(profiles_read("20", None))

    assert {change.actor for change in added} == {change.actor for change in removed} == {OURS}
    assert {change.actor for change in beside} == {FOREIGN}
    assert foreign == knobs.foreign_power_profiles == (20,)
    assert Knobs(400.0).foreign_power_profiles == ()


def proc_with(folder: Path, *names: str) -> Path:
    for pid, name in enumerate(names, 10):
        (folder / str(pid)).mkdir()
        (folder / str(pid) / "comm").write_text(f"{name}\n")
    (folder / "99").mkdir()  # has just ended
    (folder / "self").mkdir()
    return folder


def test_known_programs_are_named(tmp_path: Path) -> None:
    assert suspects_text(proc_with(tmp_path, "bash", "nv-hostengine", "nvidia-smi")) == (
        "nv-hostengine pid 11, nvidia-smi pid 12"
    )


def test_many_are_counted_and_none_is_empty(tmp_path: Path) -> None:
    assert suspects_text(proc_with(tmp_path, *["nvidia-smi"] * 5)).endswith("pid 12 and 2 more")
    (tmp_path / "none").mkdir()
    assert suspects_text(tmp_path / "none") == ""
