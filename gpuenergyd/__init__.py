"""Lowers GPU clocks off the critical path of training; this package offers `job` for training loops.

with gpuenergyd.job("resnet") as job:
    for batch in loader:
        with job.iteration():
            train_step(batch)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuenergyd.client.loop import job

__version__ = "0.3.0"
__all__ = ["__version__", "job"]


def __getattr__(name: str) -> Any:
    """Import the client at its first use, since most importers of this package are parts of the daemon."""
    if name == "job":
        from gpuenergyd.client.loop import job  # noqa: PLC0415  see the docstring

        return job
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
