"""The warning that a busy host makes the result of `gpuenergyd demo --real-time` noisy."""

import os

from gpuenergyd.count_text import count_text

_BUSY_LOAD_PER_CPU = 0.75


def load_warning() -> str | None:
    """Return the warning if too many processes compete for this host's CPUs, else None."""
    load, num_cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load <= _BUSY_LOAD_PER_CPU * num_cpus:
        return None
    return (
        f"load {load:.0f} on {count_text(num_cpus, 'core')}: results will be noisy; without"
        " --real-time they do not depend on it"
    )
