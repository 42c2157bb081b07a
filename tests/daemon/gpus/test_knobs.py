"""Settings that are read back: what changed, and whether this daemon or another program changed it."""

import pytest

from gpuenergyd.daemon.gpus.knobs import FOREIGN, OURS, KnobChange, Knobs
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
