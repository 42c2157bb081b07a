"""Lowers GPU clocks off the critical path of training; `job` is for training loops, `measure` for any code.

with gpuenergyd.job("resnet") as job:
    for batch in loader:
        with job.iteration():
            train_step(batch)

with gpuenergyd.measure("eval") as window:
    evaluate()
print(window.energy_j)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuenergyd.client.loop import job
    from gpuenergyd.energy_windows.window import measure

__version__ = "0.3.0"
__all__ = ["__version__", "job", "measure"]


def __getattr__(name: str) -> Any:
    """Import the client at its first use, since most importers of this package are parts of the daemon."""
    if name == "job":
        from gpuenergyd.client.loop import job  # noqa: PLC0415  see the docstring

        return job
    if name == "measure":
        from gpuenergyd.energy_windows.window import measure  # noqa: PLC0415  as above

        return measure
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
