"""Switch latencies of a GPU model: where their estimate begins, and one measured change from the worker's report."""

from gpuenergyd.core.measurement.switch_calibration import SwitchCalibration
from gpuenergyd.core.pipeline.switching import LatencyBasis, ObservedSwitch, constant_latency
from gpuenergyd.gpu.device import SAME_CLOCK_MHZ, GpuIdentity
from gpuenergyd.gpu.link.messages import ClockChangeReport

_NS_PER_S = 1_000_000_000
_ASSUMED_SWITCH_LATENCY_S = 0.03
"""Latency used until enough clock changes are measured, for GPUs with no published value; above an A100's."""


def max_sm_clock_mhz(identity: GpuIdentity) -> int:
    """Return the highest SM clock of a GPU; 0 if the driver lists none."""
    return max(identity.supported_sm_clocks_mhz, default=0)


def switch_calibration(identity: GpuIdentity) -> SwitchCalibration:
    """Return the switch latency estimator of a GPU model, with its published or the assumed latency as prior."""
    if identity.switch_latency_s is None:
        prior = constant_latency(_ASSUMED_SWITCH_LATENCY_S)
    else:
        prior = constant_latency(identity.switch_latency_s, LatencyBasis.PUBLISHED)
    return SwitchCalibration(max_sm_clock_mhz(identity), prior)


def observed_switch(change: ClockChangeReport) -> ObservedSwitch | None:
    """Return the measured latency of a clock change; None if the clock read back is not the requested one."""
    before_mhz, requested_mhz, actual_mhz = (
        change.previous_sm_clock_mhz,
        change.requested_sm_clock_mhz,
        change.actual_sm_clock_mhz,
    )
    if before_mhz is None or abs(before_mhz - requested_mhz) <= SAME_CLOCK_MHZ:
        return None
    was_observed = change.effective_mono_ns is not None
    if was_observed and (actual_mhz is None or abs(actual_mhz - requested_mhz) > SAME_CLOCK_MHZ):
        return None
    if not was_observed and change.unseen_until_mono_ns is None:
        return None
    observed_ns, unobserved_ns = change.effective_mono_ns, change.unseen_until_mono_ns or change.returned_mono_ns
    return ObservedSwitch(
        from_sm_clock_mhz=before_mhz,
        to_sm_clock_mhz=requested_mhz,
        handover_s=max(0, change.called_mono_ns - change.due_mono_ns - change.blocked_ns) / _NS_PER_S,
        call_s=(change.returned_mono_ns - change.called_mono_ns) / _NS_PER_S,
        settle_low_s=(unobserved_ns - change.returned_mono_ns) / _NS_PER_S,
        settle_high_s=None if observed_ns is None else (observed_ns - change.returned_mono_ns) / _NS_PER_S,
        clock_age_s=change.clock_age_ns / _NS_PER_S,
    )
