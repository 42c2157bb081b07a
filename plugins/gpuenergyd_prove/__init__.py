"""Plugin `prove`: runs a pre-registered comparison of policies, and checks comparisons that others have run."""

from gpuenergyd.cli.command_entry import CommandEntry

PROVE = CommandEntry(
    "Train", "gpuenergyd_prove.command", "Prove a saving with a pre-registered comparison.", takes_program=True
)
