"""What a training program needs of gpuenergyd: standard library only.

with gpuenergyd.job("resnet") as job:
    for batch in loader:
        with job.iteration():
            train_step(batch)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuenergyd.client.loop import job

__version__ = "0.1.0"
__all__ = ["__version__", "job"]


def __getattr__(name: str) -> Any:
    """Load the client when it is first used: most of what imports this package is the daemon's own."""
    if name == "job":
        from gpuenergyd.client.loop import job  # noqa: PLC0415  the reason stands above

        return job
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
