"""Plugin `plan`: plans the clocks of a pipeline from tables, and explains each of them."""

from gpuenergyd.cli.command_entry import CommandEntry

PLAN = CommandEntry("Plan", "gpuenergyd_plan.command", "Plan a pipeline's clocks from measured tables.")
EXPLAIN = CommandEntry("Plan", "gpuenergyd_plan.explain", "Explain each clock of a plan.")
