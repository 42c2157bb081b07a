"""The fields of one GPU in the status: its use, why its clock is low and who lifts it, and what that saves."""

from dataclasses import asdict
from typing import Any

from gpuenergyd.gpu.device import GpuIdentity
from gpuenergyd_idle.rules.control import IdleGpu
from gpuenergyd_idle.totals import UseTotals


def gpu_fields(identity: GpuIdentity, idle: IdleGpu, totals: UseTotals, now_s: float) -> dict[str, Any]:
    """Return the fields of one GPU."""
    estimate, measured = idle.saving.estimate(), idle.saving.measured
    is_lowered = idle.acts and idle.is_lowered and not idle.is_raised
    return {
        "gpu_uuid": identity.gpu_uuid,
        "index": identity.index,
        "model_name": identity.model_name,
        "use": idle.use,
        "use_age_s": max(0.0, now_s - idle.use_since_s),
        "is_lowered": is_lowered,
        "lowered_sm_clock_mhz": idle.low_mhz if is_lowered else None,
        "reason": idle.reason,
        "num_lowerings": idle.num_lowerings if idle.acts else 0,
        "lost_s": idle.account.lost_s if idle.acts else 0.0,
        "allowed_lost_s": idle.account.allowed_s(now_s),
        "saving": None if estimate is None else {**asdict(estimate), "is_measured": measured is not None},
        "by_use": [{"use": use, **asdict(total)} for use, total in totals.by_use.items()],
    }
