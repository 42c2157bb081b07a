"""Plugin of simulated hosts: GPUs, a private daemon, training on simulated GPUs, and time that is virtual."""

from gpuenergyd.cli.command_entry import CommandEntry

DEMO = CommandEntry("Try it", "gpuenergyd_sim.demo.command", "Train on simulated GPUs and report the saving.")
EVALUATE = CommandEntry("Plan", "gpuenergyd_sim.evaluate.command", "Compare policies on a virtual training.")
