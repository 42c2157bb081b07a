"""Power, clock and limits of each GPU, in the form in which the control of a power budget takes them."""

from collections.abc import Collection

from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd.core.power.backstop import GpuPower
from gpuenergyd.daemon.gpus.inventory import Gpu
from gpuenergyd.gpu.link.messages import USABLE_HEALTH

OLD_READING_S = 2.0
"""Age from which a reading no longer tells the present power."""


def gpu_power(gpu: Gpu, now_s: float, levers: Collection[Lever]) -> GpuPower:
    """Return what is known of a GPU now, and what may be changed of it."""
    sample = gpu.sample
    is_recent = sample is not None and now_s - sample.read_mono_ns / 1e9 <= OLD_READING_S
    return GpuPower(
        power_w=sample.power_w if sample is not None and is_recent else None,
        sm_clock_mhz=sample.sm_clock_mhz if sample is not None else None,
        supported_sm_clocks_mhz=gpu.identity.supported_sm_clocks_mhz,
        power_limit_range_w=gpu.view().power_limit_range_w if Lever.POWER_LIMITS in levers else None,
        can_change=gpu.health in USABLE_HEALTH,
        can_set_clocks=Lever.CLOCKS in levers,
    )
