"""Restore rules set by the administrator: baseline clocks, foreign changes, and clocks kept across daemon restarts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpuenergyd.gpu.device import GpuIdentity


class RestorePolicy(StrEnum):
    """Policy for restoring a GPU at the end of a job or of the daemon."""

    ONLY_IF_OURS = "only-if-ours"
    """Restore settings that still have our values; report and keep those that another program has changed since."""
    RESTORE = "restore"
    """Restore all settings, including those that another program has changed since."""
    KEEP = "keep"
    """Like `only-if-ours` at the end of a job; at the end of the daemon, keep the clocks of running jobs."""


@dataclass(frozen=True, slots=True)
class RestoreRules:
    """The settings restore_policy and baseline_sm_clock_mhz; baselines are keyed by GPU UUID or model name."""

    restore_policy: RestorePolicy = RestorePolicy.ONLY_IF_OURS
    baseline_sm_clock_mhz: Mapping[str, int] = field(default_factory=dict)

    def baseline_of(self, identity: GpuIdentity) -> int | None:
        """Return the clock to restore, the fastest supported one up to the baseline; None for no lock."""
        named = self.baseline_sm_clock_mhz
        baseline_mhz = named.get(identity.gpu_uuid, named.get(identity.model_name))
        if baseline_mhz is None:
            return None
        clocks_mhz = identity.supported_sm_clocks_mhz
        return max((c for c in clocks_mhz if c <= baseline_mhz), default=min(clocks_mhz))
