"""Error of this plugin."""

from gpuenergyd.errors import GpuEnergyError


class ProofError(GpuEnergyError):
    """Proof of a saving that cannot be run, or that is not valid."""
