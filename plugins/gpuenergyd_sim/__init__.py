"""Plugin for simulated hosts: simulated GPUs, a private daemon, training on simulated GPUs, and virtual time."""

from typing import TYPE_CHECKING

from gpuenergyd.cli.command_entry import CommandEntry

if TYPE_CHECKING:
    from gpuenergyd_sim.driver.host import InstructionWork, SimulatedHost

__all__ = ["DEMO", "EVALUATE", "InstructionWork", "SimulatedHost"]

DEMO = CommandEntry("Try it", "gpuenergyd_sim.demo.command", "Train on simulated GPUs and report the saving.")
EVALUATE = CommandEntry("Plan", "gpuenergyd_sim.evaluate.command", "Compare policies on a virtual training.")


def __getattr__(name: str) -> object:
    """Import the simulated host on first use, since the list of commands needs only the entries above."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gpuenergyd_sim.driver import host  # noqa: PLC0415  see above

    return getattr(host, name)
