"""What an administrator decides about giving GPUs back: which clocks, whose changes, and when they may stay."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpuenergyd.gpu.device import GpuIdentity


class RestorePolicy(StrEnum):
    """What is given back when nobody is left who needs it changed."""

    ONLY_IF_OURS = "only-if-ours"
    """Everything that is as we left it; what somebody else changed since stays and is reported."""
    RESTORE = "restore"
    """Everything, also what somebody else changed since."""
    KEEP = "keep"
    """As `only-if-ours` when a job ends; but a daemon that ends leaves the clocks of running jobs as they are."""


@dataclass(frozen=True, slots=True)
class RestoreRules:
    """The settings of that name; baselines by GPU UUID or model name, for GPUs that are not to run unlocked."""

    restore_policy: RestorePolicy = RestorePolicy.ONLY_IF_OURS
    baseline_sm_clock_mhz: Mapping[str, int] = field(default_factory=dict)

    def baseline_of(self, identity: GpuIdentity) -> int | None:
        """Return the clock a GPU goes back to: the fastest supported one within the baseline; None is no lock."""
        named = self.baseline_sm_clock_mhz
        baseline_mhz = named.get(identity.gpu_uuid, named.get(identity.model_name))
        if baseline_mhz is None:
            return None
        clocks_mhz = identity.supported_sm_clocks_mhz
        return max((c for c in clocks_mhz if c <= baseline_mhz), default=min(clocks_mhz))
